"""Watches Ray's head, and warns before Ray ends the driver, a minute after the head was lost.

Ray 2.60 raises no exception then: one of its threads ends the process, with a line on standard error. Until then,
calls to actors go on, because they need no head.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

_log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
SILENT_SECONDS = 20.0
"""Seconds without an answer before the warning. Ray ends the driver after 60."""


async def watch(address: str) -> None:
    """Probes the head repeatedly, and warns once each time that it falls silent. Runs until cancelled.

    Args:
      address: address of the head, `host:port`.
    """
    loop = asyncio.get_running_loop()
    answered, told = loop.time(), False
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        if await _answers(address):
            answered, told = loop.time(), False
        elif not told and loop.time() - answered >= SILENT_SECONDS:
            told = True
            _log.warning(
                "Ray's head at %s has not answered for %.0f s. If it stays away, Ray ends this process a minute after "
                "it went; the same command, with the address of a cluster that is started again "
                "(config.cluster.address), goes on from the last checkpoint.",
                address,
                loop.time() - answered,
            )


async def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError, TimeoutError):
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), LOOK_SECONDS)
        writer.close()
        return True
    return False
