"""The trainer moves to other processes while it trains: a successor starts, catches up, and takes over between steps.

    starting    the successor's processes, runtime and mesh
    compiling   its programs, for every shape that the serving trainer has met
    saving      a snapshot of the state, begun between two steps and written while the next ones are trained
    restoring   the snapshot, straight into the successor's shardings
    replaying   the steps that were trained since the snapshot
    ready       no step is missed

The snapshot is taken late, after all work that needs no state, so that few steps are missed. The order of steps, the
data position and the scheduler belong to the coordinator and stay; the learning rate follows the version. If anything
fails before the take-over, the serving trainer trains on, the successor is ended and the snapshot is removed.
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

from libra_jax import config as configuration
from libra_jax import deadlines, protocols
from libra_jax.trainer_control import client

FOLDER = "handover"
"""Folder of the workdir that holds the snapshot while a hand-over is under way."""

POLL_SECONDS = 0.2
"""Seconds between two looks for the snapshot."""

PHASES = ("start", "compile", "snapshot", "restore", "replay")


@dataclasses.dataclass(frozen=True)
class Taken:
    """What a change of the mesh took.

    Attributes:
      phases: seconds of each phase; most phases run beside training.
      stall: seconds for which training stood still.
      nbytes: bytes of state that moved.
    """

    phases: Mapping[str, float]
    stall: float
    nbytes: int

    def with_stalls(self, **phases: float) -> Taken:
        """Adds phases in which training stood still."""
        stall = self.stall + sum(phases.values())
        return dataclasses.replace(self, phases={**self.phases, **phases}, stall=stall)


class Way(Protocol):
    """How a train state travels to another mesh. Calls come between two steps, with the trainer's lock held.

    Attributes:
      longest: seconds after which the change is given up, unless its caller has set a deadline.
      outside: other processes train afterwards.
    """

    longest: float
    outside: bool

    async def begin(self) -> protocols.ResizeEstimate:
        """Begins the work that goes on beside training."""
        ...

    async def progress(self) -> protocols.ResizeProgress:
        """Returns how far that work is; raises LibraError if it has failed."""
        ...

    def trains(self, batch: protocols.TrainBatch) -> None:
        """Learns of a training step as it begins."""
        ...

    async def take_over(self, step: int) -> Taken:
        """Lets the new mesh train from now on."""
        ...

    async def end_former(self) -> None:
        """Ends the processes that trained before, if others train now. Called beside training, without the lock."""
        ...

    async def cancel(self) -> None:
        """Gives the change up. Called without the lock if `outside`."""
        ...


Successors = Callable[[protocols.MeshSizes, int], Way]
"""(sizes, processes) -> how other processes take over."""


def remove_snapshot(workdir: Path) -> None:
    """Removes the snapshot of a hand-over, of this run or of one that was killed."""
    shutil.rmtree(workdir / FOLDER, ignore_errors=True)


def successors(
    cluster: protocols.Cluster,
    make_trainer: client.MakeTrainer,
    *,
    serving: client.TrainerClient,
    limits: configuration.DeadlineConfig,
    workdir: Path,
) -> Successors:
    """Returns what makes the hand-overs of a run; each successor has a name of its own."""
    numbers, name = itertools.count(1), serving.name

    def successor(sizes: protocols.MeshSizes, processes: int) -> Handover:
        made = client.TrainerProcesses(cluster, make_trainer(sizes), count=processes, name=f"{name}-{next(numbers)}")
        return Handover(
            limits, serving=serving, successor=client.TrainerClient(made, limits), sizes=sizes, workdir=workdir
        )

    return successor


class Handover:
    """`Way`: one move of the trainer to other processes. Made inside the event loop that it serves.

    Args:
      limits: deadlines of the waits; each error names the worker.
      serving: the trainer, which adopts the successor's processes.
      successor: not made yet.
      sizes: of the successor's mesh.
      workdir: the run's folder, which the processes of both trainers reach.

    Attributes:
      phase: see above; "failed", or "" before `begin` and after the end.
      error: why the move failed, a sentence.
      replayed: steps that the successor has replayed.
    """

    outside = True

    def __init__(
        self,
        limits: configuration.DeadlineConfig,
        *,
        serving: client.TrainerClient,
        successor: client.TrainerClient,
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
        self._more = asyncio.Event()  # a step was missed
        self._arrived = asyncio.Event()  # in another phase
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._stall = 0.0
        self._snapshot: protocols.Snapshot | None = None
        self._writing = False  # the serving trainer may still write the snapshot
        self._missed: collections.deque[protocols.TrainBatch] = collections.deque()
        self._behind: int | None = None  # steps missed at the last look
        self._near = False  # one step was missed at most, or as many as at the look before
        self._former: client.TrainerProcesses | None = None

    @property
    def missed(self) -> int:
        """Steps that the successor still has to replay."""
        return len(self._missed)

    async def begin(self) -> protocols.ResizeEstimate:
        """Begins to ready the successor; the serving trainer trains on."""
        self._enter("starting")
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"handover to {self._successor.name}")
        self._task.add_done_callback(lambda _: self._arrived.set())
        return protocols.ResizeEstimate(0, 0, 0)

    async def progress(self) -> protocols.ResizeProgress:
        """Returns whether the successor should take over: more time would not bring it nearer.

        Raises:
          LibraError: the move has failed.
        """
        if self.phase == "failed":
            raise protocols.LibraError(self.error)
        if self.phase == "replaying":
            behind, self._behind = self._behind, self.missed
            self._near |= self.missed <= 1 or (behind is not None and self.missed >= behind)
        return protocols.ResizeProgress(0, 0, ready=self.phase == "ready" or (self.phase == "replaying" and self._near))

    def trains(self, batch: protocols.TrainBatch) -> None:
        """Has the successor take the step, too, if its snapshot is from before: at the same time if it is ready."""
        if self._snapshot is not None and batch.policy_version >= self._snapshot.policy_version:
            self._missed.append(batch)
            self._more.set()
            if self.phase == "ready":
                self._enter("replaying")

    async def take_over(self, step: int) -> Taken:
        """Lets the successor train from now on, once it has replayed what it missed.

        Raises:
          DeadlineMissed: it needs longer than `deadlines.transition`; the serving trainer trains on, the move goes on.
          LibraError: the move failed, or the successor holds another version; the serving trainer trains on.
        """
        loop, name = asyncio.get_running_loop(), self._successor.name
        if self._task is None:
            raise protocols.LibraError("the trainer is not moving to other processes: nothing can take over.")
        if self.phase in ("starting", "compiling", "saving"):  # it needs the lock, or begins steps behind
            raise protocols.DeadlineMissed(f"The trainer {name} is still {self.phase}: it cannot take over yet.")
        began = loop.time()
        what = f"The trainer {name}, {self.phase} to take over,"
        await deadlines.limited(self._limits, "transition", self._caught_up(), what)
        if self._task.done():
            self._task.result()
            raise protocols.LibraError(self.error)
        try:
            held = await self._successor.policy_version()
            if held != step:
                raise protocols.LibraError(f"it holds version {held} and the run is at {step}")
        except protocols.LibraError as error:
            await self._stop_task()
            await self._fail(error)
            raise protocols.LibraError(self.error) from error
        await self._stop_task()
        self._stall += loop.time() - began
        self._former = self._serving.adopt(self._successor)
        self.phase = ""
        assert self._snapshot is not None
        return Taken(self._seconds, self._stall, self._snapshot.nbytes)

    async def end_former(self) -> None:
        """Ends the processes that trained before.

        Raises:
          LibraError: a process did not end as it should.
        """
        if self._former is not None:
            await self._former.stop()

    async def cancel(self) -> None:
        """Ends the successor and removes the snapshot; nothing happens if the move is over.

        Not with the lock held: while the snapshot is written, the serving trainer is asked whether it is.

        Raises:
          LibraError: something did not end as it should.
        """
        if self.phase in ("", "failed"):
            return
        await self._stop_task()
        left = await self._clean()
        self.phase = ""
        if left:
            raise protocols.LibraError(left)

    # What goes on beside training --------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            await self._remove()  # what a run that was killed left
            await self._start()
            await self._copy_state()
            await self._replay()
        except protocols.LibraError as error:
            await self._fail(error)
        except Exception as error:  # a fault of ours or of the disk: the serving trainer trains on all the same
            await self._fail(protocols.LibraError(f"{type(error).__name__}: {error}"))

    async def _start(self) -> None:
        with self._timed("start"):
            await self._successor.make()
            await self._successor.stand_by()
        self._enter("compiling")
        with self._timed("compile"):
            shapes: list[protocols.ProgramShape] = []
            while len(met := await self._met()) > len(shapes):  # training may meet another shape meanwhile
                shapes = met
                await self._successor.warm(shapes)

    async def _met(self) -> list[protocols.ProgramShape]:
        async with self._between_steps():
            return list(await self._serving.shapes())

    async def _copy_state(self) -> None:
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

    async def _replay(self) -> None:
        """Replays each missed step, until a take-over or a failure cancels the task."""
        self._enter("replaying")
        while True:
            while self._missed:
                with self._timed("replay"):
                    await self._successor.train_step(self._missed[0])
                self._missed.popleft()
                self.replayed += 1
            self._enter("ready")
            self._more.clear()
            await self._more.wait()

    async def _caught_up(self) -> None:
        """Returns when no step is missed, or the move has failed."""
        assert self._task is not None
        while self.phase != "ready" and not self._task.done():
            self._arrived.clear()
            await self._arrived.wait()

    async def _saved(self) -> None:
        """Returns when the snapshot is durable.

        The successor looks for it, because the serving trainer, which alone knows what may go wrong, answers between
        two steps only.
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
        """Holds the trainer's lock; the block's time is time for which training stands still."""
        async with self._serving.lock:
            began = asyncio.get_running_loop().time()
            try:
                yield
            finally:
                self._stall += asyncio.get_running_loop().time() - began

    # Ends --------------------------------------------------------------------------------------------------------

    async def _fail(self, error: protocols.LibraError) -> None:
        left = await self._clean()
        why = "; ".join(filter(None, (str(error).rstrip("."), left.rstrip("."))))
        self.error = f"The move of the trainer to a mesh of {self._sizes} failed, and it stays where it is: {why}."
        self._enter("failed")

    async def _clean(self) -> str:
        """Ends the successor and removes the snapshot; returns what did not end as it should."""
        left = []
        try:
            await self._successor.stop()
        except protocols.LibraError as error:
            left.append(str(error))
        if self._writing:
            writing = self._told_saved()
            with contextlib.suppress(protocols.LibraError):  # that it could not be written matters no more
                await deadlines.limited(self._limits, "checkpoint", writing, f"The snapshot of {self._serving.name}")
            self._writing = False
        try:
            await self._remove()
        except protocols.LibraError as error:
            left.append(str(error))
        return " ".join(left)

    async def _stop_task(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _remove(self) -> None:
        """Removes the snapshot, on a thread: it may be many files of a slow disk."""
        removing = asyncio.to_thread(remove_snapshot, self._workdir)
        await deadlines.limited(self._limits, "checkpoint", removing, f"The removal of {self._workdir / FOLDER}")

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self._arrived.set()

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            yield
        finally:
            self._seconds[phase] += loop.time() - began
