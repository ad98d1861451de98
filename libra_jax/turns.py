"""Waits for a turn. If work queues behind other work, its deadline counts from the beginning of its own turn.

The code that sets the deadline makes the task inside a `watched` block. The work waits inside a `queued` block, at any
depth below. This works inside one process only; work in another process is not watched.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
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
    # Outside of a `watched` block nobody reads the flag.
    turn = _turn.get(Turn())
    turn.queued = True
    try:
        yield
    finally:
        turn.queued = False
