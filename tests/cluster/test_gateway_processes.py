"""The gateway as a Ray actor, which comes back at its port if it is killed."""

from __future__ import annotations

import asyncio
import json
import pathlib
import sys
from urllib.parse import urlsplit

import psutil
import pytest

from libra_jax.cluster import create
from libra_jax.config import ClusterConfig
from libra_jax.telemetry import memory

sys.path += [str(pathlib.Path(__file__).parents[1] / folder) for folder in ("coordinator", "harness")]
import gateway_child

pytestmark = [pytest.mark.ray, pytest.mark.multiprocess, pytest.mark.slow]


def listening(log: pathlib.Path) -> list[int]:
    """Returns the ids of the processes that listen at the ports of the sessions in an agents' log."""
    text = log.read_text() if log.exists() else ""
    ports = {urlsplit(line.split()[0]).port for line in text.splitlines()}
    return [
        each.pid
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr.port in ports and each.pid is not None
    ]


def test_a_gateway_that_is_killed_loses_no_session_and_no_token(ray_session, tmp_path):
    config = gateway_child.config(steps=2, cluster={"backend": "ray"}, checkpoint={"every": 0})
    recorder, log = memory.MemoryRecorder(), tmp_path / "told.txt"
    environment = {"callable": "gateway_agents:agent", "arguments": {"log": str(log), "seconds": 0.1}}
    killed: list[int] = []

    async def kill() -> None:
        """Kills the gateway twice, while its sessions wait for outputs."""
        while len(killed) < 2:
            await asyncio.sleep(0.2)
            told = log.read_text().count("\n") if log.exists() else 0
            if told < 40 * (len(killed) + 1):
                continue
            for pid in [pid for pid in listening(log) if pid not in killed][:1]:
                psutil.Process(pid).kill()
                killed.append(pid)

    async def body() -> None:
        cluster = create.create(ClusterConfig(backend="ray"), shutdown_seconds=30, start_seconds=120)
        made = gateway_child.make(config, cluster, recorder, tmp_path, environment, tokens_per_second=300.0)
        beside = asyncio.ensure_future(kill())
        try:
            await made.run()
        finally:
            beside.cancel()
            await asyncio.wait({beside})
            await cluster.shutdown()

    asyncio.run(asyncio.wait_for(body(), 240.0))
    assert len(killed) == 2
    assert sum("gateway-" in note and "restarted" in note for note in recorder.notes) == 2
    trained = json.loads((tmp_path / "trainer.json").read_text())
    assert sorted(trained["prompts"]) == sorted(f"task-{index}" for index in range(2 * gateway_child.GROUPS))
    voids = [metrics["voids/rollouts"] for _, metrics in recorder.steps]
    assert voids == [0, 0], f"every session goes on: {recorder.notes}"
    assert [metrics["turns/mean"] for _, metrics in recorder.steps] == [3, 3]
