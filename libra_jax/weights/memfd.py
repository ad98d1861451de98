"""Shares anonymous memory between processes of one host: a memfd, which the peer opens through its owner's `/proc`.

The memory has no name in any file system, so it cannot leak: it is freed with the last process that maps it, even after
a kill. This module needs neither JAX nor torch, so that engine processes import it without JAX.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Mapping
from typing import Any

import psutil
import xxhash

from libra_jax import protocols
from libra_jax.utils import machine

HOST_VARIABLE = "LIBRA_JAX_HOST"
"""Environment variable with the host's name, for several emulated hosts on one machine."""


HUGE_BYTES = 2 * 2**20
"""Bytes of a huge page on x86-64, and on ARM with base pages of 4 KiB."""

_COLLAPSE = 25
"""`MADV_COLLAPSE` (Linux 6.1), which Python 3.11 does not name. It does not ask what sysfs says of huge pages."""


class SharedMemoryError(protocols.LibraError):
    """Raised if shared memory cannot be created or reached."""


def host() -> str:
    """Returns this host's name in addresses. Processes with the same name share memory and process ids."""
    return os.environ.get(HOST_VARIABLE) or machine.identity()


def digest(data: memoryview) -> str:
    """Returns the xxh3_128 checksum of a chunk's bytes, in hex. It finds damage, and protects against no attacker."""
    return xxhash.xxh3_128_hexdigest(data)


def available_bytes() -> int:
    """Returns the bytes that this process can still allocate: the machine's, or the rest of its container's limit."""
    free = int(psutil.virtual_memory().available)
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            unused = int(limit.read()) - int(used.read())  # "max", which is no limit, is no number either
        with open("/sys/fs/cgroup/memory.stat") as lines:
            statistics = dict(line.split() for line in lines)
        # The cgroup is charged for cached files, but the kernel drops them if memory is needed.
        return min(free, unused + int(statistics["inactive_file"]) + int(statistics["active_file"]))
    except (OSError, ValueError, KeyError):
        return free


def too_little(purpose: str, nbytes: int, free: int) -> SharedMemoryError:
    """Returns the error for too little memory, with the numbers."""
    return SharedMemoryError(
        f"{purpose} needs {nbytes / 2**20:.1f} MiB of shared memory but only {free / 2**20:.1f} MiB of memory is "
        "available: free memory on this host, raise the container's limit, or sync in a smaller config.rollout.dtype"
    )


