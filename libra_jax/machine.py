"""Identifies the machine, for its own processes and for others."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def identity() -> str:
    """Returns an id of the scope in which process ids and shared memory are the same: `<kernel boot>/<pid namespace>`.

    A container has its own namespace. If the boot id is not readable (in a sandbox's kernel, or outside Linux), the
    host's name replaces it.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = platform.node()
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = platform.system()
    return f"{boot}/{namespace}"
