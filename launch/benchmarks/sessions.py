"""A gateway with the whole way behind it, for `gateway.measure`: sessions, tokens, C-MLFQ, and a double of an engine.

The double writes tokens in no time. So its figures are those of HTTP, of the chat format, of the sessions' tokens, of
scheduling and of dispatch, in one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import pathlib
from collections.abc import Mapping, Sequence
from multiprocessing import connection
from typing import Any

import psutil

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.chat import chat_format, tokenizers
from libra_jax.cluster import inprocess
from libra_jax.coordinator import dispatch, instances, parts
from libra_jax.engines import fake_engine
from libra_jax.harness.gateway import fronts
from libra_jax.rollouts import loop, session, streams, tool_results
from libra_jax.scheduling import registry
from libra_jax.telemetry import memory

OUTPUT = 16
"""Tokens of an output, its stop token included."""

SLOTS = 256
CONTEXT = 16_384
NAME = "rollout-0"


def serve(pipe: connection.Connection, secrets: Sequence[str]) -> None:
    """Serves one session a secret, and does what `gateway.measure` asks for over the pipe."""
    asyncio.run(_serve(pipe, secrets))


def script(token_ids: Sequence[int], sampling: protocols.SamplingParams) -> int:
    """Writes `OUTPUT` - 1 letters and stops; the script of the engine's double."""
    written = next((at for at, token in enumerate(reversed(token_ids)) if token != ord("x")), 0)
    return sampling.stop_token_ids[0] if written >= OUTPUT - 1 else ord("x")


def engine(rollout: Mapping[str, Any]) -> fake_engine.FakeEngine:
    """Makes the double, as the actor's factory."""
    return fake_engine.create(NAME, {}, rollout, 1, 0, script=f"{__name__}:script", tokens_per_second=1e9)


async def _serve(pipe: connection.Connection, secrets: Sequence[str]) -> None:
    rollout = {"slots": SLOTS, "max_context": CONTEXT, "stream_interval": OUTPUT}
    config = config_lib.RunConfig(
        rollout=config_lib.RolloutConfig(
            engine="fake", slots=SLOTS, max_context=CONTEXT, stream_interval=OUTPUT, max_tokens=OUTPUT
        ),
        trainer=config_lib.TrainerConfig(row_tokens=CONTEXT),
    )
    cluster = inprocess.InProcessCluster()
    run = parts.CoordinatorContext(config, cluster, memory.MemoryRecorder(), pathlib.Path())
    engines = instances.Instances(run, [protocols.ActorSpec(NAME, f"{__name__}:engine", {"rollout": rollout})])
    await engines.start()
    engines.engines[NAME].state = "serving"
    dispatcher = dispatch.Dispatcher(run, scheduler=registry.create(config.scheduler), engines=engines)
    sampler = streams.Streams(run, dispatcher=dispatcher, engines=engines)
    run.events.announce(protocols.EnginesChanged(engines.serving()))
    gateway, form = fronts.Fronts(run, "policy"), chat_format.CharacterFormat(tokenizers.CharacterTokenizer())
    limits = loop.Limits(max_turns=100, max_tokens=OUTPUT, max_context=CONTEXT, tool_seconds=600.0, temperature=1.0)
    opened: dict[str, tuple[session.RolloutSession, protocols.Endpoint]] = {}
    lives = 0
    # The first session starts the server, whose address does not change.
    first = await gateway.open(
        session.RolloutSession(
            protocols.Trajectory("first", "first"),
            form=form,
            sampler=sampler,
            limits=limits,
            read_status=tool_results.status,
        )
    )
    pipe.send(first.url)
    event_loop, process = asyncio.get_running_loop(), psutil.Process()
    while (command := await event_loop.run_in_executor(None, pipe.recv)) is not None:
        if command == "open":
            lives += 1
            for secret in secrets:
                trajectory = protocols.Trajectory(f"{secret}/{lives}", secret)
                sampler.open(trajectory, len(opened) // 8, 0)
                one = session.RolloutSession(
                    trajectory, form=form, sampler=sampler, limits=limits, read_status=tool_results.status
                )
                opened[trajectory.trajectory_id] = one, await gateway.open(one, secret)
        elif command == "close":
            for name, (one, endpoint) in opened.items():
                await gateway.close(endpoint)
                one.close()
                sampler.finish(name)
            opened.clear()
            await asyncio.sleep(0.5)  # closed connections are noticed
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        times = process.cpu_times()
        pipe.send({"rss": process.memory_info().rss, "cpu": times.user + times.system})
    with contextlib.suppress(protocols.LibraError):
        await gateway.stop()
    await run.scope.cancel_background(config.deadlines.shutdown)
    await cluster.shutdown()
