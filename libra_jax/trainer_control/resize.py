"""Changes the trainer's mesh while the run continues: one call, and a handle with progress, deadline and cancel.

`Resizing.resize` takes the request and returns at once. All else happens beside training, and between two training
steps when the run calls `boundary`. If the trainer's process holds the devices of the new mesh, the state moves inside
that process once its programs are compiled. If not, other processes catch up and take over (`handover`). If a resize is
refused, takes too long or fails, the trainer keeps its mesh, and the handle says why.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Coroutine
from typing import Any, Protocol

from libra_jax import protocols
from libra_jax.trainer_control import handover
from libra_jax.utils import deadlines, run_context

TRAINER = "trainer"
"""Name of the trainer in `transitions.jsonl`."""


class PendingCheckpoint(Protocol):
    """The checkpoint that the trainer is writing, if any."""

    async def commit_held(self) -> None:
        """Waits until the checkpoint is durable, and commits it. Called with the trainer's lock held."""
        ...


class ResizeRequest:
    """One resize, from the request to its end.

    Attributes:
      sizes: sizes of the new mesh.
      reason: reason for the record.
      processes: number of processes of the new mesh.
      way: way of the state to the new mesh; None before the first boundary.
      held: True if the resize gets ready and waits for `go` to take over.
      deadline: seconds from the first boundary until the resize must be ready. None before that boundary, if the
        config's deadline applies.
      cancelled: reason to abort it at the next boundary; empty if none.
      begun: event-loop time of the first boundary; None before.
      estimate: estimate of the state to move, from the first boundary on.
      progress: present progress.
      compiled: future that resolves once a take-over would wait for nothing, and fails with the resize.
      stalls: seconds in which training has stood still so far, by phase: "leave" for a pending checkpoint before a
        hand-over, "late" for take-overs that failed.
      done: future that resolves once the trainer is on the new mesh. It raises LibraError after a failure or cancel.
    """

    def __init__(
        self, sizes: protocols.MeshSizes, reason: str, *, processes: int, hold: bool, deadline: float | None
    ) -> None:
        loop = asyncio.get_running_loop()
        self.sizes = sizes
        self.reason = reason
        self.processes = processes
        self.way: handover.Way | None = None
        self.held = hold
        self.deadline = deadline
        self.cancelled = ""
        self.begun: float | None = None
        self.estimate = protocols.ResizeEstimate(0, 0, 0)
        self.progress = protocols.ResizeProgress(0, 0, ready=False)
        self.compiled: asyncio.Future[None] = loop.create_future()
        self.stalls: collections.defaultdict[str, float] = collections.defaultdict(float)
        self.done: asyncio.Future[handover.HandoverCost] = loop.create_future()
        for future in (self.compiled, self.done):
            # Retrieves the error, or asyncio warns if no one awaits the handle.
            future.add_done_callback(lambda handle: handle.cancelled() or handle.exception())

    @property
    def overdue(self) -> bool:
        """True if the deadline has passed."""
        if self.begun is None or self.deadline is None:
            return False
        return asyncio.get_running_loop().time() - self.begun > self.deadline

    def go(self) -> None:
        """Allows a held resize to take over."""
        self.held = False

    def cancel(self, why: str) -> None:
        """Aborts the resize at the next boundary. Does nothing if the resize is over."""
        self.cancelled = self.cancelled or why

    def fail(self, error: protocols.LibraError) -> None:
        """Fails the handle: the mesh stays as it was."""
        for future in (self.compiled, self.done):
            if not future.done():
                future.set_exception(error)


@dataclasses.dataclass
class Inside:
    """`handover.Way` inside the trainer's process, which holds the devices of the new mesh."""

    outside = False
    trainer: protocols.TrainerClient
    sizes: protocols.MeshSizes
    longest: float

    async def begin(self) -> protocols.ResizeEstimate:
        """Starts to compile the programs of the new mesh."""
        return await self.trainer.begin_resize(self.sizes)

    async def progress(self) -> protocols.ResizeProgress:
        """Returns the number of compiled programs."""
        return await self.trainer.resize_progress()

    def trains(self, batch: protocols.TrainBatch) -> None:
        """Does nothing: the same process trains."""

    async def take_over(self, step: int) -> handover.HandoverCost:
        """Moves the state to the new mesh."""
        took = await self.trainer.finish_resize(self.longest)
        phases = {"compile": took.compile_seconds, "wait": took.wait_seconds, "move": took.move_seconds}
        return handover.HandoverCost(phases, took.wait_seconds + took.move_seconds, took.moved_bytes)

    async def end_former(self) -> None:
        """Does nothing: the same process trains."""

    async def cancel(self) -> None:
        """Keeps the present mesh."""
        await self.trainer.cancel_resize()


