"""A run over emulated hosts loses one that rolls out: a spare one takes its place, and every prompt is trained once."""

import collections
import json
import os
import pathlib
import subprocess
import sys
import time

import psutil
import pytest
import real_runs
import scripts

from libra_jax.cluster import emulated

pytestmark = [pytest.mark.ray, pytest.mark.multiprocess, pytest.mark.slow]

STEPS, GROUPS, ATTEMPTS = 600, 4, 2
DEADLINE_SECONDS = 270.0
SETTINGS = (
    "--config=configs/quickstart.py",
    f"--config.steps={STEPS}",
    f"--config.coordinator.groups_per_step={GROUPS}",
    f"--config.coordinator.group_size={ATTEMPTS}",
    "--config.rollout.engine=fake",
    "--config.rollout.tensor_parallel=1,1",
    "--config.rollout.slots=8",
    "--config.rollout.max_tokens=24",
    "--config.trainer.rows_per_micro_batch=2",
    "--config.warm_start.steps=0",
    "--config.evaluation.every=0",
    "--config.telemetry.report=False",
    "--config.cluster.backend=ray",
    "--config.cluster.accelerators_per_host=1",
)


def hosts(workdir: pathlib.Path) -> list[str]:
    """The nodes that are the run's hosts now."""
    file = workdir / "hosts.json"
    return [host["node"] for host in json.loads(file.read_text())] if file.exists() else []


def wait_until(done, run: subprocess.Popen, log: pathlib.Path, deadline: float) -> None:
    while not done():
        assert run.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.2)


def test_a_spare_host_takes_the_place_of_one_that_dies_and_nothing_is_lost(tmp_path):
    workdir, log = tmp_path / "run", tmp_path / "log"
    deadline = time.monotonic() + DEADLINE_SECONDS
    others = set(psutil.Process().children(recursive=True))  # a Ray that other tests of this process share
    with emulated.EmulatedHosts(4) as nodes, log.open("wb") as out:
        command = [sys.executable, "launch/train.py", *SETTINGS, f"--workdir={workdir}"]
        command.append(f"--config.cluster.address={nodes.address}")
        run = subprocess.Popen(
            command, cwd=scripts.ROOT, env={**os.environ, **nodes.environment}, stdout=out, stderr=subprocess.STDOUT
        )
        family = psutil.Process().children(recursive=True)
        try:
            metrics = workdir / "metrics.jsonl"
            wait_until(lambda: metrics.exists() and len(real_runs.lines(metrics)) > 3, run, log, deadline)
            family += psutil.Process().children(recursive=True)
            before = hosts(workdir)
            killed = time.monotonic()
            nodes.kill(int(before[1].removeprefix("host-")))  # the first that rolls out
            wait_until(lambda: hosts(workdir) != before, run, log, deadline)
            print(f"another host {time.monotonic() - killed:.1f} s after the loss")
            assert run.wait(deadline - time.monotonic()) == 0, log.read_text()[-3000:]
        finally:
            run.kill()
            run.wait()
    after = hosts(workdir)
    (spare,) = {"host-0", "host-1", "host-2", "host-3"} - set(before)
    assert after == [before[0], spare, before[2]]
    said = log.read_text()
    assert "Engine rollout-0 was lost" in said
    trained = collections.Counter(record["prompt_id"] for record in real_runs.lines(workdir / "trace.jsonl"))
    assert (len(trained), set(trained.values())) == (STEPS * GROUPS, {ATTEMPTS})
    assert [record["step"] for record in real_runs.lines(metrics)][-STEPS:] == list(range(1, STEPS + 1))
    assert real_runs.still_alive_after(30.0, set(family) - others) == []
