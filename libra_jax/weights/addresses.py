"""Finds this host's address on its network, as other hosts reach it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import psutil

LOOPBACK = "127.0.0.1"

ANY = "192.0.2.1"
"""An address reserved for documentation. It stands for any host on the network."""


def own(towards: str = ANY) -> str:
    """Returns this host's address on the route to another host, without contacting that host.

    If no route exists (to `ANY` on a cluster without a default route), returns the address of the first interface that
    is up. If none is up, returns the loopback.

    Args:
      towards: name or address of the other host. An address of this host returns itself.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((towards, 9))  # a datagram socket sends nothing yet
        return str(probe.getsockname()[0])
    return next(_of_interfaces(), LOOPBACK)


def in_cluster(address: str) -> str:
    """Returns this host's address on the network of a cluster.

    Args:
      address: address of the cluster's head as in `config.cluster.address` ("host:port"). "auto" and "" name no head.
    """
    head = address.rpartition(":")[0]
    return own(head) if head else own()


def _of_interfaces() -> Iterator[str]:
    """Yields the addresses of interfaces that are up, sorted by interface name, without the loopback."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    for name, found in sorted(psutil.net_if_addrs().items()):
        for address in found:
            if name in up and address.family == socket.AF_INET and not address.address.startswith("127."):
                yield address.address
