"""Stops a run from outside: for a person, who can wait for a training step, or for a scheduler, which cannot.

A scheduler that takes a machine back (a time limit, a pre-emption, a drained node) sends SIGTERM, and SIGKILL some
seconds later: Slurm's `--signal=TERM@SECONDS`, Kubernetes's `terminationGracePeriodSeconds`. Within these seconds
(`config.deadlines.grace`) the run has to write a checkpoint and end. A closed terminal sends SIGHUP, which has the same
meaning. The constants are shares of the grace:

    from the signal on     the run waits for the step under way
    STEP                   the step is aborted between two micro-batches; its groups return to the waiting ones
    ANSWER                 a trainer that has not answered is abandoned: the checkpoint before this one counts
    SAVE                   a checkpoint that is not durable yet is abandoned; the one before it counts
    the rest               workers end

At any of these points, no group is lost and none is trained twice: the newest manifest decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, TypeVar

from libra_jax import protocols
from libra_jax.utils import background_tasks, deadlines, run_context

T = TypeVar("T")


class Stopped(Exception):
    """Raised if a person or a scheduler stops the run; not an error."""


class RunScope(background_tasks.BackgroundTasks):
    """The end of the run, and the background tasks that end with it: the run's `protocols.Scope`.

    It belongs to the event loop that first uses it.
    """

    # The futures are made at their first use, because a run is described before its event loop runs.
    @functools.cached_property
    def _end(self) -> asyncio.Future[None]:
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Retrieve the exception, or asyncio warns about it if no one awaits the end.
        end.add_done_callback(lambda end: end.exception())
        return end

    @functools.cached_property
    def hurry(self) -> asyncio.Future[None]:
        """Done once no work may be awaited to its end any more: `race` then abandons work that it awaits."""
        return asyncio.get_running_loop().create_future()

    @property
    def called(self) -> bool:
        return self._end.done()

    def call(self, error: BaseException) -> None:
        if not self._end.done():
            self._end.set_exception(error)

    def check(self) -> None:
        """Raises the error that ends the run, if there is one."""
        if self._end.done():
            self._end.result()

    async def race(self, work: Coroutine[Any, Any, T], *, through_stop: bool = False) -> T:
        """Awaits `work`, or raises the run's end at once. In that case `work` is cancelled and not awaited.

        Args:
          work: the coroutine to await.
          through_stop: if True and a person or a scheduler stops the run, `work` is still awaited to its end, unless
            `hurry` is done.
        """
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, self._end}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and through_stop and isinstance(self._end.exception(), Stopped):
                either = {task, self.hurry}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._end.result()
            return task.result()
        finally:
            deadlines.abandon(task)


# Signals ------------------------------------------------------------------------------------------------------------

ENDS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that leave a run the time of grace: from a scheduler, or from a terminal or connection that closes."""

Stop = Callable[[signal.Signals, float], None]
"""Takes a signal and the seconds since it arrived: the event loop may be late, for instance during an import."""

AtOnce = Callable[[signal.Signals], None]
"""Takes a signal on the main thread as soon as it arrives, in the middle of other code. It may only set a variable."""


