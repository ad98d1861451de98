"""This host's address on its network, as others reach it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import psutil

LOOPBACK = "127.0.0.1"

ANY = "192.0.2.1"
"""An address reserved for documentation: it stands for any on the network."""


def own(towards: str = ANY) -> str:
    """This host's address on the way to another one, without asking that one.

    Where there is no way, as to `ANY` on hosts of a cluster without a default route, it is that of the first interface
    that is up; the loopback where there is none.

    Args:
      towards: name or address of the other; one of this host's own gives itself.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((towards, 9))  # a datagram socket sends nothing yet
        return str(probe.getsockname()[0])
    return next(_of_interfaces(), LOOPBACK)


def in_cluster(address: str) -> str:
    """This host's address on the network of a cluster.

    Args:
      address: of its head, as `config.cluster.address` has it ("host:port"); "auto" and the empty one name none.
    """
    head = address.rpartition(":")[0]
    return own(head) if head else own()


def _of_interfaces() -> Iterator[str]:
    """Addresses of the interfaces that are up, by the interfaces' names; the loopback's are not among them."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    for name, found in sorted(psutil.net_if_addrs().items()):
        for address in found:
            if name in up and address.family == socket.AF_INET and not address.address.startswith("127."):
                yield address.address
