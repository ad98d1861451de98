"""A rollout engine without a model: a deterministic double for tests of the code that drives engines.

The next token is a pure function of the context's tokens and of the rollout. So a request that resumes from its
retained tokens continues as if it had never stopped, and the rollouts of a group differ. Like a real engine, the double
has slots, pauses, versions and aborts. It can be told to die.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import os
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from libra_jax import protocols

Script = Callable[[Sequence[int], protocols.SamplingParams], int]
"""Returns the next token after a context. It is pure, so that resumption repeats it. A stop token ends the output."""


def scramble(token_ids: Sequence[int], sampling: protocols.SamplingParams, rollout: str = "") -> int:
    """Returns the default script's token: pseudo-random, 3..99, with a stop after 24 tokens on average.

    Args:
      token_ids: the context.
      sampling: sampling settings. At temperature 0 all rollouts of a context are alike.
      rollout: id of the rollout, which holds its place in the group.
    """
    place = rollout if sampling.temperature > 0 else ""
    digest = zlib.crc32(repr((len(token_ids), tuple(token_ids[-4:]), place)).encode())
    if digest % 24 == 0 and sampling.stop_token_ids:
        return sampling.stop_token_ids[0]
    return 3 + digest // 24 % 97


def log_prob(token_id: int) -> float:
    """Returns the log-probability that the double reports for a token. No model gave it."""
    return -0.5 - token_id % 7 / 10


class FakeEngine(protocols.RolloutEngine):
    """The double of a rollout engine (see the module docstring), made by `create`. Lives on one event loop."""

    def __init__(
        self,
        name: str,
        script: Script | None,
        slots: int,
        max_context: int,
        tensor_parallel: int,
        stream_interval: int,
        tokens_per_second: float,
        fail_after_tokens: int | None,
        accelerator: str = "",
    ) -> None:
        self.name = name
        self._accelerator = accelerator
        self._script = script
        self._slots = slots
        self._max_context = max_context
        self._tensor_parallel = tensor_parallel
        self._interval = stream_interval
        self._rate = tokens_per_second
        self._fail_after = fail_after_tokens
        self._emitted = 0
        self._waiting = 0
        self._running = 0
        self._version = protocols.NO_VERSION
        self._transport_open = False
        self._updating: int | None = None
        self._chunks: set[int] = set()
        self._expected_chunks: int | None = None
        self._alive = False

    async def start(self) -> protocols.EngineInfo:
        # Created here, because asyncio's primitives belong to the loop that runs the engine.
        self._free = asyncio.Semaphore(self._slots)
        self._go = asyncio.Event()
        self._go.set()
        self._alive = True
        return protocols.EngineInfo(
            self.name,
            self._tensor_parallel,
            self._slots,
            self._max_context,
            (os.getpid(),),
            accelerator=self._accelerator,
        )

    def kill(self) -> None:
        """Dies like a process: every running and later call raises `WorkerLost`."""
        self._alive = False
        self._go.set()

    def _check(self, condition: bool = True, problem: str = "") -> None:
        """Raises WorkerLost if the engine is dead, and LibraError with the problem unless the condition holds."""
        if not self._alive:
            raise protocols.WorkerLost(f"engine {self.name} is gone: start it again or resume its requests elsewhere")
        if not condition:
            raise protocols.LibraError(f"engine {self.name}: {problem}")

    async def generate(self, request: protocols.GenerationRequest) -> AsyncIterator[protocols.TokenDelta]:
        self._check()
        room = self._max_context - len(request.token_ids)
        if room <= 0:
            raise protocols.LibraError(
                f"request {request.request_id} has {len(request.token_ids)} tokens, which leaves no room in engine "
                f"{self.name}'s context of {self._max_context}: raise rollout.max_context"
            )
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        self._running += 1
        try:
            context = list(request.token_ids)
            budget = min(room, request.sampling.max_tokens)
            # The coordinator's request ids are the rollout's, "#" and the number of the stream.
            rollout = request.request_id.rsplit("#", 1)[0]
            script = self._script or functools.partial(scramble, rollout=rollout)
            finish: protocols.FinishReason | None = None
            while finish is None:
                tokens: list[int] = []
                while finish is None and len(tokens) < min(self._interval, budget):
                    tokens.append(script(context + tokens, request.sampling))
                    finish = "stop" if tokens[-1] in request.sampling.stop_token_ids else None
                if finish is None and len(tokens) == budget:
                    finish = "length"
                await asyncio.sleep(len(tokens) / self._rate)
                # Tokens that a pause holds back get the version that is loaded by then.
                await self._go.wait()
                self._check()
                self._emitted += len(tokens)
                if self._fail_after is not None and self._emitted > self._fail_after:
                    self.kill()
                    self._check()
                context.extend(tokens)
                budget -= len(tokens)
                yield protocols.TokenDelta(
                    tuple(tokens), tuple(map(log_prob, tokens)), (self._version,) * len(tokens), finish
                )
        finally:
            self._running -= 1
            self._free.release()

    async def pause(self) -> None:
        self._check()
        self._go.clear()

    async def resume(self) -> None:
        self._check()
        self._go.set()

    async def sleep(self) -> None:
        """Stops decoding until it has been woken and resumed."""
        await self.pause()

    async def wake(self) -> None:
        """Drops the weights. Decoding continues after `resume`."""
        self._check()
        self._version = protocols.NO_VERSION

    async def init_weight_transfer(self, transport: Mapping[str, Any]) -> None:
        self._check()
        self._transport_open = True

    async def start_weight_update(self, policy_version: int) -> None:
        self._check(self._transport_open, "start_weight_update came before init_weight_transfer")
        self._check(self._updating is None, f"version {self._updating} is still being loaded")
        self._updating, self._chunks, self._expected_chunks = policy_version, set(), None

    async def update_weights(self, chunk: protocols.WeightChunk) -> None:
        self._check(
            chunk.policy_version == self._updating,
            f"a chunk of version {chunk.policy_version} came while loading {self._updating}",
        )
        self._chunks.add(chunk.index)
        self._expected_chunks = chunk.count

    async def finish_weight_update(self, policy_version: int) -> None:
        self._check(policy_version == self._updating, f"version {policy_version} was not being loaded")
        self._check(
            self._expected_chunks == len(self._chunks),
            f"{len(self._chunks)} of {self._expected_chunks} chunks of version {policy_version} came",
        )
        self._version, self._updating = policy_version, None

    async def health(self) -> Mapping[str, float]:
        self._check()
        return {"running": self._running, "waiting": self._waiting, "tokens": self._emitted}

    async def shutdown(self) -> None:
        if self._alive:
            self.kill()


def create(
    name: str,
    model_config: Mapping[str, Any],
    rollout: Mapping[str, Any],
    tensor_parallel: int,
    seed: int,
    cpu_cores: str = "nobind",
    log_path: str = "",
    hybrid: bool = False,
    lora: Mapping[str, Any] | None = None,
    script: str = "",
    tokens_per_second: float = 20_000.0,
    fail_after_tokens: int | None = None,
    accelerator: str = "",
    kind: type[FakeEngine] = FakeEngine,
) -> FakeEngine:
    """Makes the double from the arguments of the real engine (`vllm_engine.create`), most of which it ignores.

    Args:
      rollout: fields of `config_lib.RolloutConfig`, of which slots, max_context and stream_interval have an effect.
      tensor_parallel: degree to report, without further effect.
      seed: unused, because instances differ in it and a rollout may move between them.
      script: `"module:function"` of a `Script`. Empty stands for `scramble`.
      tokens_per_second: rate of one request, in event-loop seconds.
      fail_after_tokens: number of tokens over all requests after which the engine dies. None disables this.
      kind: class of the double.
    """
    del model_config, seed, cpu_cores, log_path, hybrid, lora
    found: Script | None = None
    if script:
        module, _, function = script.partition(":")
        if not function:
            raise protocols.ConfigError(f'script {script!r} must have the form "module:function"')
        found = getattr(importlib.import_module(module), function)
    return kind(
        name=name,
        script=found,
        slots=rollout.get("slots", 64),
        max_context=rollout.get("max_context", 512),
        tensor_parallel=tensor_parallel,
        stream_interval=rollout.get("stream_interval", 16),
        tokens_per_second=tokens_per_second,
        fail_after_tokens=fail_after_tokens,
        accelerator=accelerator,
    )
