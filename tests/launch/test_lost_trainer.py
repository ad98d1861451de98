"""A run over emulated hosts loses one that trains: its trainer is made anew on a spare one, and catches up."""

import collections
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
import real_runs
import scripts

from libra_jax.cluster import emulated

pytestmark = [pytest.mark.ray, pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.drill]

STEPS, GROUPS, ATTEMPTS, LEAST_STEPS = 4000, 4, 2, 14
DEADLINE_SECONDS = 270.0
SETTINGS = (
    *real_runs.small(STEPS, GROUPS, ATTEMPTS),
    "--config.rollout.tensor_parallel=1,",
    "--config.trainer.data=2",
    "--config.trainer.processes=2",
    "--config.checkpoint.every=10",
    "--config.cluster.backend=ray",
    "--config.cluster.accelerators_per_host=1",
)


def test_a_run_goes_on_by_itself_on_a_spare_host_when_one_that_trains_dies_and_nothing_is_lost(tmp_path):
    workdir, log = tmp_path / "run", tmp_path / "log"
    deadline = time.monotonic() + DEADLINE_SECONDS
    others = set(psutil.Process().children(recursive=True))  # a Ray that other tests of this process share
    metrics = workdir / "metrics.jsonl"

    def step() -> int:
        return len(real_runs.lines(metrics)) if metrics.exists() else 0

    with emulated.EmulatedHosts(4) as nodes, log.open("wb") as out:
        command = [sys.executable, "launch/train.py", *SETTINGS, f"--workdir={workdir}"]
        command.append(f"--config.cluster.address={nodes.address}")
        environment = {**os.environ, **nodes.environment}
        run = subprocess.Popen(command, cwd=scripts.ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)
        try:
            real_runs.wait_until(lambda: step() > LEAST_STEPS, run, log, deadline)
            family = set(psutil.Process().children(recursive=True))
            before = real_runs.hosts(workdir)
            killed = time.monotonic()
            nodes.kill(int(before[1].removeprefix("host-")))  # the second that trains: the first may be Ray's head
            real_runs.wait_until(lambda: "The trainer goes on" in log.read_text(), run, log, deadline)
            known = step()
            real_runs.wait_until(lambda: step() > known, run, log, deadline)
            print(f"the next step {time.monotonic() - killed:.1f} s after the loss")
            family |= set(psutil.Process().children(recursive=True))
            run.send_signal(signal.SIGINT)
            assert run.wait(deadline - time.monotonic()) == 0, log.read_text()[-3000:]
        finally:
            run.kill()
            run.wait()
    after, said = real_runs.hosts(workdir), log.read_text()
    (spare,) = {"host-0", "host-1", "host-2", "host-3"} - set(before)
    assert after == [before[0], spare, before[2]]
    assert "Engine rollout-0 was lost" not in said, "rollouts go on"
    (told,) = [line for line in said.splitlines() if line.startswith("The trainer goes on")]
    print(told)
    begun = int(re.search(r"the checkpoint at step (\d+)", told)[1])
    assert 0 < begun < known
    steps = [record["step"] for record in real_runs.lines(metrics)]
    assert steps == list(range(1, len(steps) + 1))
    trained = collections.Counter(record["prompt_id"] for record in real_runs.lines(workdir / "trace.jsonl"))
    assert (len(trained), set(trained.values())) == (len(steps) * GROUPS, {ATTEMPTS})
    assert real_runs.still_alive_after(30.0, family - others) == []
