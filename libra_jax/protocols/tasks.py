"""Tasks, and the chat messages that pose them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Task:
    """One problem to solve.

    Attributes:
      prompt_id: id, unique in the run and stable across restarts.
      payload: data that the environment needs to pose and score the task; JSON-able.
    """

    prompt_id: str
    payload: Mapping[str, Any]


class TaskSource(Protocol):
    """Tasks by position: the data position is one integer, and a resume reads nothing twice."""

    def task(self, index: int) -> Task:
        """Returns the index-th training task. Any index >= 0 is valid (finite sources reshuffle in each pass)."""
        ...

    def evaluation_task(self, index: int) -> Task:
        """Returns the index-th held-out task; it is never a training task."""
        ...


@dataclass(frozen=True)
class Message:
    """A chat message; `role` is "system", "user", "assistant" or "tool"."""

    role: str
    content: str
