"""An event loop on a virtual clock: nothing waits, time jumps to the next timer.

Whatever reads time from the event loop alone (design rule 1) runs on it unchanged, as fast as the machine computes,
and repeats exactly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


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
        self._poll, self._selector.select = self._selector.select, self._advance  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now

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
