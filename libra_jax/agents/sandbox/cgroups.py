"""Control groups (version 2), if this process may manage a part of the tree (systemd's Delegate=yes).

Without a control group, a sandbox's first process counts memory and processes itself, every few hundredths of a second.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from pathlib import Path

from libra_jax.agents.sandbox import limits as limits_module

_CONTROLLERS = {"memory", "pids"}
_REMOVE_SECONDS = 2.0


def delegated(mounted: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Path | None:
    """Returns a group under which this process may make groups that limit memory and processes. None if there is none.

    In version 2, a group that limits others may hold no process itself, except the root. So the group is the parent of
    our own, or our own if it is the root.

    Args:
      mounted: Where the tree of version 2 is mounted.
      own: File that names this process's own group.
    """
    with contextlib.suppress(OSError):
        lines = own.read_text().splitlines()
        # Version 2 has the hierarchy number 0; other lines belong to version 1.
        here = next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), None)
        if here is None:
            return None
        for group in (mounted / here, (mounted / here).parent):
            enabled = group / "cgroup.subtree_control"
            inside = group == mounted or mounted in group.parents
            ours = inside and enabled.is_file() and os.access(group, os.W_OK)
            if ours and set(enabled.read_text().split()) >= _CONTROLLERS:
                return group
    return None


class Group:
    """The control group of one sandbox. Call `close` after its processes have ended."""

    def __init__(self, parent: Path, limits: limits_module.Limits) -> None:
        self.path = parent / f"libra-{uuid.uuid4().hex}"
        self.path.mkdir()
        # 3 more for the sandbox itself: its first process and two interpreters.
        self._write("pids.max", limits.processes + 3)
        self._write("memory.max", limits.memory_mib * 2**20)
        with contextlib.suppress(OSError):  # a machine without swap has no such file
            self._write("memory.swap.max", 0)

    def add(self, pid: int) -> None:
        """Puts a process into the group. Processes that it starts later are in the group too."""
        self._write("cgroup.procs", pid)

    def ran_out(self) -> bool:
        """Returns whether the kernel has killed a process of the group because memory ran out."""
        with contextlib.suppress(OSError):
            events = dict(line.split() for line in (self.path / "memory.events").read_text().splitlines())
            return int(events.get("oom_kill", 0)) > 0
        return False

    def close(self) -> None:
        """Kills the processes that are left in the group, and removes it."""
        with contextlib.suppress(OSError):
            # Kernels before 5.14 have no such file.
            self._write("cgroup.kill", 1)
        until = time.monotonic() + _REMOVE_SECONDS
        while self.path.is_dir() and time.monotonic() < until:
            try:
                self.path.rmdir()
            except OSError:  # busy until the kernel has released the last process
                time.sleep(0.005)

    def _write(self, name: str, value: int) -> None:
        (self.path / name).write_text(str(value))