def caught_ends() -> list[signal.Signals]:
    """Returns those of `ENDS` that this process was not started to ignore."""
    return [number for number in ENDS if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def caught(stop: Stop, at_once: AtOnce = lambda _: None) -> Iterator[Callable[[], None]]:
    """Calls `stop` at the first SIGINT and at each of `ENDS`. A second SIGINT has its usual effect.

    SIGHUP stays ignored in a process that was started so (`nohup`).

    A person who presses Ctrl-C twice means it. Schedulers send SIGTERM to a job's processes and also to a script that
    passes it on, so a second SIGTERM says nothing new.

    Yields a function to call after libraries have started that replace these handlers. (Ray's handler prints a stack
    trace at SIGTERM, and aborts at the second.)

    Catches nothing on a thread other than the main one, nor on an event loop without signal handlers (a simulation's).
    """
    loop = asyncio.get_running_loop()
    numbers: list[signal.Signals] = []
    arrival_times: dict[int, float] = {}

    def on_signal(number: int, frame: FrameType | None) -> None:
        arrival_times.setdefault(number, time.monotonic())
        at_once(signal.Signals(number))

    def once(number: signal.Signals) -> None:
        # Two signals of one kind may have arrived before the first was handled.
        if number not in numbers:
            return
        if number == signal.SIGINT:
            # Restores the usual effect, so that a second Ctrl-C interrupts.
            loop.remove_signal_handler(number)
            numbers.remove(number)
        stop(number, time.monotonic() - arrival_times.get(number, time.monotonic()))

    def catch(number: signal.Signals) -> None:
        loop.add_signal_handler(number, once, number)
        # Replaces asyncio's handler, which does nothing: its loop gets signals through a pipe.
        signal.signal(number, on_signal)
        signal.siginterrupt(number, False)

    for number in (signal.SIGINT, *caught_ends()):
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            catch(number)
            numbers.append(number)

    def again() -> None:
        for number in numbers:
            catch(number)

    try:
        yield again
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


# Shares of the grace. A step still under way at STEP is aborted, and a trainer that does not answer by ANSWER is
# waited for no longer. The last checkpoint may take until SAVE, because ending the workers needs the rest.
STEP, ANSWER, SAVE = 0.5, 0.7, 0.85


class Stopping:
    """Stops a run on request. Create it inside the event loop that it serves.

    Args:
      run: what the parts of the run share. `deadlines.grace` is the time from SIGTERM to the end.
      abort_step: asks the trainer to abort the step under way; called only during a step.

    Attributes:
      terminated: True if a scheduler stopped the run.
      in_step: True during a training step; set by the run.
    """

    def __init__(
        self,
        run: run_context.RunContext,
        ending: RunScope,
        abort_step: Callable[[], Coroutine[Any, Any, Any]],
    ) -> None:
        self._grace = run.config.deadlines.grace
        self._ending = ending
        self._recorder = run.recorder
        self._abort_step = abort_step
        self._loop = asyncio.get_running_loop()
        self._began = math.inf
        self._timers: list[asyncio.TimerHandle] = []
        self.terminated = False
        self.in_step = False

    def stop(self, number: signal.Signals, late: float = 0.0) -> None:
        """Stops the run, with a checkpoint: after the training step under way, or within the grace if `ENDS` asks.

        Args:
          number: the signal. A second one of `ENDS` has no further effect.
          late: seconds since the signal arrived.
        """
        if number not in ENDS:
            self._recorder.note("Stopping after the training step under way; a second Ctrl-C ends at once.")
            self._ending.call(Stopped())
            return
        if self.terminated:
            return
        # The grace counts from the signal's arrival, not from its handling.
        self.terminated, self._began = True, self._loop.time() - late

        def end_step() -> None:
            if self.in_step:
                self._ending.start(self._abort_step(), "abort the step")

        self._timers = [
            self._loop.call_at(self._began + STEP * self._grace, end_step),
            self._loop.call_at(self._began + ANSWER * self._grace, self._ending.hurry.set_result, None),
        ]
        within = f"within config.deadlines.grace = {self._grace:g} s"
        self._recorder.note(f"{number.name}: stopping, with a checkpoint, {within}.")
        self._ending.call(Stopped())

    def seconds_until(self, share: float) -> float:
        """Returns the seconds until a share of the grace has passed, at least 0; infinite without SIGTERM."""
        return max(0.0, self._began + share * self._grace - self._loop.time())

    async def unsaved(self, saving: Coroutine[Any, Any, Any]) -> str:
        """Awaits the last checkpoint while a scheduler leaves time for it. Returns why none was written, or "".

        Raises:
          LibraError: the checkpoint failed. During a scheduler's stop, a lost worker is no error, because its node may
            be ending too.
        """
        late = f"did not fit into config.deadlines.grace = {self._grace:g} s"
        # The trainer is in its step, so it would not take the call before the grace is over.
        if self._ending.hurry.done():
            saving.close()
            return late
        try:
            await asyncio.wait_for(saving, self.seconds_until(SAVE) if self.terminated else None)
        except TimeoutError:
            return late
        except (protocols.WorkerLost, protocols.DeadlineMissed) as error:
            self.lost(error)
            return "was not taken, because the trainer is lost or does not answer"
        return ""

    def lost(self, error: protocols.LibraError) -> None:
        """Raises the loss of a worker, unless a scheduler is stopping the run anyway."""
        if not self.terminated:
            raise error
        self._recorder.note(f"Lost while the run was being stopped: {error}")

    def close(self) -> None:
        """Cancels all timers."""
        for timer in self._timers:
            timer.cancel()
