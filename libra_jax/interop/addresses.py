"""This host's address on its network, as others reach it."""

from __future__ import annotations

import socket

LOOPBACK = "127.0.0.1"

ANY = "192.0.2.1"
"""An address reserved for documentation: it stands for any on the network."""


def own(towards: str = ANY) -> str:
    """This host's address on the way to another one, without asking anybody; the loopback where there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))  # a datagram socket sends nothing yet
            return str(probe.getsockname()[0])
        except OSError:
            return LOOPBACK
