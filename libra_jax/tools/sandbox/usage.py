"""Measures what the processes of a sandbox use, as /proc shows it.

The sandbox gets this file as text together with `supervisor.py`, so it imports the standard library only. A control
group counts more exactly. These numbers are samples, taken every few hundredths of a second; quick code can escape
them.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Iterable
from typing import NamedTuple

SHARED_BYTES = 2**20
"""Bytes that a piece of shared memory without a file counts at least, no matter how little of it is mapped.

The filter of system calls (`seccomp`) refuses larger pieces, so a process cannot hide memory by unmapping most of one.
"""

SOCKET_BYTES = 2**19
"""Bytes counted per socket: about what the kernel lets a socket buffer, including its own bookkeeping."""

PIPE_BYTES = 2**16
"""Bytes that a pipe holds at most. The filter of system calls refuses larger ones."""

FEW_DESCRIPTORS = 64
"""Size of a process's first table of descriptors. In a larger table, each two count as a pipe that is full.

A process can hide which of its descriptors are pipes, but not the size of the table.
"""

MAPS_BYTES = 2**22
"""Bytes read from all processes' lists of mappings, about 80,000 lines. Longer lists count as a limit that was hit."""

_TICKS = os.sysconf("SC_CLK_TCK")
_RESIDENT = re.compile(rb"^(RssAnon|RssShmem|FDSize):\s+(\d+)(?: kB)?$", re.MULTILINE)
_SHARED = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ...s ([0-9a-f]+) \S+ (\d+) +/dev/zero \(deleted\)$", re.MULTILINE)


class Process(NamedTuple):
    """A process as its `stat` file shows it: state letter, parent's id, seconds of processor time, number of threads.

    `seconds` is the process's own time. `of_children` is the time of children that it waited for.
    """

    state: str
    parent: int
    seconds: float
    of_children: float
    threads: int

    @property
    def runs(self) -> bool:
        """Whether any thread still runs. The first thread may end before the others, and `state` is the first one's."""
        return self.state not in "ZX" or self.threads > 1


def processes() -> dict[int, Process]:
    """Returns every process, by its id."""
    process_table = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(name)):
            # proc_pid_stat(5), counted from the state: 11 to 14 are times, and 17 is the number of threads.
            own_ticks, child_ticks = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
            process_table[int(name)] = Process(
                fields[0].decode(), int(fields[1]), own_ticks / _TICKS, child_ticks / _TICKS, int(fields[17])
            )
    return process_table


def _stat(path: str) -> list[bytes]:
    with contextlib.suppress(OSError), open(f"/proc/{path}/stat", "rb") as file:
        text = file.read()
        # The name in parentheses may itself contain spaces and parentheses: the fields begin after the last one.
        return text[text.rindex(b")") + 2 :].split()
    return []


class Processor:
    """Counts the processor time of all descendants of this process.

    The kernel adds a process's time to its parent's when the parent waits for it. A parent that ignores SIGCHLD never
    waits. So the last seen time of a vanished process is kept. A process may be too short-lived to show any time. If it
    was ready to run when it was seen, it counts as running from one check to the next.
    """

    def __init__(self) -> None:
        self._sights: dict[int, _Sight] = {}
        self._vanished = 0.0
        self._before = (0.0, 0.0)
        self._cores = len(os.sched_getaffinity(0))

    def begin(self, process_table: dict[int, Process]) -> None:
        """Starts the count. The processes that live on from before start at zero."""
        self._sights = {pid: _Sight(process.seconds, 0.0) for pid, process in process_table.items()}
        self._vanished = 0.0
        self._before = self._totals(process_table)

    def seconds(self, process_table: dict[int, Process], interval: float) -> float:
        """Returns the seconds since `begin`: the larger of the kernel's sum and the sum of what was seen.

        Args:
          process_table: All processes, including ended ones that no process has waited for.
          interval: Seconds since the last check.
        """
        for pid, sight in list(self._sights.items()):
            # It ended, or its id now belongs to another process.
            if pid not in process_table or process_table[pid].seconds < sight.seconds:
                self._vanished += sight.seconds + sight.unseen
                del self._sights[pid]
        # Threads that run, or wait only for a core. A process with one thread shows that thread's state as its own.
        ready = {pid: int(process.state == "R") for pid, process in process_table.items() if process.runs}
        for pid in (pid for pid in ready if process_table[pid].threads > 1):
            with contextlib.suppress(OSError):
                threads = os.listdir(f"/proc/{pid}/task")
                ready[pid] = sum(_stat(f"{pid}/task/{thread}")[:1] == [b"R"] for thread in threads)
        # Processes that wait for a core use none.
        share = interval * min(1.0, self._cores / max(1, sum(ready.values())))
        for pid, process in process_table.items():
            used = ready.get(pid, 0) * share
            is_known = pid in self._sights
            # Half an interval passes on average between the last look at a process and its end.
            unseen = used / 2 if is_known else max(0.0, used - process.seconds)
            self._sights[pid] = _Sight(process.seconds, unseen)
        kernel_seconds, observed_seconds = self._totals(process_table)
        return max(kernel_seconds - self._before[0], observed_seconds - self._before[1])

    def _totals(self, process_table: dict[int, Process]) -> tuple[float, float]:
        reaped_usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        live_seconds = sum(process.seconds + process.of_children for process in process_table.values())
        observed_seconds = self._vanished + sum(sight.seconds for sight in self._sights.values())
        return reaped_usage.ru_utime + reaped_usage.ru_stime + live_seconds, observed_seconds


