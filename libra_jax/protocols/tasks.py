"""Tasks, and the chat messages that pose them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Task:
    """One problem to solve.

    Attributes:
      prompt_id: id, unique in the run and stable across restarts.
      payload: data that the environment needs to pose and score the task; JSON-able.
      repeats: id of the first task with this prompt, if a later pass over the tasks poses it again; else empty. What
        is known of a prompt (`algorithm.budget`, `task.order`) goes by it.
    """

    prompt_id: str
    payload: Mapping[str, Any]
    repeats: str = ""

    @property
    def prompt(self) -> str:
        """Id that the task shares with others of the same prompt."""
        return self.repeats or self.prompt_id

    def copy(self) -> Task:
        """Returns the task with a payload of its own, which user code may change."""
        return dataclasses.replace(self, payload=copy_data(self.payload))


def copy_data(value: Any) -> Any:
    """Returns a deep copy of JSON-able data, several times faster than `copy.deepcopy`. Shares what has no copy."""
    kind = type(value)
    if kind is dict:
        return {key: copy_data(item) for key, item in value.items()}
    if kind is list:
        return [copy_data(item) for item in value]
    if kind in (str, int, float, bool, type(None)):
        return value
    try:
        return copy.deepcopy(value)
    except TypeError:  # a lock or an open file, for example, which only a Python program can put there
        return value


class TaskSource(Protocol):
    """Tasks by position: the data position is one integer, and a resume reads nothing twice.

    A finite source may have `__len__`, the number of its training tasks. `task.order=success` and
    `algorithm.budget=knapsack` need it. The tasks at the indices below that number are all different.
    """

    def task(self, index: int) -> Task:
        """Returns the index-th training task. Any index >= 0 is valid (finite sources reshuffle in each pass)."""
        ...

    def evaluation_task(self, index: int) -> Task:
        """Returns the index-th held-out task; it is never a training task."""
        ...


@dataclass(frozen=True)
class ToolCall:
    """A call in an assistant message.

    Attributes:
      call_id: id by which a tool message refers to the call.
      name: name of the tool.
      arguments: the arguments as JSON text.
    """

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """A chat message.

    Attributes:
      role: "system", "user", "assistant" or "tool".
      content: text of the message.
      tool_calls: calls of an assistant message that a tool parser has read; empty if calls stay in the text.
      tool_call_id: call that a tool message answers.
      reasoning: text that the model thought before its answer, if a parser has taken it out of the content.
      name: name of the tool or participant that wrote the message, for templates that show it; empty if not known.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""
    name: str = ""
