"""What rollout loses while a hybrid worker's engine goes to sleep and wakes: tokens a second of all instances."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import itertools
import os
import pathlib
import statistics
from collections.abc import AsyncGenerator, Callable
from typing import Any

from benchmarks import weight_sync as weights_source
from benchmarks import workload
from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.cluster import create as cluster_create
from libra_jax.coordinator import dispatch, instances, parts, weight_sync
from libra_jax.engines import client
from libra_jax.models import config as models_config
from libra_jax.rollouts import loop as agent_loop
from libra_jax.rollouts import streams
from libra_jax.scheduling import registry
from libra_jax.telemetry import memory

SLOTS, TOKENS = 16, 128
NAMES = ("rollout-0", "rollout-1")
MOVED = NAMES[1]

ROUNDS = 4
WINDOW = 2.0
"""Seconds of each measurement; a change itself takes a tenth of it, so its window holds what it leaves behind, too."""

PUBLISHED = {"published_activation_s": 10.8}
"""Until a hybrid worker of Libra's rolls out again (arXiv 2606.03077, on GPUs)."""

SETTLE = 1.5
"""Seconds before a measurement of steady rollout."""


async def measure() -> dict[str, Any]:
    """Two engines on a core each, always with as many requests as both have slots for; one sleeps and wakes in turn.

    `sleep_loss` and `wake_loss`: share of both engines' tokens a second that is missing from the moment on at which one
    is asked to sleep, or to wake. The worker's own share of the slots is `moved_share`: that much is missing anyway.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise protocols.ConfigError("this is measured on two cores, and this process may use one: widen its affinity")
    config = config_lib.RunConfig(
        rollout=config_lib.RolloutConfig(
            tensor_parallel=(1, 1),
            slots=SLOTS,
            max_context=256,
            max_tokens=TOKENS,
            kv_cache_gib=0.25,
            stream_interval=4,
        )
    )
    shape = models_config.load_preset("libra-tiny")
    cluster = cluster_create.create(config.cluster)
    run = parts.CoordinatorContext(config, cluster, memory.MemoryRecorder(), pathlib.Path())
    model = models_config.to_hf(shape)
    specs = [
        workload.engine_spec(name, config, model, cpu_cores=str(core), hybrid=name == MOVED)
        for name, core in zip(NAMES, cores, strict=False)
    ]
    engines = instances.Instances(run, specs, hybrid=(MOVED,))
    weights = weights_source.Weights(shape)
    try:
        await engines.start()
        publisher = weight_sync.WeightSync(config, trainer=weights, engines=engines, recorder=run.recorder)
        dispatcher = dispatch.Dispatcher(run, scheduler=registry.create(config.scheduler), engines=engines)
        sampler = streams.Streams(run, dispatcher=dispatcher, engines=engines)

        async def bring_weights(event: protocols.EngineLoaded) -> None:
            await publisher.catch_up(engines.engines[event.name])

        run.events.subscribe(protocols.EngineLoaded, bring_weights)
        await publisher.sync_weights(0)
        load = _Load(sampler, engines)
        return await run.scope.race(load.around(_rounds(load, engines)))
    finally:
        await run.scope.cancel_background(config.deadlines.shutdown)
        await cluster.shutdown()
        weights.snapshots.shutdown()


async def _rounds(load: _Load, engines: instances.Instances) -> dict[str, Any]:
    """Both, the change, one, the change back; medians over the rounds."""
    both, falling, one, rising, slept, woken = ([] for _ in range(6))
    for _ in range(ROUNDS):
        await asyncio.sleep(SETTLE)
        both.append(await load.rate())
        change = asyncio.ensure_future(_seconds(engines.sleep(MOVED)))
        falling.append(await load.rate())
        slept.append(await change)
        await asyncio.sleep(SETTLE)
        one.append(await load.rate())
        change = asyncio.ensure_future(_seconds(engines.wake(MOVED)))
        rising.append(await load.rate())
        woken.append(await change)
    steady = statistics.median(both)
    return {
        "tokens_per_second": steady,
        "sleeping_tokens_per_second": statistics.median(one),
        "moved_share": 1 / len(NAMES),
        "sleep_loss": 1 - statistics.median(falling) / steady,
        "sleep_loss_worst": 1 - min(falling) / steady,
        "wake_loss": 1 - statistics.median(rising) / steady,
        "wake_loss_worst": 1 - min(rising) / steady,
        "sleep_s": statistics.median(slept),
        "wake_s": statistics.median(woken),
        **PUBLISHED,
        "rounds": ROUNDS,
    }


async def _seconds(change: Any) -> float:
    loop = asyncio.get_running_loop()
    began = loop.time()
    await change
    return loop.time() - began


class _Load:
    """As many attempts under way as both engines have slots, and the tokens that come of them."""

    def __init__(self, sampler: streams.Streams, engines: instances.Instances) -> None:
        self._sampler = sampler
        self._loop = asyncio.get_running_loop()
        self._came: list[float] = []  # when each token did
        self._numbers = itertools.count()
        for engine in engines.engines.values():
            assert isinstance(engine.client, client.EngineActorClient)
            engine.client = _Counted(engine.client, self._count)

    async def around(self, work: Any) -> Any:
        """Awaits `work` while attempts go on, each in the place of one that has ended."""
        streams = [asyncio.ensure_future(self._attempts()) for _ in range(SLOTS * len(NAMES))]
        working = asyncio.ensure_future(work)
        try:
            done, _ = await asyncio.wait({working, *streams}, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()  # a stream ends only by failing
        finally:
            for task in (working, *streams):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(working, *streams, return_exceptions=True)

    async def rate(self) -> float:
        """Tokens a second of the next `WINDOW` seconds."""
        began = self._loop.time()
        await asyncio.sleep(WINDOW)
        now = self._loop.time()
        return (len(self._came) - bisect.bisect_left(self._came, began)) / (now - began)

    def _count(self, tokens: int) -> None:
        self._came += [self._loop.time()] * tokens

    async def _attempts(self) -> None:
        limits = agent_loop.Limits(max_turns=1, max_tokens=TOKENS, max_context=256, tool_seconds=10.0, temperature=1.0)
        for number in self._numbers:
            name = f"attempt-{number}"
            trajectory = protocols.Trajectory(trajectory_id=name, prompt_id=name)
            self._sampler.open(trajectory, group_id=number, dispatch_version=0)
            try:
                await agent_loop.run_rollout(
                    agent_loop.RolloutSetup(
                        trajectory=trajectory,
                        task=protocols.Task(name, {"prompt": f"{number % 1000}*7"}),
                        tokenizer=workload.NeverStops(),
                        sampler=self._sampler,
                        limits=limits,
                    ),
                    workload.OneTurn(),
                )
            finally:
                self._sampler.finish(name)


class _Counted(client.EngineActorClient):
    """An engine's client that counts the tokens that come."""

    def __init__(self, inner: client.EngineActorClient, count: Callable[[int], None]) -> None:
        super().__init__(inner._cluster, inner._spec, inner._limits)
        self._handle = inner._handle
        self._count = count

    async def generate(self, request: protocols.GenerationRequest) -> AsyncGenerator[protocols.TokenDelta, None]:
        async with contextlib.aclosing(super().generate(request)) as deltas:
            async for delta in deltas:
                self._count(len(delta.token_ids))
                yield delta
