"""Doubles for the coordinator's side of the gateway: fronts whose clients are the test, and a scripted session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

from libra_jax import protocols
from libra_jax.harness.gateway import front

made: list[ScriptedFront] = []
"""Fronts that `create` made, in order."""


class ScriptedFront:
    """A front without HTTP. `die` ends its process, as far as its caller can see; `hang` stops it until `resume`.

    Attributes:
      port: port of its settings.
      admitted: sessions that it serves.
      listened_with: those that it served when it began to listen.
      answers: what it was answered, by number of the request.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.admitted: set[bytes] = set()
        self.listened_with: frozenset[bytes] = frozenset()
        self.answers: dict[int, list[front.Item]] = {}
        self._events: asyncio.Queue[front.Event | None] = asyncio.Queue()
        self._dead = False
        self._runs = asyncio.Event()
        self._runs.set()

    async def start(self, sessions: Sequence[bytes]) -> str:
        await self.admit(sessions)
        self.listened_with = frozenset(self.admitted)
        return f"http://127.0.0.1:{self.port or 4321}/v1"

    async def admit(self, sessions: Sequence[bytes]) -> None:
        await self._runs.wait()
        self._check()
        self.admitted |= set(sessions)

    async def dismiss(self, session: bytes) -> None:
        await self._runs.wait()
        self._check()
        self.admitted.discard(session)

    async def events(self) -> AsyncIterator[front.Event]:
        while (event := await self._events.get()) is not None:
            yield event
        self._check()

    async def answer(self, items: Sequence[tuple[int, front.Item]]) -> None:
        self._check()
        for number, item in items:
            self.answers.setdefault(number, []).append(item)

    async def shutdown(self) -> None:
        pass

    def tell(self, event: front.Event) -> None:
        self._events.put_nowait(event)

    def die(self) -> None:
        self._dead = True
        self._events.put_nowait(None)

    def hang(self) -> None:
        self._runs.clear()

    def resume(self) -> None:
        self._runs.set()

    def _check(self) -> None:
        if self._dead:
            raise protocols.WorkerLost("the front is gone")


def create(gateway: Mapping[str, int], model: str) -> ScriptedFront:
    made.append(ScriptedFront(gateway["port"]))
    return made[-1]


class Scripted:
    """A session that answers with two pieces.

    Attributes:
      delivered: number of outputs that were delivered.
      closed: number of replies that were closed before.
      gate: outputs stop after their first piece until it is set.
      error: raised instead of the second piece.
      told: what the API refused.
      running: replies under way, the largest number at once being `most`.
    """

    def __init__(self) -> None:
        self.delivered = self.closed = self.running = self.most = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.told: list[str] = []

    def note_refusal(self, sentence: str) -> None:
        self.told.append(sentence)

    async def reply(
        self, request: protocols.ChatRequest
    ) -> AsyncGenerator[protocols.MessageDelta | protocols.Reply, None]:
        ended = False
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            yield protocols.ContentDelta("one ")
            await self.gate.wait()
            if self.error is not None:
                raise self.error
            yield protocols.ContentDelta("two")
            yield protocols.Reply(protocols.Message("assistant", "one two"), "stop", 3, 2)
            ended = True
            self.delivered += 1
        finally:
            await asyncio.sleep(0)  # as a session waits for the end of its sampling
            self.closed += not ended
            self.running -= 1
