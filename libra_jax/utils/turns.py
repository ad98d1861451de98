"""Waits for a turn. If work queues behind other work, its deadline counts from the beginning of its own turn.

The code that sets the deadline makes the task inside a `watched` block. The work waits inside a `queued` block, at any
depth below. Work that needs its turn only for its first part can end the turn early (`ending`). This works inside one
process only; work in another process is not watched.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass
class Turn:
    """Tells whether a task waits for its turn now."""

    queued: bool = False


_turn: contextvars.ContextVar[Turn] = contextvars.ContextVar("turn")


@contextlib.contextmanager
def watched() -> Iterator[Turn]:
    """Yields the turn of the tasks that are made in this block."""
    turn = Turn()
    token = _turn.set(turn)
    try:
        yield turn
    finally:
        _turn.reset(token)


@contextlib.contextmanager
def queued() -> Iterator[None]:
    """Marks the task as waiting for its turn, during this block."""
    # Outside of a `watched` block no one reads the flag.
    turn = _turn.get(Turn())
    turn.queued = True
    try:
        yield
    finally:
        turn.queued = False


_end: contextvars.ContextVar[Callable[[], None]] = contextvars.ContextVar("end_turn", default=lambda: None)


@contextlib.contextmanager
def ended_by(end: Callable[[], None]) -> Iterator[None]:
    """Offers `end` to the work in this block. Any thread may call it, any number of times, also after the block."""
    token = _end.set(end)
    try:
        yield
    finally:
        _end.reset(token)


def ending() -> Callable[[], None]:
    """Returns a function that ends the turn of the present work, so that the next work's turn begins.

    Any thread may call it. It does nothing if the work has no turn, or if the turn has ended.
    """
    return _end.get()
