"""An event loop on a virtual clock: nothing waits, and time jumps to the next timer.

Code that reads time only from the event loop, such as the coordinator, runs on it unchanged. It runs as fast as the
machine computes, and repeats exactly.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import heapq
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

CANCELLED = 100
"""Cancelled timers that may always stay in the heap; more are removed once they are over half of it."""

MOMENT = 1e-9
"""Seconds within which timers count as due together."""


class Clock(asyncio.SelectorEventLoop):
    """The virtual event loop. It raises AssertionError if no timer is left, or after `longest` virtual seconds.

    Attributes:
      now: seconds of virtual time since the loop was made.
      longest: virtual seconds after which a run that still waits counts as deadlocked.
    """

    longest = 50_000.0

    def __init__(self, longest: float | None = None, *, signals: bool = True) -> None:
        super().__init__()
        self.now = 0.0
        self.longest = self.longest if longest is None else longest
        self._signals = signals
        self._failed = False
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []  # those of one time fire in order of request
        self._asked = 0
        self._poll = self._selector.select  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now

    def add_signal_handler(self, sig: int, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """Adds asyncio's own signal handler if this run catches signals.

        Raises:
          NotImplementedError: this run catches no signals.
        """
        # The coordinator takes this error for a platform without signals, and lets them end the run.
        if not self._signals:
            raise NotImplementedError("this run catches no signals")
        super().add_signal_handler(sig, callback, *args)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Schedules as asyncio does, with a heap that compares numbers instead of handles."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        timer._scheduled = True  # type: ignore[attr-defined]
        self._asked += 1
        heapq.heappush(self._timers, (when, self._asked, timer))
        return timer

    def run_in_executor(  # type: ignore[override]
        self, executor: concurrent.futures.Executor | None, function: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Runs the function at once, in no virtual time: the clock does not wait for threads."""
        # A real thread would run in wall time, in which the virtual clock could jump over any deadline.
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _run_once(self) -> None:
        """Runs passes of the loop until time has to move on: asyncio's own without slow-callback checks and idle
        polls."""
        timers, ready = self._timers, self._ready  # type: ignore[attr-defined]
        while True:
            # Cancelled timers stay in the heap until they surface; without this a long run would fill with them.
            if self._timer_cancelled_count > max(CANCELLED, len(timers) // 2):  # type: ignore[has-type]
                timers[:] = [entry for entry in timers if not entry[2]._cancelled]
                heapq.heapify(timers)
                self._timer_cancelled_count = 0
            while timers and timers[0][2]._cancelled:
                heapq.heappop(timers)
                self._timer_cancelled_count -= 1
            # Time moves only if no callback is ready.
            when = timers[0][0] if timers else None
            if not ready and not self._stopping and (when is None or when > self.now):  # type: ignore[attr-defined]
                events: list[Any] = self._poll(0)
                if events:
                    self._process_events(events)  # type: ignore[attr-defined]
                elif not self._failed and (when is None or self.now > self.longest):
                    self._failed = True  # the teardown may still wait, and must not fail again
                    raise AssertionError("deadlock: nothing is left that could end this")
                elif when is not None:  # asyncio would sleep until then
                    self.now = when
            due = self.now + MOMENT
            while timers and timers[0][0] < due:
                timer = heapq.heappop(timers)[2]
                timer._scheduled = False  # type: ignore[attr-defined]
                ready.append(timer)
            # Only those that are ready now, as asyncio does: what they schedule comes after due timers.
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()
            if not ready or self._stopping:  # type: ignore[attr-defined]
                return


def run(main: Coroutine[Any, Any, T], *, longest: float | None = None, signals: bool = True) -> T:
    """Runs `main` on a fresh virtual clock.

    Args:
      main: coroutine to run.
      longest: virtual seconds it may take; None takes `Clock.longest`.
      signals: lets `main` catch signals; without it a signal ends `main` at once.
    """
    with asyncio.Runner(loop_factory=lambda: Clock(longest, signals=signals)) as runner:
        return runner.run(main)
