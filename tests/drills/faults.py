"""Drills of what befalls a whole run: a scheduler's SIGTERM, a full disk under the workdir, clocks that are wrong."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.drills import blows, clusters, judging, processes, runs, settings

GRACE_SECONDS = 20.0
"""Of `deadlines.grace`, as `settings` has it: what a scheduler gives."""

DISK = "24m"
"""Of the small disk; a checkpoint of the drills' model takes about 5."""

FULL_SECONDS = 1.0
"""How long the disk stays full after a checkpoint has failed."""

HOUR = 3600
_MAPPED = ["--map-root-user"] if os.geteuid() else []
"""Root needs no namespace of users, in which sandboxes would have no users to become."""

_COMMAND_SECONDS = 30.0


def grace(plan: runs.Plan) -> Iterator[judging.Outcome]:
    """SIGTERM to a run over three hosts, whose trainer has two processes."""

    def struck(family: processes.Family) -> blows.Blow:
        run = runs.Run(plan, "grace", "wide")
        with clusters.Cluster(settings.HOSTS["wide"]) as cluster:
            cluster.start(run)
            blow = blows.at_random_moment(
                run, plan, random.Random(f"{plan.seed} grace"), r"^SIGTERM: stopping", may_end=True
            )
            run.process.send_signal(signal.SIGTERM)
            blow.land(f"SIGTERM to the driver, with {GRACE_SECONDS:g} s of grace")
            plan.say(f"grace: {blow.hit} {blow.when}")

            def again() -> None:
                blow.left = clusters.actors_left(family)
                cluster.start(run)

            blow.follow(again)
        if blow.status != os.EX_TEMPFAIL:
            blow.also.append(f"the run ended with status {blow.status}, not with {os.EX_TEMPFAIL} (EX_TEMPFAIL)")
        if blow.ended_seconds is not None and blow.ended_seconds > GRACE_SECONDS:
            blow.also.append(f"the run took {blow.ended_seconds:.1f} s to end, and {GRACE_SECONDS:g} were given")
        return blow

    yield blows.carried_out("grace", struck)


def disk(plan: runs.Plan) -> Iterator[judging.Outcome]:
    """A run on a small disk that is full for a while: the run goes on, and so do its checkpoints once there is room."""
    if lacking := _mounting():
        yield judging.Outcome("disk", skipped=lacking)
        return
    yield blows.carried_out("disk", lambda _: _on_a_small_disk(plan))


def _on_a_small_disk(plan: runs.Plan) -> blows.Blow:
    failed = " failed, and the run goes on without it"
    with _small_disk(plan.workdir / "disk") as (enter, seen):
        hosts = [f"--hosts={settings.HOSTS['narrow']}", f"--start_seconds={clusters.UP_SECONDS:g}"]
        run = runs.Run(
            plan, "disk/run", "narrow", prefix=(*enter, sys.executable, "launch/local.py", *hosts, "--"), seen=seen
        )
        filler = seen(run.workdir) / "filler"
        try:
            run.start({})
            blow = blows.at_random_moment(run, plan, random.Random(f"{plan.seed} disk"), r"No space left on device")
            _fill(filler)
            blow.land(f"no byte is left of the {DISK.upper()} under the workdir")
            plan.say(f"disk: {blow.hit} {blow.when}")
            if not run.wait(lambda: failed in run.said(), "checkpoint that fails"):
                blow.also.append("the run did not outlive the full disk")
            time.sleep(FULL_SECONDS)
            filler.unlink()
            blow.follow(lambda: run.start({}))
        finally:
            run.kill()
    return blow


