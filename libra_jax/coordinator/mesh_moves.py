"""How a train state travels to another mesh: inside the process that trains, or to other processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from libra_jax import config as configuration
from libra_jax import deadlines, protocols
from libra_jax.coordinator import handover, process_set


@dataclasses.dataclass(frozen=True)
class Taken:
    """What a resize took.

    Attributes:
      phases: seconds of each, most of them beside training.
      stall: seconds that training stood still.
      nbytes: that moved.
    """

    phases: Mapping[str, float]
    stall: float
    nbytes: int

    def with_stalls(self, **phases: float) -> Taken:
        """The same with further phases, in which training stood still."""
        stall = self.stall + sum(phases.values())
        return dataclasses.replace(self, phases={**self.phases, **phases}, stall=stall)


class Way(Protocol):
    """How a state travels to another mesh. Calls come between two steps, with the trainer's lock held."""

    longest: float
    """Seconds after which it is given up, unless who asked for it has set a deadline."""

    async def begin(self) -> protocols.ResizeEstimate: ...

    async def progress(self) -> protocols.ResizeProgress: ...

    async def take_over(self, step: int) -> Taken: ...

    async def cancel(self) -> None: ...

    def trains(self, batch: protocols.TrainBatch) -> None: ...


Successors = Callable[[protocols.MeshSizes, int], Way]
"""(sizes, processes) to how another set of processes takes over."""


class Inside:
    """In the trainer's own process, which holds the devices of the new mesh."""

    def __init__(self, trainer: Any, sizes: protocols.MeshSizes, seconds: float) -> None:
        self.longest = seconds
        self._trainer = trainer
        self._sizes = sizes

    async def begin(self) -> protocols.ResizeEstimate:
        """Begins to compile."""
        return await self._ask(self._trainer.begin_resize(self._sizes), "begin to resize")

    async def progress(self) -> protocols.ResizeProgress:
        """Programs compiled."""
        return await self._ask(self._trainer.resize_progress(), "say how far its resize is")

    async def take_over(self, step: int) -> Taken:
        """Moves the state."""
        told = await self._ask(self._trainer.finish_resize(self.longest), "move to its new mesh")
        phases = {"compile": told.compile_seconds, "wait": told.wait_seconds, "move": told.move_seconds}
        return Taken(phases, told.wait_seconds + told.move_seconds, told.moved_bytes)

    async def cancel(self) -> None:
        """Stays."""
        await self._ask(self._trainer.cancel_resize(), "give up a resize")

    def trains(self, batch: protocols.TrainBatch) -> None:
        """It is the same trainer."""

    async def _ask(self, work: Any, what: str) -> Any:
        return await deadlines.within(self.longest, work, f"The trainer, asked to {what},", "trainer_start")


class Outside:
    """In other processes, which catch up and take over.

    Args:
      moving: the handover.
      successor: the processes, not made yet.
      sizes: of their mesh.
      serving: where the successor is to be put.
      limits: of the waits.
    """

    def __init__(
        self,
        moving: handover.Handover,
        successor: process_set.ProcessSet,
        sizes: protocols.MeshSizes,
        serving: process_set.Serving,
        limits: configuration.DeadlineConfig,
    ) -> None:
        self.longest = 2 * limits.trainer_start + 2 * limits.checkpoint
        self._limits = limits
        self._moving = moving
        self._successor = successor
        self._sizes = sizes
        self._serving = serving
        self._missed: int | None = None
        self._former: process_set.ProcessSet | None = None

    async def begin(self) -> protocols.ResizeEstimate:
        """Begins to make the processes."""
        self._moving.begin(self._successor, self._sizes)
        return protocols.ResizeEstimate(0, 0, 0)

    async def progress(self) -> protocols.ResizeProgress:
        """Ready once it has caught up, or if it gets no nearer."""
        told = self._moving.progress
        if told.phase == "failed":
            raise protocols.LibraError(told.error)
        before, self._missed = self._missed, told.missed if told.phase == "replaying" else None
        nearly = told.phase == "replaying" and (told.missed <= 1 or (before is not None and told.missed >= before))
        return protocols.ResizeProgress(0, 0, ready=told.ready or nearly)

    async def take_over(self, step: int) -> Taken:
        """The successor serves; the processes before live until `end_former`."""
        self._former = self._serving.set
        successor, told = await self._moving.take_over(step, self._limits.transition)
        self._serving.hand_over(successor)
        phases = {"start": told.start, "compile": told.compile, "snapshot": told.snapshot, "restore": told.restore}
        return Taken({**phases, "replay": told.replay}, told.stall, told.nbytes)

    def end_former(self) -> None:
        """Ends the processes that served before, beside the run."""
        if self._former is not None:
            self._serving.retire(self._former)

    async def cancel(self) -> None:
        """Ends the successor's processes. Without the lock: the trainer may be asked until its snapshot is written."""
        await self._moving.cancel()

    def trains(self, batch: protocols.TrainBatch) -> None:
        """They take the step, too, at the same time if they have caught up."""
        self._moving.missed(batch)
