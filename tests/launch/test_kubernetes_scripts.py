"""The shell scripts of launch/templates as pods run them: the driver is told, waited for, and outlived by its hosts."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import scripts

TEMPLATES = scripts.ROOT / "launch" / "templates"
SECONDS = 30.0

DRIVER = """
import pathlib, signal, sys, time
workdir = pathlib.Path(sys.argv[-1].removeprefix("--workdir="))
def end(*_):
    time.sleep(1.0)
    (workdir / "saved").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
(workdir / "ready").write_text(repr(sys.argv[1:]))
time.sleep(60)
"""


def variables(workdir: Path, *command: str) -> dict[str, str]:
    return {
        **os.environ,
        "LIBRA_JAX_COMMAND": "\n".join(command),
        "LIBRA_JAX_WORKDIR": str(workdir),
        "LIBRA_JAX_GRACE": "20",
        "HOSTNAME": "head",
    }


def run(script: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(TEMPLATES / script)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)


@pytest.mark.parametrize(("labels", "given"), [("libra-role=rollout", ["--labels=libra-role=rollout"]), ("", [])])
def test_a_host_of_a_jobset_tells_ray_what_its_group_is_for(tmp_path, labels, given):
    ray = tmp_path / "ray"
    ray.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" >{tmp_path}/told\n')
    ray.chmod(0o755)
    timeout = tmp_path / "timeout"  # of host.sh's look for its head
    timeout.write_text("#!/bin/bash\n")
    timeout.chmod(0o755)
    environment = {**variables(tmp_path / "run"), "LIBRA_JAX_HEAD": "head", "LIBRA_JAX_LABELS": labels}
    done = run("host.sh", {**environment, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert done.returncode == 0, done.stderr
    told = (tmp_path / "told").read_text().splitlines()
    assert told == ["start", "--address=head:6379", *given, "--disable-usage-stats", "--block"]


def until(found: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not found.exists():
        assert time.monotonic() < deadline, f"{found} did not come within {SECONDS:g} s"
        time.sleep(0.05)


@pytest.fixture
def driver(tmp_path):
    """run_driver.sh with a driver that takes a second to save, once it is told to end."""
    workdir = tmp_path / "run"
    program = tmp_path / "driver.py"
    program.write_text(DRIVER)
    environment = variables(workdir, sys.executable, str(program), "--config.a=(1, 2)", "$HOME 'x'")
    process = subprocess.Popen(["bash", str(TEMPLATES / "run_driver.sh")], env=environment)
    family = [psutil.Process(process.pid)]
    try:
        until(workdir / "ready")
        family += family[0].children(recursive=True)
        yield process, workdir, environment
    finally:
        for member in family:
            if member.is_running():
                member.kill()
        process.wait(SECONDS)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing():
    rendered = scripts.ROOT / "tests" / "launch" / "golden" / "tpu.sh"
    files = sorted(map(str, [*TEMPLATES.glob("*.sh"), rendered]))
    done = subprocess.run(["shellcheck", *files], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout


def test_arguments_reach_the_driver_as_they_were_given(driver):
    _, workdir, _ = driver
    assert (workdir / "ready").read_text() == repr(["--config.a=(1, 2)", "$HOME 'x'", f"--workdir={workdir}"])


def test_a_driver_that_is_told_to_end_saves_first_and_asks_to_be_started_again(driver):
    process, workdir, _ = driver
    assert (workdir / ".driver").exists()
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) == 75
    assert (workdir / "saved").exists()
    assert not (workdir / ".driver").exists()


def test_a_driver_that_has_been_taken_over_leaves_what_the_other_says(driver):
    process, workdir, _ = driver
    (workdir / ".driver").write_text("1 another-head\n")
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) == 75
    assert (workdir / ".driver").read_text() == "1 another-head\n"


def test_before_a_head_ends_its_driver_has_saved(driver):
    process, workdir, environment = driver
    assert run("stop_driver.sh", environment).returncode == 0
    assert (workdir / "saved").exists()
    assert process.wait(SECONDS) == 75


def test_a_host_that_is_not_the_head_stops_nobody(driver):
    process, workdir, environment = driver
    assert run("stop_driver.sh", {**environment, "HOSTNAME": "host"}).returncode == 0
    assert process.poll() is None
    assert not (workdir / "saved").exists()


def test_a_host_goes_when_the_driver_has_ended_and_not_before(driver):
    process, workdir, environment = driver
    waiting = subprocess.Popen(["bash", str(TEMPLATES / "await_driver.sh")], env=environment)
    try:
        time.sleep(1.0)
        assert waiting.poll() is None
        process.send_signal(signal.SIGTERM)
        assert waiting.wait(SECONDS) == 0
        assert (workdir / "saved").exists()
    finally:
        waiting.kill()
        waiting.wait(SECONDS)


def test_a_host_waits_no_longer_than_its_grace(tmp_path):
    (tmp_path / ".driver").write_text("1 gone\n")  # of a head that was killed
    begun = time.monotonic()
    assert run("await_driver.sh", {**variables(tmp_path), "LIBRA_JAX_GRACE": "1"}).returncode == 0
    assert 0.9 < time.monotonic() - begun < 10


@pytest.mark.parametrize("status", [0, 3])
def test_a_driver_that_ends_by_itself_gives_its_own_status(status, tmp_path):
    workdir = tmp_path / "run"
    done = run("run_driver.sh", variables(workdir, sys.executable, "-c", f"raise SystemExit({status})"))
    assert done.returncode == status
    assert not (workdir / ".driver").exists()


RAY_DRIVER = """
import pathlib, signal, sys, time
import ray
workdir = pathlib.Path(sys.argv[-1].removeprefix("--workdir="))
ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(True))  # in the place of Ray's
def alive(): return sum(node["Alive"] for node in ray.nodes())
deadline = time.monotonic() + 120
(workdir / "ready").write_text(str(alive()))
while not told and time.monotonic() < deadline: time.sleep(0.1)
time.sleep(2)
(workdir / "saved").write_text(str(alive()))
"""

POD = "exec unshare --pid --fork --kill-child --mount-proc bash launch/templates/{}.sh"
"""What a script starts ends with it, as in a container."""

JOBSET = f"""
ip link set lo up
({POD.format("head")}) >"$LIBRA_JAX_WORKDIR.head" 2>&1 & head=$!
({POD.format("host")}) >"$LIBRA_JAX_WORKDIR.host" 2>&1 & host=$!
wait $head; echo "head $?"
wait $host; echo "host $?"
"""


MAIN_PROCESSES = [["bash", f"launch/templates/{name}.sh"] for name in ("run_driver", "host")]
"""Of the pods; the head's script has become the driver's."""


def can_isolate() -> bool:
    probe = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "ip", "link", "set", "lo", "up"]
    try:
        return subprocess.run(probe, capture_output=True, timeout=SECONDS, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.multiprocess
@pytest.mark.skipif(not can_isolate(), reason="unshare and ip are needed, and the right to use them")
def test_the_head_and_a_host_of_a_jobset_join_and_leave_together_by_real_ray(tmp_path):
    workdir, program = tmp_path / "run", tmp_path / "driver.py"
    program.write_text(RAY_DRIVER)
    environment = {
        **variables(workdir, sys.executable, str(program)),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "LIBRA_JAX_HEAD": "127.0.0.1",
        "LIBRA_JAX_HOSTS": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
        "RAY_TMPDIR": f"/tmp/libra-k8s-{os.getpid()}",
    }
    os.makedirs(environment["RAY_TMPDIR"])
    command = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", JOBSET]
    pods = subprocess.Popen(command, cwd=scripts.ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 150
        while not (workdir / "ready").exists():
            assert pods.poll() is None, said(workdir)
            assert time.monotonic() < deadline, said(workdir)
            time.sleep(0.2)
        assert (workdir / "ready").read_text() == "2", "the driver began before the host had joined"
        for process in psutil.Process(pods.pid).children(recursive=True):  # all at once, as when a set is deleted
            if process.cmdline() in MAIN_PROCESSES:
                process.terminate()
        out, _ = pods.communicate(timeout=60)
    finally:
        pods.kill()
        pods.wait(SECONDS)
        shutil.rmtree(environment["RAY_TMPDIR"], ignore_errors=True)
    assert out.split("\n")[:2] == ["head 75", "host 0"], said(workdir)
    assert (workdir / "saved").read_text() == "2", "the host left before the driver had saved"
    assert not (workdir / ".driver").exists()


def said(workdir: Path) -> str:
    return "\n".join(path.read_text() for path in (Path(f"{workdir}.head"), Path(f"{workdir}.host")) if path.exists())
