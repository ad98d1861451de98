"""The trainer moves to other processes while it trains: another set starts, catches up, and takes over between steps.

    starting    processes, runtime and mesh of the successor
    compiling   its programs, for every shape that the serving trainer has met
    saving      a snapshot of the state, begun between two steps and written while the next ones are trained
    restoring   the snapshot, straight into the successor's shardings
    replaying   the steps that were trained since the snapshot
    ready       nothing is missed

The snapshot comes late, when all that needs no state is done, so that few steps are missed. The order of steps, the
data position and the scheduler are the coordinator's and stay; the learning rate goes by the version. Whatever fails
before the take-over, the serving trainer trains on and knows nothing of it, and nothing is left behind.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import shutil
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from libra_jax import config as configuration
from libra_jax import deadlines, protocols
from libra_jax.coordinator import process_set

T = TypeVar("T")

FOLDER = "handover"
"""Of the workdir: the snapshot, for as long as a handover is under way."""

POLL_SECONDS = 0.2
"""Between two looks whether the snapshot is there."""


def remove_snapshot(workdir: Path) -> None:
    """Removes what a handover, of this run or of one that was killed, has left in the run's folder."""
    shutil.rmtree(workdir / FOLDER, ignore_errors=True)


@dataclass(frozen=True)
class Progress:
    """How far a handover is.

    Attributes:
      phase: as above; "failed", or "" where none is under way.
      missed: steps that the successor still has to replay.
      ready: waiting longer gains nothing: the successor has been one step behind at most, or is no faster than the
        serving trainer. Taking over waits for the replay of the steps missed.
      error: why it failed, a sentence.
    """

    phase: str
    missed: int = 0
    ready: bool = False
    error: str = ""


@dataclass
class Phases:
    """What a handover took, in seconds, waits for the end of a step included; only `stall` kept the run from training.

    Attributes:
      start: until the successor's processes stood.
      compile: of its programs.
      snapshot: until it was durable.
      restore: until the successor held it.
      replay: of the steps missed.
      stall: what the serving trainer was asked for, and the take-over.
      replayed: steps.
      nbytes: of the state.
    """

    start: float = 0.0
    compile: float = 0.0
    snapshot: float = 0.0
    restore: float = 0.0
    replay: float = 0.0
    stall: float = 0.0
    replayed: int = 0
    nbytes: int = 0


