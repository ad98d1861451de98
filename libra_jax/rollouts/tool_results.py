"""Reads what tools returned off the messages of a harness's requests.

A harness runs its tools itself, so the run sees only the text of their returns. `status` knows the usual conventions of
agents. A harness with conventions of its own has a method `status` (`protocols.ReadsStatus`).
"""

from __future__ import annotations

import re
from collections.abc import Callable

from libra_jax import protocols
from libra_jax.chat import messages
from libra_jax.utils import resolving, user_code

ReadStatus = Callable[[protocols.ToolCall | None, protocols.Message], tuple[str, protocols.ToolStatus] | None]
"""Reads tool and outcome from a message (`protocols.ReadsStatus.status`)."""

_HEAD = 400
"""Characters at each end of a return that are searched for the words of a failure."""

_TIMEOUT = re.compile(r"\b(timed out|timeout expired|time limit exceeded|deadline exceeded)\b", re.IGNORECASE)
_FAILURE = re.compile(r"\s*(error\b|traceback \(most recent call last\)|exception\b|failed\b)", re.IGNORECASE)
_EXIT = re.compile(
    r"(?:<returncode>|\bexit(?:ed with)? (?:code|status)[: ]+|\breturncode[: =]+)\s*(-?\d+)", re.IGNORECASE
)
_TIMEOUT_EXITS = (124,)
"""Exit status of coreutils' `timeout`."""


def status(call: protocols.ToolCall | None, message: protocols.Message) -> tuple[str, protocols.ToolStatus] | None:
    """Returns the tool and the outcome of its call, by the usual conventions.

    A message of role "tool" is a tool's return. So is a message of another role that names an exit status, as agents
    that run commands from the model's text write it; its tool is "command".

    - "timeout": the text says that time ran out, or the exit status is 124.
    - "failure": the exit status is not 0, the JSON object in the text has an "error" that is not empty, or the text
      begins with an error, an exception or a traceback.
    - "success": everything else, unless the client marks the call as failed (`ChatRequest.failed_calls`).
    """
    text = message.content
    ends = text if len(text) <= 2 * _HEAD else f"{text[:_HEAD]}\n{text[-_HEAD:]}"
    exits = _EXIT.search(ends)
    if message.role != "tool" and exits is None:
        return None
    name = call.name if call is not None else "tool" if message.role == "tool" else "command"
    if exits is not None:
        code = int(exits.group(1))
        return name, "timeout" if code in _TIMEOUT_EXITS else "failure" if code else "success"
    failed = _FAILURE.match(text) is not None or _says_error(text)
    if failed and _TIMEOUT.search(ends):
        return name, "timeout"
    return name, "failure" if failed else "success"


_ERROR = re.compile(r"\b([A-Z][A-Za-z]{0,60}(?:Error|Exception))\b")

_ERROR_ENDS = 2_000
"""Characters at the end of a return that are searched for the name of an error."""

_CALLS = (
    (
        "test",
        re.compile(
            r"\b(pytest|unittest|tox|nox|ctest|jest|(npm|go|cargo|make|mvn) (run )?test)\b"
            r"|(\b(python3?|bash|sh|node)\s+|\./)\S*\btests?[/_]"
        ),
    ),
    ("edit", re.compile(r"\bsed\s+-i|<<\s*\S|\btee\b|\bpatch\b|\bgit apply\b|(?<![0-9&>])>{1,2}\s*[\w./~]")),
    ("install", re.compile(r"\b(pip3?|uv|conda|apt|apt-get|npm|yarn|cargo) (-\S+ )*(install|add|i)\b")),
    ("read", re.compile(r"^\s*(cd \S+\s*(&&|;)\s*)?(ls|cat|head|tail|grep|rg|find|wc|file|tree|sed|awk|pwd|stat)\b")),
)
"""What commands do, the first that fits."""


def error(text: str) -> str:
    """Returns the class of the error that the return of a failed call names, by the usual conventions; or nothing.

    The last name of an exception counts ("ImportError"), and else an exit status ("exit 1").
    """
    error_names = _ERROR.findall(text[-_ERROR_ENDS:])
    if error_names:
        return str(error_names[-1])
    exits = _EXIT.search(text[-_ERROR_ENDS:])
    return f"exit {exits.group(1)}" if exits is not None and int(exits.group(1)) else ""


def call(tool_call: protocols.ToolCall | None) -> str:
    """Returns what a call that runs a command does: test, edit, install or read; nothing for all others."""
    if tool_call is None or len(tool_call.arguments) > 2**20:
        return ""
    arguments = messages.json_object(tool_call.arguments) or {}
    command = arguments.get("command", arguments.get("cmd"))
    if not isinstance(command, str):
        return ""
    return next((name for name, pattern in _CALLS if pattern.search(command[:_ERROR_ENDS])), "")


def _says_error(text: str) -> bool:
    if not text.lstrip().startswith("{") or len(text) > 2**20:
        return False
    return bool((messages.json_object(text) or {}).get("error"))


def checked(
    read: Callable[[protocols.ToolCall | None, protocols.Message], object],
    crash: Callable[[str, str], protocols.EnvironmentCrashed],
) -> ReadStatus:
    """Returns a harness's own `status` that crashes its rollout if it raises or returns something else.

    Args:
      read: the harness's method.
      crash: makes the error from the method's name and what it did.
    """

    def status(call: protocols.ToolCall | None, message: protocols.Message) -> tuple[str, protocols.ToolStatus] | None:
        try:
            with user_code.contain_exits():
                result = read(call, message)
        except Exception as error:
            raise crash("status", resolving.raised(error)) from error
        if result is None:
            return None
        statuses: tuple[protocols.ToolStatus, ...] = ("success", "failure", "timeout")
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], str) and result[1] in statuses:
            return result[0], statuses[statuses.index(result[1])]
        raise crash("status", f"returned {result!r:.80} instead of a tool's name and one of {', '.join(statuses)}")

    return status
