"""Moves the trainer to other processes while it trains: a successor starts, catches up, and takes over between steps.

    starting    the successor's processes, runtime and mesh
    compiling   its programs, for every shape that the serving trainer has met
    saving      a snapshot of the state, taken between two steps and written during the next ones
    restoring   the snapshot, straight into the successor's shardings
    replaying   the steps that were trained since the snapshot
    ready       no step is missed

The snapshot is taken late, after all work that needs no state, so that few steps are missed. The order of steps, the
data position and the scheduler belong to the coordinator and stay. The learning rate follows the version. If anything
fails before the take-over, the serving trainer continues, the successor is ended and the snapshot is removed.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.trainer_control import client
from libra_jax.utils import deadlines, run_context

FOLDER = "handover"
"""Folder in the workdir that holds the snapshot during a hand-over."""

POLL_SECONDS = 0.2
"""Seconds between two looks for the finished snapshot."""

PHASES = ("start", "compile", "snapshot", "restore", "replay")


@dataclasses.dataclass(frozen=True)
class HandoverCost:
    """The cost of a change of the mesh.

    Attributes:
      phases: seconds of each phase. Most phases run beside training.
      stall: seconds in which training stood still.
      nbytes: bytes of state that moved.
    """

    phases: Mapping[str, float]
    stall: float
    nbytes: int

    def with_stalls(self, **phases: float) -> HandoverCost:
        """Adds phases in which training stood still."""
        stall = self.stall + sum(phases.values())
        return dataclasses.replace(self, phases={**self.phases, **phases}, stall=stall)


class Way(Protocol):
    """The way in which a train state reaches another mesh. Calls come between two steps, under the trainer's lock.

    Attributes:
      longest: seconds before the change is aborted, unless its caller sets a deadline.
      outside: True if other processes train afterwards.
    """

    longest: float
    outside: bool

    async def begin(self) -> protocols.ResizeEstimate:
        """Begins the part of the work that runs beside training."""
        ...

    async def progress(self) -> protocols.ResizeProgress:
        """Returns the progress of that work. Raises LibraError if it has failed."""
        ...

    def trains(self, batch: protocols.TrainBatch) -> None:
        """Takes note of a training step as it begins."""
        ...

    async def take_over(self, step: int) -> HandoverCost:
        """Makes the new mesh train from now on."""
        ...

    async def end_former(self) -> None:
        """Ends the former processes, if other processes train now. Called beside training, without the lock."""
        ...

    async def cancel(self) -> None:
        """Aborts the change. Called without the lock if `outside`."""
        ...


Successors = Callable[[protocols.MeshSizes, int], Way]
"""Returns the way to other processes, from (mesh sizes, number of processes)."""


def successors(
    run: run_context.RunContext,
    make_trainer: client.MakeTrainer,
    *,
    serving: client.TrainerActorClient,
    divide: protocols.DivideBatch | None = None,
) -> Successors:
    """Returns a function that makes the hand-overs of a run. Each successor has a new name.

    Args:
      run: what the parts of the run share.
      make_trainer: makes the successors' processes.
      serving: the present trainer.
      divide: gives each of several processes its part of a batch (`client.TrainerProcesses`).
    """
    numbers, name = itertools.count(1), serving.name

    def successor(sizes: protocols.MeshSizes, processes: int) -> Handover:
        trainer_processes = client.TrainerProcesses(
            run.cluster, make_trainer(sizes), count=processes, name=f"{name}-{next(numbers)}", divide=divide
        )
        next_trainer = client.TrainerActorClient(trainer_processes, run.config.deadlines)
        return Handover(run.config.deadlines, serving=serving, successor=next_trainer, sizes=sizes, workdir=run.workdir)

    return successor


class Handover:
    """`Way`: one move of the trainer to other processes. Create it inside the event loop that it serves.

    Args:
      limits: deadlines of the waits; each error names the worker.
      serving: the present trainer, which adopts the successor's processes.
      successor: the next trainer; its processes do not exist yet.
      sizes: mesh of the successor.
      workdir: the run's folder, which both trainers' processes can reach.

    Attributes:
      phase: a phase of the module's table, "failed", or "" before `begin` and after the end.
      error: sentence about why the move failed.
      replayed: number of steps that the successor has replayed.
      missed: the steps that it still has to replay.
    """

    outside = True

    def __init__(
        self,
        limits: config_lib.DeadlineConfig,
        *,
        serving: client.TrainerActorClient,
        successor: client.TrainerActorClient,
        sizes: protocols.MeshSizes,
        workdir: Path,
    ) -> None:
        self.longest = 2 * limits.trainer_start + 2 * limits.checkpoint
        self.phase = self.error = ""
        self.replayed = 0
        self._limits = limits
        self._serving = serving
        self._successor = successor
        self._sizes = sizes
        self._workdir = workdir
        self._path = str(workdir / FOLDER / successor.name)
        self._task: asyncio.Task[None] | None = None
        # Set after another missed step, and at each change of phase.
        self._more = asyncio.Event()
        self._arrived = asyncio.Event()
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._stall = 0.0
        self._snapshot: protocols.Snapshot | None = None
        # True while the serving trainer may still write the snapshot.
        self._writing = False
        self.missed: collections.deque[protocols.TrainBatch] = collections.deque()
        # Number of missed steps at the last look.
        self._behind: int | None = None
        # True once at most one step is missed, or waiting longer does not reduce the number.
        self._near = False
        self._former: client.TrainerProcesses | None = None

    async def begin(self) -> protocols.ResizeEstimate:
        """Begins to prepare the successor. The serving trainer continues."""
        self._enter("starting")
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"handover to {self._successor.name}")
        self._task.add_done_callback(lambda _: self._arrived.set())
        return protocols.ResizeEstimate(0, 0, 0)

    async def progress(self) -> protocols.ResizeProgress:
        """Returns whether the successor should take over. It should once more time would bring it no nearer.

        Raises:
          LibraError: the move has failed.
        """
        if self.phase == "failed":
            raise protocols.LibraError(self.error)
        if self.phase == "replaying":
            # A successor that replays no faster than training proceeds never catches up while training runs.
            behind, self._behind = self._behind, len(self.missed)
            self._near |= self._behind <= 1 or (behind is not None and self._behind >= behind)
        return protocols.ResizeProgress(0, 0, ready=self.phase == "ready" or (self.phase == "replaying" and self._near))

    def trains(self, batch: protocols.TrainBatch) -> None:
        """Adds a step after the snapshot to the successor's missed steps. A ready successor replays it at once."""
        if self._snapshot is not None and batch.policy_version >= self._snapshot.policy_version:
            self.missed.append(batch)
            self._more.set()
            if self.phase == "ready":
                self._enter("replaying")

    async def take_over(self, step: int) -> HandoverCost:
        """Makes the successor the trainer, once it has replayed the missed steps.

        Raises:
          DeadlineMissed: the replay takes longer than `deadlines.transition`. The serving trainer continues, and so
            does the move.
          LibraError: the move failed, or the successor holds another version. The serving trainer continues.
        """
        loop, name = asyncio.get_running_loop(), self._successor.name
        if self._task is None:
            raise protocols.LibraError("the trainer is not moving to other processes: nothing can take over.")
        # These phases need the trainer's lock, or end many steps behind.
        if self.phase in ("starting", "compiling", "saving"):
            raise protocols.DeadlineMissed(f"The trainer {name} is still {self.phase}: it cannot take over yet.")
        start = loop.time()

        async def caught_up(task: asyncio.Task[None]) -> None:
            # The task ends only if the move has failed.
            while self.phase != "ready" and not task.done():
                self._arrived.clear()
                await self._arrived.wait()

        what = f"The trainer {name}, {self.phase} to take over,"
        await deadlines.limited(self._limits, "transition", caught_up(self._task), what)
        if self._task.done():
            self._task.result()
            raise protocols.LibraError(self.error)
        try:
            # The last check before the point of no return: a wrong version would train the run from another state.
            version = await self._successor.policy_version()
            if version != step:
                raise protocols.LibraError(f"it holds version {version} and the run is at {step}")
        except protocols.LibraError as error:
            await self._stop_task()
            await self._fail(error)
            raise protocols.LibraError(self.error) from error
        await self._stop_task()
        self._stall += loop.time() - start
        self._former = self._serving.adopt(self._successor)
        self.phase = ""
        assert self._snapshot is not None
        return HandoverCost(self._seconds, self._stall, self._snapshot.nbytes)

    async def end_former(self) -> None:
        """Ends the former processes.

        Raises:
          LibraError: a process did not end cleanly.
        """
        if self._former is not None:
            await self._former.end()

    async def cancel(self) -> None:
        """Ends the successor and removes the snapshot. Does nothing if the move is over.

        Call without the trainer's lock: while the snapshot is written, the serving trainer has to be asked about it.

        Raises:
          LibraError: a process or file did not go away cleanly.
        """
        if self.phase in ("", "failed"):
            return
        await self._stop_task()
        leftovers = await self._clean()
        self.phase = ""
        if leftovers:
            raise protocols.LibraError(leftovers)

    # Work beside training ----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Prepares the successor. Then replays each missed step, until a take-over or a failure cancels the task."""
        try:
            # Remains of a killed run would be taken for this snapshot.
            await self._remove()
            await self._prepare()
            self._enter("replaying")
            while True:
                while self.missed:
                    with self._timed("replay"):
                        await self._successor.train_step(self.missed[0])
                    # Removed only after the step, so that `missed` counts a step that is being replayed.
                    self.missed.popleft()
                    self.replayed += 1
                self._enter("ready")
                self._more.clear()
                await self._more.wait()
        except protocols.LibraError as error:
            await self._fail(error)
        # A fault of this program or of the disk must not stop the serving trainer.
        except Exception as error:
            await self._fail(protocols.LibraError(f"{type(error).__name__}: {error}"))

    async def _prepare(self) -> None:
        """Starts the successor, compiles its programs, and gives it the state: last, so that it misses few steps."""
        with self._timed("start"):
            await self._successor.make()
            await self._successor.stand_by()
        self._enter("compiling")
        with self._timed("compile"):
            shapes: list[protocols.ProgramShape] = []
            while True:
                async with self._between_steps():
                    met = list(await self._serving.shapes())
                # Training may have used a new shape while the successor compiled.
                if len(met) <= len(shapes):
                    break
                shapes = met
                await self._successor.warm(shapes)
        self._enter("saving")
        with self._timed("snapshot"):
            self._writing = True
            async with self._between_steps():
                self._snapshot = await self._serving.snapshot(self._path)
            await deadlines.limited(self._limits, "checkpoint", self._saved(), f"The snapshot of {self._serving.name}")
            self._writing = False
        self._enter("restoring")
        with self._timed("restore"):
            version = await self._successor.restore(self._path)
        if version != self._snapshot.policy_version:
            raise protocols.LibraError(
                f"{self._path} holds version {version} and not the snapshot's {self._snapshot.policy_version}"
            )
        await self._remove()

    async def _saved(self) -> None:
        """Waits until the snapshot is durable.

        Only the serving trainer knows about errors of the write, but it answers only between two steps. So the
        successor also looks for the finished snapshot.
        """
        telling = asyncio.ensure_future(self._told_saved())
        try:
            while not telling.done():
                if await self._successor.is_saved(self._path):
                    return
                await asyncio.wait({telling}, timeout=POLL_SECONDS)
            telling.result()
        finally:
            deadlines.abandon(telling)

    async def _told_saved(self) -> None:
        while True:
            async with self._between_steps():
                if await self._serving.snapshot_saved():
                    return
            await asyncio.sleep(POLL_SECONDS)

    @contextlib.asynccontextmanager
    async def _between_steps(self) -> AsyncIterator[None]:
        """Holds the trainer's lock, and counts the time in the block as a stall of training."""
        async with self._serving.lock:
            start = asyncio.get_running_loop().time()
            try:
                yield
            finally:
                self._stall += asyncio.get_running_loop().time() - start

    # Ends --------------------------------------------------------------------------------------------------------

    async def _fail(self, error: protocols.LibraError) -> None:
        leftovers = await self._clean()
        why = "; ".join(filter(None, (str(error).rstrip("."), leftovers.rstrip("."))))
        self.error = f"The move of the trainer to a mesh of {self._sizes} failed, and it stays where it is: {why}."
        self._enter("failed")

    async def _clean(self) -> str:
        """Ends the successor and removes the snapshot. Returns what did not end cleanly, as text."""
        leftovers = []
        try:
            await self._successor.stop()
        except protocols.LibraError as error:
            leftovers.append(str(error))
        if self._writing:
            writing = self._told_saved()
            # The snapshot is discarded, so a failed write does not matter.
            with contextlib.suppress(protocols.LibraError):
                await deadlines.limited(self._limits, "checkpoint", writing, f"The snapshot of {self._serving.name}")
            self._writing = False
        try:
            await self._remove()
        except protocols.LibraError as error:
            leftovers.append(str(error))
        return " ".join(leftovers)

    async def _stop_task(self) -> None:
        assert self._task is not None
        await deadlines.cancel_all((self._task,))

    async def _remove(self) -> None:
        """Removes the snapshot on a thread, because a slow disk may hold many files."""
        removing = asyncio.to_thread(shutil.rmtree, self._workdir / FOLDER, ignore_errors=True)
        await deadlines.limited(self._limits, "checkpoint", removing, f"The removal of {self._workdir / FOLDER}")

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self._arrived.set()

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        start = loop.time()
        try:
            yield
        finally:
            self._seconds[phase] += loop.time() - start