class Handover:
    """Moves a run's trainer between process sets, one move at a time. Made inside the event loop it serves.

    Args:
      limits: of the waits; each names the worker.
      serving: the trainer that trains (`protocols.MovableTrainer`).
      lock: held by whoever calls the serving trainer, because it takes one call at a time.
      workdir: the run's folder; both trainers' processes reach it.
    """

    def __init__(
        self,
        limits: configuration.DeadlineConfig,
        *,
        serving: process_set.ProcessSet,
        lock: asyncio.Lock,
        workdir: Path,
    ) -> None:
        self._limits = limits
        self._serving = serving
        self._lock = lock
        self._workdir = workdir
        self._folder = workdir / FOLDER
        self._task: asyncio.Task[None] | None = None
        self._more = asyncio.Event()  # a step was missed
        self._arrived = asyncio.Event()  # in another phase
        self._clear()

    def _clear(self) -> None:
        self._successor: process_set.ProcessSet | None = None
        self._sizes: protocols.MeshSizes | None = None
        self._phase, self._error = "", ""
        self._phases = Phases()
        self._snapshot: protocols.Snapshot | None = None
        self._writing = False  # the serving trainer may still write the snapshot
        self._missed: collections.deque[protocols.TrainBatch] = collections.deque()
        self._behind: int | None = None  # steps that the successor was behind after the last one
        self._close = False  # it has been one step behind, or has stopped gaining

    @property
    def progress(self) -> Progress:
        """Of the handover under way, or of one that has failed."""
        ready = self._phase == "ready" or (self._phase == "replaying" and self._close)
        return Progress(self._phase, len(self._missed), ready, self._error)

    def begin(self, successor: process_set.ProcessSet, sizes: protocols.MeshSizes) -> None:
        """Begins to ready another set; the serving one goes on.

        Args:
          successor: not made yet; its specs have the new mesh.
          sizes: of that mesh, for sentences.

        Raises:
          ConfigError: a handover is under way, or the successor has the serving set's name.
        """
        if self._task is not None and not self._task.done():
            raise protocols.ConfigError(
                f"the trainer is moving to a mesh of {self._sizes} already; wait for that, or cancel it"
            )
        if successor.name == self._serving.name:
            raise protocols.ConfigError(
                f"the name {successor.name!r} is the serving trainer's; give the other set a name of its own"
            )
        self._clear()
        self._successor, self._sizes = successor, sizes
        self._enter("starting")
        self._task = asyncio.get_running_loop().create_task(self._run(successor), name=f"handover to {successor.name}")
        self._task.add_done_callback(lambda _: self._arrived.set())

    def missed(self, batch: protocols.TrainBatch) -> None:
        """A step that the serving trainer takes; the successor takes it, too, if its snapshot is from before.

        Told as the step begins, with the lock held, a successor that has caught up takes it at the same time.
        """
        if self._snapshot is not None and batch.policy_version >= self._snapshot.policy_version:
            self._missed.append(batch)
            self._more.set()
            if self._phase == "ready":
                self._enter("replaying")
            if self._phase == "replaying":
                behind, self._behind = self._behind, len(self._missed)
                self._close |= self._behind <= 1 or (behind is not None and self._behind >= behind)

    async def take_over(self, version: int, seconds: float) -> tuple[process_set.ProcessSet, Phases]:
        """The successor, which serves from now on. Between two steps, with the lock held by the caller.

        The set that served before is the caller's to stop.

        Args:
          version: that the serving trainer holds.
          seconds: that the successor may take to catch up; none is trained meanwhile.

        Raises:
          DeadlineMissed: it needs longer; the serving trainer stays for now, and the handover goes on.
          LibraError: it failed, or holds another version; the serving trainer stays, and nothing is left behind.
        """
        loop, successor = asyncio.get_running_loop(), self._successor
        if successor is None or self._task is None:
            raise protocols.LibraError("the trainer is not moving to other processes: nothing can take over.")
        if self._phase in ("starting", "compiling", "saving"):  # it needs the lock, or begins steps behind
            raise protocols.DeadlineMissed(
                f"The trainer {successor.name} is still {self._phase}: it cannot take over yet."
            )
        began = loop.time()
        what = f"The trainer {successor.name}, {self._phase} to take over,"
        await deadlines.within(seconds, self._caught_up(), what, "transition")
        if self._task.done():
            self._task.result()
            raise protocols.LibraError(self._error)
        try:
            asked = successor.policy_version()
            held = await self._ask(asked, f"The trainer {successor.name}, asked for its version,", "transition")
            if held != version:
                raise protocols.LibraError(f"it holds version {held} and the run is at {version}")
        except protocols.LibraError as error:
            await self._stop_task()
            await self._fail(successor, error)
            raise protocols.LibraError(self._error) from error
        await self._stop_task()
        phases = self._phases
        phases.stall += loop.time() - began
        self._serving = successor
        self._clear()
        return successor, phases

    async def cancel(self) -> None:
        """Gives the handover up: the successor is ended, the snapshot removed. Nothing happens if none is under way.

        Not with the lock held: where the snapshot is being written, the serving trainer is asked until it is.

        Raises:
          LibraError: something did not end as it should.
        """
        successor, failed = self._successor, self._phase == "failed"
        left = ""
        if successor is not None and not failed:
            await self._stop_task()
            left = await self._clean(successor)
        self._clear()
        if left:
            raise protocols.LibraError(left)

    # What goes on beside training -------------------------------------------------------------------------------

    async def _run(self, successor: process_set.ProcessSet) -> None:
        try:
            await self._remove()  # what a run that was killed left
            await self._ready(successor)
            await self._replay(successor)
        except protocols.LibraError as error:
            await self._fail(successor, error)
        except Exception as error:  # a fault of ours or of the disk: the serving trainer goes on all the same
            await self._fail(successor, protocols.LibraError(f"{type(error).__name__}: {error}"))

    async def _ready(self, successor: process_set.ProcessSet) -> None:
        name, path = f"The trainer {successor.name},", self._folder / successor.name
        with self._timed("start"):
            await self._ask(successor.make(), f"{name} being made,", "trainer_start")
            await self._ask(successor.stand_by(), f"{name} asked to stand by,", "trainer_start")
        self._enter("compiling")
        with self._timed("compile"):
            shapes: list[protocols.ProgramShape] = []
            while len(met := await self._ask_serving("shapes")) > len(shapes):  # training may meet another meanwhile
                shapes = list(met)
                await self._ask(successor.warm(shapes), f"{name} asked to compile its programs,", "trainer_start")
        self._enter("saving")
        with self._timed("snapshot"):
            self._writing = True
            self._snapshot = await self._ask_serving("snapshot", str(path))
            await self._ask(self._saved(successor, path), f"The snapshot of {self._serving.name}", "checkpoint")
            self._writing = False
        self._enter("restoring")
        with self._timed("restore"):
            version = await self._ask(successor.restore(str(path)), f"{name} asked to restore,", "checkpoint")
        if version != self._snapshot.policy_version:
            raise protocols.LibraError(
                f"{path} holds version {version} and not the snapshot's {self._snapshot.policy_version}"
            )
        self._phases.nbytes = self._snapshot.nbytes
        await self._remove()

    async def _replay(self, successor: process_set.ProcessSet) -> None:
        """For ever: until the task is cancelled by a take-over, or fails."""
        self._enter("replaying")
        while True:
            while self._missed:
                with self._timed("replay"):
                    work = successor.train_step(self._missed[0])
                    await self._ask(work, f"The trainer {successor.name}, asked to replay a step,", "train_step")
                self._missed.popleft()
                self._phases.replayed += 1
            self._enter("ready")
            self._more.clear()
            await self._more.wait()

    async def _caught_up(self) -> None:
        """Returns when nothing is missed, or the handover has failed."""
        assert self._task is not None
        while self._phase != "ready" and not self._task.done():
            self._arrived.clear()
            await self._arrived.wait()

    async def _saved(self, successor: process_set.ProcessSet, path: Path) -> None:
        """Returns when the snapshot is durable.

        The successor looks for it, because the serving trainer, which alone knows what may go wrong, answers between
        two steps only.
        """
        telling = asyncio.ensure_future(self._told_saved())
        try:
            while not telling.done():
                if await successor.is_saved(str(path)):
                    return
                await asyncio.wait({telling}, timeout=POLL_SECONDS)
            telling.result()
        finally:
            deadlines.abandon(telling)

    async def _told_saved(self) -> None:
        while True:
            if await self._ask_serving("snapshot_saved"):
                return
            await asyncio.sleep(POLL_SECONDS)

    async def _ask(self, work: Awaitable[T], who: str, field: str) -> T:
        return await deadlines.within(getattr(self._limits, field), work, who, field)

    async def _ask_serving(self, method: str, *args: Any) -> Any:
        """Asks between two steps; the time it takes is time that the trainer does not train."""
        async with self._lock:
            began = asyncio.get_running_loop().time()
            call = getattr(self._serving, method)(*args)
            try:
                return await self._ask(call, f"The trainer {self._serving.name}, asked for its {method},", "checkpoint")
            finally:
                self._phases.stall += asyncio.get_running_loop().time() - began

    # Ends -------------------------------------------------------------------------------------------------------

    async def _fail(self, successor: process_set.ProcessSet, error: protocols.LibraError) -> None:
        left = await self._clean(successor)
        why = "; ".join(filter(None, (str(error).rstrip("."), left.rstrip("."))))
        self._error = f"The move of the trainer to a mesh of {self._sizes} failed, and it stays where it is: {why}."
        self._enter("failed")

    async def _clean(self, successor: process_set.ProcessSet) -> str:
        """Ends the successor and removes the snapshot; returns what did not end as it should."""
        left = []
        try:
            await successor.stop()  # the cluster sees to its deadlines
        except protocols.LibraError as error:
            left.append(str(error))
        if self._writing:
            with contextlib.suppress(protocols.LibraError):  # that it could not be written matters no more
                await self._ask(self._told_saved(), f"The snapshot of {self._serving.name}", "checkpoint")
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
        await self._ask(removing, f"The removal of {self._folder}", "checkpoint")

    def _enter(self, phase: str) -> None:
        self._phase = phase
        self._arrived.set()

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            yield
        finally:
            setattr(self._phases, phase, getattr(self._phases, phase) + loop.time() - began)
