"""Limits for the code in a sandbox, the control groups that enforce them exactly, and the outcome of one call.

A process may make control groups (version 2) if it may manage a part of their tree (systemd's Delegate=yes). Without
one, a sandbox's first process counts memory and processes itself, every few hundredths of a second.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from libra_jax import config as config_lib
from libra_jax import protocols

Limits = config_lib.SandboxLimits
"""Limits for the code in one sandbox."""

_CONTROLLERS = {"memory", "pids"}
_REMOVE_SECONDS = 2.0


@dataclass(frozen=True)
class SandboxOutcome:
    """The outcome of a call, as data for the policy. A failed call has an outcome too.

    Attributes:
      status: Status of the call. "failure" also if the code raised, exited with a status other than 0, or hit a limit.
      text: Output and standard error, shortened in the middle if too long. A note in brackets follows if needed.
      seconds: Duration of the call in seconds.
      lost: Part of the session that the call lost: "" (nothing), "state" (the interpreter's) or "all" (files too).
      broken: True if the sandbox itself ended, fell silent or sent an invalid answer, and the code is not known to be
        the cause.
      by_code: True if the sandbox was ended because of its processes, its files or its usage. Never with `broken`.
      archive: The workspace's files as a tar, for `Session.save`.
    """

    status: protocols.ToolStatus
    text: str
    seconds: float
    lost: str = ""
    broken: bool = False
    by_code: bool = False
    archive: bytes = b""


def cut(text: str, max_characters: int) -> str:
    """Returns the text. If it is too long, returns its two ends and a mark with the number of characters left out."""
    if len(text) <= max_characters:
        return text
    head, tail = (max_characters + 1) // 2, max_characters // 2
    return f"{text[:head]}\n[... {len(text) - max_characters} characters left out ...]\n{text[len(text) - tail :]}"


def delegated(mounted: Path = Path("/sys/fs/cgroup"), group_file: Path = Path("/proc/self/cgroup")) -> Path | None:
    """Returns a group under which this process may make groups that limit memory and processes. None if there is none.

    In version 2, a group that limits others may hold no process itself, except the root. So the group is the parent of
    our own, or our own if it is the root.

    Args:
      mounted: Where the tree of version 2 is mounted.
      group_file: File that names this process's own group.
    """
    with contextlib.suppress(OSError):
        lines = group_file.read_text().splitlines()
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


class ControlGroup:
    """The control group of one sandbox. Call `close` after its processes have ended.

    Args:
      parent: Group that `delegated` found.
      limits: Limits of the sandbox.
      pid: Process to put into the group. Processes that it starts later are in the group too.

    Raises:
      OSError: The parent takes no group or no process. No group is left then.
    """

    def __init__(self, parent: Path, limits: Limits, pid: int) -> None:
        self.path = parent / f"libra-{uuid.uuid4().hex}"
        self.path.mkdir()
        try:
            # 3 more for the sandbox itself: its first process and two interpreters.
            (self.path / "pids.max").write_text(str(limits.processes + 3))
            (self.path / "memory.max").write_text(str(limits.memory_mib * 2**20))
            with contextlib.suppress(OSError):  # a machine without swap has no such file
                (self.path / "memory.swap.max").write_text("0")
            (self.path / "cgroup.procs").write_text(str(pid))
        except OSError:  # a delegated group can still refuse processes
            self.path.rmdir()
            raise

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
            (self.path / "cgroup.kill").write_text("1")
        until = time.monotonic() + _REMOVE_SECONDS
        while self.path.is_dir() and time.monotonic() < until:
            try:
                self.path.rmdir()
            except OSError:  # busy until the kernel has released the last process
                time.sleep(0.005)
