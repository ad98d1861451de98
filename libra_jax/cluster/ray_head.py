"""Whether Ray's head is there: said before Ray itself ends the driver, as it does a minute after the head was lost.

That end is no exception here: Ray 2.60 leaves the process from a thread of its own, with a line on standard error.
Until then calls to actors go on, because they need no head.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

_log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
SILENT_SECONDS = 20.0
"""Without an answer, after which it is said; Ray ends the driver after 60."""


async def watch(address: str) -> None:
    """Looks again and again, and warns once each time that the head falls silent; ends by being cancelled.

    Args:
      address: of the head, `host:port`.
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
