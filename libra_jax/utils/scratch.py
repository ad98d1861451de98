"""Temporary folders of one process. If the process is killed, the next process removes its folders.

A file lock shows whether a folder's process lives. Process ids would mean nothing to other containers that share the
temporary directory. The kernel releases a lock when its process ends in any way.

A folder also shows the named shared memory of the process's engine. vLLM unlinks its own segments, for example those
of `cpu_communicator._CPUSHMDistributed` (vllm_dist_*), unless it is killed. Their names are random, and no variable of
vLLM turns them off. The folder lists the segments, and has the file at which vLLM's workers meet, whose name begins
those of `_CPUSHMDistributed`.

Other users may write into a shared temporary directory. So only folders of this user, which no one else can enter, are
looked into.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import glob
import os
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path

PREFIX = "libra-jax-"
RAY_PREFIX = "libra-ray-"
"""Prefix of Ray's folders, followed by a process id, by which leftovers are removed (`cluster.ray_runtime`)."""

LOCK = "lock"
SEGMENTS = "segments"
"""File in the folder with one line for each shared-memory segment: its inode and its name."""

SHARED_MEMORY = Path("/dev/shm")
MEETING = "vllm_dist_"
"""Prefix of the file at which vLLM's workers meet, and of their segments."""

OF_ENGINES = (MEETING, "psm_")
"""Prefixes of vLLM's and Python's own segments. No other segment is removed."""

LONGEST_TEMPORARY = 51
"""Longest temporary directory for sockets, in bytes. Our folder and vLLM's name add 56, and the kernel allows 107."""


def is_ours(folder: Path) -> bool:
    """Returns whether a folder, not a link to one, belongs to this user alone."""
    with contextlib.suppress(OSError):
        status = folder.lstat()
        return (
            status.st_uid == os.getuid() and stat.S_ISDIR(status.st_mode) and not stat.S_IMODE(status.st_mode) & 0o077
        )
    return False


class Scratch:
    """A temporary folder of this process.

    Args:
      sockets: sockets will be bound in the folder. It is in /tmp if the path of the temporary directory is too long.

    Attributes:
      path: path of the folder.
    """

    def __init__(self, *, sockets: bool = False) -> None:
        temporary = tempfile.gettempdir()
        if sockets and len(os.fsencode(temporary)) > LONGEST_TEMPORARY:
            temporary = "/tmp"
        # Removes the folders of dead processes, and the shared-memory segments that they show.
        for file in Path(temporary).glob(f"{PREFIX}*/{LOCK}"):
            if not is_ours(file.parent):
                continue
            with contextlib.suppress(OSError):  # its process lives, or it is gone
                lock = os.open(file, os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    with contextlib.suppress(OSError, UnicodeDecodeError):
                        for line in (file.parent / SEGMENTS).read_text().splitlines():
                            inode, _, name = line.partition(" ")
                            if name.startswith(OF_ENGINES) and "/" not in name:
                                with contextlib.suppress(OSError, ValueError):
                                    # The inode tells the segment from a later one of the same name.
                                    if (SHARED_MEMORY / name).lstat().st_ino == int(inode):
                                        (SHARED_MEMORY / name).unlink()
                    # A process that was killed while its engine started has listed nothing yet.
                    for meeting in file.parent.glob(f"{MEETING}*"):
                        for segment in SHARED_MEMORY.glob(f"{glob.escape(meeting.name)}-*"):
                            with contextlib.suppress(OSError):
                                segment.unlink()
                    remove(file.parent)
                finally:
                    os.close(lock)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=temporary))
            self._lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if (self.path / LOCK).exists():
                return
            os.close(self._lock)  # another process removed the folder before it was locked

    def list_segments(self, names: Iterable[str]) -> None:
        """Lists shared-memory segments to remove with this folder if its process is killed."""
        lines = []
        for name in names:
            with contextlib.suppress(OSError):  # the segment is gone already
                lines.append(f"{(SHARED_MEMORY / name).stat().st_ino} {name}\n")
        (self.path / SEGMENTS).write_text("".join(lines))

    def close(self) -> None:
        """Removes the folder and its content. Idempotent."""
        remove(self.path)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove(folder: Path) -> None:
    """Removes a folder as far as possible. It may lack rights, or nest deeper than Python recurs."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.is_dir() and not folder.is_symlink():
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            subprocess.run([*command, "--", folder], capture_output=True)


_making = threading.Lock()
_own: list[Scratch] = []
"""The folder in which `folder` makes others, once there is one."""


def folder(name: str) -> Path:
    """Makes a new folder, whose name begins with `name`, in a temporary folder of this process."""
    with _making:
        # Cleaners of temporary files may have removed the last one, and tests have temporary directories of their own.
        if not _own or not (_own[-1].path.is_dir() and _own[-1].path.parent == Path(tempfile.gettempdir())):
            _own.append(Scratch())
            atexit.register(_own[-1].close)
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=_own[-1].path))
