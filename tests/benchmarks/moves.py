"""What it costs a trainer to move to other processes, and to let a hybrid replica join: wall time with and without."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.cluster import create as cluster_create
from libra_jax.coordinator import parts
from libra_jax.hybrid import training_sides
from libra_jax.models import config as model_config
from libra_jax.telemetry import memory
from libra_jax.trainer_control import client, handover
from tests.benchmarks import models

PLAIN_STEPS, STEPS_AFTER = 4, 4
TOKENS, SEQUENCES = 128, 8
MEMBER = "rollout-0"

PUBLISHED = {"published_snapshot_s": 3.6, "published_recovery_s": 4.4, "published_step_s": 454.0}
"""Of a step of its 454 s, Libra spends so much on a mesh's snapshot and recovery (arXiv 2606.03077, on GPUs)."""


async def measure() -> dict[str, Any]:
    """A model of 105 M parameters, each set of processes on a core of its own.

    `stall_*` is the wall time of all steps from the move's beginning to the last of four after it, minus that of as
    many plain steps: everything that goes on beside training included. `longest_step_*` is the longest of them.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise protocols.ConfigError("this is measured on two cores, and this process may use one: widen its affinity")
    with tempfile.TemporaryDirectory(prefix="libra-jax-") as folder:
        workdir = Path(folder)
        shape = _write_model(workdir / "model")
        config = _config(workdir / "model")
        cluster = cluster_create.create(config.cluster)
        try:
            bench = _Bench(config, cluster, workdir, (cores[0], cores[1]))
            figures = {"parameters": model_config.parameter_count(shape)}
            return figures | await bench.handover() | await bench.replica() | PUBLISHED
        finally:
            await cluster.shutdown()


def _write_model(path: Path) -> model_config.TransformerConfig:
    import jax

    from libra_jax.models import transformer
    from libra_jax.models.hf import hf

    shape = models.hundred_million()
    hf.save(transformer.init_params(shape, jax.random.key(0)), shape, path)
    return shape


def _config(model: Path) -> config_lib.RunConfig:
    return config_lib.RunConfig(
        model=config_lib.ModelConfig(path=str(model)),
        rollout=config_lib.RolloutConfig(max_context=TOKENS, max_tokens=64, checksum=True),
        trainer=config_lib.TrainerConfig(platform="cpu", row_tokens=TOKENS, rows_per_micro_batch=2),
        cluster=config_lib.ClusterConfig(backend="ray"),
    )


class _Bench:
    """A trainer on one core, and what is to move on the other."""

    def __init__(
        self, config: config_lib.RunConfig, cluster: protocols.Cluster, workdir: Path, cores: tuple[int, int]
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._workdir = workdir
        self._cores = cores
        self._version = 0
        self._trainer = self._client(cores[0], "trainer")

    def _client(self, core: int, name: str) -> client.TrainerActorClient:
        processes = client.TrainerProcesses(self._cluster, self._make(core), name=name)
        return client.TrainerActorClient(processes, self._config.deadlines)

    def _make(self, core: int) -> client.MakeProcess:
        trainer = dataclasses.replace(self._config.trainer, cores=(core,))
        arguments = {
            "config": config_lib.to_dict(dataclasses.replace(self._config, trainer=trainer)),
            "workdir": str(self._workdir),
        }
        spec = protocols.ActorSpec(
            "trainer", "libra_jax.training.trainer:create", arguments, environment=_cpu_environment()
        )
        return lambda process, processes: spec

    async def _step(self, moving: handover.Handover | None = None) -> float:
        batch, began = _batch(self._version), time.perf_counter()
        async with self._trainer.lock:
            if moving is not None:
                moving.trains(batch)
            await self._trainer.train_step(batch)
        self._version += 1
        return time.perf_counter() - began

    async def _plain(self, count: int) -> float:
        return statistics.median([await self._step() for _ in range(count)])

    async def handover(self) -> dict[str, Any]:
        """The trainer moves from the first core to the second."""
        await self._trainer.make()
        await self._trainer.start()
        await self._plain(1)
        plain = await self._plain(PLAIN_STEPS)
        moving = handover.Handover(
            self._config.deadlines,
            serving=self._trainer,
            successor=self._client(self._cores[1], "trainer-1"),
            sizes=protocols.MeshSizes(1, 1, 1),
            workdir=self._workdir,
        )
        began, gaps = time.perf_counter(), []
        await moving.begin()
        while not (await moving.progress()).ready:
            gaps.append(await self._step(moving))
        taking = time.perf_counter()
        async with self._trainer.lock:
            taken = await moving.take_over(self._version)
        gaps.append(time.perf_counter() - taking + await self._step())
        after = [await self._step() for _ in range(STEPS_AFTER - 1)]
        total = time.perf_counter() - began
        await moving.end_former()
        return {
            "handover_step_before_s": plain,
            "handover_step_after_s": statistics.median(after),
            **_stalls("handover", total, len(gaps) - 1, plain, statistics.median(after), gaps),
            **{f"handover_{name}_s": seconds for name, seconds in taken.phases.items()},
            "handover_stood_still_s": taken.stall,
            "handover_replayed_steps": moving.replayed,
            "handover_state_mb": taken.nbytes / 1e6,
        }

    async def replica(self) -> dict[str, Any]:
        """A replica on the first core joins the trainer on the second, and computes half of each step from then on."""
        plain = statistics.median([await self._published_step() for _ in range(PLAIN_STEPS)])
        spec = protocols.ActorSpec(
            "hybrid-0",
            "libra_jax.training.training_side:create",
            {
                "config": config_lib.to_dict(self._config),
                "workdir": str(self._workdir),
                "name": MEMBER,
                "cores": self._cores[:1],
            },
            environment=_cpu_environment(),
        )
        run = parts.CoordinatorContext(self._config, self._cluster, memory.MemoryRecorder(), self._workdir)
        sides = training_sides.TrainingSides(run, {MEMBER: spec})
        began, gaps = time.perf_counter(), []
        readying = asyncio.ensure_future(self._ready(sides))
        while not readying.done():
            gaps.append(await self._published_step())
        ready_seconds = readying.result()
        joining = time.perf_counter()
        address = await self._trainer.listen(MEMBER, 1)
        await self._trainer.connect(MEMBER, 1, address)
        await sides.join(MEMBER, 1, address)
        joined = time.perf_counter() - joining
        after = [await self._shared_step(sides) for _ in range(STEPS_AFTER)]
        gaps.append(joined + after[0])
        total = time.perf_counter() - began
        shared = statistics.median(after[1:])
        return {
            "replica_step_before_s": plain,
            "replica_step_after_s": shared,
            "replica_speedup": plain / shared,
            **_stalls("replica", total, len(gaps) - 1, plain, shared, gaps),
            "replica_ready_s": ready_seconds,
            "replica_join_s": joined,
        }

    async def _ready(self, sides: training_sides.TrainingSides) -> float:
        """Its process, beside training: up and compiled."""
        began = time.perf_counter()
        await sides.ensure(MEMBER)
        await sides.warm(MEMBER)
        return time.perf_counter() - began

    async def _publish(self) -> list[protocols.WeightChunk]:
        count = await self._trainer.open_weights(self._version)
        buckets = [await self._trainer.stage_weights(self._version, index) for index in range(count)]
        await self._trainer.close_weights(self._version)
        return buckets

    async def _published_step(self) -> float:
        """As in a run: the version is published, whoever reads it, and a step taken."""
        began = time.perf_counter()
        await self._publish()
        await self._step()
        return time.perf_counter() - began

    async def _shared_step(self, sides: training_sides.TrainingSides) -> float:
        """Publishes the version to the replica, and takes a step with it."""
        began = time.perf_counter()
        await sides.settle()
        buckets = await self._publish()
        sides.offer(self._version, buckets)
        await sides.fetch(MEMBER)
        share = protocols.Share(MEMBER, 1, 0.5)
        batch = _batch(self._version)
        contributing = asyncio.ensure_future(sides.contribute(MEMBER, batch, [share]))
        metrics = await self._trainer.train_step(batch, [share])
        await contributing
        if metrics["shares/late"]:
            raise protocols.LibraError("the replica's share came too late to count")
        self._version += 1
        return time.perf_counter() - began


def _stalls(name: str, total: float, before: int, plain: float, after: float, gaps: list[float]) -> dict[str, float]:
    """What a move lengthened its steps by: `before` of them as plain ones, the rest as those after it."""
    stall = total - before * plain - STEPS_AFTER * after
    return {
        f"{name}_steps_beside": before,
        f"{name}_stall_s": stall,
        f"{name}_stall_steps": stall / max(plain, after),
        f"{name}_longest_step_s": max(gaps),
    }


def _cpu_environment() -> dict[str, str]:
    return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}


def _batch(version: int) -> protocols.TrainBatch:
    """Two groups of four attempts of `TOKENS` tokens, half of them right."""
    rng = np.random.default_rng(version)
    groups = []
    for number in range(2):
        group = protocols.Group(number, protocols.Task(f"task-{number}", {}), version)
        for sample in range(SEQUENCES // 2):
            attempt = protocols.Trajectory(f"task-{number}/{sample}", f"task-{number}", reward=float(sample % 2))
            attempt.append_text(rng.integers(0, 16_384, 32).tolist(), protocols.TokenSource.PROMPT)
            sampled = tuple(rng.integers(0, 16_384, TOKENS - 32).tolist())
            count = len(sampled)
            attempt.append_sampled(protocols.TokenDelta(sampled, (-9.7,) * count, (version,) * count))
            group.trajectories.append(attempt)
        groups.append(group)
    return protocols.TrainBatch(version, tuple(groups))
