"""Which machine this is, to its processes and to others'."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def identity() -> str:
    """What tells where process ids and shared memory mean the same: `<the kernel's boot>/<namespace of process ids>`.

    A container has a namespace of its own. Where a sandbox's kernel, or a system other than Linux, does not tell its
    boot, the host's name stands for it.
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
