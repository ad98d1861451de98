"""A whole run whose trainer and engines are Ray actors: what it publishes crosses from one process into others."""

from __future__ import annotations

import asyncio
import pathlib
import sys

import pytest

from libra_jax import protocols
from libra_jax.cluster import create
from libra_jax.config import ClusterConfig
from libra_jax.coordinator import run as run_module
from libra_jax.telemetry import memory

sys.path.append(str(pathlib.Path(__file__).parents[1] / "coordinator"))
import coordinator_doubles as doubles

pytestmark = [pytest.mark.ray, pytest.mark.multiprocess, pytest.mark.slow]


def test_a_run_on_ray_trains_and_publishes_through_shared_memory_across_processes(ray_session, tmp_path):
    config = doubles.make_config(
        steps=3,
        cluster={"backend": "ray"},
        rollout={"restarts": 0},
        coordinator={"max_staleness": 1},
        checkpoint={"every": 2},
    )
    engines = [
        protocols.ActorSpec(name, "publishing_actors:Engine", {"name": name, "log": str(tmp_path / name)})
        for name in ("engine-0", "engine-1")
    ]
    recorder = memory.MemoryRecorder()

    async def body() -> run_module.RunSummary:
        coordinator = doubles.make_coordinator(
            config,
            cluster=create.create(ClusterConfig(backend="ray"), shutdown_seconds=30, start_seconds=120),
            trainer_spec=protocols.ActorSpec(
                "trainer", "publishing_actors:trainer", {"log": str(tmp_path / "trainer.json")}
            ),
            engine_specs=engines,
            recorder=recorder,
            workdir=tmp_path,
        )
        return await coordinator.run()

    summary = asyncio.run(body())
    assert (summary.steps, summary.replaced) == (3, {})
    assert [step for step, _ in recorder.steps] == [1, 2, 3]
    trained = doubles.read(str(tmp_path / "checkpoints" / "step-00000003" / "trainer"))
    assert sorted(trained["prompts"]) == sorted(f"task-{index}" for index in range(9))
    pids = set()
    for spec in engines:
        reads = [line.split() for line in (tmp_path / spec.name).read_text().splitlines()]
        assert [(int(version), int(index)) for _, _, version, index in reads] == [
            (version, index) for version in range(4) for index in range(3)
        ]
        pids |= {(reader, owner) for reader, owner, *_ in reads}
    readers, owners = ({pair[side] for pair in pids} for side in (0, 1))
    assert (len(readers), len(owners), len(readers & owners)) == (2, 1, 0)
