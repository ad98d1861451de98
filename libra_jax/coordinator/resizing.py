"""Changes of the trainer's mesh while the run goes on: one call, a handle with progress, deadline and cancel.

`Resizing.resize` says what is wanted and returns at once. Everything else happens between two training steps, when the
run calls `boundary`: the new mesh's programs begin to compile, and once they are there the state moves over. A resize
that is refused, takes too long or fails leaves the trainer on the mesh it has; its handle says why.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.coordinator import deadlines

TRAINER = "trainer"
"""The name under which the trainer stands in `transitions.jsonl`."""


class Resize:
    """One resize, from the asking to its end.

    Attributes:
      sizes: wanted.
      reason: why.
      progress: how far it is.
      compiled: done when taking over would wait for nothing; fails with the resize.
      done: done when the trainer is on the new mesh; a failed or cancelled resize raises LibraError there.
    """

    def __init__(self, sizes: protocols.MeshSizes, reason: str, *, hold: bool) -> None:
        loop = asyncio.get_running_loop()
        self.sizes = sizes
        self.reason = reason
        self.progress = protocols.ResizeProgress(0, 0, ready=False)
        self.compiled: asyncio.Future[None] = loop.create_future()
        self.done: asyncio.Future[protocols.ResizePhases] = loop.create_future()
        for future in (self.compiled, self.done):
            future.add_done_callback(_looked_at)
        self.held = hold
        self.cancelled = ""
        self.begun: float | None = None  # event-loop seconds
        self.estimate = protocols.ResizeEstimate(0, 0, 0)

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
      config: the run's configuration (`trainer`, `deadlines`).
      trainer: the trainer's proxy.
      recorder: gets a transition, a span and a sentence for each resize.

    Attributes:
      sizes: of the mesh that trains.
      changed: called when it is another.
    """

    def __init__(self, config: configuration.RunConfig, *, trainer: Any, recorder: protocols.Recorder) -> None:
        mesh = config.trainer
        self.sizes = protocols.MeshSizes(mesh.data, mesh.fsdp, mesh.tensor)
        self._deadline = config.deadlines.trainer_start
        self._trainer = trainer
        self._recorder = recorder
        self._resize: Resize | None = None
        self.changed: Callable[[], None] = lambda: None

    def resize(self, sizes: protocols.MeshSizes, reason: str, *, hold: bool = False) -> Resize:
        """Asks for another mesh; what is wrong with it shows when the handle is awaited.

        Args:
          sizes: wanted.
          reason: for the record.
          hold: compiles only, until `Resize.go`.

        Raises:
          ConfigError: a resize is under way.
        """
        if self._resize is not None:
            raise protocols.ConfigError(
                f"the trainer's mesh cannot become {sizes} while it becomes {self._resize.sizes}: wait, or cancel that"
            )
        self._resize = Resize(sizes, reason, hold=hold)
        return self._resize

    async def boundary(self, step: int) -> None:
        """Between two steps, with the trainer's lock held: begins, takes over, or gives up. Raises nothing of a resize.

        Args:
          step: training steps taken.
        """
        resize = self._resize
        if resize is None:
            return
        try:
            await self._advance(resize, step)
        except protocols.WorkerLost:  # of the trainer: that ends more than a resize
            raise
        except protocols.LibraError as error:
            await self._give_up(resize, error, step)

    async def _advance(self, resize: Resize, step: int) -> None:
        now = asyncio.get_running_loop().time()
        if resize.cancelled:
            raise protocols.LibraError(f"the resize to {resize.sizes} was cancelled: {resize.cancelled}.")
        if resize.begun is None:
            resize.begun = now
            resize.estimate = await self._ask(self._trainer.begin_resize(resize.sizes), "begin to resize")
        resize.progress = await self._ask(self._trainer.resize_progress(), "say how far its resize is")
        if not resize.progress.ready:
            if now - resize.begun > self._deadline:
                raise protocols.DeadlineMissed(
                    f"Compiling for a mesh of {resize.sizes} took longer than {self._deadline:g} s: raise "
                    "config.deadlines.trainer_start."
                )
            return
        if not resize.compiled.done():
            resize.compiled.set_result(None)
        if not resize.held:
            await self._take_over(resize, step, now)

    async def _take_over(self, resize: Resize, step: int, now: float) -> None:
        self._recorder.status(TRAINER, f"moving to {resize.sizes}")
        phases = await self._ask(self._trainer.finish_resize(self._deadline), "move to its new mesh")
        before, self.sizes, self._resize = self.sizes, resize.sizes, None
        self._record(resize, before, step, phases, "done", "")
        self.changed()
        self._recorder.note(
            f"The trainer's mesh is {resize.sizes} now, {before} before: {phases.moved_bytes / 2**20:.1f} MiB moved in "
            f"{phases.move_seconds:.2f} s, after {phases.compile_seconds:.1f} s of compilation beside training."
        )
        resize.done.set_result(phases)

    async def _give_up(self, resize: Resize, error: protocols.LibraError, step: int) -> None:
        self._resize = None
        try:
            await self._ask(self._trainer.cancel_resize(), "give up a resize")
        except protocols.WorkerLost:
            raise
        except protocols.LibraError as second:
            error = protocols.LibraError(f"{error} Nor could it be cancelled: {second}")
        outcome = "cancelled" if resize.cancelled else "failed"
        self._record(resize, self.sizes, step, protocols.ResizePhases(0.0, 0.0, 0.0, 0), outcome, str(error))
        self._recorder.note(f"The trainer stays on its mesh of {self.sizes}: {error}")
        resize.fail(error)

    def close(self) -> None:
        """The run ends: a resize that is not over never will be."""
        if self._resize is not None:
            self._resize.fail(protocols.LibraError(f"the run ended before the resize to {self._resize.sizes}"))
            self._resize = None

    def _record(
        self,
        resize: Resize,
        before: protocols.MeshSizes,
        step: int,
        phases: protocols.ResizePhases,
        outcome: str,
        why: str,
    ) -> None:
        end = asyncio.get_running_loop().time()
        start = end if resize.begun is None else resize.begun
        seconds = {
            "compile": phases.compile_seconds,
            "wait": phases.wait_seconds,
            "move": phases.move_seconds,
        }
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
                "phases": seconds,
                "bytes": phases.moved_bytes,
                "estimate": dataclasses.asdict(resize.estimate),
                "stall": {"training": phases.wait_seconds + phases.move_seconds, "rollout": 0.0},
            }
        )
        self._recorder.span(TRAINER, f"resize to {resize.sizes}", start, end, {"outcome": outcome, **seconds})

    async def _ask(self, work: Any, what: str) -> Any:
        return await deadlines.within(self._deadline, work, f"The trainer, asked to {what},", "trainer_start")


def _looked_at(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