def _mounting() -> str:
    """Why no small disk can be mounted here; empty: it can."""
    tried = ["unshare", "--mount", *_MAPPED, "mount", "-t", "tmpfs", "none", "/mnt"]
    with contextlib.suppress(OSError):
        if subprocess.run(tried, capture_output=True, timeout=_COMMAND_SECONDS, check=False).returncode == 0:
            return ""
    return "this machine lets no one mount a small disk (unshare --mount)"


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[tuple[list[str], Callable[[Path], Path]]]:
    """A command that runs others where a small disk is at the folder, and how its paths are seen from outside."""
    folder.mkdir()
    script = 'mount -t tmpfs -o "size=$1" none "$2" && echo mounted && exec cat'
    holder = subprocess.Popen(
        ["unshare", "--mount", *_MAPPED, "sh", "-c", script, "sh", DISK, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert holder.stdout is not None
        if holder.stdout.readline() != b"mounted\n":
            raise runs.Stuck(f"no small disk could be mounted at {folder}")
        mapped = ["--user", "--preserve-credentials"] if _MAPPED else []
        enter = ["nsenter", *mapped, "--mount", f"--target={holder.pid}"]
        yield [*enter, *runs.IN_ROOT], lambda path: Path(f"/proc/{holder.pid}/root{path}")
    finally:
        holder.kill()
        holder.wait()


def _fill(filler: Path) -> None:
    """Takes every byte of its disk."""
    with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)


def clock(plan: runs.Plan) -> Iterator[judging.Outcome]:
    """A rollout host's clock is an hour ahead; then the driver is killed, and goes on where it is an hour behind."""
    if shutil.which("cc") is None:
        yield judging.Outcome("clock", skipped="this machine has no C compiler (cc), which makes what sets clocks off")
        return
    yield blows.carried_out("clock", lambda family: _with_other_clocks(plan, family))


def _with_other_clocks(plan: runs.Plan, family: processes.Family) -> blows.Blow:
    library = _library(plan.workdir)
    if wrong := _is_off(library):
        raise runs.Stuck(wrong)
    ahead, behind = _clock(library, HOUR), _clock(library, -HOUR)
    run = runs.Run(plan, "clock", "narrow")
    with clusters.Cluster(settings.HOSTS["narrow"], {1: ahead}) as cluster:
        cluster.start(run)
        run.wait_for_step(1)
        off = [process for process in family.alive() if processes.maps(process, library.name)]
        if not any(processes.actors(off, "rollout-0")):
            raise runs.Stuck("the clock of the rollout host is not ahead: its engine has not loaded the library")
        expected = "DEAD|Going on from the checkpoint"
        blow = blows.at_random_moment(run, plan, random.Random(f"{plan.seed} clock"), expected, may_end=True)
        run.process.kill()
        blow.land("the driver, whose clock is an hour behind from then on; that of the rollout host is an hour ahead")
        plan.say(f"clock: {blow.hit} {blow.when}")
        blow.follow(lambda: cluster.start(run, behind))
        blow.left = clusters.actors_left(family)
    return blow


def _library(folder: Path) -> Path:
    """What sets off the clock of programs that load it."""
    made = folder / "other_clock.so"
    command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(made), str(Path(__file__).with_name("other_clock.c")), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
    if done.returncode:
        raise runs.Stuck(f"other_clock.c cannot be compiled: {done.stderr.strip()}")
    return made


def _clock(library: Path, seconds: int) -> Mapping[str, str]:
    """Environment of programs whose clock is so much off."""
    return {"LD_PRELOAD": str(library), "DRILL_CLOCK_SECONDS": str(seconds)}


def _is_off(library: Path) -> str:
    """What is wrong with the library; empty: Python programs that load it read another clock, and still wait."""
    script = "import threading, time; threading.Event().wait(0.1); time.sleep(0.1); print(int(time.time()))"
    told = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **_clock(library, HOUR)},
        capture_output=True,
        text=True,
        timeout=_COMMAND_SECONDS,
        check=False,
    )
    off = int(told.stdout) - time.time() if told.returncode == 0 else 0.0
    return "" if abs(off - HOUR) < _COMMAND_SECONDS else f"{library} sets no clock off: {told.stderr.strip()[-200:]}"
