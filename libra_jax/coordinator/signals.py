"""SIGINT, SIGTERM and SIGHUP as a request to stop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

ENDS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that leave a run the time of grace: a scheduler's, and that of a terminal or connection that is closed."""

Stop = Callable[[signal.Signals, float], None]
"""Given a signal, and the seconds since it came: while a library is imported, the event loop hears of nothing."""

AtOnce = Callable[[signal.Signals], None]
"""Given a signal on the main thread as soon as it comes, in the middle of whatever that does: it may set a variable."""


def caught_ends() -> list[signal.Signals]:
    """Returns those of `ENDS` that this process was not started to ignore."""
    return [number for number in ENDS if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def caught(stop: Stop, at_once: AtOnce = lambda _: None) -> Iterator[Callable[[], None]]:
    """Calls `stop` with the signal: at the first SIGINT (a second one has its usual effect), and at each of `ENDS`.

    SIGHUP stays ignored in a process that was started so (`nohup`).

    A person who presses Ctrl-C twice means it. Schedulers send SIGTERM to a job's processes and to a script that passes
    it on, so that a second one says nothing new.

    Yields what is to be called after libraries have been started that put handlers of their own in the place of these
    (Ray's prints a stack trace at SIGTERM, and aborts at the second).

    Catches nothing on a thread other than the main one, nor on an event loop that does not (a simulation's).
    """
    loop = asyncio.get_running_loop()
    numbers: list[signal.Signals] = []
    came: dict[int, float] = {}

    def heard(number: int, frame: FrameType | None) -> None:
        came.setdefault(number, time.monotonic())
        at_once(signal.Signals(number))

    def once(number: signal.Signals) -> None:
        if number not in numbers:  # two of a kind came before the first was handled
            return
        if number == signal.SIGINT:
            loop.remove_signal_handler(number)
            numbers.remove(number)
        stop(number, time.monotonic() - came.get(number, time.monotonic()))

    def catch(number: signal.Signals) -> None:
        loop.add_signal_handler(number, once, number)
        signal.signal(number, heard)  # in the place of asyncio's, which does nothing: its loop hears through a pipe
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
