"""Rollout engines: what they are, and the verbs of a weight update."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from libra_jax.protocols.generation import GenerationRequest, TokenDelta


@dataclass(frozen=True)
class EngineInfo:
    """What an engine is: told once, when it has started.

    Attributes:
      name: the instance's name, as errors and the timeline show it.
      tensor_parallel: devices that share one copy of the weights.
      slots: most requests that decode at once.
      max_context: longest context, in tokens.
      process_ids: the processes the engine runs in.
      cache_tokens: tokens of context that its key-value cache holds; 0 if it does not say.
    """

    name: str
    tensor_parallel: int
    slots: int
    max_context: int
    process_ids: tuple[int, ...]
    cache_tokens: int = 0


@dataclass(frozen=True)
class WeightEntry:
    """One tensor inside a chunk, under its Hugging Face name; `offset` and `nbytes` are in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class WeightChunk:
    """A contiguous piece of a published snapshot, and how its bytes are reached.

    Attributes:
      policy_version: the version whose snapshot this is.
      index: position among the snapshot's chunks.
      count: chunks in the snapshot.
      entries: tensors in the chunk, in order.
      nbytes: bytes in use.
      transport: transport-specific address, e.g. {"kind": "memfd", "pid": 1, "fd": 7}; plain values only.
      checksum: digest of the bytes, or None where checksums are off.
    """

    policy_version: int
    index: int
    count: int
    entries: tuple[WeightEntry, ...]
    nbytes: int
    transport: Mapping[str, Any]
    checksum: str | None = None


class RolloutEngine(Protocol):
    """A rollout instance. Every method may raise `WorkerLost`; the caller sets deadlines."""

    async def start(self) -> EngineInfo:
        """Starts the engine's processes. It holds no useful weights until its first `finish_weight_update`."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        """Streams the continuation; the last delta has a finish reason. Closing the iterator aborts the request."""
        ...

    async def hand_over(self, request: GenerationRequest) -> Mapping[str, Any]:
        """Keeps the keys and values of the context for another engine; returns the other's `kv_source`.

        Called only where `rollout.kv_transfer` says that engines can.
        """
        ...

    async def pause(self) -> None:
        """Freezes decoding with requests kept; returns when no step is running and all tokens so far are stamped."""
        ...

    async def resume(self) -> None:
        """Goes on decoding; KV computed under older weights has been dropped and is recomputed."""
        ...

    async def init_weight_transfer(self, transport: Mapping[str, Any]) -> None:
        """First weight verb, once: opens the transport."""
        ...

    async def start_weight_update(self, policy_version: int) -> None:
        """Second weight verb, once a version: prepares the model for new weights."""
        ...

    async def update_weights(self, chunk: WeightChunk) -> None:
        """Third weight verb, once a chunk: loads it."""
        ...

    async def finish_weight_update(self, policy_version: int) -> None:
        """Fourth weight verb, once a version: the engine now serves `policy_version`."""
        ...

    async def sleep(self) -> None:
        """Gives its devices up: no request runs, and weights and cache are dropped where the platform can."""
        ...

    async def wake(self) -> None:
        """Takes its devices again. Like one just started, it holds no useful weights until they are updated."""
        ...

    async def health(self) -> Mapping[str, float]:
        """Raises `WorkerLost` if the engine is not serving; else numbers such as `running` and `waiting`."""
        ...

    async def shutdown(self) -> None:
        """Ends and reaps every process of the engine. Idempotent."""
        ...


class EngineClient(RolloutEngine, Protocol):
    """A rollout engine as other rooms call it.

    Each call but `generate` has a deadline of `config.deadlines`: DeadlineMissed names the engine and the call. The
    caller of `generate` watches the time between two deltas itself, because a request may wait for a slot.
    """

    @property
    def name(self) -> str:
        """The engine's name."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
        """Streams the continuation; the last delta has a finish reason. Closing the iterator aborts the request."""
        ...
