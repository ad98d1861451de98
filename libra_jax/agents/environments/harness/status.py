"""Reads the outcome of a tool call from the message that returns its result, as most agents write such messages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from libra_jax import protocols

UNNAMED = "tool"
"""Name of a tool whose call is not known, because calls are a part of the output's text."""

SHELL = "shell"
"""Name of the tool behind a user message that reports an exit status."""

_FAILURES = (
    "error", "exception", "traceback (most recent call last)", "an error occurred", "failed", "invalid tool call",
    "tool call error", "unknown tool",
)  # fmt: skip
"""Beginnings of a failure's text, in small letters."""

_TIMEOUTS = ("timeout", "timed out", "time out", "timeouterror", "error: timeout", "error: timed out")
"""Beginnings of a time-out's text, in small letters."""

_EXIT = re.compile(
    r"<returncode>\s*(-?\d+)\s*</returncode>|\breturn ?code:? *(-?\d+)"
    r"|\bexit(?:ed)?(?: with)? (?:code|status)\W{0,3}(-?\d+)",
    re.IGNORECASE,
)
_LATE = re.compile(r"\btim(?:ed|e) ?out\b", re.IGNORECASE)
_EDGE = 400
"""Characters at each end of a result that are searched for an exit status. Between them is what the tool printed."""


def read(call: protocols.ToolCall | None, message: protocols.Message) -> tuple[str, protocols.ToolStatus] | None:
    """Returns the name of the tool and the outcome of its call. See `protocols.ReadsStatus`.

    A result is a failure if the client says so (`Message.failed`), if it reports an exit status other than 0, or if
    it is a JSON object with `is_error`, `error` or `success: false`. It is one too if it begins with a word such as
    "error". It is a time-out if it says so at its beginning, or beside its exit status. A user message is a tool's
    result only if it reports an exit status.
    """
    text = message.content.strip()
    edges = text if len(text) <= 2 * _EDGE else f"{text[:_EDGE]}\n{text[-_EDGE:]}"
    reported = _EXIT.search(edges)
    if message.role != "tool" and call is None:
        if message.role != "user" or reported is None:
            return None
        return SHELL, _outcome(message, text, reported)
    return (call.name if call is not None and call.name else UNNAMED), _outcome(message, text, reported)


def _outcome(message: protocols.Message, text: str, reported: re.Match[str] | None) -> protocols.ToolStatus:
    start = text[:80].lower().lstrip("[({<*#_ ")
    if start.startswith(_TIMEOUTS):
        return "timeout"
    fields = _fields(text)
    if fields.get("timed_out") or fields.get("timeout") is True or fields.get("status") == "timeout":
        return "timeout"
    status = next((fields[name] for name in ("exit_code", "returncode", "exit_status") if name in fields), None)
    if status is None and reported is not None:
        status = int(next(group for group in reported.groups() if group is not None))
    if status not in (None, 0):
        # Agents report a command that was killed for its deadline with a status and a word.
        return "timeout" if status == 124 or _LATE.search(text[:_EDGE]) else "failure"
    bad = fields.get("is_error") or fields.get("error") or fields.get("success") is False
    bad = bad or fields.get("status") in ("error", "failure", "failed")
    if message.failed or bad or (status is None and start.startswith(_FAILURES)):
        return "failure"
    return "success"


def _fields(text: str) -> Mapping[str, Any]:
    if not text.startswith("{"):
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
