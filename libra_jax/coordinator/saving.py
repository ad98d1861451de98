"""Takes checkpoints: the trainer saves while the run continues, and the manifest follows at the next step.

If the disk refuses a checkpoint, it is noted and removed, the last good one stays, and the next is tried when due. So a
full disk costs no run if somebody makes room. Only the last checkpoint, which ends a run, has to succeed. Several
processes of a trainer write together and wait for each other: if one of them fails, the run ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from libra_jax import protocols
from libra_jax.coordinator import checkpoint_store, checkpoints
from libra_jax.utils import deadlines, run_context

TELL_EVERY = 10
"""Number of failed checkpoints in a row of which one is told."""


class Saver:
    """Saves and commits the run's checkpoints.

    Args:
      run: what the parts of the run share (`checkpoint`, `deadlines.checkpoint`). The recorder gets a span for each
        checkpoint and a note for each failed one, and events get a CheckpointCommitted for each one that counts.
      trainer: saves and restores its state.
      state: returns the coordinator's part of a checkpoint, as of the call.

    Attributes:
      newest: step of the checkpoint restored or committed last; -1 if none exists.
    """

    def __init__(
        self,
        run: run_context.RunContext,
        *,
        trainer: protocols.TrainerClient,
        state: Callable[[], checkpoints.CoordinatorState],
    ) -> None:
        self._every = run.config.checkpoint.every
        self._deadline = run.config.deadlines.checkpoint
        self._workdir = run.workdir
        self._files = checkpoints.Checkpoints(run.workdir, run.config.checkpoint.keep, run.fencing)
        self._recorder = run.recorder
        self._events = run.events
        self._clock = run.clock
        self._trainer = trainer
        self._state = state
        self._pending: int | None = None
        self._writing: asyncio.Future[Path] | None = None
        # Progress in the newest checkpoint that was restored or begun, and in the newest one that counts. A failed
        # checkpoint falls back to the second, so that the next one is tried even without further progress.
        self._held: list[int] = []
        self._durable: list[int] = []
        self.newest = -1
        self._seconds = 0.0
        self._failed = 0

    def take_seconds(self) -> float:
        """Returns the seconds spent on checkpoints since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    async def restore(self, stored: checkpoint_store.Stored) -> checkpoints.CoordinatorState:
        """Restores the trainer from a verified checkpoint. Returns the coordinator's part.

        Raises:
          DataError: the checkpoint cannot be read, or its parts are of different steps.
        """
        state = await deadlines.off_loop(self._files.load, stored)
        self._files.go_on_from(stored)
        await self._restore_trainer(stored.step)
        self._held = self._durable = _progress(state)
        self.newest = stored.step
        return state

    async def restore_lost(self) -> int:
        """Restores a restarted trainer. Returns the warm-start steps in the checkpoint.

        The caller holds the trainer's lock.

        Raises:
          DataError: the checkpoint cannot be read, or its parts are of different steps.
        """
        step = self.newest
        await self._restore_trainer(step)
        return self._files.load(step, routing=False)["warm_start_steps"]

    async def verified(self) -> tuple[int, str]:
        """Returns the step of the newest checkpoint that verifies, and sentences about those that do not.

        The step is -1 if there is no checkpoint.

        Raises:
          DataError: checkpoints exist and none verifies.
          DeadlineMissed: the disk did not answer; the message names the folder.
        """
        search = await deadlines.within(
            self._deadline,
            deadlines.off_loop(checkpoint_store.find, self._workdir),
            f"Verifying the checkpoints in {self._workdir / checkpoint_store.FOLDER}",
            "checkpoint",
            look="see whether its disk answers",
        )
        # So that `restore_lost` takes this manifest, and not a damaged one of the same step.
        if search.stored is not None and search.step == self.newest:
            self._files.go_on_from(search.stored)
        return search.step, " ".join(search.skipped)

    def lost(self) -> None:
        """Drops the checkpoint that a lost trainer had not finished. The next one is tried when due."""
        if self._pending is not None:
            self._abort(self._pending)
        self._files.restarts += 1

    async def _restore_trainer(self, step: int) -> None:
        path = str(self._files.trainer_path(step))
        version = await self._trainer.restore(path)
        if version != step:
            raise protocols.DataError(
                f"{path} holds version {version}, not {step}: move that checkpoint away, to go on from the one before."
            )

    async def at_step(self, step: int) -> None:
        """Commits the last checkpoint, and begins one if `step` is due. Notes a disk that refuses either."""
        # Only one checkpoint at a time may be pending.
        await self.commit()
        if self._every and step % self._every == 0:
            with self._noted(step):
                await self._begin(step)

    async def now(self, step: int) -> bool:
        """Takes a checkpoint and commits it. Returns False if the config turns checkpoints off.

        Raises:
          CheckpointFailed: the disk refused it.
        """
        await self.commit()
        if not self._every:
            return False
        try:
            await self._begin(step)
            async with self._trainer.lock:
                await self._commit_held()
        except protocols.CheckpointFailed:
            self._abort(step)
            raise
        return True

    async def commit(self) -> None:
        """Waits until the last checkpoint is durable, and writes its manifest. Notes a disk that refuses."""
        if self._pending is not None:
            async with self._trainer.lock:
                await self.commit_held()

    async def commit_held(self) -> None:
        """Does the same as `commit`. The caller holds the trainer's lock."""
        if self._pending is not None:
            with self._noted(self._pending):
                await self._commit_held()

    async def _begin(self, step: int) -> None:
        """Begins a checkpoint, unless the newest one holds the same progress."""
        begin, state = self._clock(), self._state()
        # A run's last step may have been saved already when it was due.
        if _progress(state) == self._held:
            return
        # The state and the trainer's save are of the same step: no step begins before `save` has returned.
        path = await deadlines.within(
            self._deadline,
            self._written(step, checkpoints.encode(state)),
            f"Writing the checkpoint of step {step} into {self._workdir / checkpoint_store.FOLDER}",
            "checkpoint",
            look="see whether its disk answers",
        )
        async with self._trainer.lock:
            try:
                with self._writing_together():
                    await self._trainer.save(str(path))
            except protocols.TrainerLost:
                self._abort(step)
                raise
        self._pending, self._held = step, _progress(state)
        self._count(begin, "save", step)

    async def _written(self, step: int, encoded: checkpoints.Encoded) -> Path:
        """Writes the coordinator's part off the event loop, which serves rollouts meanwhile."""
        if self._writing is not None:
            # A write goes on after its waiter was cancelled, and two at once would share names.
            await asyncio.wait([self._writing])
        self._writing = asyncio.ensure_future(deadlines.off_loop(self._files.write, step, encoded))
        try:
            return await asyncio.shield(self._writing)
        except asyncio.CancelledError:
            self._writing.add_done_callback(lambda write: write.cancelled() or write.exception())  # no one else asks
            raise

    async def _commit_held(self) -> None:
        if self._pending is None:
            return
        begin, step, trainer = self._clock(), self._pending, self._trainer.name
        self._recorder.status(trainer, f"writing the checkpoint of step {step}")
        try:
            with self._writing_together():
                await self._trainer.wait_saved()
        finally:
            self._recorder.status(trainer, "idle")
        # The manifest comes last: only now does the checkpoint count.
        self._files.commit(step)
        self._pending, self._durable, self.newest, self._failed = None, self._held, step, 0
        await self._events.deliver(protocols.CheckpointCommitted(step))
        self._count(begin, "commit", step)

    @contextlib.contextmanager
    def _writing_together(self) -> Iterator[None]:
        try:
            yield
        except protocols.CheckpointFailed as error:
            # If one process failed, the others wait for it forever.
            if self._trainer.processes > 1:
                raise protocols.LibraError(str(error)) from error
            raise

    @contextlib.contextmanager
    def _noted(self, step: int) -> Iterator[None]:
        try:
            yield
        except protocols.CheckpointFailed as error:
            self._abort(step)
            self._failed += 1
            # The first of a row, and then every few: a disk that refuses one refuses the next.
            if self._failed % TELL_EVERY != 1:
                return
            row = f" It is number {self._failed} in a row." if self._failed > 1 else ""
            newest = self._files.newest()
            before = (
                f"from the one at step {newest}" if newest >= 0 else "from the beginning, as there is none before it"
            )
            self._recorder.note(
                f"The checkpoint at step {step} failed, and the run goes on without it; killed before the next one, it "
                f"would begin {before}.{row} {error}"
            )

    def _abort(self, step: int) -> None:
        """Aborts a checkpoint and removes its files. The next one is tried even if its progress is the same."""
        self._pending, self._held = None, self._durable
        self._files.discard(step)

    def _count(self, begin: float, what: str, step: int) -> None:
        end = self._clock()
        self._seconds += end - begin
        self._recorder.span("coordinator", f"checkpoint {what}", begin, end, {"step": step})


def _progress(state: checkpoints.CoordinatorState) -> list[int]:
    """Returns the numbers by which two checkpoints differ in a way worth saving."""
    return [state["step"], state["warm_start_steps"], state["evaluated"]]
