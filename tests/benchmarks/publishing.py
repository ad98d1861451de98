"""What engines and hosts cost the coordinator apart from calls: in a publication, by their health, when they begin.

Its own objects on a virtual clock, among doubles that answer at once and hold no weights.
"""

from __future__ import annotations

import asyncio
import pathlib
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.coordinator import dispatch, instances, parts
from libra_jax.planning import calibration
from libra_jax.scheduling import registry
from libra_jax.simulator import clock, world
from libra_jax.telemetry import memory
from libra_jax.weights import relay_tree, sync
from tests.benchmarks import coordinator

PUBLICATION_COSTS = ("engine_update", "engine_chunk", "host_chunk")

SIZES = ((128, 1, 4), (128, 1, 32), (128, 4, 4), (512, 1, 8), (512, 2, 8), (32, 8, 8))
"""(hosts, engines on each, chunks) of the publications that are measured. A host costs more where there are more of
them, though nothing in the code says so: caches hold less of each."""

HELD_OUT = (256, 2, 16)
"""Predicted from the others, and measured."""

SERVED = 1_024
CHECKS = 10
"""Looks at each engine whose cost is taken."""


class Engine(coordinator.Instant):
    """Takes weights, which it has no use for."""

    def __init__(self, name: str, degree: int) -> None:
        super().__init__(deltas=1)
        self._info = protocols.EngineInfo(name, degree, 32, coordinator.MAX_CONTEXT, ())

    async def start(self) -> protocols.EngineInfo:
        return self._info

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def start_weight_update(self, policy_version: int) -> None: ...

    async def update_weights(self, chunk: protocols.WeightChunk) -> None: ...

    async def finish_weight_update(self, policy_version: int) -> None: ...


class Relay:
    """Passes on what has no bytes."""

    async def health(self) -> Mapping[str, float]:
        return {}

    async def listen(self, generation: int) -> Mapping[str, Any]:
        return {}

    async def connect(self, child: str, generation: int, address: Mapping[str, Any]) -> None: ...

    async def compare(self, chunk: protocols.WeightChunk) -> None: ...

    async def send(self, chunk: protocols.WeightChunk, child: str, difference: object = None) -> None: ...

    async def receive(self, chunk: protocols.WeightChunk, difference: object = None) -> protocols.WeightChunk:
        return chunk

    async def shutdown(self) -> None: ...


class Weights:
    """A trainer's part in a publication of so many empty chunks."""

    def __init__(self, chunks: int) -> None:
        self._chunks = chunks
        self.lock = asyncio.Lock()

    async def open_weights(self, policy_version: int, destinations: Sequence[protocols.WeightDestination] = ()) -> int:
        return self._chunks

    async def stage_weights(self, policy_version: int, index: int) -> protocols.WeightChunk:
        return protocols.WeightChunk(policy_version, index, self._chunks, (), 0, {}, f"{policy_version}.{index}")

    async def close_weights(self, policy_version: int) -> None: ...


def costs(rounds: int) -> dict[str, float]:
    """CPU seconds of engine_update, engine_chunk, host_chunk, health and serving (`planning.scale.Costs`)."""
    taken = [clock.run(_published(*size, rounds), signals=False) for size in SIZES]
    rows = np.array([_counts(*size) for size in SIZES]) / np.array(taken)[:, None]
    fitted = calibration.non_negative_fit(rows, np.ones(len(SIZES)))
    return {
        **dict(zip(PUBLICATION_COSTS, map(float, fitted), strict=True)),
        "health": clock.run(_health(), signals=False),
        "serving": statistics.median(serving(SERVED) for _ in range(rounds)) / SERVED,
    }


def held_out(known: Mapping[str, float], rounds: int) -> tuple[str, float, float]:
    """A publication of `HELD_OUT` in words, its CPU seconds by known costs, and as measured."""
    hosts, engines, chunks = HELD_OUT
    predicted = float(np.dot(_counts(*HELD_OUT), [known[name] for name in PUBLICATION_COSTS]))
    what = f"a publication of {chunks} chunks to {hosts} hosts with {engines} engines each, calls apart"
    return what, predicted, clock.run(_published(*HELD_OUT, rounds), signals=False)


def _counts(hosts: int, engines: int, chunks: int) -> list[float]:
    """How often each of `PUBLICATION_COSTS` comes; the first host's engines read the trainer's memory."""
    return [hosts * engines, hosts * engines * chunks, (hosts - 1) * chunks]


def serving(engines: int) -> float:
    """CPU seconds until the scheduler knows all of so many engines that hold the first weights."""
    return clock.run(_serving(engines), signals=False)


def _made(hosts: int, each: int) -> tuple[parts.RunContext, instances.Instances]:
    rollout = configuration.RolloutConfig(max_context=coordinator.MAX_CONTEXT)
    config = configuration.RunConfig(
        rollout=rollout, trainer=configuration.TrainerConfig(row_tokens=coordinator.MAX_CONTEXT)
    )
    cluster = world.Cluster(world.Parts())
    specs = [
        protocols.ActorSpec(
            f"rollout-{host}-{number}",
            f"{__name__}:Engine",
            {"name": f"rollout-{host}-{number}", "degree": (1, 1, 2, 4)[number % 4]},
            host=host,
        )
        for host in range(hosts)
        for number in range(each)
    ]
    run = parts.RunContext(config, cluster, memory.MemoryRecorder(), pathlib.Path())
    return run, instances.Instances(run, specs)


async def _published(hosts: int, each: int, chunks: int, rounds: int) -> float:
    run, engines = _made(hosts, each)
    specs = {host: protocols.ActorSpec(f"relay-{host}", f"{__name__}:Relay", {}, host=host) for host in range(hosts)}
    passing = relay_tree.RelayTree(run.config, cluster=run.cluster, specs=specs, recorder=run.recorder)
    await engines.start()
    publisher = sync.WeightSync(
        run.config,
        trainer=Weights(chunks),
        engines=engines,
        recorder=run.recorder,
        hosts=passing,
    )
    spent = []
    for version in range(rounds + 1):  # the first makes the relays and their links
        begin = time.process_time()
        await publisher.sync_weights(version)
        spent.append(time.process_time() - begin)
    await _end(run)
    if any(engine.policy_version != rounds for engine in engines.engines.values()):
        raise protocols.LibraError("an engine was lost")
    return statistics.median(spent[1:])


async def _health() -> float:
    run, engines = _made(32, 8)
    await engines.start()
    begin = time.process_time()
    await asyncio.sleep((CHECKS + 0.5) * run.config.rollout.health_seconds)
    spent = time.process_time() - begin
    await _end(run)
    return spent / (CHECKS * len(engines.engines))


async def _serving(count: int) -> float:
    run, engines = _made(1, count)
    await engines.start()
    scheduler = registry.create(run.config.scheduler, kinds=((1, ""), (2, ""), (4, "")))
    dispatch.Dispatcher(run, scheduler=scheduler, engines=engines)
    begin = time.process_time()
    engines.serve(engines.engines.values())
    spent = time.process_time() - begin
    await _end(run)
    if len(engines.serving()) != count:
        raise protocols.LibraError(f"{len(engines.serving())} of {count} engines serve")
    return spent


async def _end(run: parts.RunContext) -> None:
    await run.scope.cancel_background(1.0)
    await run.cluster.shutdown()
