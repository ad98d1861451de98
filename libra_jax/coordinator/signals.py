"""Turns SIGINT, SIGTERM and SIGHUP into a request to stop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

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
    came: dict[int, float] = {}

    def heard(number: int, frame: FrameType | None) -> None:
        came.setdefault(number, time.monotonic())
        at_once(signal.Signals(number))

    def once(number: signal.Signals) -> None:
        if number not in numbers:  # two signals of one kind arrived before the first was handled
            return
        if number == signal.SIGINT:
            # Restores the usual effect, so that a second Ctrl-C interrupts.
            loop.remove_signal_handler(number)
            numbers.remove(number)
        stop(number, time.monotonic() - came.get(number, time.monotonic()))

    def catch(number: signal.Signals) -> None:
        loop.add_signal_handler(number, once, number)
        # Replaces asyncio's handler, which does nothing: its loop gets signals through a pipe.
        signal.signal(number, heard)
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
