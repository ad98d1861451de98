"""A snapshot of the trainer's parameters, in the wire dtype, as chunks of shared memory that engines read.

Parameters come block by block (`models.hf.gather`), cast on their devices, through pinned memory, into memory that the
engines have mapped. On CPU devices of one process this is a single copy, with a cast. Afterwards nothing refers to the
live parameters, so the next training step may donate them while engines still read. The memory is reused from version
to version: the page faults of fresh memory would cost more than the copy.

`device_snapshot` syncs weights without host memory.

Tensors travel under their Hugging Face names, layer by layer. `lm_head.weight` is always among them: engines get an
untied model, because vLLM's reload on CPU leaves a tied output projection stale.

JAX arrays become torch tensors by DLPack, without a copy if the bytes lie in this host's memory already. Such a tensor
keeps the array's buffer alive and JAX from donating it, and a write through it changes the array. Drop the tensor
before the array's next donation.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any

import jax
import numpy as np
import torch

from libra_jax import protocols
from libra_jax.models import config as models_config
from libra_jax.models.hf import gather, hf_names
from libra_jax.weights import memfd

ALIGNMENT = 64
"""Alignment in bytes of each tensor's place in a chunk (a cache line)."""

WHOLE = -1
"""Stands for the layer of a tensor that is a whole leaf."""

PART_BYTES = 4 * 2**20
"""Approximate bytes of one copy."""

MOST_COPIERS = 4
"""Maximum number of copying threads. More threads do not raise a host's memory bandwidth."""


def wire_entries(config: models_config.TransformerConfig) -> tuple[hf_names.HfEntry, ...]:
    """Returns the tensors to send: the checkpoint's, plus an explicit output projection if embeddings are tied."""
    entries = hf_names.weight_map(config)
    if not config.tie_word_embeddings:
        return entries
    # The engine gets an untied config, whose output projection is a tensor of its own.
    table = next(entry for entry in entries if entry.hf_name == "model.embed_tokens.weight")
    return (*entries, hf_names.HfEntry("lm_head.weight", table.path, table.layer, table.shape))


def wire_dtype(source: hf_names.HfEntry, dtype: str) -> str:
    """Returns the dtype in which a tensor is sent: `dtype` for matrices, float32 for vectors.

    A trainer computes with norm weights in float32. When a hybrid worker got them rounded to bfloat16, its gradients
    were off by 2%. An engine rounds vectors to its own dtype as it copies them.
    """
    return "float32" if len(source.shape) == 1 else dtype


def block_bytes(sources: Sequence[hf_names.HfEntry], dtype: str) -> int:
    """Returns the bytes of the largest tensor of a layer, the size of the blocks in which parameters are gathered."""
    sizes = [math.prod(source.shape) for source in sources if source.layer is not None]
    return max(sizes) * getattr(torch, dtype).itemsize


