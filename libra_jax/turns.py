"""Waits for one's turn: a deadline on work that queues behind another's counts from the begin of its own turn.

Whoever sets the deadline opens a `watched` block around the making of the task, and the work puts its waiting into a
`queued` block, however deep below. It holds inside one process; work in another is watched by nobody.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class Turn:
    """Whether a task waits for its turn now."""

    queued: bool = False


_turn: contextvars.ContextVar[Turn] = contextvars.ContextVar("turn")


@contextlib.contextmanager
def watched() -> Iterator[Turn]:
    """The turn of the tasks made in this block."""
    turn = Turn()
    token = _turn.set(turn)
    try:
        yield turn
    finally:
        _turn.reset(token)


@contextlib.contextmanager
def queued() -> Iterator[None]:
    """In this block the task waits for its turn."""
    turn = _turn.get(Turn())
    turn.queued = True
    try:
        yield
    finally:
        turn.queued = False
