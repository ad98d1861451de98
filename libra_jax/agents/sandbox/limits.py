"""Limits for the code in a sandbox, and the outcome of one call."""

from __future__ import annotations

from dataclasses import dataclass

from libra_jax import config, protocols

Limits = config.SandboxLimits
"""Limits for the code in one sandbox."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a call, as data for the policy. A failed call has an outcome too.

    Attributes:
      status: Status of the call. "failure" also if the code raised, exited with a status other than 0, or hit a limit.
      text: Output and standard error, shortened in the middle if too long. A note in brackets follows if needed.
      seconds: Duration of the call in seconds.
      lost: Part of the session that the call lost: "" (nothing), "state" (the interpreter's) or "all" (files too).
      broken: True if the sandbox itself ended, fell silent or sent an invalid answer, and the code is not known to be
        the cause.
      by_code: True if the sandbox was ended because of its processes, its files or its usage. Never with `broken`.
      archive: The workspace's files as a tar, for `Session.save`.
    """

    status: protocols.ToolStatus
    text: str
    seconds: float
    lost: str = ""
    broken: bool = False
    by_code: bool = False
    archive: bytes = b""


def cut(text: str, most: int) -> str:
    """Returns the text. If it is too long, returns its two ends and a mark with the number of characters left out."""
    if len(text) <= most:
        return text
    head, tail = (most + 1) // 2, most // 2
    return f"{text[:head]}\n[... {len(text) - most} characters left out ...]\n{text[len(text) - tail :]}"
