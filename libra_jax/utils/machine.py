"""Identifies the machine, finds its address on the network, and writes sizes of memory for people."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
from pathlib import Path

import psutil

LOOPBACK = "127.0.0.1"

ANY = "192.0.2.1"
"""An address reserved for documentation. It stands for any host on the network."""


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


def address(towards: str = ANY) -> str:
    """Returns this host's address on the route to another host, without contacting that host.

    If no route exists (to `ANY` on a cluster without a default route), returns the address of the first interface that
    is up, by name. If none is up, returns the loopback.

    Args:
      towards: name or address of the other host. An address of this host returns itself.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((towards, 9))  # a datagram socket sends nothing yet
        return str(probe.getsockname()[0])
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        for item in addresses:
            if name in up and item.family == socket.AF_INET and not item.address.startswith("127."):
                return item.address
    return LOOPBACK


def cluster_address(head: str) -> str:
    """Returns this host's address on the network of a cluster.

    Args:
      head: address of the cluster's head as in `config.cluster.address` ("host:port"). "auto" and "" name no head.
    """
    host = head.rpartition(":")[0]
    return address(host) if host else address()
