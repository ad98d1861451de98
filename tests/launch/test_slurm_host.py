"""One host's part in a run under Slurm: its ports, its Ray's end, and the driver's."""

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


def test_jobs_have_other_ports_below_those_that_the_kernel_chooses_from():
    chosen = [port for job in range(41, 41 + slurm_host.JOBS) for port in slurm_host.ports(job).values()]
    assert len(set(chosen)) == len(chosen)
    first = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(chosen) < first


def test_two_runs_that_meet_at_a_port_are_told_what_to_do():
    job = 900_000_000 + os.getpid()
    slurm_host.check_free(job)
    port = slurm_host.ports(job)["metrics-export-port"]
    with (
        socket.create_server(("", port)),
        pytest.raises(protocols.LibraError, match=rf"port {port} .* maybe by another run; submit with --exclusive"),
    ):
        slurm_host.check_free(job)


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


def test_a_driver_is_told_once_to_stop_and_says_whether_there_is_more_to_do(tmp_path):
    drivers = {}
    for status, how in ((os.EX_TEMPFAIL, "stopped"), (0, "finished")):  # side by side, because they wait
        (tmp_path / how).mkdir()
        drivers[how] = drive(tmp_path / how, STOPS_AT_THE_FIRST_SIGNAL.replace("{status}", str(status)))
    try:
        for how in drivers:
            wait_for_line(tmp_path / how / "train.log")
            (tmp_path / how / "stop").touch()
        for how, driver in drivers.items():
            assert ended(tmp_path / how, driver) == how
            assert (tmp_path / how / "train.log").read_text() == "ready\n1 signal\n"
    finally:
        for how, driver in drivers.items():
            if driver.poll() is None:
                (tmp_path / how / "stop").touch()  # it ends its program
                ended(tmp_path / how, driver)


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


class TestAHostWhoseRay:
    """`ray start` by a double that lives for as long as it is told; the head's port answers, and starts no driver."""

    JOB = 900_000_000 + os.getpid()

    @pytest.fixture
    def run(self, attempt, tmp_path, monkeypatch):
        started: list[subprocess.Popen[str]] = []

        def run(ray: str, node: str, hosts: int = 2) -> subprocess.Popen[str]:
            (tmp_path / "ray").write_text(f"#!/bin/sh\n{ray}\n")
            (tmp_path / "ray").chmod(0o755)
            monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
            monkeypatch.setenv("SLURMD_NODENAME", node)
            address = f"127.0.0.1:{head.getsockname()[1]}"
            job = f"--job={self.JOB}", "--head=n1", f"--address={address}", f"--hosts={hosts}"
            started.append(start("run", *job, f"--attempt={attempt}", command=[sys.executable, "-c", "print('drove')"]))
            return started[-1]

        with socket.create_server(("127.0.0.1", 0)) as head:
            yield run
        for process in started:
            if process.poll() is None:
                # Stopped first, or it may start Ray once more between the two.
                driver = psutil.Process(process.pid)
                driver.suspend()
                for child in driver.children(recursive=True):
                    child.kill()
            process.kill()
            process.communicate(timeout=60)
        left = list(pathlib.Path("/tmp").glob(f"libra-{self.JOB}-*"))
        for folder in left:
            shutil.rmtree(folder)
        assert not left

    def test_does_not_start_ends_the_attempt(self, run, attempt):
        process = run("exit 0", "n2")
        said, _ = process.communicate(timeout=60)
        again = "n2: Ray ended before the driver began; it is started again.\n"
        assert (process.returncode, said) == (1, 2 * again + "n2: error: Ray did not start here\n")
        assert (attempt / "ended").read_text() == "failed 1\n"

    def test_opens_its_folder_to_all_is_in_one_for_this_user_only(self, run, attempt):
        """Ray makes its folder 0777; its logs say why a run did not finish."""
        process = run(
            'for word; do case "$word" in --temp-dir=*) own=${word#*=} ;; esac; done\n'
            "mkdir -p $own/session_2026/logs; chmod 777 $own\n"
            "stat -c %a $own $own/.. >$own/session_2026/logs/modes; exit 1",
            "n2",
        )
        process.communicate(timeout=60)
        assert (attempt / "ray-n2" / "modes").read_text().split() == ["777", "700"]

    def test_does_not_start_at_once_is_started_again(self, run, attempt, tmp_path):
        process = run(f"test -e {tmp_path}/tried && exit 0; touch {tmp_path}/tried; exit 1", "n1", hosts=1)
        assert process.wait(60) == 0
        assert (attempt / "ended").read_text() == "finished\n"

    def test_meets_another_run_ends_the_attempt(self, run, attempt):
        with socket.create_server(("", slurm_host.ports(self.JOB)["runtime-env-agent-port"])):
            process = run("exit 0", "n2")
            said, _ = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "is taken (Address already in use), maybe by another run; submit with --exclusive" in said
        assert (attempt / "ended").read_text() == "failed 1\n"

    def test_was_killed_has_its_folder_removed_by_the_next_attempt(self, run, attempt):
        process = run("exec sleep 600", "n1", hosts=1)
        deadline = time.monotonic() + 60
        while not (found := list(pathlib.Path("/tmp").glob(f"libra-{self.JOB}-*"))):
            assert time.monotonic() < deadline, "no folder"
            time.sleep(0.05)
        process.kill()
        process.wait(60)
        assert run("exit 0", "n1", hosts=1).wait(60) == 0
        assert not found[0].exists()

    def test_has_no_driver_yet_ends_when_another_host_has_failed(self, run, attempt):
        (attempt / "ended").write_text("failed 1\n")
        process = run("exec sleep 600", "n1")
        assert process.wait(60) != 0

    def test_has_no_driver_yet_ends_when_it_is_told_to_stop(self, run, attempt):
        (attempt / "stop").touch()
        process = run("exec sleep 600", "n1")
        said, _ = process.communicate(timeout=60)
        assert (process.returncode, said) == (0, "n1: told to stop before the driver began\n")
        assert (attempt / "ended").read_text() == "stopped\n"

    def test_is_up_alone_runs_the_driver_and_ends_with_what_ray_started(self, run, attempt):
        process = run("sleep 600 & exit 0", "n1", hosts=1)
        said, _ = process.communicate(timeout=60)
        assert (process.returncode, said) == (0, "n1: all 1 hosts have joined; the driver starts.\n")
        assert (attempt / "train.log").read_text() == "drove\n"
        assert (attempt / "ended").read_text() == "finished\n"

    def test_serves_others_ends_with_the_driver(self, run, attempt):
        process = run("exec sleep 600", "n2")
        (attempt / "train.log").touch()
        (attempt / "ended").write_text("finished\n")
        assert process.wait(60) == 0

    def test_is_lost_while_the_driver_runs_leaves_the_rest_to_the_driver(self, run, attempt):
        (attempt / "train.log").touch()
        process = run("exit 0", "n2")
        assert process.wait(60) == 1
        assert not (attempt / "ended").exists()
