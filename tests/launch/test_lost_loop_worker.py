"""A real run whose loop worker is killed: the run goes on, and every prompt is trained once."""

import collections
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import real_runs
import scripts

pytestmark = [pytest.mark.ray, pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.drill]

STEPS, GROUPS, ATTEMPTS = 30, 4, 2
DEADLINE_SECONDS = 240.0


def named(name: str) -> list[psutil.Process]:
    """Processes of this test's run that Ray named after an actor."""
    found = []
    for process in psutil.Process().children(recursive=True):
        threads = Path(f"/proc/{process.pid}/task").glob("*/comm")
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if name in {thread.read_text().strip() for thread in threads}:
                found.append(process)
    return found


@pytest.mark.timeout(300)
def test_a_killed_loop_worker_is_started_again_and_nothing_is_lost(tmp_path):
    workdir, log = tmp_path / "run", tmp_path / "log"
    deadline = time.monotonic() + DEADLINE_SECONDS
    command = [
        sys.executable,
        "launch/train.py",
        *real_runs.small(STEPS, GROUPS, ATTEMPTS),
        "--config.cluster.backend=ray",
        "--config.rollout.loop_workers=2",
        f"--workdir={workdir}",
    ]
    with log.open("wb") as out:
        run = subprocess.Popen(command, cwd=scripts.ROOT, stdout=out, stderr=subprocess.STDOUT)
        try:
            metrics = workdir / "metrics.jsonl"
            real_runs.wait_until(lambda: metrics.exists() and len(real_runs.lines(metrics)) > 3, run, log, deadline)
            (victim,) = named("loops-0")
            os.kill(victim.pid, signal.SIGKILL)
            assert run.wait(deadline - time.monotonic()) == 0, log.read_text()[-3000:]
        finally:
            run.kill()
            run.wait(20)
    assert "Loop worker loops-0 was lost" in log.read_text()
    steps = [step["step"] for step in real_runs.lines(metrics) if "loss" in step]
    assert steps == list(range(1, STEPS + 1))
    trained = collections.Counter(record["trajectory_id"] for record in real_runs.lines(workdir / "trace.jsonl"))
    assert set(trained.values()) == {1}
    assert len(trained) == STEPS * GROUPS * ATTEMPTS
