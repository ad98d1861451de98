"""Checks of the values that user code returns: metrics, messages, tool returns and rewards."""

from __future__ import annotations

import collections
import contextvars
import math
import numbers
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import TypeGuard, get_args

from libra_jax import protocols

_METRIC = re.compile(r"[A-Za-z0-9_/]+")
"""Pattern of a metric's name. Files, charts and queries take such a name without quotes."""

counts: contextvars.ContextVar[collections.Counter[str]] = contextvars.ContextVar("counts")
"""Counts of the rollout whose environment runs. The toolboxes that the environment makes add to them."""


def metrics_problem(metrics: object) -> str:
    """Returns what keeps an object from being metrics; empty if it is a mapping from names to finite numbers."""
    if not isinstance(metrics, Mapping):
        return f"the metrics {shown(metrics)}, which are no mapping"
    for name, value in metrics.items():
        if not is_finite(value):
            return f"the metric {name!r:.80} = {shown(value)}, which is not a finite number"
        if not (isinstance(name, str) and _METRIC.fullmatch(name)):
            return f"a metric the name {name!r:.80}; use only letters, digits, _ and /"
    return ""


def messages_problem(messages: object) -> str:
    """Returns what keeps an object from being a list of messages, and what one is; empty if it is one."""
    expected = "instead of a list of protocols.Message(role, content)"
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        return f"{type(messages).__name__} {expected}"
    for message in messages:
        # By attributes and not by class, so that an environment's own kind of message will do.
        if not (hasattr(message, "role") and hasattr(message, "content")):
            return f"a list of {type(message).__name__} {expected}"
        if not isinstance(message.role, str):
            return f"a message with the role {message.role!r}; a role is a string, such as 'user'"
        if not isinstance(message.content, str):
            chat = "; if the data set's prompt is a chat, return a Message for each of its entries"
            hint = chat if isinstance(message.content, list) else ""
            return f"a message whose content is of type {type(message.content).__name__} and not a string{hint}"
    return ""


def returns_problem(answers: object) -> str:
    """Returns what keeps an object from being a list of tool returns, and what one is; empty if it is one."""
    if not isinstance(answers, Sequence) or isinstance(answers, str | bytes):
        return f"{type(answers).__name__} instead of a list of protocols.ToolReturn"
    statuses = get_args(protocols.ToolStatus)
    for answer in answers:
        if not isinstance(answer, protocols.ToolReturn):
            return f"a list of {type(answer).__name__} instead of protocols.ToolReturn"
        for name in ("tool", "content", "call", "error"):
            if not isinstance(value := getattr(answer, name), str):
                return f"a ToolReturn whose {name} is of type {type(value).__name__}"
        if answer.status not in statuses:
            return f"a ToolReturn with the status {shown(answer.status)}; a status is {', '.join(statuses)}"
        if not is_finite(answer.seconds):
            return f"a ToolReturn whose seconds are {shown(answer.seconds)}"
    return ""


def is_finite(value: object) -> TypeGuard[float]:
    """Returns whether a value is a number that a reward may be."""
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def shown(value: object) -> str:
    """Returns a user's value for a sentence."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python writes no integer of thousands of digits
        return f"one of type {type(value).__name__}"
