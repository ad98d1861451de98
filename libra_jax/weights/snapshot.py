"""A snapshot of the trainer's parameters, in the wire dtype, as chunks of shared memory that engines read.

To open a snapshot is one copy, with a cast, from the trainer's arrays into memory that the engines have mapped.
Afterwards nothing refers to the live parameters, so the next training step may donate them while engines still read.
The memory is reused from version to version: the page faults of fresh memory would cost more than the copy.

`HostSnapshot` is the snapshot in host memory. `DeviceSnapshot` syncs weights without host memory, NOT RUN YET, on any
machine: a snapshot in torch's memory on the trainer's first GPU, sent by vLLM's engines.

Tensors travel under their Hugging Face names, layer by layer. `lm_head.weight` is always among them: engines get an
untied model, because vLLM's reload on CPU leaves a tied output projection stale.

JAX arrays become torch tensors by DLPack, without a copy if the bytes lie in this host's memory already. Such a tensor
keeps the array's buffer alive and JAX from donating it, and a write through it changes the array. Drop the tensor
before the array's next donation.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import jax
import torch

from libra_jax import protocols
from libra_jax.models import config as models_config
from libra_jax.models import hf_names, sharding
from libra_jax.weights import memfd

ALIGNMENT = 64
"""Alignment in bytes of each tensor's place in a chunk (a cache line)."""

PART_BYTES = 4 * 2**20
"""Approximate bytes of one copy."""

MOST_COPIERS = 4
"""Maximum number of copying threads. More threads do not raise a host's memory bandwidth."""

SENDER = "libra_jax.engines.vllm_weight_sender"
"""Module of a `DeviceSnapshot`'s sender. It is named and not imported: weights do not depend on an engine."""


def wire_entries(config: models_config.TransformerConfig) -> tuple[hf_names.HfEntry, ...]:
    """Returns the tensors to send: the checkpoint's, plus an explicit output projection if embeddings are tied."""
    entries = hf_names.weight_map(config)
    if not config.tie_word_embeddings:
        return entries
    table = next(entry for entry in entries if entry.hf_name == "model.embed_tokens.weight")
    return (*entries, hf_names.HfEntry("lm_head.weight", table.path, table.layer, table.shape))


def create(
    model_config: models_config.TransformerConfig,
    dtype: str,
    chunk_bytes: int,
    transport: str,
    checksum: bool,
    tensor_parallel: Sequence[int],
    publish_seconds: float,
) -> Snapshot:
    """Makes the snapshot of a transport: memfd through host memory (`HostSnapshot`), ipc and nccl between devices.

    Args:
      model_config: the model's shape.
      dtype: wire dtype.
      chunk_bytes: maximum bytes of a chunk (memfd).
      transport: "memfd", "ipc" or "nccl".
      checksum: True to digest each chunk (memfd).
      tensor_parallel: degrees of the receiving rollout instances.
      publish_seconds: maximum seconds to wait for an instance to receive (ipc, nccl).

    Raises:
      ConfigError: the transport needs CUDA, or serves fewer instances or trainer processes than the run has.
    """
    if transport == "memfd":
        return HostSnapshot(model_config, dtype, chunk_bytes, checksum)
    if jax.process_count() > 1:
        raise protocols.ConfigError(
            f"config.rollout.transport: {transport!r} serves a trainer of one process (config.trainer.processes); use "
            "'memfd'"
        )
    if len(tensor_parallel) != 1:
        raise protocols.ConfigError(
            f"config.rollout.transport: {transport!r} serves one rollout instance, not {len(tensor_parallel)} "
            "(config.rollout.tensor_parallel); use 'memfd'"
        )
    return DeviceSnapshot(model_config, dtype, transport, tensor_parallel[0], publish_seconds)


