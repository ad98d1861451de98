"""Reads the body of a request, and writes one response to a client that may be slow, large or gone."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from libra_jax.harness.gateway import errors, exchanges, fields
from libra_jax.utils import deadlines

TRANSPORT = "libra_jax.transport"
"""ASGI extension by which `server` hands over a connection's asyncio transport."""

DRAIN_FACTOR = 8
"""A body that is too large is read on, and dropped, up to this multiple of the limit, or the client would not read the
error: it writes first."""

DRAIN_SECONDS = 10.0
"""Seconds for which such a body is read on."""

LAST_BYTES = 16_384
"""Bytes of a response that go out in its last piece; less than servers buffer before they make the writer wait."""

END_SECONDS = 60.0
"""Seconds that a cancelled answer has to end, its conversation's `outputs.CLOSE_SECONDS` included."""

Headers = list[tuple[bytes, bytes]]


class ClientDisconnected(Exception):
    """The client left, or was cut off because it did not read."""


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """Returns the body of a request.

    Raises:
      Problem: the body has more bytes than `max_bytes`. No more of it than that is ever in memory.
      ClientDisconnected: the client left.
    """
    length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    body, size, more = bytearray(), 0, True
    # Announced as too large, it is dropped from the first byte on.
    dropped = length.isdigit() and int(length) > max_bytes
    try:
        async with asyncio.timeout(None) as limit:
            while more and size <= DRAIN_FACTOR * max_bytes:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                chunk, more = message.get("body", b""), message.get("more_body", False)
                size += len(chunk)
                if dropped or size > max_bytes:
                    if limit.when() is None:
                        limit.reschedule(asyncio.get_running_loop().time() + DRAIN_SECONDS)
                    dropped = True
                    body.clear()
                else:
                    body += chunk
    except TimeoutError:
        if not limit.expired():
            raise
    if dropped:
        raise errors.Problem(413, f"The body has more than {max_bytes} bytes.", code="request_too_large")
    return bytes(body)


class Answer:
    """Writes one response.

    Args:
      scope: the request.
      send: ASGI's callable.
      seconds: seconds that the client may leave what was written unread, once the connection's buffers are full.

    Attributes:
      awaits_body: the request's body has not been read to its end.
      started: the status has been sent.
      complete: the whole response has been handed to the transport of a connection that was open.
    """

    def __init__(self, scope: Scope, send: Send, seconds: float) -> None:
        # Other servers do not hand their transport over. A client that leaves is then noticed by `receive` alone.
        self._transport: asyncio.Transport | None = scope.get("extensions", {}).get(TRANSPORT)
        self._send, self._seconds = send, seconds
        self._failed: Callable[[errors.Problem], bytes] = lambda problem: b""
        self.awaits_body = self.started = self.complete = False

    async def json(self, status: int, value: exchanges.Json, headers: Headers | None = None) -> None:
        """Writes a whole response.

        Raises:
          ClientDisconnected: the client left before, or does not read.
        """
        body = fields.encoded(value)
        lines = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *(headers or [])]
        await self._start(status, lines)
        await self._finish(body)

    async def start_stream(self, failed: Callable[[errors.Problem], bytes]) -> None:
        """Writes the head of a stream of server-sent events.

        Args:
          failed: returns the event of an error.
        """
        self._failed = failed
        lines = [
            (b"content-type", b"text/event-stream"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await self._start(200, lines)

    async def write(self, events: bytes) -> None:
        """Writes a further piece. Waits until the client has read enough of what came before."""
        if self._closed:
            raise ClientDisconnected
        await self._hand_over({"type": "http.response.body", "body": events, "more_body": True})

    async def end_stream(self, events: bytes) -> None:
        """Writes the last events of a stream."""
        await self._finish(events)

    async def fail_stream(self, problem: errors.Problem) -> None:
        """Ends a stream with the event of an error."""
        await self.end_stream(self._failed(problem))

    def cut(self) -> None:
        """Drops the connection, with what was written and not yet read."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def _closed(self) -> bool:
        return self._transport is not None and self._transport.is_closing()

    async def _start(self, status: int, headers: Headers) -> None:
        self.started = True
        await self._hand_over({"type": "http.response.start", "status": status, "headers": headers})

    async def _finish(self, body: bytes) -> None:
        """Writes the end of the response, and notes that it is complete in the same step of the event loop.

        The last bytes are kept back until the client has read so much that they find room. So a client that does not
        read is noticed, and `complete` is true of all but the bytes in the connection's buffers.
        """
        if len(body) > LAST_BYTES:
            await self.write(body[:-LAST_BYTES])
            body = body[-LAST_BYTES:]
        await self.write(b"")  # the server waits for room before it writes
        if self._closed:
            raise ClientDisconnected
        await self._hand_over({"type": "http.response.body", "body": body, "more_body": False})
        self.complete = True

    async def _hand_over(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._seconds) as limit:
                await self._send(message)
        except TimeoutError:
            if not limit.expired():
                raise
            self.cut()
            raise ClientDisconnected from None


async def while_connected(receive: Receive, answer: Answer, work: Coroutine[Any, Any, None]) -> None:
    """Runs the work of an answer. If the client leaves before the response is complete, the work is cancelled.

    Raises:
      ClientDisconnected: the client left.
    """
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_leaves(receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        # Servers report a client as gone once the response is complete, and then the delivery still has to be noted.
        if not task.done() and not answer.complete:
            raise ClientDisconnected
        await asyncio.wait({task}, timeout=END_SECONDS)
    finally:
        await deadlines.cancel_all((task, disconnect), END_SECONDS)
    task.result()


async def _leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def retry_headers(problem: errors.Problem) -> Headers:
    """Returns the headers by which clients decide whether and when to try again."""
    if problem.retry_seconds is None:
        return []
    return [(b"retry-after", b"%d" % math.ceil(problem.retry_seconds))]
