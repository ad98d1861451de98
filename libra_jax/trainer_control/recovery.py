"""Restarts a trainer after the loss of one or all of its processes, while the run lives, and lets it catch up.

    lost         a call to the trainer fails, because a process or its host is gone; the other processes are killed.
                 The trainer is also called now and then while it waits for a batch
    restarted    the same processes by the same specs; a lost host is replaced if a spare one exists
    restored     the last committed checkpoint; before the first one, the state that a run begins with
    caught up    the steps since are trained again, on the groups that they were trained on
    synced       its weights go to every engine again, so that the engines hold the bits of this trainer
    repeated     each call that the lost trainer did not answer

Only the trainer goes back. Each version is trained from the same batches in the same order, so its number names the
same policy as before. On the same devices the two agree bit for bit. Other devices, a share that a hybrid worker
computed, or a step that began on its first groups, round differently. So tokens keep the version that sampled them;
groups under way, records and the data position stay. Rollouts continue meanwhile, up to the staleness bound. Each group
is trained into the resulting state once. The batches since the last checkpoint are kept until a later checkpoint is
committed. If no checkpoint is committed for too long (`KEPT`), a lost trainer ends the run.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.trainer_control import client, resize
from libra_jax.utils import run_context, turns

T = TypeVar("T")

KEPT = 4
"""Number of steps kept since the last checkpoint, as a multiple of `checkpoint.every`.

The limit keeps the kept groups from filling the memory while the disk takes no checkpoint.
"""


class RecoveryCheckpoints(Protocol):
    """The part of the run's checkpoints that recovery calls."""

    @property
    def newest(self) -> int:
        """Step of the checkpoint restored or committed last; -1 if none exists."""
        ...

    async def verified(self) -> tuple[int, str]:
        """Returns the step of the newest checkpoint that verifies (-1 for none), and the faults of later ones."""
        ...

    def lost(self) -> None:
        """Drops the checkpoint that the lost trainer had not finished writing."""
        ...

    async def restore_lost(self) -> int:
        """Restores the restarted trainer. Returns the number of warm-start steps in its state."""
        ...


class RecoveryWeights(Protocol):
    """The part of the weight sync that recovery calls."""

    async def resync(self) -> None:
        """Sends the trainer's weights to every engine again. Called with the trainer's lock held."""
        ...


