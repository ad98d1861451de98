"""A real run whose trainer is lost and may not be made anew: its status asks whoever started it for another start."""

import os
import subprocess
import sys
import time

import psutil
import pytest
import real_runs
import scripts

from tests.drills import processes

pytestmark = [pytest.mark.ray, pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(600)]

SECONDS = 400.0
SETTINGS = (
    *real_runs.small(4000, 2, 2),
    "--config.rollout.tensor_parallel=1,",
    "--config.trainer.platform=cpu",
    "--config.trainer.restarts=0",
    "--config.checkpoint.every=1",
    "--config.cluster.backend=ray",
    "--config.deadlines.cluster_start=200",
)


def test_a_run_that_cannot_do_without_what_it_lost_ends_with_the_status_that_asks_for_it_again(tmp_path):
    log, metrics = tmp_path / "log", tmp_path / "run" / "metrics.jsonl"
    command = [sys.executable, "launch/train.py", *SETTINGS, f"--workdir={tmp_path / 'run'}"]
    deadline = time.monotonic() + SECONDS
    with log.open("wb") as out:
        run = subprocess.Popen(command, cwd=scripts.ROOT, stdout=out, stderr=out)
    family: list[psutil.Process] = []
    try:
        real_runs.wait_until(lambda: metrics.exists() and len(real_runs.lines(metrics)) > 1, run, log, deadline)
        family = psutil.Process(run.pid).children(recursive=True)
        (trainer,) = processes.actors(family, "trainer")
        trainer.kill()
        assert run.wait(deadline - time.monotonic()) == os.EX_TEMPFAIL, log.read_text()[-3000:]
    finally:
        run.kill()
        run.wait()
    (error,) = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert "config.trainer.restarts is 0" in error
    assert real_runs.still_alive_after(30.0, family) == []
