"""A temporary folder that does not outlive its process for long: what a killed one left, the next one removes.

A lock tells whether a folder's process lives, because process ids mean nothing in other containers that share the
folder of temporary files; the kernel gives a lock up with its process, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "libra-jax-"
LOCK = "lock"


class Scratch:
    """A folder of this process's own.

    Attributes:
      path: of it.
    """

    def __init__(self) -> None:
        _remove_abandoned()
        self.path, self._lock = _make()

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
                shutil.rmtree(file.parent, ignore_errors=True)
            finally:
                os.close(lock)