class _Sight(NamedTuple):
    """A process at the last check. `unseen` are the seconds that it may have used since, if it is gone by the next."""

    seconds: float
    unseen: float


def memory(pids: Iterable[int], *, network: bool) -> float:
    """Returns the bytes held by the processes and backed by no file. Infinity if they have too many mappings to read.

    Args:
      pids: Ids of the processes.
      network: Also count the sockets of this network namespace. The namespace has to belong to the processes alone.
    """
    private_kib, shmem_kib, maps_room, shared = 0, 0, MAPS_BYTES, dict[bytes, int]()
    pipes = 0
    for pid in pids:
        status = dict(_RESIDENT.findall(_read_thread_file(pid, "status", 2**16)))
        private_kib += int(status.get(b"RssAnon", 0))
        shmem_kib += int(status.get(b"RssShmem", 0))
        if (descriptors := int(status.get(b"FDSize", 0))) > FEW_DESCRIPTORS:
            pipes += descriptors // 2
        maps = _read_thread_file(pid, "maps", maps_room)
        maps_room -= len(maps)
        if maps_room == 0:
            return float("inf")
        if b" /dev/zero (deleted)\n" in maps:
            for first, last, offset, inode in _SHARED.findall(maps):
                size = int(last, 16) - int(first, 16) + int(offset, 16)
                # Several processes may map the same piece of memory; its inode identifies it.
                shared[inode] = max(shared.get(inode, SHARED_BYTES), size)
    # Files of the workspace (tmpfs) count in RssShmem too, and several processes may map the same memory. So the two
    # estimates of shared memory overlap, and the larger one is taken instead of their sum.
    total = 1024 * private_kib + max(1024 * shmem_kib, sum(shared.values())) + PIPE_BYTES * pipes
    if not network:
        return total
    # All sockets, including sockets in transit over other sockets, which no process holds.
    with contextlib.suppress(OSError), open("/proc/self/net/sockstat", "rb") as file:
        counts = {line.split()[0]: int(line.split()[2]) for line in file if line.startswith((b"sockets:", b"TCP:"))}
        total += SOCKET_BYTES * counts.get(b"sockets:", 0)
        # TCP sockets buffer more than others, so what waits in their queues is counted too.
        for kind in ("tcp", "tcp6") if counts.get(b"TCP:", 0) else ():
            with contextlib.suppress(OSError), open(f"/proc/self/net/{kind}", "rb") as connections:
                next(connections)
                queues = [line.split()[4].split(b":") for line in connections]
                total += 2 * sum(int(sent, 16) + int(received, 16) for sent, received in queues)
    return total


def _read_thread_file(pid: int, name: str, max_bytes: int) -> bytes:
    """Returns a file of the first thread that still has one. The main thread may have ended before the others."""
    with contextlib.suppress(OSError):
        for thread in (str(pid), *os.listdir(f"/proc/{pid}/task")):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/{name}", "rb") as file:
                text = file.read(max_bytes)
                if text and (name != "status" or b"\nRssAnon:" in text):
                    return text
    return b""
