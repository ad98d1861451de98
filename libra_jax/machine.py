"""Identifies the machine, for its own processes and for others, and writes sizes of memory for people."""

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


def bytes_text(count: float) -> str:
    """Formats a number of bytes for people, with three digits.

    >>> [bytes_text(count) for count in (12, 1536, 1.64e6, 24e9, 3e12)]
    ['12 B', '1.5 KiB', '1.56 MiB', '22.4 GiB', '2.73 TiB']
    """
    unit = 0
    while count >= 999.5 and unit < 4:  # three digits would round up to 1e+03
        count, unit = count / 1024, unit + 1
    return f"{count:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"