class HostSnapshot:
    """Holds one snapshot at a time in host memory. Not thread-safe: the thread that owns the parameters calls it.

    Args:
      dtype: wire dtype of matrices (float32, bfloat16 or float16), in which the engine computes. Vectors: float32.
      chunk_bytes: maximum bytes of a chunk. A single larger tensor gets a chunk of its own size.
      checksum: True to digest each chunk, so that the engine notices damage.
      sources: tensors to send; by default those of `wire_entries`.

    Attributes:
      nbytes: bytes of a snapshot.
    """

    def __init__(
        self,
        model_config: models_config.TransformerConfig,
        dtype: str,
        chunk_bytes: int,
        checksum: bool,
        sources: Sequence[hf_names.HfEntry] | None = None,
    ) -> None:
        self._checksum = checksum
        self._sources = wire_entries(model_config) if sources is None else sources
        self._block_bytes = block_bytes(self._sources, dtype)
        self._dtypes: dict[tuple[str, ...], str] = {}
        self._chunks: list[list[protocols.WeightEntry]] = [[]]
        for source in self._sources:
            kind = self._dtypes[source.path] = wire_dtype(source, dtype)
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
        # The cores that this process may use, which in a container are fewer than the host has.
        cores = len(os.sched_getaffinity(0))
        self._copiers = futures.ThreadPoolExecutor(min(MOST_COPIERS, cores), "copy", torch.set_num_threads, (1,))

    def open(
        self, version: int, params: Mapping[str, Any], destinations: Sequence[protocols.WeightDestination] = ()
    ) -> int:
        """Takes a snapshot of `params`, which may be donated once this returns. Replaces an open snapshot.

        Args:
          version: policy version of the parameters.
          params: nested dict of arrays, addressed as by `hf_names.weight_map`, with any sharding. If several processes
            share them, all processes call this method, and process 0 holds the snapshot.
          destinations: not needed, because instances read the memory by themselves.

        Returns:
          The number of chunks.

        Raises:
          SharedMemoryError: there is too little memory.
          LibraError: a parameter is missing, has another shape, or is donated already.
        """
        # Closed first: a failure below leaves no snapshot, and not one of mixed versions.
        self._version = self._written = None
        leaves = {source.path: leaf(params, source) for source in self._sources}
        self._checksums.clear()
        requests = [gather.LeafRequest(array, self._dtypes[path]) for path, array in leaves.items()]
        # All processes take part in the gathering, and process 0 alone keeps the result.
        with gather.blocks(requests, self._block_bytes, to_host=True) as blocks:
            if jax.process_index() == 0:
                if not self._memory:  # it serves all versions
                    self._memory = self._allocated()
                self._copy(tuple(leaves), blocks)
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
        return snapshot_digest(self.checksums())

    def checksums(self) -> list[str]:
        """Returns the checksums of the chunks of the last opened version, in order."""
        return [self._chunk_checksum(index) for index in range(len(self._chunks))]

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
        # Once a version: staging and the digest both ask for it.
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
        owners: list[memfd.Owner] = []
        try:
            for nbytes in self._sizes:
                owners.append(memfd.Owner(nbytes, purpose))
        except memfd.SharedMemoryError:
            for owner in owners:
                owner.close()
            raise
        return owners

    def _copy(self, paths: Sequence[tuple[str, ...]], blocks: Iterator[gather.Block]) -> None:
        """Copies block by block, and casts what lay in the host's memory already."""
        targets: dict[tuple[str, ...], dict[int, torch.Tensor]] = {path: {} for path in paths}
        locations = (
            (owner, entry) for owner, entries in zip(self._memory, self._chunks, strict=True) for entry in entries
        )
        tied: list[tuple[torch.Tensor, torch.Tensor]] = []
        for source, (owner, entry) in zip(self._sources, locations, strict=True):
            kind = getattr(torch, entry.dtype)
            flat = torch.frombuffer(owner.buffer, dtype=kind, count=math.prod(entry.shape), offset=entry.offset)
            target, layer = flat.view(entry.shape), WHOLE if source.layer is None else source.layer
            if layer in targets[source.path]:  # a tied table is written a second time
                tied.append((target, targets[source.path][layer]))
            else:
                targets[source.path][layer] = target

        threads = torch.get_num_threads()
        # Torch's own threads would wait for each other at the end of every tensor.
        torch.set_num_threads(1)
        try:
            # The name of a finished block would keep it alive while the next one is on its way.
            for pairs in (copies(pieces, targets[paths[number]]) for number, pieces in blocks):
                self._copy_in_parts(pairs)
            self._copy_in_parts(tied)
        finally:
            torch.set_num_threads(threads)

    def _copy_in_parts(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copies each (target, source), in parts, so that all copying threads work on a large tensor."""

        def parts() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for target, source in pairs:
                # Whole rows, so that each part is contiguous.
                rows = max(1, PART_BYTES // target[0].nbytes)
                yield from zip(target.split(rows), source.split(rows), strict=True)

        for _ in self._copiers.map(lambda copy: copy[0].copy_(copy[1]), parts()):
            pass  # iterating raises a copying thread's error


def copies(
    pieces: Sequence[gather.BlockPiece], targets: Mapping[int, torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields (target, source) of each copy that writes a block to its places.

    Args:
      pieces: the block.
      targets: memory of the leaf's tensors by layer, or of the whole leaf (`WHOLE`).
    """
    for piece in pieces:
        parts = to_torch(piece.data)
        if parts.dim() == len(piece.starts[0]):  # a shard itself
            parts = parts[None]
        for start, part in zip(piece.starts, parts, strict=True):
            if WHOLE in targets:
                yield _place(targets[WHOLE], start, part.shape), part
                continue
            for layer in range(start[0], start[0] + len(part)):
                if layer in targets:
                    source = part[layer - start[0]]
                    yield _place(targets[layer], start[1:], source.shape), source


def _place(target: torch.Tensor, start: gather.Start, shape: Sequence[int]) -> torch.Tensor:
    for axis, (first, size) in enumerate(zip(start, shape, strict=True)):
        if size != target.shape[axis]:
            target = target.narrow(axis, first, size)
    return target


def leaf(params: Mapping[str, Any], source: hf_names.HfEntry) -> jax.Array:
    """Returns the parameter that holds a checkpoint's tensor: the tensor itself, or a stack of layers.

    Raises:
      LibraError: the parameter is missing or has another shape.
    """
    node: Any = params
    for key in source.path:
        node = node.get(key) if isinstance(node, Mapping) else None
    shape = None if node is None else tuple(node.shape if source.layer is None else node.shape[1:])
    if shape != source.shape:
        raise protocols.LibraError(
            f"{source.hf_name} cannot be synced: parameter {'/'.join(source.path)} has shape {shape}, not "
            f"{source.shape}"
        )
    return node


def snapshot_digest(checksums: Sequence[str]) -> str:
    """Returns the digest of a whole snapshot, from the checksums of its chunks in order."""
    return memfd.digest(memoryview(" ".join(checksums).encode()))


def to_torch(array: jax.Array) -> torch.Tensor:
    """Returns a single-device array as a tensor that shares its memory: the host's, or the device's.

    Raises:
      LibraError: the array's buffer has been donated.
    """
    if array.is_deleted():
        raise protocols.LibraError(f"an array of shape {array.shape} was donated before it was handed to torch")
    array.block_until_ready()
    if array.sharding.memory_kind != gather.PINNED:
        return torch.from_dlpack(array)
    # JAX has no DLPack of a device's pinned host memory, and numpy shares it. Torch does not know numpy's bfloat16.
    data = np.asarray(array)
    with warnings.catch_warnings():
        # The memory is read-only on purpose, and nothing here writes to it.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(data.view(f"u{data.itemsize}")).view(getattr(torch, str(data.dtype)))
