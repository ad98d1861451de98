"""A process that dies with the one that started it, however that one died (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None) -> None:
    """Asks the kernel for SIGKILL when the parent dies, killed with -9 or not.

    The kernel watches the parent's *thread* that started this process: it must live as long as the process.

    Args:
      parent: its process id, if known: who has another parent by now is too late, and ends.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
