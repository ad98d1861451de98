"""What the code in a sandbox may use, and what a call of it came to."""

from __future__ import annotations

from dataclasses import dataclass

from libra_jax import config, protocols

Limits = config.SandboxLimits
"""What the code in one sandbox may use."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a call: data for the policy, failures included.

    Attributes:
      status: "failure" also if the code raised, exited with another status than 0, or met a limit.
      text: output with standard error, cut in the middle and marked; then, in brackets, what happened to the call.
      seconds: seconds that the call took.
      lost: what of the session went with it: nothing (""), the interpreter's "state", or "all", its files included.
      broken: the sandbox itself ended, fell silent or answered nonsense, which is no doing of the code's as far as
        anyone can tell.
      by_code: the sandbox was given up because of its processes, its files or what it used. Never with `broken`.
      archive: of `Session.save`: the workspace's files, as a tar.
    """

    status: protocols.ToolStatus
    text: str
    seconds: float
    lost: str = ""
    broken: bool = False
    by_code: bool = False
    archive: bytes = b""


def cut(text: str, most: int) -> str:
    """The text, or its two ends with a mark between them that tells how many characters were left out."""
    if len(text) <= most:
        return text
    head, tail = (most + 1) // 2, most // 2
    return f"{text[:head]}\n[... {len(text) - most} characters left out ...]\n{text[len(text) - tail :]}"
