"""The coordinator's side of the gateway: gives sessions to the front, answers its requests, and restarts it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from libra_jax import protocols
from libra_jax.harness.gateway import front as front_lib
from libra_jax.utils import deadlines, run_context, typed_clients

FACTORY = "libra_jax.harness.gateway.front:create"
RESTARTS = 20
"""Restarts of one front, beyond which the run ends: something kills it again and again."""


class FrontClient(typed_clients.ActorClient):
    """A front, for one life of its process. See `typed_clients.ActorClient` for the arguments."""

    start = typed_clients.ClientMethod("engine_start", "start", front_lib.Front.start)
    admit = typed_clients.ClientMethod("first_token", "admit sessions", front_lib.Front.admit)
    dismiss = typed_clients.ClientMethod("first_token", "end a session", front_lib.Front.dismiss)
    answer = typed_clients.ClientMethod("first_token", "take answers", front_lib.Front.answer)

    def events(self) -> AsyncGenerator[front_lib.Event, None]:
        """Yields what clients ask and how their answers end."""
        return self._actor.stream(front_lib.Front.events)


@dataclass(frozen=True)
class _ServedSession:
    """A session, and whom to tell whether requests can arrive (see `Fronts.open`)."""

    conversation: protocols.Conversation
    reachable: Callable[[bool], None]


@dataclass(eq=False)
class _PendingRequest:
    """A request under way.

    Attributes:
      task: iterates the session's reply.
      settled: True if the answer was delivered, False if no one waits for it.
    """

    task: asyncio.Task[None]
    settled: asyncio.Future[bool]


@dataclass(eq=False)
class _Front:
    """A front and its requests.

    Attributes:
      spec: how its actor is made; the port is the one that it had first.
      client: present life of the actor.
      url: base URL of the OpenAI-compatible API.
      sessions: its sessions by digest.
      requests: requests under way, by number.
      outbox: parts of answers that have not been sent.
      restarts: restarts so far.
      silent: resolves to the error of a call that the present life did not answer; None before the first life.
    """

    spec: protocols.ActorSpec
    client: FrontClient
    url: str = ""
    sessions: dict[bytes, _ServedSession] = field(default_factory=dict)
    requests: dict[int, tuple[bytes, _PendingRequest]] = field(default_factory=dict)
    outbox: list[tuple[int, front_lib.Item]] = field(default_factory=list)
    waiting: asyncio.Event = field(default_factory=asyncio.Event)
    restarts: int = 0
    silent: asyncio.Future[protocols.LibraError] | None = None


class Fronts:
    """The run's `protocols.Gateway`: a front, which starts with the first session. Belongs to one event loop.

    Args:
      run: what the parts of the run share (`gateway`, `deadlines`, the cluster and the scope of background work). The
        recorder gets a note for each restart.
      model: name of the model in answers.
    """

    def __init__(self, run: run_context.RunContext, model: str) -> None:
        self._config = run.config
        self._scope = run.scope
        self._recorder = run.recorder
        self._cluster = run.cluster
        self._model = model
        self._front: _Front | None = None
        self._starting = asyncio.Lock()

    async def open(
        self,
        conversation: protocols.Conversation,
        secret: str = "",
        reachable: Callable[[bool], None] = lambda _: None,
    ) -> protocols.Endpoint:
        async with self._starting:
            if self._front is None:
                self._front = await self._make_front()
            front = self._front
        secret = secret or secrets.token_urlsafe(24)
        session = front_lib.digest(secret)
        front.sessions[session] = _ServedSession(conversation, reachable)
        try:
            # While the front restarts, the session is admitted with the others.
            with _restarting(front):
                await front.client.admit([session])
        except BaseException:
            front.sessions.pop(session, None)
            raise
        return protocols.Endpoint(front.url, secret, self._model)

    async def close(self, endpoint: protocols.Endpoint) -> None:
        session, front = front_lib.digest(endpoint.secret), self._front
        if front is None or front.sessions.pop(session, None) is None:
            return
        tasks = {request.task for owner, request in front.requests.values() if owner == session}
        # Of a complete answer this means that no one knows: the client may have it already.
        await deadlines.cancel_all(tasks)
        with _restarting(front):
            await front.client.dismiss(session)

    async def stop(self) -> None:
        """Ends the front. Idempotent."""
        front, self._front = self._front, None
        if front is not None:
            await front.client.stop()

    # One front -------------------------------------------------------------------------------------------------------

    async def _make_front(self) -> _Front:
        spec = protocols.ActorSpec(
            name="gateway-0",
            factory=FACTORY,
            arguments={"gateway": dataclasses.asdict(self._config.gateway), "model": self._model},
            cpus=0.0,
        )
        front = _Front(spec, FrontClient(self._cluster, spec, self._config.deadlines))
        await front.client.make()
        front.url = await front.client.start([])
        # A front that restarts has to be found where it was.
        arguments = {**spec.arguments["gateway"], "port": urlsplit(front.url).port}
        front.spec = dataclasses.replace(spec, arguments={**spec.arguments, "gateway": arguments})
        self._scope.start(self._keep(front), spec.name)
        return front

    async def _keep(self, front: _Front) -> None:
        """Answers a front's requests, and restarts it where it dies or does not answer."""
        while True:
            lost: protocols.LibraError | None = await self._one_life(front)
            for session in front.sessions.values():
                session.reachable(False)
            while lost is not None:
                try:
                    await self._restart(front, lost)
                    lost = None
                except (protocols.WorkerLost, protocols.DeadlineMissed) as error:
                    lost = error

    async def _one_life(self, front: _Front) -> protocols.LibraError:
        """Answers a front's requests until it dies or does not answer. Returns the error that says so."""
        front.silent = asyncio.get_running_loop().create_future()
        work = {asyncio.ensure_future(self._read(front)), asyncio.ensure_future(self._send(front))}
        try:
            ends: set[asyncio.Future[Any]] = {*work, front.silent}
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if front.silent in done:
                return front.silent.result()
            for task in done:
                task.result()
        except (protocols.WorkerLost, protocols.DeadlineMissed) as error:
            return error
        finally:
            await deadlines.cancel_all(work)
        return protocols.WorkerLost(f"{front.spec.name} stopped to tell of requests")

    async def _read(self, front: _Front) -> None:
        async with contextlib.aclosing(front.client.events()) as events:
            async for event in events:
                self._take(front, event)

    async def _restart(self, front: _Front, lost: protocols.LibraError) -> None:
        """Starts the front again at its port. Requests under way end undelivered: their clients ask again."""
        front.restarts += 1
        if front.restarts > RESTARTS:
            raise protocols.LibraError(f"{front.spec.name} died {front.restarts} times; the last time: {lost}")
        await deadlines.cancel_all(request.task for _, request in front.requests.values())
        front.requests.clear()
        front.outbox.clear()
        await front.client.stop()
        front.client = FrontClient(self._cluster, front.spec, self._config.deadlines)
        await front.client.make()
        await front.client.start(list(front.sessions))
        # Again, because the calls of sessions that opened meanwhile may have failed.
        await front.client.admit(list(front.sessions))
        for session in front.sessions.values():
            session.reachable(True)
        self._recorder.note(f"{front.spec.name} died and was restarted ({lost}).")

    def _take(self, front: _Front, event: front_lib.Event) -> None:
        if isinstance(event, front_lib.OutputRequested):
            settled: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            task = asyncio.ensure_future(self._serve(front, event, settled))
            front.requests[event.number] = event.session, _PendingRequest(task, settled)
            task.add_done_callback(lambda _: front.requests.pop(event.number, None))
            return
        if isinstance(event, front_lib.Rejected):
            if event.session in front.sessions:
                front.sessions[event.session].conversation.note_refusal(event.sentence)
            return
        _, request = front.requests.get(event.number, (b"", None))
        if request is not None and not request.settled.done():
            request.settled.set_result(isinstance(event, front_lib.Delivered))

    async def _serve(self, front: _Front, event: front_lib.OutputRequested, settled: asyncio.Future[bool]) -> None:
        """Passes a session's reply on, until it is delivered or no one waits for it."""

        def tell(item: front_lib.Item) -> None:
            front.outbox.append((event.number, item))
            front.waiting.set()

        session = front.sessions.get(event.session)
        if session is None:
            tell(front_lib.Refusal("closed", "the rollout of this session has ended", ""))
            return
        task, complete = asyncio.current_task(), False
        # A client that asks again has left before. Its request of before ends first, or this one would find the
        # dialogue in use, and would count as a further output.
        earlier_tasks = {
            request.task
            for number, (owner, request) in front.requests.items()
            # Earlier ones alone: it may have left this request and later ones, too.
            if number < event.number
            and owner == event.session
            and request.settled.done()
            and not request.settled.result()
        }
        if earlier_tasks:
            await asyncio.wait(earlier_tasks)

        def gone(done: asyncio.Future[bool]) -> None:
            """Ends the wait for tokens, if the client goes away."""
            if task is not None and not complete and not done.cancelled() and not done.result():
                task.cancel()

        settled.add_done_callback(gone)
        try:
            async with contextlib.aclosing(session.conversation.reply(event.request)) as items:
                async for item in items:
                    complete = isinstance(item, protocols.Reply)
                    tell(item)
                    if complete and not await settled:
                        with contextlib.suppress(StopAsyncIteration, protocols.ClientGone):
                            await items.athrow(protocols.ClientGone)
                        return
        except protocols.Refused as refused:
            tell(front_lib.Refusal(refused.kind, str(refused), refused.field))
        except Exception as error:  # the session has told its rollout
            tell(front_lib.Failure(f"the run could not serve the request: {error}"))

    async def _send(self, front: _Front) -> None:
        """Sends the parts of all answers, in batches: those that gather while a batch is under way are the next."""
        while True:
            await front.waiting.wait()
            front.waiting.clear()
            batch, front.outbox = front.outbox, []
            await front.client.answer(batch)


@contextlib.contextmanager
def _restarting(front: _Front) -> Iterator[None]:
    """Bears a call that the front does not answer: it is restarted with the sessions that it has then."""
    client = front.client
    try:
        yield
    except protocols.WorkerLost:
        pass  # the reader of its events has met the same
    except protocols.DeadlineMissed as error:
        if front.client is client and front.silent is not None and not front.silent.done():
            front.silent.set_result(error)
