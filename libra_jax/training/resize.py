"""Moves a learner to another mesh within one process, between two training steps.

A resize builds a second learner on the new mesh. A thread (`background`) compiles its programs while the first learner
trains, for every shape that the first learner has compiled. Then, between two steps, the state moves leaf by leaf. Each
old leaf is freed as soon as its new copy exists, so at most one leaf exists twice. The moved values are bit-identical.

All devices belong to this process. Between processes, a state travels through a checkpoint (`checkpoints`).

Thread-safety: one thread starts, finishes and cancels a resize; only compilation runs on another thread.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from libra_jax import protocols
from libra_jax.training import background
from libra_jax.training import learner as learner_lib
from libra_jax.training import state as state_lib
from libra_jax.weights import memfd

FreeBytes = Callable[[Sequence[jax.Device]], "dict[jax.Device, int]"]
"""Maps devices to the free bytes of each; devices that do not report their memory are left out."""


class StayedError(protocols.LibraError):
    """A state was not moved; it is whole on its old mesh."""


class MeshChange:
    """One resize, from its start to the takeover.

    Attributes:
      sizes: axis sizes of the new mesh.
      estimate: estimated memory and traffic of the move.
    """

    def __init__(
        self,
        present: learner_lib.Learner,
        sizes: protocols.MeshSizes,
        devices: Sequence[jax.Device],
        *,
        free_bytes: FreeBytes | None = None,
    ) -> None:
        """Checks the sizes and the memory, then starts to compile.

        Args:
          present: the learner that trains; it continues.
          sizes: wanted axis sizes.
          devices: the new mesh takes the first of these devices.
          free_bytes: function that returns the free bytes of devices. Default: as reported by the devices, this machine
            or its container.

        Raises:
          ConfigError: the sizes do not fit this model, batch and number of devices, or equal the present sizes; or the
            devices belong to several processes.
          LibraError: a device lacks memory for the move.
        """
        if jax.process_count() > 1:
            raise protocols.ConfigError(
                "a mesh of several processes cannot be resized inside them; start other processes from a checkpoint"
            )
        before = present.config.trainer
        try:
            trainer = dataclasses.replace(before, **dataclasses.asdict(sizes))
        except protocols.ConfigError as error:
            raise protocols.ConfigError(f"a mesh of {sizes} cannot be: {error}") from error
        if sizes == protocols.MeshSizes(before.data, before.fsdp, before.tensor, before.context):
            raise protocols.ConfigError(f"the trainer's mesh is {sizes} already")
        self.sizes = sizes
        self._present = present
        self._next = present.on(trainer, devices)
        self._free_bytes = free_bytes or _free_bytes
        self.estimate = self._checked()
        self.compilation = background.Compilation(
            self._next.programs, lambda: present.programs.shapes, name="compile for a resize"
        )
        self.compilation.begin()

    @property
    def progress(self) -> protocols.ResizeProgress:
        """Number of programs compiled, and number that the present learner has. Training may add more."""
        self.compilation.begin()  # the thread may have ended before training met another shape
        met = len(self._present.programs.shapes)
        return protocols.ResizeProgress(self.compilation.done, met, ready=not self.compilation.running)

    def take_over(self, seconds: float) -> tuple[learner_lib.Learner, protocols.ResizePhases]:
        """Moves the state to the new mesh and returns its learner; empties the present learner. Call between two steps.

        Args:
          seconds: seconds that compilation may still take.

        Raises:
          DeadlineMissed: compilation took longer. The present learner and the compilation continue.
          LibraError: the new programs do not compile, a device lacks memory, or the state could not be moved. The
            present learner continues, or the message says that the state is lost.
        """
        start, compilation = time.monotonic(), self.compilation
        in_time = compilation.wait(seconds)
        waited = time.monotonic() - start
        if not in_time:
            raise protocols.DeadlineMissed(
                f"compiling for a mesh of {self.sizes} takes longer than {seconds:g} s; the trainer stays on "
                "its mesh for now"
            )
        if compilation.cancelled:
            raise protocols.LibraError(f"the resize to {self.sizes} was cancelled.")
        if compilation.error is not None:
            raise protocols.LibraError(
                f"the programs of a mesh of {self.sizes} do not compile ({compilation.error}); the trainer stays on "
                "its mesh."
            ) from compilation.error
        self.estimate = self._checked()  # since then, others may have taken memory, and a first step its accumulator
        start = time.monotonic()
        # `move` frees each old leaf only if no one else refers to it.
        leaves, structure = self._present.release()
        try:
            move(leaves, jax.tree.leaves(self._next.layout.state))
        except StayedError:
            # The learner gave its state up in `release`; the leaves are back on their old mesh.
            self._present.state = jax.tree.unflatten(structure, leaves)
            raise
        self._next.state = jax.tree.unflatten(structure, leaves)
        moved = time.monotonic() - start
        return self._next, protocols.ResizePhases(compilation.seconds, waited, moved, self.estimate.arriving_bytes)

    def _checked(self) -> protocols.ResizeEstimate:
        """Returns the estimate for the memory that is free now."""
        present, following = self._present, self._next
        before, after = present.layout, following.layout
        # Until the new programs are compiled, their temporary bytes are scaled from the present ones.
        program_bytes = following.programs.temporary_bytes() or (
            present.programs.temporary_bytes() * before.mesh.size // after.mesh.size
        )
        holds_sums = present.accumulator is not None or present.has_begun
        memory_estimate = estimate(before, after, holds_sums=holds_sums, program_bytes=program_bytes)
        devices = list(after.mesh.devices.flat)
        free = self._free_bytes(devices)
        # The move and the first step on the new mesh must both fit.
        peak_bytes = max(memory_estimate.peak_bytes, memory_estimate.step_bytes)
        for device, room in free.items():
            if peak_bytes > room:
                raise protocols.LibraError(
                    f"a live resize takes up to {peak_bytes / 2**20:.1f} MiB more on a device, and "
                    f"{device} has {room / 2**20:.1f} MiB; raise trainer.fsdp, or restart on the other mesh."
                )
        return dataclasses.replace(memory_estimate, unchecked=len(devices) - len(free))


def estimate(
    before: state_lib.StateLayout, after: state_lib.StateLayout, *, holds_sums: bool, program_bytes: int = 0
) -> protocols.ResizeEstimate:
    """Estimates the memory and traffic of moving a state.

    Args:
      before: present layout of the state.
      after: wanted layout.
      holds_sums: the devices hold an accumulator, too. It is freed before the move. The next step always makes a new
        accumulator, which may be larger on each device.
      program_bytes: temporary bytes that a program of the next step needs on each device.
    """
    extra_bytes: Counter[jax.Device] = Counter()  # relative to the bytes that the device holds now

    def hold(leaf: Any, sign: int) -> None:
        if leaf.sharding.memory_kind == state_lib.HOST:
            return
        # The shards of a leaf are of equal size.
        nbytes = np.dtype(leaf.dtype).itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
        for device in leaf.sharding.device_set:
            extra_bytes[device] += sign * nbytes

    total_bytes = arriving = peak = 0
    for sums in jax.tree.leaves(before.accumulator) if holds_sums else ():
        hold(sums, -1)
    for old, new in zip(jax.tree.leaves(before.state), jax.tree.leaves(after.state), strict=True):
        item = np.dtype(old.dtype).itemsize
        total_bytes += item * math.prod(old.shape)
        arriving += item * _arriving(old, new)
        hold(new, 1)
        # The old leaf is freed after the new leaf exists, so the peak counts both.
        peak = max(peak, *extra_bytes.values())
        hold(old, -1)
    for sums in jax.tree.leaves(after.accumulator):
        hold(sums, 1)
    stays = max(extra_bytes[device] for device in after.mesh.devices.flat)
    return protocols.ResizeEstimate(total_bytes, arriving, max(peak, stays), step_bytes=max(0, stays + program_bytes))


def _arriving(old: Any, new: Any) -> int:
    """Returns the number of elements that the devices of `new` do not hold of `old`, over all devices."""

    def places(leaf: Any) -> dict[jax.Device, list[tuple[int, int]]]:
        # For each device, the first and last index of each dimension that it holds.
        device_indices = leaf.sharding.devices_indices_map(leaf.shape).items()
        return {
            device: [part.indices(size)[:2] for part, size in zip(parts, leaf.shape, strict=True)]
            for device, parts in device_indices
        }

    here, count = places(old), 0
    for device, part in places(new).items():
        count += math.prod(last - first for first, last in part)
        if device in here:
            both = zip(here[device], part, strict=True)
            count -= math.prod(max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in both)
    return count


def move(leaves: list[jax.Array], places: Sequence[jax.ShapeDtypeStruct]) -> None:
    """Moves each leaf to the sharding of its place. The list must hold the only references, or nothing is freed.

    Raises:
      StayedError: the devices refused; all leaves are back in their old places.
      WorkerLost: the devices refused the way back, too.
    """
    homes = [leaf.sharding for leaf in leaves]
    done = 0
    try:
        for index, place in enumerate(places):
            # Dropped, not deleted: JAX may share a shard that stays on its device between the old and the new leaf.
            leaves[index] = _put(leaves[index], place.sharding)
            done = index + 1
    except jax.errors.JaxRuntimeError as error:
        line = str(error).strip().splitlines()[0][:200]
        try:
            for index in range(done):
                leaves[index] = _put(leaves[index], homes[index])
        except jax.errors.JaxRuntimeError as again:
            raise protocols.WorkerLost(
                f"the state could be moved neither to another mesh nor back, and is lost ({line}); the same command "
                "goes on from the last checkpoint."
            ) from again
        raise StayedError(f"the state could not be moved to another mesh and stays ({line}).") from error


def _put(leaf: jax.Array, where: jax.sharding.Sharding) -> jax.Array:
    # Waiting frees the old leaf before the next one moves, and raises the error of this leaf here.
    return jax.block_until_ready(jax.device_put(leaf, where))


def _free_bytes(devices: Sequence[jax.Device]) -> dict[jax.Device, int]:
    """Returns the free bytes that each device reports; CPU devices share this process's free memory."""
    free = {}
    for device in devices:
        stats = device.memory_stats() if device.platform != "cpu" else None
        if stats and "bytes_limit" in stats:
            free[device] = stats["bytes_limit"] - stats["bytes_in_use"]
        elif device.platform == "cpu":
            free[device] = memfd.available_bytes() // len(devices)
    return free
