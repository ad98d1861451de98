"""A temporary folder that does not outlive its process for long: what a killed one left, the next one removes.

A lock tells whether a folder's process lives, because process ids mean nothing in other containers that share the
folder of temporary files; the kernel gives a lock up with its process, however that ends.

The folder also lists the named shared memory that the process's engine made. vLLM unlinks its segments itself, those of
`cpu_communicator._CPUSHMDistributed` (vllm_dist_*) for example, unless it is killed. Their names are random, and no
variable of vLLM turns them off. So only this list tells whose they are.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

PREFIX = "libra-jax-"
LOCK = "lock"
SEGMENTS = "segments"
"""File of a folder: name and inode of each segment of shared memory, one a line."""

SHARED_MEMORY = Path("/dev/shm")
OF_ENGINES = ("vllm_dist_", "psm_")
"""What the names of vLLM's and Python's own segments begin with; no other segment is removed."""


class Scratch:
    """A folder of this process's own.

    Attributes:
      path: of it.
    """

    def __init__(self) -> None:
        _remove_abandoned()
        self.path, self._lock = _make()

    def list_segments(self, names: Iterable[str]) -> None:
        """Lists segments of shared memory that go with this folder if its process is killed."""
        lines = []
        for name in names:
            with contextlib.suppress(OSError):  # it has gone
                lines.append(f"{(SHARED_MEMORY / name).stat().st_ino} {name}\n")
        (self.path / SEGMENTS).write_text("".join(lines))

    def close(self) -> None:
        """Removes it with all that is in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _make() -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        lock = os.open(path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (path / LOCK).exists():
            return path, lock
        os.close(lock)  # another process found it before it was locked, and removed it


def _remove_abandoned() -> None:
    for file in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError):  # it lives, or is somebody else's, or has gone meanwhile
            lock = os.open(file, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_segments(file.parent / SEGMENTS)
                shutil.rmtree(file.parent, ignore_errors=True)
            finally:
                os.close(lock)


def _remove_segments(listed: Path) -> None:
    """Removes the segments that a dead process listed; another process's segment of the same name has another inode."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in listed.read_text().splitlines():
            inode, _, name = line.partition(" ")
            if name.startswith(OF_ENGINES) and "/" not in name:
                with contextlib.suppress(OSError, ValueError):
                    if (SHARED_MEMORY / name).lstat().st_ino == int(inode):
                        (SHARED_MEMORY / name).unlink()
