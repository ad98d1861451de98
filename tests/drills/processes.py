"""Processes of a drill: those that it has started, directly or not, which is which, and what is left of them."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from libra_jax.utils import scratch

LOOK_SECONDS = 1.0
END_SECONDS = 30.0
"""How long processes may take to end after what they belong to has ended."""

_FILES_EVERY = 10
"""Looks at processes to one at the files that they have mapped, which takes longer."""

_SHOWN = 160
"""Characters of a command line that are shown of what is left."""

_LONGEST = 15
"""Characters of a thread's name that the kernel keeps."""


@dataclass(frozen=True)
class Left:
    """What is left when all has ended.

    Attributes:
      processes: of those that were started, the names.
      ports: addresses at which one of them listens.
      files: named shared memory that one of them had mapped, and Ray's folders.
    """

    processes: tuple[str, ...] = ()
    ports: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return len(self.processes) + len(self.ports) + len(self.files)


def _folders() -> set[Path]:
    """Ray's, of this process."""
    return set(Path("/tmp").glob(f"{scratch.RAY_PREFIX}{os.getpid()}-*"))


class Family:
    """All processes that this one starts while the block runs, also those whose parents have ended meanwhile."""

    def __init__(self) -> None:
        self._before = set(psutil.Process().children(recursive=True))
        self._folders_before = _folders()
        self._members: dict[psutil.Process, str] = {}
        self._files: set[Path] = set()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="drill-family", daemon=True)

    def __enter__(self) -> Family:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def alive(self) -> list[psutil.Process]:
        """Those that run now."""
        self._look()
        return [process for process in list(self._members) if is_alive(process)]

    def left(self, seconds: float = END_SECONDS) -> Left:
        """What is left after so many seconds, at most; call it when all has been told to end."""
        deadline = time.monotonic() + seconds
        while (found := self._left()).count and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        return found

    def kill(self) -> None:
        """Ends whatever is left."""
        for process in self.alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _left(self) -> Left:
        members = self.alive()
        names = tuple(f"{self._members[process]} ({process.pid}: {command(process)[:_SHOWN]})" for process in members)
        ids = {process.pid for process in members}
        ports = tuple(sorted(f"{where.laddr.ip}:{where.laddr.port}" for where in _listening() if where.pid in ids))
        folders = _folders() - self._folders_before
        files = sorted(str(path) for path in self._files | folders if path.exists())
        return Left(names, ports, tuple(files))

    def _watch(self) -> None:
        for number in itertools.count():
            if self._ended.wait(LOOK_SECONDS):
                return
            self._look(files=number % _FILES_EVERY == 0)

    def _look(self, *, files: bool = False) -> None:
        with self._lock:
            children = collections.defaultdict(list)
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.NoSuchProcess):
                    children[process.ppid()].append(process)
            # Under a worker whose parent has ended is found what that has started, and under no one else.
            above = [os.getpid(), *(process.pid for process in self._members if process.is_running())]
            while above:
                for process in children.pop(above.pop(), ()):
                    above.append(process.pid)
                    if process not in self._before and process not in self._members:
                        with contextlib.suppress(psutil.NoSuchProcess):
                            self._members[process] = process.name()
            for process in self._members if files else ():
                self._files |= _named_memory(process.pid)


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def actors(processes: Iterable[psutil.Process], name: str) -> list[psutil.Process]:
    """Those that hold the actor of this name: a thread of theirs is called so (`cluster.ray_host`)."""
    return [process for process in processes if name[:_LONGEST] in _threads(process.pid)]


def _threads(pid: int) -> set[str]:
    found = set()
    for file in Path(f"/proc/{pid}/task").glob("*/comm"):
        with contextlib.suppress(OSError):
            found.add(file.read_text().strip())
    return found


def maps(process: psutil.Process, library: str) -> bool:
    """Whether it has loaded a library."""
    with contextlib.suppress(OSError):
        return library in Path(f"/proc/{process.pid}/maps").read_text()
    return False


def name(process: psutil.Process) -> str:
    """Its name; empty where it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name()
    return ""


def command(process: psutil.Process) -> str:
    """Its command line; empty where it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return " ".join(process.cmdline())
    return ""


def _listening() -> Iterator[psutil._common.sconn]:
    for where in psutil.net_connections(kind="tcp"):
        if where.status == psutil.CONN_LISTEN:
            yield where


def _named_memory(pid: int) -> set[Path]:
    """Of Ray, Python or vLLM: what lies in /dev/shm while a process has it mapped, and is not removed yet."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        names = {line.split(maxsplit=5)[-1] for line in lines if "/dev/shm/" in line}
        return {Path(name) for name in names if not name.endswith(" (deleted)") and os.path.isabs(name)}
    return set()
