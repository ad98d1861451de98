"""An event loop on a virtual clock: nothing waits, time jumps to the next timer.

Whatever reads time from the event loop alone, as the coordinator does, runs on it unchanged, as fast as the machine
computes, and repeats exactly.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

CANCELLED = 100
"""Cancelled timers that may stay in the heap besides as many as there are live ones."""


class Clock(asyncio.SelectorEventLoop):
    """The loop. It refuses to wait for ever: with no timer left, or past `longest`, it raises AssertionError.

    Attributes:
      now: seconds of virtual time since the loop was made.
      longest: virtual seconds after which a run that still waits is taken for a deadlock.
    """

    longest = 50_000.0

    def __init__(self, longest: float | None = None) -> None:
        super().__init__()
        self.now = 0.0
        self.longest = self.longest if longest is None else longest
        self._failed = False
        self._clock_resolution = 1e-9
        self._poll = self._selector.select  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        """Passes of the loop, until time has to go on: asyncio's own without slow-callback checks and idle polls."""
        timers, ready = self._scheduled, self._ready  # type: ignore[attr-defined]
        while True:
            if self._timer_cancelled_count > max(CANCELLED, len(timers) // 2):  # type: ignore[has-type]
                for timer in timers:
                    timer._scheduled = not timer._cancelled
                timers[:] = [timer for timer in timers if not timer._cancelled]
                heapq.heapify(timers)
                self._timer_cancelled_count = 0
            while timers and timers[0]._cancelled:
                heapq.heappop(timers)._scheduled = False
                self._timer_cancelled_count -= 1
            if not ready:
                until = max(0.0, timers[0]._when - self.now) if timers else None
                self._process_events(self._advance(0 if self._stopping else until))  # type: ignore[attr-defined]
            due = self.now + self._clock_resolution
            while timers and timers[0]._when < due:
                timer = heapq.heappop(timers)
                timer._scheduled = False
                ready.append(timer)
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()
            if not ready or self._stopping:  # type: ignore[attr-defined]
                return

    def _advance(self, timeout: float | None = None) -> list[Any]:
        """Jumps to the next timer where asyncio would have slept until it."""
        if timeout == 0:  # there is work at this very instant
            return []
        events: list[Any] = self._poll(0)
        if not self._failed and not events and (timeout is None or self.now > self.longest):
            self._failed = True  # what is left is only torn down
            raise AssertionError("deadlock: nothing is left that could end this")
        if not events and timeout:
            # To the timer itself: now + timeout may fall short of it by a rounding error.
            self.now = max(self.now, self._scheduled[0].when())  # type: ignore[attr-defined]
        return events


def run(main: Coroutine[Any, Any, T], *, longest: float | None = None) -> T:
    """Runs `main` on a fresh virtual clock.

    Args:
      main: what to run.
      longest: virtual seconds it may take.
    """
    with asyncio.Runner(loop_factory=lambda: Clock(longest)) as runner:
        return runner.run(main)