class Owner:
    """Memory that this process writes and other processes may map. Not thread-safe.

    Every page is reserved and mapped at once, so that later writes neither fail nor fault. Pages are huge if the kernel
    has some: a copy to them takes three quarters of the time.

    Args:
      nbytes: size in bytes, above zero.
      purpose: use of the memory, for the error message.

    Attributes:
      buffer: the writable memory.

    Raises:
      SharedMemoryError: there is too little memory; the message has the numbers.
    """

    def __init__(self, nbytes: int, purpose: str) -> None:
        free = available_bytes()
        # Checked first, because the kernel may kill a process rather than refuse memory.
        if nbytes > free:
            raise too_little(purpose, nbytes, free)
        self.nbytes = nbytes
        # Close-on-exec, or programs that are started later would hold the memory after this process has freed it.
        self._fd = os.memfd_create("libra-jax", os.MFD_CLOEXEC)
        try:
            huge = _in_huge_pages(self._fd, nbytes)
            # Allocated now, so that a full memory is an error here and not a SIGBUS at the first write to a page.
            os.posix_fallocate(self._fd, 0, nbytes)
            self.buffer = huge or mmap.mmap(self._fd, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            os.close(self._fd)
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            raise SharedMemoryError(
                f"{purpose} needs {nbytes / 2**20:.1f} MiB of shared memory, which the kernel refused "
                f"({error.strerror}; {free / 2**20:.1f} MiB was available): raise this process's or its container's "
                "memory limits"
            ) from None
        self._inode = os.fstat(self._fd).st_ino

    @property
    def address(self) -> dict[str, Any]:
        """Address for a peer; plain values, valid while this process lives and has not closed the memory."""
        return {
            "kind": "memfd",
            "host": host(),
            "pid": os.getpid(),
            "fd": self._fd,
            "inode": self._inode,
            "nbytes": self.nbytes,
        }

    def close(self) -> None:
        """Releases the memory, which is freed with the last peer's mapping. Idempotent."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        try:
            self.buffer.close()
        except BufferError:
            # A tensor still views the memory: the mapping goes with the last view.
            del self.buffer


def _in_huge_pages(fd: int, nbytes: int) -> mmap.mmap | None:
    """Returns a mapping of an empty memfd in huge pages, and grows the memfd to `nbytes`. None if there are none."""
    if nbytes < HUGE_BYTES:
        return None
    os.ftruncate(fd, nbytes)
    # The kernel places a mapping right below the one before. A small one between them moves the next to where a huge
    # page may begin. Nothing depends on it but speed.
    with contextlib.closing(mmap.mmap(fd, nbytes)) as probe:
        beyond = _address(probe) % HUGE_BYTES
    with contextlib.closing(mmap.mmap(-1, beyond)) if beyond else contextlib.nullcontext():
        mapping = mmap.mmap(fd, nbytes)
    if _address(mapping) % HUGE_BYTES == 0:
        # A page in each place, because the kernel makes no huge page of nothing. Written to the file, where too little
        # memory is an error and not a signal.
        for place in range(0, nbytes, HUGE_BYTES):
            os.pwrite(fd, b"\0", place)
        with contextlib.suppress(OSError):
            mapping.madvise(_COLLAPSE)
            return mapping
    mapping.close()
    return None


def _address(memory: mmap.mmap) -> int:
    """Returns where a mapping begins."""
    first = ctypes.c_char.from_buffer(memory)
    # The view goes with this function's end: a mapping with views cannot be closed.
    return ctypes.addressof(first)


def open_peer(address: Mapping[str, Any]) -> mmap.mmap:
    """Maps memory of another process, read-only.

    The mapping stays valid after the owner has closed the memory or died.

    Args:
      address: the owner's `Owner.address`.

    Raises:
      SharedMemoryError: the owner is on another host or gone, or the address now names other memory.
    """
    if address["host"] != host():
        raise SharedMemoryError(
            f"shared weights of process {address['pid']} are on another host ({address['host']}) than this one "
            f"({host()}): lay the run out over its hosts (config.cluster.accelerators_per_host), so that each has a "
            "relay"
        )
    path = f"/proc/{address['pid']}/fd/{address['fd']}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SharedMemoryError(
            f"shared weights of process {address['pid']} cannot be opened ({error.strerror}): the owner is gone, or "
            "runs under another user or in another container; memfd needs trainer and engine on one host"
        ) from None
    try:
        status = os.fstat(fd)
        # The owner may have reused the descriptor, or its process id may belong to another process by now.
        if status.st_ino != address["inode"] or status.st_size < address["nbytes"]:
            raise SharedMemoryError(
                f"shared weights of process {address['pid']} are gone: its descriptor {address['fd']} is another file"
            )
        return mmap.mmap(fd, address["nbytes"], mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)
    finally:
        os.close(fd)


class PeerMemory:
    """Maps chunks that other processes own, each chunk once. Not thread-safe."""

    def __init__(self) -> None:
        self._mappings: dict[tuple[int, int, int], mmap.mmap] = {}

    def map(self, address: Mapping[str, Any]) -> mmap.mmap:
        """Returns the memory at an owner's address, read-only."""
        key = (address["pid"], address["fd"], address["inode"])
        if key not in self._mappings:
            # After a trainer has moved to other processes, nothing of the former ones is read again. Kept mappings
            # would hold a whole copy of the weights.
            self._mappings = {old: mapping for old, mapping in self._mappings.items() if old[0] == address["pid"]}
            self._mappings[key] = open_peer(address)
        return self._mappings[key]

    def close(self) -> None:
        """Drops every mapping. A tensor that still views one keeps it alive. Idempotent."""
        self._mappings.clear()