class Resizing:
    """Changes the trainer's mesh over a run. Create it inside the event loop that it serves.

    Args:
      run: what the parts of the run share (`trainer`, `elastic`, `deadlines`). The recorder gets a transition, a span
        and a note for each resize. Events get TrainerResized, and TrainerReplaced before the former processes end
        (phase "settle").
      trainer: the trainer whose mesh changes.
      sizes: sizes of its present mesh.
      checkpoint: checkpoint to commit before other processes take over, because its writers end (phase "leave").
      successors: makes other processes that take over. If None, the trainer stays in its process.

    Attributes:
      sizes: sizes of the mesh that trains.
    """

    def __init__(
        self,
        run: run_context.RunContext,
        *,
        trainer: protocols.TrainerClient,
        sizes: protocols.MeshSizes,
        checkpoint: PendingCheckpoint,
        successors: handover.Successors | None = None,
    ) -> None:
        config = run.config
        self.sizes = sizes
        self._recorder = run.recorder
        self._events = run.events
        self._clock = run.clock
        self._trainer = trainer
        self._checkpoint = checkpoint
        self._successors = successors
        self._spare = config.elastic.spare_devices
        # Pinned cores, and weights that do not travel by memfd, serve one process only.
        self._alone = bool(config.trainer.cores) or config.rollout.transport != "memfd"
        # Number of devices that a single process can use, and the largest number that a process has had: its host has
        # at least that many.
        self._reach = sizes.devices + self._spare
        self._each = self._reach // trainer.processes
        self._longest = config.deadlines.trainer_start
        self._resize: ResizeRequest | None = None
        # Tasks that end processes beside the run, and the one of them that ends an aborted take-over.
        self._ending: set[asyncio.Task[None]] = set()
        self._aborting: asyncio.Task[None] | None = None

    def resize(
        self,
        sizes: protocols.MeshSizes,
        reason: str,
        *,
        processes: int | None = None,
        hold: bool = False,
        deadline: float | None = None,
    ) -> ResizeRequest:
        """Requests another mesh. Faults of the request show when the handle is awaited.

        Args:
          sizes: sizes of the new mesh.
          reason: reason for the record.
          processes: number of processes of the new mesh. If None, the fewest processes with no more devices each than a
            process has had before, because a host has that many. A trainer stays one process if the config pins it to
            cores, or if its weights do not travel by memfd.
          hold: if True, the resize gets ready and waits for `ResizeRequest.go`.
          deadline: positive seconds from the next boundary until the resize must be ready. None applies the config's
            deadlines.

        Raises:
          ConfigError: a resize is under way, or the deadline is not positive.
        """
        if deadline is not None and not deadline > 0:
            raise protocols.ConfigError(f"the deadline of a resize to {sizes} must be positive seconds, not {deadline}")
        if self._aborting is not None and not self._aborting.done():
            raise protocols.ConfigError(
                f"the trainer's mesh cannot become {sizes} before the processes of the last one have ended: try "
                "again later"
            )
        if self._resize is not None:
            raise protocols.ConfigError(
                f"the trainer's mesh cannot become {sizes} while it becomes {self._resize.sizes}: wait, or cancel that"
            )
        devices = sizes.devices
        if processes is None and (self._successors is None or self._alone or devices < 1):
            processes = self._trainer.processes
        elif processes is None:
            # From the fewest processes that can hold the devices; every process gets the same number.
            fewest = -(-devices // self._each)
            processes = next(count for count in range(fewest, devices + 1) if devices % count == 0)
        self._resize = ResizeRequest(sizes, reason, processes=processes, hold=hold, deadline=deadline)
        return self._resize

    def trains(self, batch: protocols.TrainBatch) -> None:
        """Passes a beginning step on to the processes that will take over, because they have to take it, too."""
        if self._resize is not None and self._resize.way is not None:
            self._resize.way.trains(batch)

    async def boundary(self, step: int) -> None:
        """Starts a resize, lets it take over or aborts it, between two steps. The caller holds the trainer's lock.

        Args:
          step: number of training steps taken, which is the trainer's version.

        Raises:
          WorkerLost: the trainer is lost, which needs more than an aborted resize. Other errors end only the resize.
        """
        resize = self._resize
        if resize is None:
            return
        try:
            way = await self._advance(resize)
        except protocols.WorkerLost:
            raise
        except protocols.LibraError as error:
            await self._abort(resize, error, step)
            return
        if way is None:
            return
        start = self._clock()
        if way.outside:
            # A failure here would also occur without a resize, so it is not caught.
            await self._checkpoint.commit_held()
            resize.stalls["leave"] += self._clock() - start
            start = self._clock()
        try:
            await self._take_over(resize, way, step)
        except protocols.WorkerLost:
            raise
        except protocols.LibraError as error:
            resize.stalls["late"] += self._clock() - start
            if isinstance(error, protocols.DeadlineMissed) and not resize.overdue:
                self._recorder.note(
                    f"The trainer's mesh is not {resize.sizes} yet, and is to become that after a later step: {error}"
                )
            else:
                await self._abort(resize, error, step)

    async def _advance(self, resize: ResizeRequest) -> handover.Way | None:
        """Starts the resize, or checks its progress. Returns its way if it should take over now."""
        if resize.cancelled:
            raise protocols.LibraError(f"the resize to {resize.sizes} was cancelled: {resize.cancelled}.")
        if resize.way is None:
            resize.begun = self._clock()
            # Inside the process if it can hold the devices: that moves the state without a copy on disk. Without
            # successors, too, so that the trainer itself says which devices it lacks.
            alone = resize.processes == self._trainer.processes == 1
            if alone and (resize.sizes.devices <= self._reach or self._successors is None):
                resize.way = Inside(self._trainer, resize.sizes, self._longest)
            elif self._successors is not None:
                resize.way = self._successors(resize.sizes, resize.processes)
            else:
                raise protocols.ConfigError(
                    f"a mesh of {resize.sizes} over {resize.processes} processes needs other processes than the "
                    "trainer's, which only config.cluster.backend=ray makes"
                )
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
            if resize.overdue:
                raise protocols.DeadlineMissed(
                    f"A mesh of {resize.sizes} was not ready after {resize.deadline:g} s: ask for it with a later "
                    "deadline, or without one and raise config.deadlines.trainer_start."
                )
            return None
        if not resize.compiled.done():
            resize.compiled.set_result(None)
        return None if resize.held else resize.way

    async def _take_over(self, resize: ResizeRequest, way: handover.Way, step: int) -> None:
        """Lets the new mesh train from now on, ends the former processes beside the run, and records the move."""
        self._recorder.status(TRAINER, f"moving to {resize.sizes}")
        takeover = (await way.take_over(step)).with_stalls(**resize.stalls)
        before, self.sizes, self._resize = self.sizes, resize.sizes, None
        await self._events.deliver(protocols.TrainerResized(resize.sizes))
        if way.outside:
            start = self._clock()
            await self._events.deliver(protocols.TrainerReplaced(lost=False))
            takeover = takeover.with_stalls(settle=self._clock() - start)
            self._end_beside(way.end_former(), "The trainer's former processes")
            # The successor was made for this mesh only; a single process also holds spare devices.
            self._reach = resize.sizes.devices + (self._spare if resize.processes == 1 else 0)
            self._each = max(self._each, resize.sizes.devices // resize.processes)
        self._record(resize, before, step, takeover, "done", "")
        phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in takeover.phases.items())
        self._recorder.note(
            f"The trainer's mesh is {resize.sizes} now, {before} before: {takeover.nbytes / 2**20:.1f} MiB moved, "
            f"training stood still for {takeover.stall:.2f} s ({phases})."
        )
        resize.done.set_result(takeover)

    async def _abort(self, resize: ResizeRequest, error: protocols.LibraError, step: int) -> None:
        """Ends a resize that cannot go on. The mesh stays as it is, and the handle says why."""
        self._resize = None
        if resize.way is not None and resize.way.outside:
            # In the background: `cancel` may wait until the serving trainer says that its snapshot is written.
            self._aborting = self._end_beside(resize.way.cancel(), "The processes that were to take over")
        elif resize.way is not None:
            try:
                await resize.way.cancel()
            except protocols.WorkerLost:
                resize.fail(error)
                raise
            except protocols.LibraError as second:
                error = protocols.LibraError(f"{error} Nor could it be cancelled: {second}")
        outcome = "cancelled" if resize.cancelled else "failed"
        takeover = handover.HandoverCost({}, 0.0, 0).with_stalls(**resize.stalls)
        self._record(resize, self.sizes, step, takeover, outcome, str(error))
        self._recorder.note(f"The trainer stays on its mesh of {self.sizes}: {error}")
        resize.fail(error)

    async def trainer_lost(self, step: int) -> None:
        """Aborts a resize under way, because the trainer that was to move is gone."""
        if (resize := self._resize) is None:
            return
        if resize.way is not None and not resize.way.outside:
            # The way ended with the trainer's process.
            resize.way = None
        error = protocols.LibraError("the trainer was lost meanwhile, and is restarted.")
        await self._abort(resize, error, step)

    async def close(self) -> None:
        """Aborts a pending resize at the end of the run."""
        await deadlines.cancel_all(self._ending)
        resize, self._resize = self._resize, None
        if resize is None:
            return
        resize.fail(protocols.LibraError(f"the run ended before the resize to {resize.sizes}"))
        # A way inside the trainer's process ends with that process.
        if resize.way is not None and resize.way.outside:
            await resize.way.cancel()

    def _end_beside(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        async def end() -> None:
            try:
                await work
            except protocols.LibraError as error:
                self._recorder.note(f"{what} did not end cleanly: {error}")

        task = asyncio.get_running_loop().create_task(end(), name=what)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    def _record(
        self,
        resize: ResizeRequest,
        before: protocols.MeshSizes,
        step: int,
        takeover: handover.HandoverCost,
        outcome: str,
        why: str,
    ) -> None:
        end = self._clock()
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
                "phases": dict(takeover.phases),
                "bytes": takeover.nbytes,
                "estimate": dataclasses.asdict(resize.estimate),
                "stall": {"training": takeover.stall, "rollout": 0.0},
            }
        )
        self._recorder.span(TRAINER, f"resize to {resize.sizes}", start, end, {"outcome": outcome, **takeover.phases})
