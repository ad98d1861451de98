"""Coordinator time a request: everything between a rollout's start and its last token that is not the engine's."""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
import statistics
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from benchmarks import workload
from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.chat import tokenizers
from libra_jax.cluster import create as cluster_create
from libra_jax.coordinator import dispatch, instances, parts
from libra_jax.rollouts import loop as agent_loop
from libra_jax.rollouts import streams
from libra_jax.scheduling import registry
from libra_jax.telemetry import memory

REQUESTS = 2000
CONCURRENT = 64
MAX_CONTEXT = 65_536
NAME = "instant"


@dataclasses.dataclass(frozen=True)
class Shape:
    """The one model output of each request.

    Attributes:
      deltas: parts in which its tokens come.
      tokens: tokens of the output.
      pause: seconds before each delta.
    """

    deltas: int = 8
    tokens: int = 128
    pause: float = 0.0


class Instant:
    """An engine that costs nothing: a turn's tokens come in `deltas` parts, with `pause` seconds before each part."""

    def __init__(self, deltas: int, pause: float = 0.0) -> None:
        self._deltas = deltas
        self._pause = pause

    async def start(self) -> protocols.EngineInfo:
        return protocols.EngineInfo(NAME, 1, CONCURRENT, MAX_CONTEXT, ())

    async def init_weight_transfer(self, transport: Any) -> None: ...

    async def generate(self, request: protocols.GenerationRequest) -> AsyncIterator[protocols.TokenDelta]:
        size, last = request.sampling.max_tokens // self._deltas, self._deltas - 1
        for index in range(self._deltas):
            if self._pause:
                await asyncio.sleep(self._pause)
            end = (request.sampling.stop_token_ids[0],) if index == last else (65,)
            finish: protocols.FinishReason | None = "stop" if index == last else None
            yield protocols.TokenDelta((65,) * (size - 1) + end, (-1.0,) * size, (0,) * size, finish)

    async def health(self) -> dict[str, float]:
        return {}

    async def shutdown(self) -> None: ...


def instant(deltas: int, pause: float) -> Instant:
    """Factory of the actor."""
    return Instant(deltas, pause)


PACED = Shape(deltas=16, tokens=256, pause=0.4)
"""An output of 256 tokens as an engine sends it, at 40 tokens a second."""


async def measure() -> dict[str, Any]:
    """2,000 single-turn requests, 64 at a time, through agent loop, dispatcher, scheduler and actor proxy; then outputs
    that come in the time that an engine takes, in process and through Ray."""
    (seconds,) = await cpu_seconds(Shape(), REQUESTS)
    figures: dict[str, Any] = {"requests": REQUESTS, "microseconds_per_request": 1e6 * seconds}
    for backend in ("inprocess", "ray"):
        paced = await cpu_seconds(PACED, 4 * CONCURRENT, backend=backend, rounds=2)
        figures[f"microseconds_per_paced_request/{backend}"] = 1e6 * statistics.median(paced)
    return figures


async def cpu_seconds(shape: Shape, requests: int, *, backend: str = "inprocess", rounds: int = 1) -> list[float]:
    """CPU seconds of this process for a request, of each round.

    Args:
      shape: of every request.
      requests: of a round.
      backend: of the cluster, which makes the engine.
      rounds: measured one after the other; with more than one, another goes before and is not counted.
    """
    config = config_lib.RunConfig(
        rollout=config_lib.RolloutConfig(slots=CONCURRENT, max_context=MAX_CONTEXT, max_tokens=shape.tokens),
        trainer=config_lib.TrainerConfig(row_tokens=MAX_CONTEXT),
        cluster=config_lib.ClusterConfig(backend=backend),
    )
    cluster = cluster_create.create(config.cluster)
    run = parts.CoordinatorContext(config, cluster, memory.MemoryRecorder(), pathlib.Path())
    spec = protocols.ActorSpec(NAME, f"{__name__}:instant", {"deltas": shape.deltas, "pause": shape.pause})
    engines = instances.Instances(run, [spec])
    seconds = []
    try:
        await engines.start()
        engines.engines[NAME].state = "serving"
        scheduler = registry.create(config.scheduler)
        dispatcher = dispatch.Dispatcher(run, scheduler=scheduler, engines=engines)
        sampler = streams.Streams(run, dispatcher=dispatcher, engines=engines)
        run.events.announce(protocols.EnginesChanged(engines.serving()))
        for _ in range(rounds + (rounds > 1)):
            start = time.process_time()
            await asyncio.gather(*(_attempt(sampler, shape) for _ in range(requests)))
            seconds.append((time.process_time() - start) / requests)
    finally:
        await run.scope.cancel_background(config.deadlines.shutdown)
        await cluster.shutdown()
    return seconds[-rounds:]


async def _attempt(sampler: streams.Streams, shape: Shape) -> None:
    name = uuid.uuid4().hex
    trajectory = protocols.Trajectory(trajectory_id=name, prompt_id=name)
    sampler.open(trajectory, group_id=0, dispatch_version=0)
    limits = agent_loop.Limits(
        max_turns=1, max_tokens=shape.tokens, max_context=MAX_CONTEXT, tool_seconds=10.0, temperature=1.0
    )
    try:
        made = await agent_loop.run_rollout(
            agent_loop.RolloutSetup(
                trajectory=trajectory,
                task=protocols.Task(name, {"prompt": "1+1"}),
                tokenizer=tokenizers.CharacterTokenizer(),
                sampler=sampler,
                limits=limits,
            ),
            workload.OneTurn(),
        )
    finally:
        sampler.finish(name)
    if len(made.turns) != 1 or made.finish != "answered":
        raise protocols.LibraError(f"an attempt of {shape} took {len(made.turns)} turns and ended by {made.finish}")
