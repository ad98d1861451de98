"""Control groups of version 2, where this process was given a part of the tree to rule (systemd's Delegate=yes).

Without, a sandbox's first process counts memory and processes itself, every few hundredths of a second.
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
    """A group under which this process may make others that limit memory and processes; None where there is none.

    A group that limits others holds no process itself, so it is the parent of ours, or, at the root, our own.

    Args:
      mounted: where the tree of version 2 is mounted.
      own: tells our group.
    """
    with contextlib.suppress(OSError):
        lines = own.read_text().splitlines()
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
    """One sandbox's group. `close` removes it, once its processes are gone."""

    def __init__(self, parent: Path, limits: limits_module.Limits) -> None:
        self.path = parent / f"libra-{uuid.uuid4().hex}"
        self.path.mkdir()
        self._write("pids.max", limits.processes + 3)  # the sandbox's own: its first process and two interpreters
        self._write("memory.max", limits.memory_mib * 2**20)
        with contextlib.suppress(OSError):  # a machine without swap has no such file
            self._write("memory.swap.max", 0)

    def add(self, pid: int) -> None:
        """Puts a process in, and with it all that it starts from then on."""
        self._write("cgroup.procs", pid)

    def ran_out(self) -> bool:
        """Returns whether the kernel has killed a process of the group for its memory."""
        with contextlib.suppress(OSError):
            events = dict(line.split() for line in (self.path / "memory.events").read_text().splitlines())
            return int(events.get("oom_kill", 0)) > 0
        return False

    def close(self) -> None:
        """Kills what is left in it and removes it."""
        with contextlib.suppress(OSError):
            self._write("cgroup.kill", 1)
        until = time.monotonic() + _REMOVE_SECONDS
        while self.path.is_dir() and time.monotonic() < until:
            try:
                self.path.rmdir()
            except OSError:  # busy until the kernel has buried the last of them
                time.sleep(0.005)

    def _write(self, name: str, value: int) -> None:
        (self.path / name).write_text(str(value))
