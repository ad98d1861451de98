"""kill -9 with 64 sessions in flight: nothing is lost, trained twice or scored zero."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import gateway_child
import psutil
import pytest

from libra_jax.cluster import inprocess
from libra_jax.telemetry import memory

CHILD = [sys.executable, str(Path(__file__).with_name("gateway_child.py"))]
PROMPTS = gateway_child.GROUPS * gateway_child.STEPS


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_trained(workdir: Path) -> None:
    """Each prompt was trained once, with all its rollouts, and each rollout has its three outputs."""
    trained = json.loads((workdir / "trainer.json").read_text())
    assert sorted(trained["prompts"]) == sorted(f"task-{index}" for index in range(PROMPTS))


def check_trace(workdir: Path) -> None:
    records = lines(workdir / "trace.jsonl")
    names = [f"task-{index}/{sample}" for index in range(PROMPTS) for sample in range(gateway_child.SIZE)]
    assert sorted(record["trajectory_id"] for record in records) == sorted(names)
    for record in records:
        assert [turn["segment"] for turn in record["turns"]] == [0, 0, 1]
        assert record["finish"] == "answered"


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_killed_twice_trains_the_same_prompts_as_none(tmp_path):
    moments = random.Random(27)
    for _ in range(2):
        child = subprocess.Popen([*CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "running\n"
        time.sleep(moments.uniform(0.7, 2.0))
        child.kill()
        child.wait()
        child.stdout.close()
    survivor = subprocess.run([*CHILD, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert survivor.returncode == 0, survivor.stderr
    check_trained(tmp_path)
    check_trace(tmp_path)


def run_here(workdir: Path, config, environment, disturb, **engines) -> memory.MemoryRecorder:
    """Runs in this process, with a disturbance beside it."""
    recorder = memory.MemoryRecorder()

    async def body() -> None:
        cluster = inprocess.InProcessCluster(shutdown_seconds=5.0)
        made = gateway_child.make(config, cluster, recorder, workdir, environment, **engines)
        beside = asyncio.ensure_future(disturb())
        try:
            await made.run()
        finally:
            beside.cancel()
            await asyncio.wait({beside})
            await cluster.shutdown()

    asyncio.run(asyncio.wait_for(body(), 120.0))
    return recorder


@pytest.mark.slow
def test_engines_that_die_cost_no_session_a_token(tmp_path):
    """Clients see nothing of it, and what they were told is what is trained."""
    log = tmp_path / "told.txt"
    config = gateway_child.config(
        steps=2, rollout={"slots": 16, "restarts": 50, "generation_retries": 50}, checkpoint={"every": 0}
    )

    async def nothing() -> None:
        await asyncio.sleep(0)

    environment = {"callable": "gateway_agents:agent", "arguments": {"log": str(log)}}
    recorder = run_here(tmp_path, config, environment, nothing, fail_after_tokens=400)
    assert len(recorder.steps) == 2
    assert sum(metrics["rollout/resumed"] for _, metrics in recorder.steps) > 0
    assert all(metrics["voids/rollouts"] == 0 for _, metrics in recorder.steps)
    assert len(log.read_text().splitlines()) == 2 * 64 * 3, "no request had to be asked twice"


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.drill  # tests/launch/test_any_agent_runs.py kills an agent of each prompt in a whole run
def test_harnesses_that_are_killed_are_run_again_and_never_scored_zero(tmp_path):
    config = gateway_child.config(steps=1, checkpoint={"every": 0}, task={"retry_seconds": 0.05})
    killed: list[int] = []

    async def kill() -> None:
        """Kills six agents that have asked for something, one after another."""
        while len(killed) < 6:
            await asyncio.sleep(0.05)
            agents = [
                child
                for child in psutil.Process().children(recursive=True)
                if child.status() != psutil.STATUS_ZOMBIE
                and "gateway_agents.py" in " ".join(child.cmdline())
                and child.pid not in killed
                and child.cpu_times().user > 0.1
            ]
            if agents:
                agents[0].kill()
                killed.append(agents[0].pid)

    environment = {
        "command": [sys.executable, str(Path(__file__).with_name("gateway_agents.py"))],
        "variables": {"PYTHONPATH": ":".join(sys.path)},
        "exits": [0],
    }
    recorder = run_here(tmp_path, config, environment, kill)
    ((_, metrics),) = recorder.steps
    assert len(killed) == 6
    assert metrics["voids/rollouts"] >= 1
    assert metrics["groups/replaced"] == 0
    assert metrics["agent/answered"] == 1.0
    check = json.loads((tmp_path / "trainer.json").read_text())
    assert sorted(check["prompts"]) == sorted(f"task-{index}" for index in range(gateway_child.GROUPS))
    assert not [
        child for child in psutil.Process().children(recursive=True) if "gateway_agents.py" in " ".join(child.cmdline())
    ]