class HostSnapshot:
    """Holds one snapshot at a time in host memory. Not thread-safe: the thread that owns the parameters calls it.

    Args:
      model_config: the model's shape.
      dtype: wire dtype of matrices (float32, bfloat16 or float16), in which the engine computes. Vectors: float32.
      chunk_bytes: maximum bytes of a chunk. A single larger tensor gets a chunk of its own size.
      checksum: True to digest each chunk, so that the engine notices damage.

    Attributes:
      nbytes: bytes of a snapshot.
    """

    def __init__(
        self, model_config: models_config.TransformerConfig, dtype: str, chunk_bytes: int, checksum: bool
    ) -> None:
        self._checksum = checksum
        self._sources = wire_entries(model_config)
        self._chunks: list[list[protocols.WeightEntry]] = [[]]
        for source in self._sources:
            # A trainer computes with norm weights in float32. When a hybrid worker got them rounded to bfloat16, its
            # gradients were off by 2%. An engine rounds vectors to its own dtype as it copies them.
            kind = "float32" if len(source.shape) == 1 else dtype
            nbytes = getattr(torch, kind).itemsize * math.prod(source.shape)
            last = self._chunks[-1][-1:]
            # Rounds up to the alignment.
            offset = -(-(last[0].offset + last[0].nbytes) // ALIGNMENT) * ALIGNMENT if last else 0
            if offset and offset + nbytes > chunk_bytes:
                self._chunks.append([])
                offset = 0
            self._chunks[-1].append(protocols.WeightEntry(source.hf_name, kind, source.shape, offset, nbytes))
        self._sizes = [entries[-1].offset + entries[-1].nbytes for entries in self._chunks]
        self.nbytes = sum(self._sizes)
        self._memory: list[memfd.Owner] = []
        self._version: int | None = None
        self._written: int | None = None  # version of the bytes in memory, even after `close`
        self._checksums: dict[int, str] = {}
        cores = len(os.sched_getaffinity(0))
        self._copiers = futures.ThreadPoolExecutor(min(MOST_COPIERS, cores), "copy", torch.set_num_threads, (1,))

    def open(self, version: int, params: Mapping[str, Any]) -> int:
        """Takes a snapshot of `params`, which may be donated once this returns. Replaces an open snapshot.

        Args:
          version: policy version of the parameters.
          params: nested dict of arrays, addressed as by `hf_names.weight_map`, with any sharding. If several processes
            share them, all processes call this method, and process 0 holds the snapshot.

        Returns:
          The number of chunks.

        Raises:
          SharedMemoryError: there is too little memory.
          LibraError: a parameter is missing, has another shape, or is donated already.
        """
        self._version = self._written = None
        leaves = {source.path: leaf(params, source) for source in self._sources}
        self._checksums.clear()
        # All processes take part in the gathering, and process 0 alone keeps the result.
        with sharding.whole(leaves.values()) as gathered:
            if jax.process_index() == 0:
                if not self._memory:  # it serves all versions
                    self._memory = self._allocated()
                self._copy(leaves, gathered)
        self._version = self._written = version
        return len(self._chunks)

    def stage(self, version: int, index: int) -> protocols.WeightChunk:
        """Returns one chunk of the open snapshot. It stays readable until the next snapshot is opened."""
        if version != self._version or not 0 <= index < len(self._chunks):
            raise protocols.LibraError(
                f"chunk {index} of version {version} cannot be staged: version {self._version} is open, with "
                f"{len(self._chunks)} chunks"
            )
        return protocols.WeightChunk(
            policy_version=version,
            index=index,
            count=len(self._chunks),
            entries=tuple(self._chunks[index]),
            nbytes=self._sizes[index],
            transport=self._memory[index].address,
            checksum=self._chunk_checksum(index) if self._checksum else None,
        )

    def digest(self, version: int) -> str:
        """Returns the digest of the last opened version, from its chunks' checksums. Works also after `close`.

        Raises:
          LibraError: the version is not the last opened one.
        """
        if version != self._written:
            raise protocols.LibraError(
                f"version {version} has no digest: the last snapshot is of version {self._written}"
            )
        return snapshot_digest([self._chunk_checksum(index) for index in range(len(self._chunks))])

    def close(self, version: int) -> None:
        """Ends the snapshot. Its memory is reused for the next one."""
        if version == self._version:
            self._version = None

    def shutdown(self) -> None:
        """Releases the shared memory. Idempotent."""
        self._version = self._written = None
        self._copiers.shutdown()
        for owner in self._memory:
            owner.close()
        self._memory.clear()

    def _chunk_checksum(self, index: int) -> str:
        if index not in self._checksums:
            data = memoryview(self._memory[index].buffer)[: self._sizes[index]]
            self._checksums[index] = memfd.digest(data)
        return self._checksums[index]

    def _allocated(self) -> list[memfd.Owner]:
        purpose = f"the snapshot of the weights ({self.nbytes / 2**20:.1f} MiB in all)"
        free = memfd.available_bytes()
        # Checked in total first, so that a failure comes before any memory is taken.
        if self.nbytes > free:
            raise memfd.too_little(purpose, self.nbytes, free)
        made: list[memfd.Owner] = []
        try:
            for nbytes in self._sizes:
                made.append(memfd.Owner(nbytes, purpose))
        except memfd.SharedMemoryError:
            for owner in made:
                owner.close()
            raise
        return made

    def _copy(self, paths: Iterable[tuple[str, ...]], gathered: Iterator[jax.Array]) -> None:
        """Copies leaf by leaf, so that torch never holds more than one leaf."""
        targets: dict[tuple[str, ...], list[tuple[int | None, torch.Tensor]]] = {path: [] for path in paths}
        placed = (
            (owner, entry) for owner, entries in zip(self._memory, self._chunks, strict=True) for entry in entries
        )
        for source, (owner, entry) in zip(self._sources, placed, strict=True):
            kind = getattr(torch, entry.dtype)
            flat = torch.frombuffer(owner.buffer, dtype=kind, count=math.prod(entry.shape), offset=entry.offset)
            targets[source.path].append((source.layer, flat.view(entry.shape)))

        threads = torch.get_num_threads()
        # Torch's own threads would wait for each other at the end of every tensor.
        torch.set_num_threads(1)
        try:
            for places in targets.values():
                # No variable keeps a leaf alive while the next one is gathered.
                for _ in self._copiers.map(lambda copy: copy[0].copy_(copy[1]), _copies(next(gathered), places)):
                    pass  # iterating raises a copying thread's error
        finally:
            torch.set_num_threads(threads)


class DeviceSnapshot:
    """A snapshot over the ipc and nccl transports. One chunk holds the whole model.

    It is a copy in torch's memory, because CUDA IPC exports only memory that torch allocated. Methods without a
    docstring are those of `HostSnapshot`.
    """

    def __init__(
        self,
        model_config: models_config.TransformerConfig,
        dtype: str,
        transport: str,
        workers: int,
        publish_seconds: float,
    ) -> None:
        self._sources = wire_entries(model_config)
        self._dtype_name = dtype
        self._dtype = getattr(torch, dtype)
        self._sender = importlib.import_module(SENDER).Sender(transport, workers, publish_seconds)
        self._version: int | None = None
        self._chunk: protocols.WeightChunk | None = None

    def open(self, version: int, params: Mapping[str, Any]) -> int:
        """Takes the snapshot and starts to send it. See `HostSnapshot.open`."""
        leaves = {source.path: leaf(params, source) for source in self._sources}
        gathered: dict[tuple[str, ...], torch.Tensor] = {}
        for path, array in leaves.items():
            device = min(array.sharding.device_set, key=lambda item: item.id)
            gathered[path] = torch.from_dlpack(jax.device_put(array, device).block_until_ready())
        named = []
        for source in self._sources:
            tensor = gathered[source.path] if source.layer is None else gathered[source.path][source.layer]
            named.append((source.hf_name, tensor.to(self._dtype, copy=True)))
        # The copies must be complete before the gathered arrays go, and before the engine reads them.
        torch.cuda.synchronize()
        # The snapshot has its own copies.
        gathered.clear()
        entries, offset = [], 0
        for name, tensor in named:
            entries.append(protocols.WeightEntry(name, self._dtype_name, tuple(tensor.shape), offset, tensor.nbytes))
            offset += tensor.nbytes
        address = self._sender.begin(named)
        self._version = version
        self._chunk = protocols.WeightChunk(version, 0, 1, tuple(entries), offset, address)
        return 1

    def stage(self, version: int, index: int) -> protocols.WeightChunk:
        """Returns the only chunk."""
        if version != self._version or index != 0 or self._chunk is None:
            raise protocols.LibraError(f"chunk {index} of version {version} cannot be staged: {self._version} is open")
        return self._chunk

    def close(self, version: int) -> None:
        """Waits until the last byte is sent, and frees the snapshot."""
        if version == self._version:
            self._version, self._chunk = None, None
            self._sender.end()

    def shutdown(self) -> None:
        """Closes the transport. Idempotent."""
        self._version, self._chunk = None, None
        self._sender.shutdown()


Snapshot = HostSnapshot | DeviceSnapshot
"""One version's parameters for others to read, over any transport."""


def _copies(
    array: jax.Array, places: Sequence[tuple[int | None, torch.Tensor]]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields (target, source) of each copy that writes a leaf to its places.

    Args:
      array: the leaf, on the devices.
      places: for each tensor of the leaf, its layer (None: the whole leaf) and its memory.
    """
    for piece in pieces(array):
        for layer, target in places:
            start, tensor = piece.start, piece.tensor
            if layer is not None:
                if not start[0] <= layer < start[0] + tensor.shape[0]:
                    continue
                start, tensor = start[1:], tensor[layer - start[0]]
            for axis, (first, size) in enumerate(zip(start, tensor.shape, strict=True)):
                target = target.narrow(axis, first, size)
            # In parts, so that all copying threads work on a large tensor.
            rows = max(1, PART_BYTES // target[0].nbytes)
            yield from zip(target.split(rows), tensor.split(rows), strict=True)


def leaf(params: Mapping[str, Any], source: hf_names.HfEntry) -> jax.Array:
    """Returns the parameter that holds a checkpoint's tensor: the tensor itself, or a stack of layers.

    Raises:
      LibraError: the parameter is missing or has another shape.
    """
    found: Any = params
    for key in source.path:
        found = found.get(key) if isinstance(found, Mapping) else None
    shape = None if found is None else tuple(found.shape if source.layer is None else found.shape[1:])
    if shape != source.shape:
        raise protocols.LibraError(
            f"{source.hf_name} cannot be synced: parameter {'/'.join(source.path)} has shape {shape}, not "
            f"{source.shape}"
        )
    return found


def snapshot_digest(checksums: Sequence[str]) -> str:
    """Returns the digest of a whole snapshot, from the checksums of its chunks in order."""
    return memfd.digest(memoryview(" ".join(checksums).encode()))


@dataclass(frozen=True)
class Piece:
    """One device's part of an array.

    Attributes:
      start: first index of the part along each axis of the array.
      tensor: the part, on the CPU.
    """

    start: tuple[int, ...]
    tensor: torch.Tensor


def to_torch(array: jax.Array) -> torch.Tensor:
    """Returns a single-device array as a CPU tensor: shared if the array is on a CPU device, else copied to the host.

    Raises:
      LibraError: the array's buffer has been donated.
    """
    if array.is_deleted():
        raise protocols.LibraError(f"an array of shape {array.shape} was donated before it was handed to torch")
    (device,) = array.sharding.device_set
    if device.platform != "cpu":
        try:
            host = jax.local_devices(backend="cpu")[0]
        except RuntimeError:
            raise protocols.ConfigError(
                'weights cannot reach host memory: JAX has no CPU backend; set JAX_PLATFORMS to "cuda,cpu" or unset it'
            ) from None
        array = jax.device_put(array, host)
    return torch.from_dlpack(array.block_until_ready())


def pieces(array: jax.Array) -> tuple[Piece, ...]:
    """Returns the parts of an array that is sharded over this process's devices, each part once."""
    if array.is_deleted():
        raise protocols.LibraError(f"an array of shape {array.shape} was donated before it was handed to torch")
    if not (array.is_fully_addressable or array.is_fully_replicated):
        raise protocols.LibraError("a snapshot is taken by one process that sees all devices of the weights")
    if array.is_fully_replicated:
        return (Piece((0,) * array.ndim, to_torch(array.addressable_data(0))),)
    return tuple(
        Piece(tuple(axis.start or 0 for axis in shard.index), to_torch(shard.data))
        # Several devices may hold the same shard: one copy is enough.
        for shard in array.addressable_shards
        if shard.replica_id == 0
    )
