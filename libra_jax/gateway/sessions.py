"""The sessions that a gateway serves: each rollout under way has a secret, and the first one starts the server."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from libra_jax import protocols

CLOSE_SECONDS = 10.0
"""Seconds that the requests of a session may take to end once they are cancelled."""


class Server(Protocol):
    """Serves sessions over HTTP."""

    async def start(self) -> str:
        """Starts to listen; returns the base URL without a path."""
        ...

    async def stop(self) -> None:
        """Ends all connections and stops to listen. Idempotent."""
        ...


class Sessions:
    """All sessions of a run (`protocols.Gateway` and `protocols.Conversations`). Belongs to one event loop.

    Args:
      serve: makes the server of these sessions.
      model: name of the model in answers.
    """

    def __init__(self, serve: Callable[[protocols.Conversations], Server], model: str) -> None:
        self.model = model
        self._server = serve(self)
        self._url = ""
        self._starting = asyncio.Lock()
        # By the secret's digest: a lookup by the secret itself would take a time that depends on the right secrets.
        self._open: dict[bytes, _Open] = {}

    async def open(self, conversation: protocols.Conversation) -> protocols.Endpoint:
        """Serves a session under a fresh secret (`protocols.Gateway.open`)."""
        async with self._starting:
            if not self._url:
                self._url = await self._server.start()
        secret = secrets.token_urlsafe(24)
        self._open[_digest(secret)] = _Open(conversation)
        return protocols.Endpoint(f"{self._url}/v1", secret, self.model)

    async def close(self, endpoint: protocols.Endpoint) -> None:
        """Ends a session (`protocols.Gateway.close`).

        Raises:
          DeadlineMissed: a request of the session does not end.
        """
        opened = self._open.pop(_digest(endpoint.secret), None)
        if opened is not None:
            await opened.close()

    def find(self, secret: str) -> protocols.Conversation | None:
        """Returns the session with this secret; None if there is none (any more)."""
        return self._open.get(_digest(secret))

    async def stop(self) -> None:
        """Ends all sessions and the server. Idempotent."""
        sessions = list(self._open.values())
        self._open.clear()
        await self._server.stop()
        for opened in sessions:
            await opened.close()


class _Open:
    """A session that is served, and the tasks that wait for its outputs."""

    def __init__(self, conversation: protocols.Conversation) -> None:
        self._conversation = conversation
        self._tasks: set[asyncio.Task[object]] = set()
        self._closed = False

    async def reply(
        self, request: protocols.ChatRequest
    ) -> AsyncGenerator[protocols.MessageDelta | protocols.Reply, None]:
        """Streams one model output (`protocols.Conversation.reply`)."""
        if self._closed:
            raise protocols.Refused("closed", "the rollout of this session has ended")
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            async with contextlib.aclosing(self._conversation.reply(request)) as items:
                async for item in items:
                    yield item
        finally:
            self._tasks.discard(task)

    async def close(self) -> None:
        """Cancels the requests under way and waits for their end."""
        self._closed = True
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
            if left:
                raise protocols.DeadlineMissed(
                    f"{len(left)} requests of a harness's session did not end within {CLOSE_SECONDS:g} s of its close."
                )


def _digest(secret: str) -> bytes:
    # Surrogates stand for bytes of a header that are no UTF-8.
    return hashlib.sha256(secret.encode(errors="surrogatepass")).digest()
