"""An event loop on a virtual clock: nothing waits, time jumps to the next timer.

Whatever reads time from the event loop alone, as the coordinator does, runs on it unchanged, as fast as the machine
computes, and repeats exactly.
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
"""Cancelled timers that may stay in the heap besides as many as there are live ones."""

MOMENT = 1e-9
"""Seconds within which timers count as due together."""


class Clock(asyncio.SelectorEventLoop):
    """The loop. It refuses to wait for ever: with no timer left, or past `longest`, it raises AssertionError.

    Attributes:
      now: seconds of virtual time since the loop was made.
      longest: virtual seconds after which a run that still waits is taken for a deadlock.
    """

    longest = 50_000.0

    def __init__(self, longest: float | None = None, *, signals: bool = True) -> None:
        super().__init__()
        self.now = 0.0
        self.longest = self.longest if longest is None else longest
        self._signals = signals
        self._failed = False
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []  # those of one time as they were asked for
        self._asked = 0
        self._poll = self._selector.select  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now

    def add_signal_handler(self, sig: int, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """asyncio's own, where signals are to be caught.

        Raises:
          NotImplementedError: they are not.
        """
        if not self._signals:
            raise NotImplementedError("this run catches no signals")
        super().add_signal_handler(sig, callback, *args)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """asyncio's own, with a heap that compares numbers instead of handles."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        timer._scheduled = True  # type: ignore[attr-defined]
        self._asked += 1
        heapq.heappush(self._timers, (when, self._asked, timer))
        return timer

    def run_in_executor(  # type: ignore[override]
        self, executor: concurrent.futures.Executor | None, function: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Runs what asyncio would give to a thread in place, in no time: the clock does not wait for threads."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _run_once(self) -> None:
        """Passes of the loop, until time has to go on: asyncio's own without slow-callback checks and idle polls."""
        timers, ready = self._timers, self._ready  # type: ignore[attr-defined]
        while True:
            if self._timer_cancelled_count > max(CANCELLED, len(timers) // 2):  # type: ignore[has-type]
                timers[:] = [entry for entry in timers if not entry[2]._cancelled]
                heapq.heapify(timers)
                self._timer_cancelled_count = 0
            while timers and timers[0][2]._cancelled:
                heapq.heappop(timers)
                self._timer_cancelled_count -= 1
            if not ready and not self._stopping:  # type: ignore[attr-defined]
                self._advance(timers[0][0] if timers else None)
            due = self.now + MOMENT
            while timers and timers[0][0] < due:
                timer = heapq.heappop(timers)[2]
                timer._scheduled = False  # type: ignore[attr-defined]
                ready.append(timer)
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()
            if not ready or self._stopping:  # type: ignore[attr-defined]
                return

    def _advance(self, when: float | None) -> None:
        """Jumps to the next timer where asyncio would have slept until it."""
        if when is not None and when <= self.now:  # there is work at this very instant
            return
        events: list[Any] = self._poll(0)
        if events:
            self._process_events(events)  # type: ignore[attr-defined]
            return
        if not self._failed and (when is None or self.now > self.longest):
            self._failed = True  # what is left is only torn down
            raise AssertionError("deadlock: nothing is left that could end this")
        if when is not None:
            self.now = when


def run(main: Coroutine[Any, Any, T], *, longest: float | None = None, signals: bool = True) -> T:
    """Runs `main` on a fresh virtual clock.

    Args:
      main: what to run.
      longest: virtual seconds it may take.
      signals: `main` may catch them; else they end it at once, whatever it would do.
    """
    with asyncio.Runner(loop_factory=lambda: Clock(longest, signals=signals)) as runner:
        return runner.run(main)
