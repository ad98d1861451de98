"""Brings parameters from the devices of a mesh to the first process, a block of a leaf at a time.

A block is a run of indices of a leaf's axis 0: layers of a stacked leaf, or rows of the vocabulary table. One program
for each kind of leaf slices the block on every device, casts it to the wanted dtype, and gathers what other processes
hold. Its index is an argument, so no layer compiles again. The next block is launched before the last one is read.
Devices and the host therefore hold two blocks beside the leaf, in the wanted dtype, and never a whole stacked leaf.

Letters: H is the number of shards that a device gathers, N the block's indices of axis 0.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from libra_jax.protocols import LibraError

PINNED = "pinned_host"
"""Memory of the host that a device writes without a detour through a staging buffer."""

Start = tuple[int, ...]
"""First index along each axis of a leaf."""


@dataclass(frozen=True)
class LeafRequest:
    """A leaf, or one layer of a stacked leaf, to bring to the first process.

    Attributes:
      leaf: the parameter, with a NamedSharding or on a single device.
      dtype: dtype of the blocks.
      layer: index into axis 0, which is not sharded; None stands for the whole leaf, in blocks.
    """

    leaf: jax.Array
    dtype: str
    layer: int | None = None


@dataclass(frozen=True)
class BlockPiece:
    """One device's part of a block.

    Attributes:
      starts: place in the leaf of each part of `data`.
      data: array on a single device, [H, N, ...] in the requested dtype. A piece that lay in the host's memory already
        is a shard itself, [N, ...], in the dtype of the leaf.
    """

    starts: tuple[Start, ...]
    data: jax.Array


Block = tuple[int, Sequence[BlockPiece]]
"""Number of the request, and the pieces that make up a block of it, each part of the leaf once."""


@contextlib.contextmanager
def blocks(requests: Sequence[LeafRequest], block_bytes: int, *, to_host: bool) -> Iterator[Iterator[Block]]:
    """Yields an iterator over the blocks of all requests, in order, for the first process to read.

    With several processes, taking the next block is a collective. All processes enter with the same requests. Blocks
    that are not taken by the end of the context, even after an error, are gathered then, because other processes wait
    for them. A process that needs no block leaves the context. Drop a block before you take the next.

    A request whose shards all lie in the host memory of the first process is one block of these shards, without a copy
    and without a cast. Drop them before the leaf is donated.

    Args:
      requests: what to bring.
      block_bytes: largest size of a block, if a single index of axis 0 is not larger.
      to_host: True to read the pieces on the CPU, False to read them on their devices.

    Raises:
      LibraError: a leaf was donated.
    """
    running = _ahead(_launched(requests, block_bytes, to_host))
    try:
        yield running
    finally:
        if jax.process_count() > 1:
            for _ in running:
                pass


def parts(blocks: Iterable[Block]) -> Iterator[tuple[Start, np.ndarray]]:
    """Yields the place in its leaf of each part of the blocks, and the part on the CPU."""
    for _, pieces in blocks:
        for piece in pieces:
            is_single = piece.data.ndim == len(piece.starts[0])
            array = piece.data
            if is_single:
                # JAX keeps a view of the host with an array, and the view would hinder the leaf's donation.
                array = jax.make_array_from_single_device_arrays(array.shape, array.sharding, [array])
            data = np.asarray(array)[None] if is_single else np.asarray(array)
            yield from zip(piece.starts, data, strict=True)
            del data  # a view would keep the block in memory while the next one is launched


def _ahead(launched: Iterator[Block]) -> Iterator[Block]:
    """Yields blocks when they are complete. While the caller reads a block, the next one is on its way."""
    for block, _ in itertools.pairwise(itertools.chain(launched, [None])):
        assert block is not None
        jax.block_until_ready([piece.data for piece in block[1]])
        yield block
        for piece in block[1]:
            # Names of the reader may last; the memory is needed for the next block. Shards themselves stay.
            if piece.data.ndim > len(piece.starts[0]):
                piece.data.delete()


def _launched(requests: Sequence[LeafRequest], block_bytes: int, to_host: bool) -> Iterator[Block]:
    # By the leaf's identity: requests for its layers share them.
    host_pieces: dict[int, list[BlockPiece] | None] = {}
    plans: dict[int, _Plan] = {}
    for number, request in enumerate(requests):
        leaf = request.leaf
        if leaf.is_deleted():
            raise LibraError(f"an array of shape {leaf.shape} was donated before it was read")
        if to_host and id(leaf) not in host_pieces:
            host_pieces[id(leaf)] = _in_host_memory(leaf)
        if (pieces := host_pieces.get(id(leaf))) is not None:
            yield number, pieces
            continue
        if id(leaf) not in plans:
            plans[id(leaf)] = _Plan(leaf, request.dtype, block_bytes, to_host)
        plan = plans[id(leaf)]
        for first, rows in plan.runs(request.layer):
            yield number, plan.launch(first, rows)


def _in_host_memory(leaf: jax.Array) -> list[BlockPiece] | None:
    """Returns the leaf's shards, each part once, if all lie in the memory of the first process; else None."""
    if any(device.platform != "cpu" for device in leaf.sharding.device_set):
        return None
    places = {
        device: tuple(axis.start or 0 for axis in index)
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items()
    }
    if {place for device, place in places.items() if device.process_index == 0} != set(places.values()):
        return None
    if jax.process_index() != 0:
        return []
    shards = {places[shard.device]: shard.data for shard in leaf.addressable_shards}
    return [BlockPiece((start,), data) for start, data in shards.items()]


