"""Coordinator time a request: everything between an attempt's start and its last token that is not the engine's."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from benchmarks import workload
from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.agents import loop as agent_loop
from libra_jax.agents import tokenizers
from libra_jax.cluster import create as cluster_create
from libra_jax.coordinator import dispatch, failure, instances
from libra_jax.scheduling import registry
from libra_jax.telemetry import memory

REQUESTS = 2000
CONCURRENT = 64
DELTAS = 8
NAME = "instant"


class Instant:
    """An engine that costs nothing: a request of 128 tokens in eight deltas, at once."""

    async def start(self) -> protocols.EngineInfo:
        return protocols.EngineInfo(NAME, 1, CONCURRENT, 4096, ())

    async def init_weight_transfer(self, transport: Any) -> None: ...

    async def generate(self, request: protocols.GenerationRequest) -> AsyncIterator[protocols.TokenDelta]:
        size = request.sampling.max_tokens // DELTAS
        for index in range(DELTAS):
            finish: protocols.FinishReason | None = "length" if index == DELTAS - 1 else None
            yield protocols.TokenDelta((65,) * size, (-1.0,) * size, (0,) * size, finish)

    async def health(self) -> dict[str, float]:
        return {}

    async def shutdown(self) -> None: ...


def instant() -> Instant:
    """Factory of the actor."""
    return Instant()


async def measure() -> dict[str, Any]:
    """2,000 single-turn requests, 64 at a time, through agent loop, dispatcher, scheduler and actor proxy."""
    config = configuration.RunConfig(
        rollout=configuration.RolloutConfig(slots=CONCURRENT, max_context=256, max_tokens=128)
    )
    cluster = cluster_create.create(config.cluster)
    recorder = memory.MemoryRecorder()
    ending = failure.Ending()
    spec = protocols.ActorSpec(NAME, f"{__name__}:instant", {})
    engines = instances.Instances(config, cluster=cluster, specs=[spec], recorder=recorder, ending=ending)
    try:
        await engines.start()
        engines.engines[NAME].state = "serving"
        scheduler = registry.create(config.scheduler)
        dispatcher = dispatch.Dispatcher(config, scheduler=scheduler, engines=engines, recorder=recorder, ending=ending)
        engines.changed()
        start = time.process_time()
        await asyncio.gather(*(_attempt(dispatcher) for _ in range(REQUESTS)))
        seconds = time.process_time() - start
    finally:
        await ending.cancel_background(config.deadlines.shutdown)
        await cluster.shutdown()
    return {"requests": REQUESTS, "microseconds_per_request": 1e6 * seconds / REQUESTS}


async def _attempt(dispatcher: dispatch.Dispatcher) -> None:
    name = uuid.uuid4().hex
    dispatcher.open(name, group_id=0, dispatch_version=0)
    try:
        await agent_loop.run_attempt(
            trajectory=protocols.Trajectory(trajectory_id=name, prompt_id=name),
            task=protocols.Task(name, {"prompt": "1+1"}),
            environment=workload.single_turn(),
            tokenizer=tokenizers.CharacterTokenizer(),
            sampler=dispatcher,
            limits=agent_loop.Limits(max_turns=1, max_tokens=128, max_context=256, tool_seconds=10.0, temperature=1.0),
        )
    finally:
        dispatcher.finish(name)
