"""Makes a process die together with its parent, no matter how the parent dies (Linux).

As a script, it becomes another program that dies this way: `python parent_death.py PARENT_ID PROGRAM ARGUMENTS...`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None) -> None:
    """Asks the kernel to send SIGKILL when the parent dies, even if the parent is killed with -9. Linux only.

    The kernel watches the parent's *thread* that started this process. That thread must live as long as the process.

    Args:
      parent: Process id of the parent, if known. If the process has another parent by now, it is too late, and it ends.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # If the parent died before the call above, the kernel never sends the signal.
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def command(program: list[str]) -> list[str]:
    """Returns the command that starts `program` so that it dies with this process. Costs a bare Python start, 15 ms."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *program]


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"{sys.argv[2]}: {error.strerror}")
