"""One host's part in a run under Slurm: its ports, the driver's end, and a process table of its own."""

import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
import scripts
import slurm_host

from libra_jax import protocols

HOST = [sys.executable, "launch/slurm_host.py"]


def start(part: str, *arguments: str, command: list[str]) -> subprocess.Popen[str]:
    paths = os.pathsep.join(filter(None, [str(scripts.ROOT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.Popen(
        [*HOST, part, *arguments, "--", *command],
        cwd=scripts.ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_jobs_choose_other_ports_and_none_that_is_taken():
    first, second = (slurm_host.free_ports(job, "127.0.0.1", ("a", "b"), half=0) for job in (41, 42))
    agents = slurm_host.free_ports(41, "127.0.0.1", slurm_host.AGENT_PORTS, half=1)
    chosen = [*first.values(), *second.values(), *agents.values()]
    assert len(set(chosen)) == len(chosen)
    with socket.create_server(("127.0.0.1", first["b"])):
        again = slurm_host.free_ports(41, "127.0.0.1", ("a", "b"), half=0)
    assert again["a"] > first["b"]
    assert again["b"] == again["a"] + 1


def test_ports_lie_below_those_that_the_kernel_chooses_from():
    last = slurm_host.FIRST_PORT + slurm_host.WINDOWS * slurm_host.WINDOW
    assert last <= int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def test_a_host_that_is_full_is_told_of_in_a_sentence(monkeypatch):
    monkeypatch.setattr(slurm_host, "_is_free", lambda *_: False)
    with pytest.raises(protocols.LibraError, match="no 1 free ports from 20000 to 31999 on this host"):
        slurm_host.free_ports(1, "127.0.0.1", ("a",), half=0)


@pytest.mark.parametrize(
    ("training", "labels"),
    [("", []), ("a,b", ["--labels=libra-role=training"]), ("a,c", ["--labels=libra-role=rollout"])],
)
def test_of_two_partitions_ray_is_told_what_a_host_is_for(training, labels):
    assert slurm_host._labels("b", training) == labels


def test_the_address_is_one_of_this_host():
    mine = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    assert slurm_host.own_address(socket.gethostname()) in mine
    assert slurm_host.own_address("127.0.0.1") == "127.0.0.1"


@pytest.fixture
def attempt(tmp_path):
    folder = tmp_path / "logs" / "attempt_1"
    folder.mkdir(parents=True)
    return folder


def drive(attempt: pathlib.Path, program: str) -> subprocess.Popen[str]:
    return start("drive", f"--attempt={attempt}", command=[sys.executable, "-c", program])


def ended(attempt: pathlib.Path, driver: subprocess.Popen[str]) -> str:
    try:
        driver.wait(60)
    finally:
        driver.kill()
        driver.communicate()
    return (attempt / "ended").read_text().strip()


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("print('hello')", "finished"),
        ("exit(3)", "failed 3"),
        ("import os; os.kill(os.getpid(), 9)", "failed 137"),
        ("exit(75)", "lost"),
    ],
)
def test_the_drivers_end_is_written_down(attempt, program, status):
    assert ended(attempt, drive(attempt, program)) == status
    assert (attempt / "train.log").read_text() == ("hello\n" if status == "finished" else "")


def test_what_does_not_end_when_it_is_told_to_is_killed():
    deaf, told = subprocess.Popen(["sleep", "600"]), []
    try:
        assert slurm_host._wait(deaf, lambda: True, once=lambda: told.append(1), most=0.1) == -signal.SIGKILL
        assert told == [1]
    finally:
        deaf.kill()


STOPS_AT_THE_FIRST_SIGNAL = """
import signal, time
came = []
signal.signal(signal.SIGTERM, lambda *_: came.append(1))
print("ready", flush=True)
while not came:
    time.sleep(0.05)
time.sleep(2.5)
print(f"{len(came)} signal", flush=True)
raise SystemExit({status})
"""


@pytest.mark.parametrize(("status", "how"), [(os.EX_TEMPFAIL, "stopped"), (0, "finished")])
def test_a_driver_is_told_once_to_stop_and_says_whether_there_is_more_to_do(attempt, status, how):
    driver = drive(attempt, STOPS_AT_THE_FIRST_SIGNAL.replace("{status}", str(status)))
    wait_for_line(attempt / "train.log")
    (attempt / "stop").touch()
    assert ended(attempt, driver) == how
    assert (attempt / "train.log").read_text() == "ready\n1 signal\n"


def test_a_signal_to_the_whole_job_is_not_given_to_the_driver_again(attempt):
    driver = drive(attempt, STOPS_AT_THE_FIRST_SIGNAL.replace("{status}", str(os.EX_TEMPFAIL)))
    wait_for_line(attempt / "train.log")
    for process in [psutil.Process(driver.pid), *psutil.Process(driver.pid).children()]:
        process.send_signal(signal.SIGTERM)
    (attempt / "stop").touch()
    assert ended(attempt, driver) == "stopped"
    assert (attempt / "train.log").read_text() == "ready\n1 signal\n"


def wait_for_line(log: pathlib.Path) -> None:
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_text()):
        assert time.monotonic() < deadline, "the driver did not begin"
        time.sleep(0.05)


def test_a_process_table_of_ones_own_hides_others_and_leaves_nothing_alive():
    try:
        alone = slurm_host._alone()
    except protocols.LibraError as refused:
        pytest.skip(str(refused))
    marked = "0.6180339887"
    program = f"sleep 1000{marked} & echo /proc/[0-9]*; exit 5"
    command = [*alone, *HOST, "reap", "--", "sh", "-c", program]
    done = subprocess.run(
        command, cwd=scripts.ROOT, capture_output=True, text=True, timeout=60, check=False, env={**os.environ}
    )
    assert done.returncode == 5, done.stderr
    assert len(done.stdout.split()) <= 4
    assert not [process for process in psutil.process_iter(["cmdline"]) if marked in str(process.info["cmdline"])]


def test_a_host_without_process_tables_is_refused_in_a_sentence(monkeypatch, tmp_path):
    unshare = tmp_path / "unshare"
    unshare.write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2; exit 1\n")
    unshare.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(
        protocols.LibraError, match=r"Operation not permitted\), .*submit with --exclusive, for whole hosts"
    ):
        slurm_host._alone()


class TestAHostWhoseRay:
    """`ray symmetric-run` by a double that lives for as long as it is told, and starts no driver."""

    JOB = str(900_000_000 + os.getpid())

    @pytest.fixture
    def run(self, attempt, tmp_path, monkeypatch):
        started: list[subprocess.Popen[str]] = []

        def run(ray: str, node: str, *flags: str, unshare: str = "") -> subprocess.Popen[str]:
            for program, text in (("ray", ray), ("unshare", unshare)):
                (tmp_path / program).write_text(f"#!/bin/sh\n{text}\n")
                (tmp_path / program).chmod(0o755)
            monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
            monkeypatch.setenv("SLURMD_NODENAME", node)
            job = f"--job={self.JOB}", "--head=n1", "--address=127.0.0.1:20000", "--hosts=2"
            started.append(start("run", *job, f"--attempt={attempt}", *flags, command=["driver"]))
            return started[0]

        yield run
        for process in started:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
            process.kill()
            process.communicate(timeout=60)
        left = list(pathlib.Path("/tmp").glob(f"libra-{self.JOB}-*"))
        for folder in left:
            shutil.rmtree(folder)
        assert not left

    def test_does_not_start_ends_the_attempt(self, run, attempt):
        process = run("exit 0", "n2", "--exclusive")
        said, _ = process.communicate(timeout=60)
        assert (process.returncode, said) == (1, "n2: error: Ray did not start here\n")
        assert (attempt / "ended").read_text() == "failed 1\n"

    def test_has_no_driver_yet_ends_when_another_host_has_failed(self, run, attempt):
        (attempt / "ended").write_text("failed 1\n")
        process = run("exec sleep 600", "n1", "--exclusive")
        assert process.wait(60) != 0

    def test_has_no_driver_yet_ends_when_it_is_told_to_stop(self, run, attempt):
        (attempt / "stop").touch()
        process = run("exec sleep 600", "n1", "--exclusive")
        assert process.wait(60) == 0
        assert (attempt / "ended").read_text() == "stopped\n"

    def test_ends_with_its_driver_as_that_is_told_to_stop_goes_on_later(self, run, attempt):
        (attempt / "train.log").touch()
        (attempt / "stop").touch()
        process = run("exit 143", "n1", "--exclusive")
        said, _ = process.communicate(timeout=60)
        assert (process.returncode, said) == (0, "n1: told to stop, and ended before the driver could save\n")
        assert (attempt / "ended").read_text() == "stopped\n"

    def test_serves_others_ends_with_the_driver(self, run, attempt):
        process = run("exec sleep 600", "n2", "--exclusive")
        (attempt / "train.log").touch()
        (attempt / "ended").write_text("finished\n")
        assert process.wait(60) == 0

    def test_is_lost_while_the_driver_runs_leaves_the_rest_to_the_driver(self, run, attempt):
        (attempt / "train.log").touch()
        process = run("exit 0", "n2", "--exclusive")
        assert process.wait(60) == 1
        assert not (attempt / "ended").exists()

    def test_would_be_seen_by_others_ends_the_attempt(self, run, attempt):
        process = run("exec sleep 600", "n1", unshare="echo not permitted >&2; exit 1")
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 1
        assert said.startswith("n1: error: this host gives a run no process table of its own (not permitted), ")
        assert (attempt / "ended").read_text() == "failed 1\n"