class Recovery:
    """Restarts a lost trainer. Create it inside the event loop that it serves.

    Args:
      run: what the parts of the run share (`trainer.restarts`, `checkpoint.every`, `rollout`, `deadlines`). Events get
        TrainerReplaced before the restart, and each CheckpointCommitted frees the steps before it. The run ends if the
        trainer cannot be restarted.
      trainer: the trainer to restart.
      checkpoints: restores the trainer.
      weights: sends the trainer's weights to the engines.
      resizing: knows the trainer's mesh, and aborts a resize under way.
    """

    def __init__(
        self,
        run: run_context.RunContext,
        *,
        trainer: client.TrainerActorClient,
        checkpoints: RecoveryCheckpoints,
        weights: RecoveryWeights,
        resizing: resize.Resizing,
    ) -> None:
        self._max_restarts = run.config.trainer.restarts
        self._look_seconds = run.config.rollout.health_seconds
        self._longest_move = run.config.deadlines.trainer_start
        self._why_not = _why_not(run.config)
        self._recorder = run.recorder
        self._events = run.events
        self._scope = run.scope
        self._clock = run.clock
        self._fencing = run.fencing
        self._trainer = trainer
        self._checkpoints = checkpoints
        self._weights = weights
        self._resizing = resizing
        self._name = trainer.name
        # Batches since the last checkpoint: of the warm start by number of steps before, and of training.
        self._warm: list[tuple[int, Sequence[protocols.Trajectory]]] = []
        max_batches = KEPT * run.config.checkpoint.every or None
        self._steps: collections.deque[protocols.TrainBatch] = collections.deque(maxlen=max_batches)
        self._task: asyncio.Task[None] | None = None
        self._restarts = self._reported = self._replayed = 0
        self._phases: collections.defaultdict[str, float] = collections.defaultdict(float)
        self._seconds = 0.0
        self._restart_start: float | None = None
        run.events.subscribe(protocols.CheckpointCommitted, self._committed)

    @property
    def under_way(self) -> bool:
        """True while the trainer is being restarted."""
        return self._task is not None and not self._task.done()

    @property
    def seconds(self) -> float:
        """Seconds in which training stood still in total, including a restart under way."""
        # A restart may outlast several reports, so its time so far counts, too.
        under_way = 0.0 if self._restart_start is None else self._clock() - self._restart_start
        return self._seconds + under_way

    def watch(self) -> None:
        """Starts to check the trainer while it waits for a batch. A trainer restarted then may be back in time."""

        async def look() -> None:
            async with self._trainer.lock:
                # The next training call reports a missed deadline.
                with contextlib.suppress(protocols.DeadlineMissed):
                    await self._trainer.policy_version()

        async def look_often() -> None:
            while True:
                await asyncio.sleep(self._look_seconds)
                if not self._trainer.lock.locked():
                    await self.through(look)

        if not self._why_not:
            self._scope.start(look_often(), f"{self._name} health")

    def warmed(self, number: int, batch: Sequence[protocols.Trajectory]) -> None:
        """Keeps a warm-start step for a replay. `number` steps were taken before it."""
        if not self._why_not:
            self._warm.append((number, batch))

    def trained(self, batch: protocols.TrainBatch) -> None:
        """Keeps a training step for a replay."""
        if not self._why_not:
            self._steps.append(batch)

    def _committed(self, event: protocols.CheckpointCommitted) -> None:
        # A committed checkpoint holds the warm start and all steps before its own.
        self._warm.clear()
        while self._steps and self._steps[0].policy_version < event.step:
            self._steps.popleft()

    def take_metrics(self) -> dict[str, float]:
        """Returns the metrics of restarts since the last call; empty if none took place."""
        if self._restarts == self._reported and not self._replayed:
            return {}
        self._reported, replayed, self._replayed = self._restarts, self._replayed, 0
        return {"trainer/restarts": float(self._restarts), "trainer/replayed_steps": float(replayed)}

    async def through(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs a trainer call. If the trainer dies, waits for its restart and retries. Call without the trainer's lock.

        Raises:
          WorkerLost: the trainer is lost and is not restarted; the message says why.
        """
        while True:
            try:
                return await work()
            # Any other error would come again, so the caller gets it.
            except protocols.TrainerLost as error:
                await self.restarted(error)

    async def restarted(self, error: protocols.TrainerLost) -> float:
        """Returns once the lost trainer can be called again: the event loop's time. Call without the trainer's lock.

        Raises:
          WorkerLost: the trainer is not restarted; the message says why.
        """
        if self._task is None or not self.under_way:
            # Another caller has had it restarted.
            if self._trainer.lost is None:
                return self._clock()
            # A task of its own: the caller that found the loss may be cancelled, and others wait for it, too.
            self._task = self._scope.start(self._restart(error), f"restart of {self._name}")
        # Each step of the restart has its own deadline.
        with turns.queued():
            await asyncio.shield(self._task)
        return self._clock()

    async def _restart(self, error: protocols.LibraError) -> None:
        async with self._trainer.lock:
            # Under the lock, so that no other call reaches the trainer before it has caught up.
            self._restart_start = start = self._clock()
            self._recorder.status(self._name, protocols.LOST)
            while True:
                await self._check(error)
                self._restarts += 1
                self._recorder.note(
                    f"The trainer is lost and restarted (restart {self._restarts} of {self._max_restarts}), while "
                    f"rollouts go on: {error}"
                )
                self._phases.clear()
                try:
                    step, again = await self._restart_once()
                    break
                except (protocols.WorkerLost, protocols.DeadlineMissed) as another:
                    error = another
            end = self._clock()
            self._seconds, self._restart_start = self._seconds + end - start, None
            self._replayed += again
            took = {"checkpoint": step, "replayed": again, **self._phases}
            self._recorder.span(self._name, "restart", start, end, took)
            self._recorder.status(self._name, "idle")
            whence = f"the checkpoint at step {step}" if step >= 0 else "the state that the run began with"
            phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._phases.items())
            self._recorder.note(
                f"The trainer goes on, {end - start:.1f} s after its loss was seen ({phases}): it began with {whence} "
                f"and trained {again} steps again."
            )

    async def _check(self, error: protocols.LibraError) -> None:
        """Raises WorkerLost if the trainer cannot be restarted (again), and DataError if no checkpoint verifies."""
        lost = str(error).rstrip(".")
        if self._why_not:
            raise protocols.WorkerLost(f"{lost}. It is not restarted: {self._why_not}.")
        step, skipped = await self._checkpoints.verified()
        goes_on = f"goes on from the checkpoint at step {step}" if step >= 0 else "begins again: there is none"
        # The batches between the two are no longer kept.
        if step < self._checkpoints.newest:
            raise protocols.WorkerLost(
                f"{lost}. It is not restarted: its last checkpoint cannot be used. {skipped} The same command "
                f"{goes_on}."
            )
        if self._steps and self._steps[0].policy_version > max(step, 0):
            raise protocols.WorkerLost(
                f"{lost}. It is not restarted: too many steps have been taken since the last checkpoint, and "
                f"the groups of the last {len(self._steps)} alone are kept ({KEPT} times config.checkpoint.every). The "
                f"same command {goes_on}."
            )
        if self._restarts >= self._max_restarts:
            raise protocols.WorkerLost(
                f"The trainer was lost once more than config.trainer.restarts = {self._max_restarts} allows, the last "
                f"time: {lost}. The same command {goes_on}."
            )
        # A superseded run must not restart a trainer: the workdir and its checkpoints belong to its successor.
        if self._fencing is not None and not self._fencing.may_write():
            self._fencing.check()

    async def _restart_once(self) -> tuple[int, int]:
        """Restarts the trainer. Returns the checkpoint's step (-1 for none) and the number of repeated steps."""
        with self._timed("end"):
            completed_steps = self._steps[-1].policy_version + 1 if self._steps else max(self._checkpoints.newest, 0)
            # In this order: nothing may use the lost processes' channels, memory or files once they are killed.
            await self._resizing.trainer_lost(completed_steps)
            await self._events.deliver(protocols.TrainerReplaced(lost=True))
            self._checkpoints.lost()
            try:
                await self._trainer.stop(force=True)
            except protocols.LibraError as error:
                self._recorder.note(f"Not all of the lost trainer ended cleanly: {error}")
        self._recorder.status(self._name, "starting its process again")
        with self._timed("start"):
            await self._trainer.make()
        step = self._checkpoints.newest
        with self._trainer.catching_up():
            with self._timed("start"):
                info = await (self._trainer.start() if step < 0 else self._trainer.stand_by())
            self._recorder.status(self._name, "reading the checkpoint")
            with self._timed("restore"):
                warm = await self._checkpoints.restore_lost() if step >= 0 else 0
                # The lost trainer had moved to that mesh inside its process.
                if info.sizes != self._resizing.sizes:
                    moving = resize.Inside(self._trainer, self._resizing.sizes, self._longest_move)
                    await moving.begin()
                    await moving.take_over(max(step, 0))
            with self._timed("train again"):
                # The checkpoint holds the first `warm` warm-start steps.
                for sequences in [batch for number, batch in self._warm if number >= warm]:
                    await self._trainer.warm_start_step(sequences)
                steps = [batch for batch in self._steps if batch.policy_version >= step]
                for batch in steps:
                    compiling = ", compiling its programs first" if batch is steps[0] else ""
                    self._recorder.status(self._name, f"training step {batch.policy_version + 1} again{compiling}")
                    await self._trainer.train_step(batch)
            with self._timed("weight sync"):
                await self._weights.resync()
        return step, len(steps)

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = self._clock()
        yield
        self._phases[phase] += self._clock() - start


def _why_not(config: config_lib.RunConfig) -> str:
    """Returns why a lost trainer of this run cannot be restarted; empty if it can."""
    if not config.trainer.restarts:
        return "config.trainer.restarts is 0"
    if not config.checkpoint.every:
        return "config.checkpoint.every is 0, and there is nothing to begin it with"
    if config.rollout.transport != "memfd":
        return f"config.rollout.transport={config.rollout.transport} ties engines to the one that is gone"
    return ""
