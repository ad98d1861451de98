"""The actor that serves HTTP: it reads requests, passes them to the coordinator, and streams what comes back.

A front holds no token and no dialogue. The sessions hold them, on the coordinator's side (`harness/gateway/fronts.py`).
So a front that is killed loses nothing but its connections, and another one takes its port.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from libra_jax import config as config_lib
from libra_jax import protocols


@dataclass(frozen=True)
class OutputRequested:
    """A client asks for an output.

    Attributes:
      number: number of the request at its front.
      session: digest of the session's secret.
      request: the request.
    """

    number: int
    session: bytes
    request: protocols.ChatRequest


@dataclass(frozen=True)
class Delivered:
    """The whole answer to a request has been handed to the transport."""

    number: int


@dataclass(frozen=True)
class Gone:
    """No one waits for the answer to a request any more."""

    number: int


@dataclass(frozen=True)
class Rejected:
    """The API refused a request of a session, in these words."""

    session: bytes
    sentence: str


Event = OutputRequested | Delivered | Gone | Rejected


@dataclass(frozen=True)
class Refusal:
    """The session refuses the request (`protocols.Refused`, as plain data)."""

    kind: Literal["invalid", "context", "limit", "closed", "busy"]
    message: str
    field: str


@dataclass(frozen=True)
class Failure:
    """The run failed to serve the request."""

    message: str


Item = protocols.MessageDelta | protocols.Reply | Refusal | Failure


class Front:
    """A front. Belongs to one event loop.

    Args:
      settings: address and limits.
      model: name of the model in answers.
    """

    def __init__(self, settings: config_lib.GatewayConfig, model: str) -> None:
        # Imported here: only the process that serves needs the web framework.
        from libra_jax.harness.gateway import server

        self.model = model
        self._server = server.GatewayServer(self, settings)
        self._sessions: dict[bytes, _Relayed] = {}
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._inboxes: dict[int, asyncio.Queue[Item]] = {}
        self._numbers = itertools.count()

    async def start(self, sessions: Sequence[bytes]) -> str:
        """Starts to listen; returns the base URL of the OpenAI-compatible API, which ends in "/v1".

        Args:
          sessions: digests of the sessions that are served from the first request on. A request of any other is
            refused for good, so a front that restarts must know its sessions before it listens.

        Raises:
          ConfigError: the address is not this host's, or the port is in use.
        """
        await self.admit(sessions)
        return await self._server.start()

    async def admit(self, sessions: Sequence[bytes]) -> None:
        """Serves the sessions with these digests from now on."""
        for session in sessions:
            self._sessions.setdefault(session, _Relayed(self, session))

    async def dismiss(self, session: bytes) -> None:
        """Ends a session: refuses its requests, those under way included. Idempotent."""
        relayed = self._sessions.pop(session, None)
        for number in relayed.numbers if relayed is not None else ():
            self._inboxes[number].put_nowait(Refusal("closed", "the rollout of this session has ended", ""))

    async def events(self) -> AsyncIterator[Event]:
        """Yields what clients ask and how their answers end. One reader at a time."""
        while True:
            yield await self._events.get()

    async def answer(self, items: Sequence[tuple[int, Item]]) -> None:
        """Takes parts of answers, each with the number of its request. Ignores requests that no one waits for."""
        for number, item in items:
            inbox = self._inboxes.get(number)
            if inbox is not None:
                inbox.put_nowait(item)

    async def shutdown(self) -> None:
        """Ends all connections and stops to listen. Idempotent."""
        await self._server.stop()

    def tell(self, event: Event) -> None:
        """Passes an event on to the coordinator."""
        self._events.put_nowait(event)

    def find(self, secret: str) -> protocols.Conversation | None:
        """Returns the session with this secret; None if there is none (any more)."""
        return self._sessions.get(digest(secret))

    async def ask(
        self, session: _Relayed, request: protocols.ChatRequest
    ) -> AsyncGenerator[protocols.MessageDelta | protocols.Reply, None]:
        """Passes a request on, and yields its answer (`protocols.Conversation.reply`)."""
        number, inbox = next(self._numbers), asyncio.Queue[Item]()
        self._inboxes[number] = inbox
        session.numbers.add(number)
        self._events.put_nowait(OutputRequested(number, session.digest, request))
        end: Event | None = Gone(number)
        try:
            while True:
                item = await inbox.get()
                if isinstance(item, Refusal):
                    end = None
                    raise protocols.Refused(item.kind, item.message, item.field)
                if isinstance(item, Failure):
                    end = None
                    raise protocols.LibraError(item.message)
                yield item
                if isinstance(item, protocols.Reply):
                    end = Delivered(number)
                    return
        finally:
            del self._inboxes[number]
            session.numbers.discard(number)
            if end is not None:
                self._events.put_nowait(end)


class _Relayed:
    """A session whose tokens are elsewhere (`protocols.Conversation`).

    Attributes:
      digest: digest of the session's secret.
      numbers: numbers of its requests under way.
    """

    def __init__(self, front: Front, digest: bytes) -> None:
        self._front = front
        self.digest = digest
        self.numbers: set[int] = set()

    def reply(self, request: protocols.ChatRequest) -> AsyncGenerator[protocols.MessageDelta | protocols.Reply, None]:
        return self._front.ask(self, request)

    def note_refusal(self, sentence: str) -> None:
        self._front.tell(Rejected(self.digest, sentence))


def digest(secret: str) -> bytes:
    """Returns the digest by which fronts know a secret: a lookup by it takes no time that depends on right secrets."""
    # Surrogates stand for bytes of a header that are no UTF-8.
    return hashlib.sha256(secret.encode(errors="surrogatepass")).digest()


def create(gateway: Mapping[str, object], model: str) -> Front:
    """Makes a front, as the actor's factory.

    Args:
      gateway: fields of `config.GatewayConfig`.
      model: name of the model in answers.
    """
    return Front(config_lib.GatewayConfig(**gateway), model)  # type: ignore[arg-type]