class _Plan:
    """How a program brings one leaf."""

    def __init__(self, leaf: jax.Array, dtype: str, block_bytes: int, to_host: bool) -> None:
        self._dtype, self._to_host, self._block_bytes = dtype, to_host, block_bytes
        self._shape = leaf.shape
        self._mesh, self._spec = _split(leaf.sharding)
        sharding = NamedSharding(self._mesh, self._spec)
        starts = {
            device: tuple(axis.start or 0 for axis in index)
            for device, index in sharding.devices_indices_map(leaf.shape).items()
        }
        self._local_rows = sharding.shard_shape(leaf.shape)[0]
        # The same buffers under the split mesh.
        shards = [shard.data for shard in leaf.addressable_shards]
        self._leaf = jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)
        self._gathered = _outer_axes(self._spec)
        # The places in the leaf of what each device gathers, in the order of the gathered axis H.
        names, grid = self._mesh.axis_names, self._mesh.devices
        order = np.argsort([self._gathered.index(name) for name in names if name in self._gathered])
        self._peers: dict[jax.Device, list[Start]] = {}
        for place, device in np.ndenumerate(grid):
            # All positions along the gathered axes; the device's own position along the others.
            index = tuple(slice(None) if name in self._gathered else at for name, at in zip(names, place, strict=True))
            peers = np.transpose(grid[index], order) if self._gathered else np.array([device], object)
            self._peers[device] = [starts[peer] for peer in peers.flat]

    def runs(self, layer: int | None) -> Iterator[tuple[int, int]]:
        """Yields (first, number) of the indices of axis 0 in each block, as a single shard counts them."""
        if layer is not None:
            yield layer, 1
            return
        shards = self._shape[0] // self._local_rows
        row_bytes = jax.numpy.dtype(self._dtype).itemsize * math.prod(self._shape[1:]) * shards
        rows = min(self._local_rows, max(1, self._block_bytes // row_bytes))
        for first in range(0, self._local_rows, rows):
            # The last block is as long as the others, so that it runs the same program. It repeats some rows.
            yield min(first, self._local_rows - rows), rows

    def launch(self, first: int, rows: int) -> list[BlockPiece]:
        """Starts to bring a block. The pieces are this process's; a process other than the first gets no pieces."""
        program = _program(self._mesh, self._spec, self._dtype, rows)
        block = program(self._leaf, np.int32(first))
        if jax.process_index() != 0:
            # Waiting bounds the blocks in flight, because no one reads them here.
            jax.block_until_ready(block)
            return []
        pieces, launched_starts = [], set()
        for shard in block.addressable_shards:
            starts = tuple((start[0] + first, *start[1:]) for start in self._peers[shard.device])
            # Several devices may hold the same parts: one copy is enough.
            if starts in launched_starts:
                continue
            launched_starts.add(starts)
            data, device = shard.data, shard.device
            # A device with memory of its own starts the copy to the host here; the reader waits for it.
            leaves = self._to_host and device.platform != "cpu"
            if leaves and PINNED in {memory.kind for memory in device.addressable_memories()}:
                data = jax.device_put(data, jax.sharding.SingleDeviceSharding(device, memory_kind=PINNED))
            pieces.append(BlockPiece(starts, data))
        return pieces


@functools.lru_cache(maxsize=64)
def _program(mesh: Mesh, spec: PartitionSpec, dtype: str, rows: int) -> Callable[[jax.Array, np.int32], jax.Array]:
    """Returns the program that cuts `rows` indices out of a leaf of this sharding, casts and gathers them: [H, N, ...].

    Each device gathers over the outer axes alone: from the other processes, what the devices of its own do not hold.
    """
    gathered = _outer_axes(spec)
    inner = (tuple(name for name in _names(part) if name not in gathered) or None for part in spec)

    def cut(shard: jax.Array, first: jax.Array) -> jax.Array:
        block = jax.lax.dynamic_slice_in_dim(shard, first, rows).astype(dtype)
        return jax.lax.all_gather(block, gathered) if gathered else block[None]

    return jax.jit(
        jax.shard_map(
            cut,
            mesh=mesh,
            in_specs=(spec, PartitionSpec()),
            out_specs=PartitionSpec(None, *inner),
            # A gathered block is the same along the gathered axes, which shard_map cannot prove.
            check_vma=False,
        )
    )


def _split(sharding: jax.sharding.Sharding) -> tuple[Mesh, PartitionSpec]:
    """Returns the sharding with every mesh axis split in two: `<name>.outer` over processes, `<name>.inner` within one.

    If the processes do not cut the mesh into equal blocks, every axis is outer, and each device gathers whole layers.
    """
    if not isinstance(sharding, NamedSharding):
        (device,) = sharding.device_set
        return Mesh(np.array([device], object), ("device.inner",)), PartitionSpec()
    mesh = _split_mesh(sharding.mesh)
    parts = []
    for part in sharding.spec:
        names = tuple(name for axis in _names(part) for name in (f"{axis}.outer", f"{axis}.inner"))
        # An axis of size one shards nothing.
        names = tuple(name for name in names if mesh.shape[name] > 1)
        parts.append(names or None)
    return mesh, PartitionSpec(*parts)


@functools.lru_cache(maxsize=8)
def _split_mesh(mesh: Mesh) -> Mesh:
    names = tuple(f"{name}.{part}" for name in mesh.axis_names for part in ("outer", "inner"))
    rest = sum(device.process_index == mesh.devices.flat[0].process_index for device in mesh.devices.flat)
    inner: list[int] = []
    for size in reversed(mesh.devices.shape):
        inner.insert(0, math.gcd(size, rest))
        rest //= inner[0]
    for sizes in (inner, [1] * len(inner)):
        shape = [
            part
            for size, inner_size in zip(mesh.devices.shape, sizes, strict=True)
            for part in (size // inner_size, inner_size)
        ]
        grid = mesh.devices.reshape(shape)
        blocks = np.moveaxis(grid, range(1, 2 * len(sizes), 2), range(len(sizes), 2 * len(sizes)))
        if all(len({device.process_index for device in row}) == 1 for row in blocks.reshape(-1, math.prod(sizes))):
            break
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


def _outer_axes(spec: PartitionSpec) -> tuple[str, ...]:
    return tuple(name for part in spec for name in _names(part) if name.endswith(".outer"))


def _names(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if part is None else (part,) if isinstance(part, str) else tuple(part)
