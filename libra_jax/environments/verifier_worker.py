"""The process in which `math-verify` compares answers. Reads one request per line and writes one finding per line.

SIGPROF ends the process if a request takes too much processor time; no library can delay it. So the parent can tell
this end from any other. The process also ends with its parent.
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

from libra_jax.utils import parent_death

_ADDRESSES = 4 * 2**30
"""Bytes of address space that a comparison may use. A larger one fails, and does not exhaust the machine's memory."""


def find(answer: str, accepted: Sequence[str]) -> dict[str, bool]:
    """Returns `right`, whether an answer is one of the accepted ones, and `read`, whether it contains an expression.

    The last expression that `math-verify` finds in it counts; marked expressions come first.
    """
    import math_verify

    # The library's own time limits use signals too. They would report "wrong" for answers that it had no time to
    # compare.
    read = math_verify.parse(answer, parsing_timeout=None)
    right = any(
        math_verify.verify(math_verify.parse(text, parsing_timeout=None), read, timeout_seconds=None)
        for text in accepted
    )
    return {"right": bool(right), "read": bool(read)}


def main() -> None:
    """Serves requests until standard input ends."""
    parent_death.die_with_parent(int(sys.argv[1]))
    logging.disable()  # the library logs every text that it cannot read
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a library's own prints must not mix with the answers

    def say(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    try:
        find("1", ["1"])  # imports everything that comparisons need
    except Exception as error:
        say(problem=f"{type(error).__name__}: {error}")
        return
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESSES, _ADDRESSES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # A parent may ignore the signal, and its children would inherit that.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    say(ready=True)
    for line in sys.stdin:
        request = json.loads(line)
        # ITIMER_PROF counts processor time, so a busy machine does not cost an answer its time.
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        try:
            finding = find(request["given"], request["accepted"])
        except Exception:  # a text that breaks the library counts as not readable
            finding = {"right": False, "read": False}
        signal.setitimer(signal.ITIMER_PROF, 0)
        say(**finding)


if __name__ == "__main__":
    main()
