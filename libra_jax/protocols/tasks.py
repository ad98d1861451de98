"""Problems to attempt, and the messages in which they are posed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Task:
    """One problem to attempt.

    Attributes:
      prompt_id: unique in the run, stable across restarts.
      payload: what the environment needs to pose and score it; JSON-able.
    """

    prompt_id: str
    payload: Mapping[str, Any]


class TaskSource(Protocol):
    """Tasks by position, so that a data position is one integer and a resume re-reads nothing."""

    def task(self, index: int) -> Task:
        """The index-th training task; any index >= 0 is valid (finite sources reshuffle by epoch)."""
        ...

    def evaluation_task(self, index: int) -> Task:
        """The index-th held-out task; never among the training tasks."""
        ...


@dataclass(frozen=True)
class Message:
    """A chat message; `role` is "system", "user", "assistant" or "tool"."""

    role: str
    content: str
