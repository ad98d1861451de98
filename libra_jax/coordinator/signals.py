"""SIGINT and SIGTERM as a request to stop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def caught(stop: Callable[[signal.Signals], None]) -> Iterator[Callable[[], None]]:
    """Calls `stop` with the signal: at the first SIGINT (a second one has its usual effect), and at each SIGTERM.

    A person who presses Ctrl-C twice means it. Schedulers send SIGTERM to a job's processes and to a script that passes
    it on, so that a second one says nothing new.

    Yields what is to be called after libraries have been started that put handlers of their own in the place of these
    (Ray's prints a stack trace at SIGTERM, and aborts at the second).

    Catches nothing on a thread other than the main one, nor on an event loop that does not (a simulation's).
    """
    loop = asyncio.get_running_loop()
    numbers: list[signal.Signals] = []

    def once(number: signal.Signals) -> None:
        if number not in numbers:  # two of a kind came before the first was handled
            return
        if number == signal.SIGINT:
            loop.remove_signal_handler(number)
            numbers.remove(number)
        stop(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, once, number)
            numbers.append(number)

    def again() -> None:
        for number in numbers:
            loop.add_signal_handler(number, once, number)

    try:
        yield again
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
