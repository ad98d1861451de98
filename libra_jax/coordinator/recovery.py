"""A trainer that is lost, one of its processes or all, is made anew while the run lives, and catches up.

    lost         a call to the trainer fails, because a process or its host is gone; the others are killed. It is asked
                 now and then, too, while it waits for a batch
    made anew    the same processes by the same specs; a host that is gone is replaced where there is a spare one
    restored     the last checkpoint that counts; before the first one, the state that a run begins with
    caught up    the steps trained since are trained again, on the groups that they were trained on
    published    once more to every engine, which then has the bits that this trainer has
    asked again  for what the lost one was asked for

Nothing but the trainer goes back. Each version comes of the same batches in the same order, so its number names the
policy that it named before: on the same devices bit for bit, while other devices, or a share that a replica had
computed then, round otherwise. So tokens keep the version that sampled them, and groups under way, records and the data
position stay as they are: rollouts go on meanwhile, up to the staleness bound. Each group is once in the state that
comes of it. It takes the batches since the last checkpoint, which are kept until there is a later one;
where none comes for too long (`KEPT`), a lost trainer ends the run.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from libra_jax import config as configuration
from libra_jax import deadlines, protocols, turns
from libra_jax.coordinator import failure, fencing, mesh_moves, process_set, saving
from libra_jax.weights import sync

T = TypeVar("T")

KEPT = 4
"""Of the steps since the last checkpoint, the newest are kept, so many times `checkpoint.every`: while no disk takes a
checkpoint, memory is not to be filled."""


class Recovery:
    """Made inside the event loop it serves.

    Args:
      config: the run's configuration (`trainer.restarts`, `checkpoint.every`, `rollout`, `deadlines`).
      trainer: the one that serves.
      trainer_lock: held by whoever calls it.
      saver: restores it; told to give up what the lost one was writing.
      publisher: gives engines the weights of the new one.
      sizes: tells the mesh that it is to be on.
      lost: awaited before anything is made: whoever had to do with the lost one lets go of it.
      recorder: gets a span and sentences.
      ending: ends where it cannot be made anew.
      epoch: the run's own; None: it has none.

    Attributes:
      seconds: that training stood still for it, in all, the one under way included.
    """

    def __init__(
        self,
        config: configuration.RunConfig,
        *,
        trainer: process_set.Serving,
        trainer_lock: asyncio.Lock,
        saver: saving.Saver,
        publisher: sync.WeightSync,
        sizes: Callable[[], protocols.MeshSizes],
        lost: Callable[[], Awaitable[None]],
        recorder: protocols.Recorder,
        ending: failure.Ending,
        epoch: fencing.Epoch | None = None,
    ) -> None:
        self._limits = config.deadlines
        self._most = config.trainer.restarts
        self._look_seconds = config.rollout.health_seconds
        self._why_not = _why_not(config)
        self._trainer = trainer
        self._lock = trainer_lock
        self._saver = saver
        self._publisher = publisher
        self._sizes = sizes
        self._lost = lost
        self._recorder = recorder
        self._ending = ending
        self._epoch = epoch
        self._name = trainer.set.name
        self._warm: list[tuple[int, Sequence[protocols.Trajectory]]] = []
        most = KEPT * config.checkpoint.every or None
        self._steps: collections.deque[protocols.TrainBatch] = collections.deque(maxlen=most)
        self._task: asyncio.Task[None] | None = None
        self._restarts = self._reported = self._replayed = 0
        self._phases: collections.defaultdict[str, float] = collections.defaultdict(float)  # seconds
        self._seconds = 0.0
        self._began: float | None = None
        saver.committed = self._committed

    @property
    def under_way(self) -> bool:
        """Whether the trainer is being made anew."""
        return self._task is not None and not self._task.done()

    @property
    def seconds(self) -> float:
        under_way = 0.0 if self._began is None else asyncio.get_running_loop().time() - self._began
        return self._seconds + under_way

    def watch(self) -> None:
        """From now on the trainer is looked at while it waits for a batch: made anew then, it may be back in time."""
        if not self._why_not:
            self._ending.start(self._watch(), f"{self._name} health")

    def warmed(self, number: int, batch: Sequence[protocols.Trajectory]) -> None:
        """A warm-start step has been taken, after so many others."""
        if not self._why_not:
            self._warm.append((number, batch))

    def trained(self, batch: protocols.TrainBatch) -> None:
        """A training step has been taken."""
        if not self._why_not:
            self._steps.append(batch)

    def _committed(self, step: int) -> None:
        """A checkpoint counts: what it holds is never trained again."""
        self._warm.clear()
        while self._steps and self._steps[0].policy_version < step:
            self._steps.popleft()

    def take_metrics(self) -> dict[str, float]:
        """What became of it since the last call; empty where nothing did."""
        if self._restarts == self._reported and not self._replayed:
            return {}
        self._reported, replayed, self._replayed = self._restarts, self._replayed, 0
        return {"trainer/restarts": float(self._restarts), "trainer/replayed_steps": float(replayed)}

    async def through(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Does what asks the trainer, without its lock held; where that is lost meanwhile, again of the next one.

        Raises:
          WorkerLost: the trainer is lost, and is not made anew; the message says why.
        """
        while True:
            try:
                return await work()
            except protocols.TrainerLost as error:
                if self._task is None or not self.under_way:
                    if self._trainer.lost is None:  # it was made anew meanwhile
                        continue
                    # A task of its own: whoever found the loss may be given up, and others wait for it, too.
                    self._task = self._ending.start(self._make_anew(error), f"{self._name} made anew")
                with turns.queued():  # its parts have deadlines of their own
                    await asyncio.shield(self._task)

    async def _watch(self) -> None:
        async def look() -> None:
            async with self._lock:
                with contextlib.suppress(protocols.DeadlineMissed):  # whoever asks it for more will say so
                    await self._ask(self._trainer.policy_version(), "asked for its version", "publish")

        while True:
            await asyncio.sleep(self._look_seconds)
            if not self._lock.locked():
                await self.through(look)

    async def _make_anew(self, error: protocols.LibraError) -> None:
        async with self._lock:
            self._began = began = asyncio.get_running_loop().time()
            self._recorder.status(self._name, protocols.LOST)
            while True:
                await self._check(error)
                self._restarts += 1
                self._recorder.note(
                    f"The trainer is lost and made anew (restart {self._restarts} of {self._most}), while rollouts go "
                    f"on: {error}"
                )
                self._phases.clear()
                try:
                    step, again = await self._attempt()
                    break
                except (protocols.WorkerLost, protocols.DeadlineMissed) as another:
                    error = another
            end = asyncio.get_running_loop().time()
            self._seconds, self._began = self._seconds + end - began, None
            self._replayed += again
            told = {"checkpoint": step, "replayed": again, **self._phases}
            self._recorder.span(self._name, "made anew", began, end, told)
            self._recorder.status(self._name, "idle")
            whence = f"the checkpoint at step {step}" if step >= 0 else "the state that the run began with"
            phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._phases.items())
            self._recorder.note(
                f"The trainer goes on, {end - began:.1f} s after its loss was seen ({phases}): it began with {whence} "
                f"and trained {again} steps again."
            )

    async def _check(self, error: protocols.LibraError) -> None:
        """Raises WorkerLost if the trainer is not restarted (again), DataError if no checkpoint verifies."""
        if self._why_not:
            raise protocols.WorkerLost(f"{_text(error)}. It is not made anew: {self._why_not}.")
        step, skipped = await self._saver.verified()
        goes_on = f"goes on from the checkpoint at step {step}" if step >= 0 else "begins anew: there is none"
        if step < self._saver.newest:  # the steps between the two are no longer kept
            raise protocols.WorkerLost(
                f"{_text(error)}. It is not restarted: its last checkpoint cannot be used. {skipped} The same command "
                f"{goes_on}."
            )
        if self._steps and self._steps[0].policy_version > max(step, 0):
            raise protocols.WorkerLost(
                f"{_text(error)}. It is not made anew: too many steps have been taken since the last checkpoint, and "
                f"the groups of the last {len(self._steps)} alone are kept ({KEPT} times config.checkpoint.every). The "
                f"same command {goes_on}."
            )
        if self._restarts >= self._most:
            raise protocols.WorkerLost(
                f"The trainer was lost once more than config.trainer.restarts = {self._most} allows, the last time: "
                f"{_text(error)}. The same command {goes_on}."
            )
        if self._epoch is not None and not self._epoch.may_write():
            self._epoch.check()

    async def _attempt(self) -> tuple[int, int]:
        """Makes the trainer as it was; returns the checkpoint's step, -1 for none, and the steps trained again."""
        trainer = self._trainer.set
        with self._timed("end"):
            await self._lost()
            self._saver.lost()
            try:
                await trainer.kill()
            except protocols.LibraError as error:
                self._recorder.note(f"Not all of the lost trainer ended cleanly: {error}")
        self._recorder.status(self._name, "starting its process again")
        with self._timed("start"):
            await self._ask(trainer.make(), "being made anew", "trainer_start")
        self._trainer.made_anew()
        try:
            return await self._bring_back(trainer)
        except BaseException as error:  # given up half-way, it is nobody's trainer
            self._trainer.lost = error
            raise
        finally:
            self._trainer.caught_up()

    async def _bring_back(self, trainer: process_set.ProcessSet) -> tuple[int, int]:
        step = self._saver.newest
        begin = trainer.start if step < 0 else trainer.stand_by
        with self._timed("start"):
            info = await self._ask(begin(), "asked to start", "trainer_start")
        self._recorder.status(self._name, "reading the checkpoint")
        with self._timed("restore"):
            warm = await self._saver.restore_lost() if step >= 0 else 0
            await self._move(info, step)
        with self._timed("train again"):
            again = await self._replay(trainer, step, warm)
        with self._timed("publish"):
            await self._publisher.resync()
        return step, again

    async def _move(self, info: protocols.TrainerInfo, step: int) -> None:
        if process_set.sizes(info) != self._sizes():  # it had moved inside its process
            moving = mesh_moves.Inside(self._trainer, self._sizes(), self._limits.trainer_start)
            await moving.begin()
            await moving.take_over(max(step, 0))

    async def _replay(self, trainer: process_set.ProcessSet, step: int, warm: int) -> int:
        """Takes the steps after a checkpoint that holds so many of the warm start; returns those of training."""
        for sequences in [batch for number, batch in self._warm if number >= warm]:
            await self._ask(trainer.warm_start_step(sequences), "asked to take a warm-start step again", "train_step")
        steps = [batch for batch in self._steps if batch.policy_version >= step]
        for batch in steps:
            compiling = ", compiling its programs first" if batch is steps[0] else ""
            self._recorder.status(self._name, f"training step {batch.policy_version + 1} again{compiling}")
            await self._ask(trainer.train_step(batch), "asked to train a step again", "train_step")
        return len(steps)

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        began = asyncio.get_running_loop().time()
        yield
        self._phases[phase] += asyncio.get_running_loop().time() - began

    async def _ask(self, work: Awaitable[T], what: str, field: str) -> T:
        seconds = getattr(self._limits, field)
        return await deadlines.within(seconds, work, f"The trainer {self._name}, {what},", field)


def _text(error: BaseException) -> str:
    return str(error).rstrip(".")


def _why_not(config: configuration.RunConfig) -> str:
    """Why a lost trainer of this run is not made anew; empty where it is."""
    if not config.trainer.restarts:
        return "config.trainer.restarts is 0"
    if not config.checkpoint.every:
        return "config.checkpoint.every is 0, and there is nothing to begin it with"
    if config.rollout.transport != "memfd":
        return f"config.rollout.transport={config.rollout.transport} ties engines to the one that is gone"
    return ""
