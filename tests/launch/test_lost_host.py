"""A run over emulated hosts loses one that rolls out: a spare one takes its place, and every prompt is trained once."""

import collections
import os
import subprocess
import sys
import time

import psutil
import pytest
import real_runs
import scripts

from libra_jax.cluster import emulated

pytestmark = [pytest.mark.ray, pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.drill]

STEPS, GROUPS, ATTEMPTS = 4000, 4, 2
MORE = 20
"""Steps to take after another host has taken the lost one's place."""

DEADLINE_SECONDS = 270.0
SETTINGS = (
    *real_runs.small(STEPS, GROUPS, ATTEMPTS),
    "--config.rollout.tensor_parallel=1,1",
    "--config.cluster.backend=ray",
    "--config.cluster.accelerators_per_host=1",
    "--config.rollout.loop_workers=2",
)


def test_a_spare_host_takes_the_place_of_one_that_dies_and_nothing_is_lost(tmp_path):
    workdir, log = tmp_path / "run", tmp_path / "log"
    deadline = time.monotonic() + DEADLINE_SECONDS
    others = set(psutil.Process().children(recursive=True))  # a Ray that other tests of this process share
    with emulated.EmulatedHosts(4) as nodes, log.open("wb") as out:
        command = [sys.executable, "launch/train.py", *SETTINGS, f"--workdir={workdir}"]
        command.append(f"--config.cluster.address={nodes.address}")
        run = subprocess.Popen(
            command,
            cwd=scripts.ROOT,
            env={**os.environ, **nodes.environment},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        family = psutil.Process().children(recursive=True)
        try:
            metrics = workdir / "metrics.jsonl"
            real_runs.wait_until(lambda: metrics.exists() and len(real_runs.lines(metrics)) > 3, run, log, deadline)
            family += psutil.Process().children(recursive=True)
            before = real_runs.hosts(workdir)
            killed = time.monotonic()
            nodes.kill(int(before[1].removeprefix("host-")))  # the first that rolls out
            real_runs.wait_until(lambda: real_runs.hosts(workdir) != before, run, log, deadline)
            print(f"another host {time.monotonic() - killed:.1f} s after the loss")
            enough = len(real_runs.lines(metrics)) + MORE
            real_runs.wait_until(lambda: len(real_runs.lines(metrics)) >= enough, run, log, deadline)
            run.terminate()
            assert run.wait(deadline - time.monotonic()) == os.EX_TEMPFAIL, log.read_text()[-3000:]
        finally:
            run.kill()
            run.wait()
    after = real_runs.hosts(workdir)
    (spare,) = {"host-0", "host-1", "host-2", "host-3"} - set(before)
    assert after == [before[0], spare, before[2]]
    said = log.read_text()
    assert "Engine rollout-0 was lost" in said
    trained = collections.Counter(record["prompt_id"] for record in real_runs.lines(workdir / "trace.jsonl"))
    steps = [record["step"] for record in real_runs.lines(metrics)]
    assert steps == list(range(1, len(steps) + 1))
    assert (len(trained), set(trained.values())) == (len(steps) * GROUPS, {ATTEMPTS})
    assert real_runs.still_alive_after(30.0, set(family) - others) == []
