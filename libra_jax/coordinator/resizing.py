"""Changes of the trainer's mesh while the run goes on: one call, a handle with progress, deadline and cancel.

`Resizing.resize` says what is wanted and returns at once. Everything else happens beside training and between two
training steps, when the run calls `boundary`. Where the trainer's process holds the devices of the new mesh, the state
moves inside it, once its programs are compiled; else another set of processes catches up and takes over (`handover`).
A resize that is refused, takes too long or fails leaves the trainer on the mesh it has; its handle says why.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

from libra_jax import config as configuration
from libra_jax import deadlines, protocols
from libra_jax.coordinator import mesh_moves, process_set

TRAINER = "trainer"
"""The name under which the trainer stands in `transitions.jsonl`."""


class Resize:
    """One resize, from the asking to its end.

    Attributes:
      sizes: wanted.
      reason: why.
      processes: that the wanted mesh is to belong to.
      way: how the state travels; None before the first boundary.
      held: ready or not, it does not take over until `go`.
      deadline: seconds from the first boundary until it has to be ready; None before, if the config's was asked for.
      cancelled: why it is given up at the next boundary; empty: it is not.
      begun: event-loop seconds of the first boundary; None before.
      estimate: of what it moves, from the first boundary on.
      progress: how far it is.
      compiled: done when taking over would wait for nothing; fails with the resize.
      left: seconds that training stood still for `Resizing.leaving`.
      late: seconds that it stood still for attempts to take over that came to nothing.
      done: done when the trainer is on the new mesh; a failed or cancelled resize raises LibraError there.
    """

    def __init__(
        self,
        sizes: protocols.MeshSizes,
        reason: str,
        *,
        processes: int = 1,
        hold: bool = False,
        deadline: float | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.processes = processes
        self.way: mesh_moves.Way | None = None
        self.sizes = sizes
        self.reason = reason
        self.progress = protocols.ResizeProgress(0, 0, ready=False)
        self.compiled: asyncio.Future[None] = loop.create_future()
        self.done: asyncio.Future[mesh_moves.Taken] = loop.create_future()
        for future in (self.compiled, self.done):
            future.add_done_callback(_looked_at)
        self.held = hold
        self.deadline = deadline
        self.cancelled = ""
        self.begun: float | None = None  # event-loop seconds
        self.left = self.late = 0.0
        self.estimate = protocols.ResizeEstimate(0, 0, 0)

    @property
    def stalls(self) -> dict[str, float]:
        """Phases of its attempts to take over in which training stood still so far."""
        return {name: seconds for name, seconds in (("leave", self.left), ("late", self.late)) if seconds}

    def go(self) -> None:
        """Lets a resize that was asked for with `hold` take over."""
        self.held = False

    def cancel(self, why: str) -> None:
        """Gives it up, at the next boundary; nothing happens if it is over."""
        self.cancelled = self.cancelled or why

    def fail(self, error: protocols.LibraError) -> None:
        """Ends it without the new mesh."""
        for future in (self.compiled, self.done):
            if not future.done():
                future.set_exception(error)


class Resizing:
    """The trainer's mesh over a run. Made inside the event loop it serves.

    Args:
      config: the run's configuration (`trainer`, `elastic`, `deadlines`).
      trainer: the trainer that serves.
      sizes: of its mesh.
      recorder: gets a transition, a span and a sentence for each resize.
      successors: makes the processes of a trainer on another mesh; None: it stays in its own.

    Attributes:
      sizes: of the mesh that trains.
      changed: called when it is another.
      leaving: awaited before other processes take over, each time that they are about to: the phase "leave".
      moved: awaited when they have, before those that trained end: the phase "settle".
    """

    def __init__(
        self,
        config: configuration.RunConfig,
        *,
        trainer: process_set.Serving,
        sizes: protocols.MeshSizes,
        recorder: protocols.Recorder,
        successors: mesh_moves.Successors | None = None,
    ) -> None:
        self.sizes = sizes
        self._spare = config.elastic.spare_devices
        self._alone = bool(config.trainer.cores) or config.rollout.transport != "memfd"  # serves one process only
        self._reach = sizes.devices + self._spare
        self._each = self._reach // trainer.processes  # most devices that a process has had
        self._deadline = config.deadlines.trainer_start
        self._trainer = trainer
        self._recorder = recorder
        self._successors = successors
        self._resize: Resize | None = None
        self.changed: Callable[[], None] = lambda: None
        self.leaving: Callable[[], Awaitable[None]] = _nothing
        self.moved: Callable[[], Awaitable[None]] = _nothing
        self._ending_successor: asyncio.Task[None] | None = None

    def resize(
        self,
        sizes: protocols.MeshSizes,
        reason: str,
        *,
        processes: int | None = None,
        hold: bool = False,
        deadline: float | None = None,
    ) -> Resize:
        """Asks for another mesh; what is wrong with it shows when the handle is awaited.

        Args:
          sizes: wanted.
          reason: for the record.
          processes: that it is to belong to; None: the fewest of which none has more devices than one has had before,
            for so many its host has. A trainer that the config pins to cores, or whose weights do not travel by memfd,
            stays one process.
          hold: readies it only, until `Resize.go`.
          deadline: seconds, above zero, from the next boundary until it has to be ready, or is given up; None: those of
            the config's deadlines.

        Raises:
          ConfigError: a resize is under way, or the deadline is not positive.
        """
        if deadline is not None and not deadline > 0:
            raise protocols.ConfigError(f"the deadline of a resize to {sizes} must be positive seconds, not {deadline}")
        if self._ending_successor is not None and not self._ending_successor.done():
            raise protocols.ConfigError(
                f"the trainer's mesh cannot become {sizes} before the processes of the last attempt have ended: try "
                "again later"
            )
        if self._resize is not None:
            raise protocols.ConfigError(
                f"the trainer's mesh cannot become {sizes} while it becomes {self._resize.sizes}: wait, or cancel that"
            )
        count = self._processes(sizes) if processes is None else processes
        self._resize = Resize(sizes, reason, processes=count, hold=hold, deadline=deadline)
        return self._resize

    async def boundary(self, step: int) -> None:
        """Between two steps, with the trainer's lock held: begins, takes over, or gives up. Raises nothing of a resize.

        Args:
          step: training steps taken, which is the trainer's version.
        """
        resize = self._resize
        if resize is None:
            return
        try:
            way = await self._advance(resize)
        except protocols.WorkerLost:  # of the trainer: that ends more than a resize
            raise
        except protocols.LibraError as error:
            await self._give_up(resize, error, step)
            return
        if way is None:
            return
        loop = asyncio.get_running_loop()
        began = loop.time()
        if isinstance(way, mesh_moves.Outside):
            await self.leaving()  # what goes wrong there would go wrong without a resize, too
            resize.left += loop.time() - began
            began = loop.time()
        try:
            await self._take_over(resize, way, step)
        except protocols.WorkerLost:
            raise
        except protocols.LibraError as error:
            resize.late += loop.time() - began
            if isinstance(error, protocols.DeadlineMissed) and not self._overdue(resize):
                self._recorder.note(
                    f"The trainer's mesh is not {resize.sizes} yet, and is to become that after a later step: {error}"
                )
            else:
                await self._give_up(resize, error, step)

    def trains(self, batch: protocols.TrainBatch) -> None:
        """A step begins; processes that are to take over have to take it, too."""
        if self._resize is not None and self._resize.way is not None:
            self._resize.way.trains(batch)

    async def _advance(self, resize: Resize) -> mesh_moves.Way | None:
        """Begins, or looks how far it is; returns the way if it is to be taken over now."""
        if resize.cancelled:
            raise protocols.LibraError(f"the resize to {resize.sizes} was cancelled: {resize.cancelled}.")
        if resize.way is None:
            resize.begun = asyncio.get_running_loop().time()
            resize.way = self._way(resize)
            if resize.deadline is None:
                resize.deadline = resize.way.longest
            resize.estimate = await resize.way.begin()
            if resize.estimate.unchecked:
                self._recorder.note(
                    f"Whether the state fits onto the mesh of {resize.sizes} is not known: {resize.estimate.unchecked} "
                    "of its devices do not say how much memory they have."
                )
        resize.progress = await resize.way.progress()
        if not resize.progress.ready:
            if self._overdue(resize):
                raise protocols.DeadlineMissed(
                    f"A mesh of {resize.sizes} was not ready after {resize.deadline:g} s: ask for it with a later "
                    "deadline, or without one and raise config.deadlines.trainer_start."
                )
            return None
        if not resize.compiled.done():
            resize.compiled.set_result(None)
        return None if resize.held else resize.way

    def _processes(self, sizes: protocols.MeshSizes) -> int:
        """That a mesh is to belong to, where nobody says."""
        devices = sizes.devices
        if self._successors is None or self._alone or devices < 1:
            return self._trainer.processes
        return next(count for count in range(-(-devices // self._each), devices + 1) if devices % count == 0)

    @staticmethod
    def _overdue(resize: Resize) -> bool:
        if resize.begun is None or resize.deadline is None:
            return False
        return asyncio.get_running_loop().time() - resize.begun > resize.deadline

    def _way(self, resize: Resize) -> mesh_moves.Way:
        """How the state is to travel.

        Raises:
          ConfigError: it cannot.
        """
        here = resize.processes == self._trainer.processes == 1
        if here and (resize.sizes.devices <= self._reach or self._successors is None):
            return mesh_moves.Inside(self._trainer, resize.sizes, self._deadline)
        if self._successors is None:
            raise protocols.ConfigError(
                f"a mesh of {resize.sizes} over {resize.processes} processes needs other processes than the trainer's, "
                "which only config.cluster.backend=ray makes"
            )
        return self._successors(resize.sizes, resize.processes)

    async def _take_over(self, resize: Resize, way: mesh_moves.Way, step: int) -> None:
        self._recorder.status(TRAINER, f"moving to {resize.sizes}")
        taken = (await way.take_over(step)).with_stalls(**resize.stalls)
        before, self.sizes, self._resize = self.sizes, resize.sizes, None
        self.changed()
        if isinstance(way, mesh_moves.Outside):
            began = asyncio.get_running_loop().time()
            await self.moved()
            taken = taken.with_stalls(settle=asyncio.get_running_loop().time() - began)
            way.end_former()
            # Processes that were made for this mesh; only one that is alone holds more than its devices.
            self._reach = resize.sizes.devices + (self._spare if resize.processes == 1 else 0)
            self._each = max(self._each, resize.sizes.devices // resize.processes)
        self._record(resize, before, step, taken, "done", "")
        phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in taken.phases.items())
        self._recorder.note(
            f"The trainer's mesh is {resize.sizes} now, {before} before: {taken.nbytes / 2**20:.1f} MiB moved, "
            f"training stood still for {taken.stall:.2f} s ({phases})."
        )
        resize.done.set_result(taken)

    async def _give_up(self, resize: Resize, error: protocols.LibraError, step: int) -> None:
        self._resize = None
        if isinstance(resize.way, mesh_moves.Outside):
            self._ending_successor = asyncio.get_running_loop().create_task(self._end_successor(resize.way))
        elif resize.way is not None:
            try:
                await resize.way.cancel()
            except protocols.WorkerLost:
                resize.fail(error)
                raise
            except protocols.LibraError as second:
                error = protocols.LibraError(f"{error} Nor could it be cancelled: {second}")
        outcome = "cancelled" if resize.cancelled else "failed"
        taken = mesh_moves.Taken({}, 0.0, 0).with_stalls(**resize.stalls)
        self._record(resize, self.sizes, step, taken, outcome, str(error))
        self._recorder.note(f"The trainer stays on its mesh of {self.sizes}: {error}")
        resize.fail(error)

    async def trainer_lost(self, step: int) -> None:
        """The trainer that was to hand over, or to move, is gone: a resize under way is given up."""
        if (resize := self._resize) is None:
            return
        if isinstance(resize.way, mesh_moves.Inside):
            resize.way = None  # it went with its process
        await self._give_up(resize, protocols.LibraError("the trainer was lost meanwhile, and is made anew."), step)

    async def close(self) -> None:
        """The run ends: a resize that is not over never will be."""
        if self._ending_successor is not None:
            deadlines.abandon(self._ending_successor)
        resize, self._resize = self._resize, None
        if resize is None:
            return
        resize.fail(protocols.LibraError(f"the run ended before the resize to {resize.sizes}"))
        if isinstance(resize.way, mesh_moves.Outside):
            await resize.way.cancel()

    async def _end_successor(self, way: mesh_moves.Outside) -> None:
        """Beside the run: the serving trainer may have to be asked whether its snapshot is written."""
        try:
            await way.cancel()
        except protocols.LibraError as error:
            self._recorder.note(f"The processes that were to take over did not end cleanly: {error}")

    def _record(
        self,
        resize: Resize,
        before: protocols.MeshSizes,
        step: int,
        taken: mesh_moves.Taken,
        outcome: str,
        why: str,
    ) -> None:
        end = asyncio.get_running_loop().time()
        start = end if resize.begun is None else resize.begun
        self._recorder.transition(
            {
                "worker": TRAINER,
                "from": str(before),
                "to": str(resize.sizes),
                "reason": resize.reason,
                "start": start,
                "end": end,
                "step": step,
                "outcome": outcome,
                "why": why,
                "phases": dict(taken.phases),
                "bytes": taken.nbytes,
                "estimate": dataclasses.asdict(resize.estimate),
                "stall": {"training": taken.stall, "rollout": 0.0},
            }
        )
        self._recorder.span(TRAINER, f"resize to {resize.sizes}", start, end, {"outcome": outcome, **taken.phases})


async def _nothing() -> None:
    pass


def _looked_at(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
