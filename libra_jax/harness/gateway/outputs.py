"""Draws the outputs of one request, each from its own generator."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence

from libra_jax import protocols

CLOSE_SECONDS = 30.0
"""Seconds that a conversation has to take back an output that no one waits for any more."""

MOST_WAITING = 4096
"""Parts of a stream that wait for the client. Beyond, the output itself waits.

An output holds a slot of an engine, so the engine should not wait for a slow reader; and its parts must not fill the
memory. This number holds a whole output of the usual kind.
"""

Part = tuple[int, protocols.MessageDelta | protocols.Reply]
"""Number of the choice, and a part of its output."""

_log = logging.getLogger(__name__)


class Outputs:
    """The outputs of one request. `close` must be called.

    Args:
      conversation: the session.
      request: the request.
      choices: number of outputs.
    """

    def __init__(self, conversation: protocols.Conversation, request: protocols.ChatRequest, choices: int) -> None:
        self._generators = [conversation.reply(request) for _ in range(choices)]
        self._pumps: list[asyncio.Task[None]] = []

    async def replies(self) -> Sequence[protocols.Reply]:
        """Waits for the ends of all outputs and returns them."""
        replies: dict[int, protocols.Reply] = {}
        async for batch in self.parts():
            replies |= {choice: item for choice, item in batch if isinstance(item, protocols.Reply)}
        return [replies[choice] for choice in range(len(self._generators))]

    async def parts(self) -> AsyncGenerator[Sequence[Part], None]:
        """Yields the parts of all outputs as they come: all that wait at a time. Ends after the last `Reply`."""
        queue: asyncio.Queue[Part | Exception] = asyncio.Queue(MOST_WAITING)
        self._pumps = [asyncio.create_task(self._pump(choice, queue)) for choice in range(len(self._generators))]
        open_outputs = len(self._generators)
        while open_outputs:
            waiting = [await queue.get()]
            while not queue.empty():
                waiting.append(queue.get_nowait())
            batch = []
            for part in waiting:
                if isinstance(part, Exception):
                    raise part
                open_outputs -= isinstance(part[1], protocols.Reply)
                batch.append(part)
            yield batch

    async def _pump(self, choice: int, queue: asyncio.Queue[Part | Exception]) -> None:
        """Hands on the parts of one output. Does not ask for an item after the `Reply`: that is `delivered`'s part."""
        try:
            async for item in self._generators[choice]:
                await queue.put((choice, item))
                if isinstance(item, protocols.Reply):
                    return
            raise RuntimeError("a conversation ended without a reply")
        except Exception as error:
            await queue.put(error)

    async def delivered(self) -> None:
        """Tells the session that the client has been given all outputs."""
        for generator in self._generators:
            await anext(generator, None)

    async def close(self) -> None:
        """Closes all generators. Outputs that are not delivered stay with the session."""
        for pump in self._pumps:
            pump.cancel()
        # A generator that runs cannot be closed, so its pump has to end first.
        _, running = await asyncio.wait(self._pumps, timeout=CLOSE_SECONDS) if self._pumps else ((), ())
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                for generator in self._generators if not running else ():
                    await generator.aclose()
        except Exception:
            # The answer is written or void by now: this is between the session and the log.
            _log.exception("A conversation failed when it was closed.")
        if running:
            _log.error("%d outputs did not end within %g s after they were cancelled.", len(running), CLOSE_SECONDS)
