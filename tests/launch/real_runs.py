"""Runs of real processes, each a script beside this file, of which none may be left when it has ended."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
import scripts

RUN_SECONDS, LOOK_SECONDS, END_SECONDS = 400.0, 0.5, 30.0


def small(steps: int, groups: int, attempts: int) -> tuple[str, ...]:
    """Flags for launch/train.py: the quickstart on the double of an engine, as small as a run gets."""
    return (
        "--config=configs/quickstart.py",
        f"--config.steps={steps}",
        f"--config.coordinator.groups_per_step={groups}",
        f"--config.coordinator.group_size={attempts}",
        "--config.rollout.engine=fake",
        "--config.rollout.slots=8",
        "--config.rollout.max_tokens=24",
        "--config.trainer.rows_per_micro_batch=2",
        "--config.warm_start.steps=0",
        "--config.evaluation.every=0",
        "--config.telemetry.report=False",
    )


def hosts(workdir: Path) -> list[str]:
    """The nodes that are the run's hosts now."""
    file = workdir / "hosts.json"
    return [host["node"] for host in json.loads(file.read_text())] if file.exists() else []


def wait_until(done: Callable[[], bool], run: subprocess.Popen[bytes], log: Path, deadline: float) -> None:
    """Looks again and again while the run lives; its log is the error's text if that or the time ends first."""
    while not done():
        assert run.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.2)


def run(script: str, workdir: Path, *arguments: str, actors: int) -> subprocess.CompletedProcess[str]:
    """One run to its end; every process that it ever had has ended, too.

    Args:
      script: its name; it is given the workdir and the arguments.
      workdir: of the run. Its siblings get the output.
      arguments: further ones.
      actors: processes, at least, that Ray has to be seen with.
    """
    paths = [scripts.ROOT, scripts.ROOT / "launch", scripts.ROOT / "tests" / "common", os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, map(str, paths))),
    }
    command = [sys.executable, str(Path(__file__).parent / script), str(workdir), *arguments]
    family: dict[psutil.Process, str] = {}
    with open(workdir.with_suffix(".out"), "w+") as out, open(workdir.with_suffix(".err"), "w+") as err:
        started = subprocess.Popen(command, cwd=scripts.ROOT, env=environment, stdout=out, stderr=err)
        deadline = time.monotonic() + RUN_SECONDS
        try:
            while started.poll() is None and time.monotonic() < deadline:
                # While it lives: whose parent has ended is found under it no more.
                with contextlib.suppress(psutil.NoSuchProcess):
                    for process in psutil.Process(started.pid).children(recursive=True):
                        family[process] = process.name()
                time.sleep(LOOK_SECONDS)
        finally:
            in_time = started.poll() is not None
            started.kill()
            started.wait(20)
            left = still_alive_after(END_SECONDS, family)
            for process in left:
                process.kill()
        out.seek(0)
        err.seek(0)
        done = subprocess.CompletedProcess(command, started.returncode, out.read(), err.read())
    assert in_time, f"the run did not end within {RUN_SECONDS:g} s: {done.stdout + done.stderr}"
    seen = sum("RayHost" in name for name in family.values())
    assert seen >= actors, f"not all actors were seen: {family.values()}; {done.stdout + done.stderr}"
    assert not left, f"processes were left behind: {left}"
    return done


def still_alive_after(seconds: float, processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    deadline = time.monotonic() + seconds
    while left := [process for process in processes if is_alive(process)]:
        if time.monotonic() > deadline:
            break
        time.sleep(LOOK_SECONDS)
    return left


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def listening(processes: Iterable[psutil.Process]) -> set[tuple[str, str]]:
    """Process name and address of every port at which one can knock, of those that still run."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            ports = [item for item in process.net_connections() if item.status == psutil.CONN_LISTEN]
            found |= {(process.name(), port.laddr.ip) for port in ports}
    return found


def beyond_loopback(ports: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Those of `listening` that other machines could knock at."""
    return {port for port in ports if port[1].removeprefix("::ffff:") not in ("127.0.0.1", "::1")}


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
