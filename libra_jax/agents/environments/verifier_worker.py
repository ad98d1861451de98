"""The process in which `math-verify` compares answers: one request a line on standard input, one finding a line back.

A request that takes too much processor time ends the process by SIGPROF, which no library can put off; who started it
tells that from any other end. It ends with its parent, too.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Sequence
from typing import Any

from libra_jax import parent_death

_ADDRESSES = 4 * 2**30
"""Bytes that a comparison may have at most: beyond them it fails, and takes nothing from the machine."""


def find(given: str, accepted: Sequence[str]) -> dict[str, bool]:
    """Whether an answer is one of the accepted ones.

    Args:
      given: what was answered; the last expression that `math-verify` finds in it counts, marked ones before others.
      accepted: texts in LaTeX or plain.

    Returns:
      `right`, and `read`: whether there was an expression to compare.
    """
    import math_verify

    # Its own deadlines are signals' too, and would only say "wrong" of what it had no time for.
    read = math_verify.parse(given, parsing_timeout=None)
    right = any(
        math_verify.verify(math_verify.parse(text, parsing_timeout=None), read, timeout_seconds=None)
        for text in accepted
    )
    return {"right": bool(right), "read": bool(read)}


def main() -> None:
    """Serves until standard input ends."""
    parent_death.die_with_parent(int(sys.argv[1]))
    logging.disable()  # the library logs what it cannot read
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # text that a library prints is no answer

    def say(**told: Any) -> None:
        answers.write(json.dumps(told) + "\n")
        answers.flush()

    try:
        find("1", ["1"])  # imports all that comparisons need
    except Exception as error:
        say(problem=f"{type(error).__name__}: {error}")
        return
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESSES, _ADDRESSES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    say(ready=True)
    for line in sys.stdin:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, asked["seconds"])
        try:
            finding = find(asked["given"], asked["accepted"])
        except Exception:  # a text on which the library breaks is none that it can read
            finding = {"right": False, "read": False}
        signal.setitimer(signal.ITIMER_PROF, 0)
        say(**finding)


if __name__ == "__main__":
    main()
