"""Rollout engines: their description, and the verbs of a weight update."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from libra_jax.protocols.generation import GenerationRequest, TokenDelta


@dataclass(frozen=True)
class EngineInfo:
    """Description of an engine, returned once when the engine has started.

    Attributes:
      name: name of the instance in errors and on the timeline.
      tensor_parallel: number of devices that share one copy of the weights.
      slots: maximum number of requests that decode at once (vLLM's max_num_seqs).
      max_context: longest context in tokens.
      process_ids: ids of the engine's processes.
      cache_tokens: capacity of the key-value cache in tokens of context; 0 if the engine does not report it.
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
    """A contiguous piece of a weight snapshot, with the address of its bytes.

    Attributes:
      policy_version: version of the snapshot.
      index: position among the snapshot's chunks.
      count: number of chunks in the snapshot.
      entries: tensors in the chunk, in order.
      nbytes: number of bytes in use.
      transport: transport-specific address, e.g. {"kind": "memfd", "pid": 1, "fd": 7}; plain values only.
      checksum: digest of the bytes, or None if checksums are off.
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
        """Streams the continuation. The last delta has a finish reason. Closing the iterator aborts the request."""
        ...

    async def hand_over(self, request: GenerationRequest) -> Mapping[str, Any]:
        """Keeps the keys and values of the context for another engine; returns that engine's `kv_source`.

        Called only if `rollout.kv_transfer` says that engines support it.
        """
        ...

    async def pause(self) -> None:
        """Freezes decoding and keeps the requests. Returns when no step runs and all tokens so far are stamped."""
        ...

    async def resume(self) -> None:
        """Continues decoding. KV computed under older weights was dropped and is recomputed."""
        ...

    async def init_weight_transfer(self, transport: Mapping[str, Any]) -> None:
        """Opens the transport. First weight verb, called once."""
        ...

    async def start_weight_update(self, policy_version: int) -> None:
        """Prepares the model for new weights. Second weight verb, called once per version."""
        ...

    async def update_weights(self, chunk: WeightChunk) -> None:
        """Loads a chunk. Third weight verb, called once per chunk."""
        ...

    async def finish_weight_update(self, policy_version: int) -> None:
        """Starts to serve `policy_version`. Fourth weight verb, called once per version."""
        ...

    async def sleep(self) -> None:
        """Gives up the engine's devices: no request runs, and weights and cache are dropped if the platform allows."""
        ...

    async def wake(self) -> None:
        """Takes the devices back. As after `start`, the engine holds no useful weights until the next update."""
        ...

    async def health(self) -> Mapping[str, float]:
        """Returns numbers such as `running` and `waiting`; raises `WorkerLost` if the engine is not serving."""
        ...

    async def shutdown(self) -> None:
        """Ends and reaps every process of the engine. Idempotent."""
        ...


class EngineClient(RolloutEngine, Protocol):
    """A rollout engine as other rooms call it.

    Each call except `generate` has a deadline of `config.deadlines`: DeadlineMissed names the engine and the call. The
    caller of `generate` watches the time between two deltas itself, because a request may wait for a free slot.
    """

    @property
    def name(self) -> str:
        """The engine's name."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
        """Streams the continuation. The last delta has a finish reason. Closing the iterator aborts the request."""
        ...
