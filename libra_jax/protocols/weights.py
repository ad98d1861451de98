"""Weights on their way: chunks of a snapshot, the trainer that stages them, and the workers that load or relay them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class WeightEntry:
    """One tensor inside a chunk.

    Attributes:
      name: Hugging Face name of the tensor.
      dtype: wire dtype, as torch names it ("float32", "bfloat16").
      shape: shape of the whole tensor.
      offset: bytes from the start of the chunk.
      nbytes: size in bytes.
    """

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
      frozen: digest of the weights under an adapter, if the chunk is a part of them; else empty. These bytes are the
        same in every version, so a receiver that holds weights of this digest skips the chunk.
    """

    policy_version: int
    index: int
    count: int
    entries: tuple[WeightEntry, ...]
    nbytes: int
    # Plain values, because vLLM's messages carry no types of ours.
    transport: Mapping[str, Any]
    checksum: str | None = None
    frozen: str = ""


@dataclass(frozen=True)
class WeightDifference:
    """What a relay may send instead of a chunk: its difference from the version before (`weights.differences`).

    Attributes:
      base: checksum of the chunk's bytes in the version before.
      nbytes: size in bytes.
    """

    base: str
    nbytes: int


@dataclass(frozen=True)
class WeightDestination:
    """A rollout instance that a version is sent to.

    Attributes:
      name: name of the instance.
      workers: number of its worker processes (its tensor-parallel degree).
      life: number of its present life. After a restart its processes have to be met again.
    """

    name: str
    workers: int
    life: int


class WeightReceiver(Protocol):
    """A worker that loads each version's weights: a rollout engine, or a hybrid worker that trains.

    The four verbs come in this order, the first only once. A version that is not finished may be started again.
    """

    async def init_weight_transfer(self, transport: Mapping[str, Any]) -> None:
        """Opens the transport. First weight verb, called once.

        Args:
          transport: address of the transport, such as {"kind": "memfd"}; plain values only.

        Raises:
          ConfigError: an engine was started for another kind of transport.
        """
        ...

    async def start_weight_update(self, policy_version: int) -> None:
        """Prepares for new weights; the old ones are undefined from here on. Second weight verb, once per version."""
        ...

    async def update_weights(self, chunk: WeightChunk) -> None:
        """Loads a chunk. Third weight verb, called once per chunk.

        Raises:
          LibraError: the chunk is of another version or another model, or its bytes are damaged.
        """
        ...

    async def finish_weight_update(self, policy_version: int) -> None:
        """Starts to use `policy_version`. Fourth weight verb, called once per version.

        Raises:
          LibraError: a chunk or a tensor is missing.
        """
        ...


class WeightStager(Protocol):
    """The trainer's part of a weight sync: one snapshot at a time, staged chunk by chunk."""

    async def open_weights(self, policy_version: int, destinations: Sequence[WeightDestination] = ()) -> int:
        """Takes a snapshot of the parameters in the wire dtype; returns its number of chunks.

        Args:
          policy_version: version of the parameters.
          destinations: instances that will load it. They matter to transports that send (ipc, nccl), and not to memfd.

        Raises:
          LibraError: the state has another version, or the memory for the snapshot is too small.
        """
        ...

    async def stage_weights(self, policy_version: int, index: int) -> WeightChunk:
        """Returns one chunk of the open snapshot; it stays readable until the next snapshot is opened."""
        ...

    async def close_weights(self, policy_version: int) -> None:
        """Frees the snapshot. Does nothing if another version's is open."""
        ...


class WeightSource(WeightStager, Protocol):
    """The trainer as the weight sync calls it.

    Attributes:
      lock: lock that the caller holds from `open_weights` to `close_weights`.
    """

    lock: asyncio.Lock


class Relay(Protocol):
    """A weight relay: passes synced weights from host to host, and keeps the last version for its own host."""

    async def health(self) -> Mapping[str, float]:
        """Returns numbers for telemetry.

        Raises:
          WorkerLost: the relay is gone.
        """
        ...

    async def listen(self, generation: int) -> Mapping[str, Any]:
        """Opens the link over which the relay receives from now on.

        Returns:
          The link's address, as plain values for the sender's `connect`.
        """
        ...

    async def connect(self, child: str, generation: int, address: Mapping[str, Any]) -> None:
        """Starts to connect to the relay that listens at this address; closes an earlier link to that relay."""
        ...

    async def compare(self, chunk: WeightChunk) -> WeightDifference | None:
        """Compares a chunk on this host with the last compared one of its number, and keeps it for the next one.

        Returns:
          The difference, which this relay can then send; None without an earlier chunk, or if the whole chunk is
          smaller.
        """
        ...

    async def send(self, chunk: WeightChunk, child: str, difference: WeightDifference | None = None) -> None:
        """Sends a chunk on this host to a relay that receives it at the same time.

        Args:
          chunk: the chunk.
          child: name of the receiving relay.
          difference: what to send instead of the whole chunk. This relay has made it, or received it.
        """
        ...

    async def receive(self, chunk: WeightChunk, difference: WeightDifference | None = None) -> WeightChunk:
        """Receives a chunk; returns its address on this host. It stays there until the next chunk with its number.

        Args:
          chunk: the chunk as described on the sending host.
          difference: what arrives instead of the whole chunk.

        Raises:
          LibraError: no chunk, another chunk or a damaged chunk arrived, or this relay does not hold the chunk that
            the difference changes; the link may be closed.
        """
        ...

    async def shutdown(self) -> None:
        """Closes its links and frees its memory. Idempotent."""
        ...


class RelayClient(Relay, Protocol):
    """A weight relay as other rooms call it.

    Each call has a deadline of `config.deadlines`: DeadlineMissed names the relay and the call.
    """

    @property
    def name(self) -> str:
        """The name of the relay."""
        ...
