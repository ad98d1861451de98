"""The loop worker: runs agent loops in a process of its own, beside the engines.

The same rollouts and streams run here as in the coordinator's process. Only the dispatcher is far away: a link turns
calls into events, and commands into placements. With each tool call and each tool return, the coordinator gets the
tokens since the last one. If this process is lost, a rollout goes on elsewhere after its last whole output.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.engines import client as engines_client
from libra_jax.rollouts import channel, mirror, rollouts, streams
from libra_jax.utils import background_tasks, resolving, run_context

PROGRESS_TOKENS = 256
"""Tokens that a request generates between two reports of its progress. The scheduler notices an outrun budget later by
up to as many."""

GATHER_SECONDS = 0.01
"""Seconds that events wait for more events, so that they travel together."""

COUNT_SECONDS = 1.0
"""Seconds between two reports of counts. A lost worker takes the counts since the last one with it."""

OpenAgent = Callable[[run_context.RunContext], AbstractAsyncContextManager[rollouts.RolloutAgent]]
"""Opens what rollouts need on the worker: environments, tools, tokenizer, reward."""


class LoopWorkerActor(protocols.LoopWorker):
    """A loop worker. An actor: all methods run on one event loop.

    Args:
      config: the run's configuration.
      cluster: makes actors in this process.
      workdir: directory of the run.
      open_agent: opens what rollouts need.
      address: address of this machine at which to listen for the coordinator; empty: it calls `tell` and `events`.
    """

    def __init__(
        self,
        config: config_lib.RunConfig,
        cluster: protocols.Cluster,
        workdir: Path,
        open_agent: OpenAgent,
        address: str = "",
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._workdir = workdir
        self._open_agent = open_agent
        self._address = address
        self._ahead = 0.0
        self._pending_events: list[protocols.WorkerEvent] = []
        self._news = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._trackers: dict[str, mirror.Tracker] = {}
        self._opened = contextlib.AsyncExitStack()
        self._scope, self._recorder = _Scope(self._say), _Recorder(self._say)

    async def start(self, now: float) -> None:
        loop = asyncio.get_running_loop()
        self._ahead = now - loop.time()
        run = run_context.RunContext(
            self._config,
            self._cluster,
            self._recorder,
            self._workdir,
            self._scope,
            clock=lambda: loop.time() + self._ahead,
        )
        agent = await self._opened.enter_async_context(self._open_agent(run))
        self._engines = _Engines(self._say, self._config.deadlines, self._cluster)
        link = _DispatcherLink(self._say, self._trackers)
        self._streams = streams.Streams(run, dispatcher=link, engines=self._engines)
        self._rollouts = rollouts.Rollouts(run, agent, self._streams)
        self._scope.start(self._count_regularly(), "counts")

    async def listen(self) -> protocols.WorkerAddress | None:
        if not self._address:
            return None
        address, server = await channel.listen(self._address, self._talk)
        self._opened.callback(server.close)
        return address

    async def _talk(self, connection: channel.Connection) -> None:
        """Sends events and takes commands, until the coordinator closes the connection."""
        work = [asyncio.ensure_future(coroutine) for coroutine in (self._take(connection), self._send(connection))]
        try:
            # An error of either ends the connection, by which the coordinator knows that this worker is lost.
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in work:
                task.cancel()

    async def _take(self, connection: channel.Connection) -> None:
        async for commands in connection.messages():
            await self.tell(commands)

    async def _send(self, connection: channel.Connection) -> None:
        async for events in self.events():
            connection.send(events)
            await connection.drain()

    async def health(self) -> None:
        """Returns at once (`protocols.LoopWorker.health`)."""

    async def tell(self, commands: Sequence[protocols.WorkerCommand]) -> None:
        for command in commands:
            match command:
                case protocols.Place(placement, ask):
                    self._streams.placed(placement, ask)
                case protocols.EngineEntry():
                    self._engines.take(command)
                case protocols.RolloutOrder(trajectory):
                    self._tasks[trajectory.trajectory_id] = asyncio.create_task(self._run(command))
                case protocols.CancelRollout(trajectory_id):
                    # It may have left, and its event is on the way. A second cancel would interrupt its closing.
                    task = self._tasks.get(trajectory_id)
                    if task is not None and not task.cancelling():
                        # Not before the task's first step: a task that never ran would never say that it left.
                        asyncio.get_running_loop().call_soon(task.cancel)

    async def events(self) -> AsyncIterator[Sequence[protocols.WorkerEvent]]:
        while True:
            await self._news.wait()
            await asyncio.sleep(GATHER_SECONDS)
            self._news.clear()
            events, self._pending_events = self._pending_events, []
            if spans := self._recorder.take_spans():
                events.append(protocols.WorkerSpans(spans))
            yield events

    async def shutdown(self) -> None:
        tasks = list(self._tasks.values())
        await asyncio.sleep(0)
        for task in tasks:
            if not task.cancelling():
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._scope.cancel_background(self._config.deadlines.shutdown)
        await self._opened.aclose()
        await self._cluster.shutdown()

    async def _run(self, order: protocols.RolloutOrder) -> None:
        trajectory = order.trajectory
        name, error = trajectory.trajectory_id, None
        trajectory.shift(-self._ahead)
        tracker = self._trackers[name] = mirror.Tracker(trajectory, self._ahead)
        try:
            await self._rollouts.run(order)
        except asyncio.CancelledError:
            # The coordinator asked for it, or this worker ends. No one awaits this task.
            pass
        except protocols.LibraError as failed:
            error = _portable_error(failed)
        except Exception as failed:
            error = protocols.LibraError(f"rollout {name} {resolving.raised(failed)}")
        del self._trackers[name], self._tasks[name]
        if not self._tasks:
            self._count()  # a step of the run may end with this rollout
        self._say(protocols.RolloutLeft(tracker.update(last=True), error))

    async def _count_regularly(self) -> None:
        while True:
            await asyncio.sleep(COUNT_SECONDS)
            if self._tasks:
                self._count()

    def _count(self) -> None:
        self._say(protocols.WorkerCounted(self._streams.take_counts(), self._rollouts.take_voids()))

    def _say(self, event: protocols.WorkerEvent) -> None:
        self._pending_events.append(event)
        self._news.set()


def _portable_error(error: BaseException) -> protocols.LibraError:
    """Returns an error in a form that can be sent to the coordinator."""
    libra_error = error if isinstance(error, protocols.LibraError) else protocols.LibraError(resolving.raised(error))
    return protocols.portable(libra_error)


Say = Callable[[protocols.WorkerEvent], None]
"""Sends an event to the coordinator, after all earlier ones."""


class _DispatcherLink(protocols.Dispatch):
    """The dispatcher, as the streams of this worker see it: every call becomes an event."""

    def __init__(self, say: Say, trackers: Mapping[str, mirror.Tracker]) -> None:
        self._say = say
        self._trackers = trackers
        self._rollouts: dict[str, str] = {}  # request to its rollout
        self._reported: dict[str, int] = {}  # request to its tokens in the last report

    def arrived(self, info: protocols.RequestInfo, sink: protocols.PlacementSink) -> None:
        self._rollouts[info.request_id] = info.rollout_id
        self._reported[info.request_id] = info.generated_tokens
        self._say(protocols.RequestArrived(info))

    def progressed(self, request: str, generated: int) -> None:
        if generated - self._reported[request] >= PROGRESS_TOKENS:
            self._reported[request] = generated
            self._say(protocols.RequestProgressed(request, generated))

    def tool_called(self, request: str, generated: int) -> None:
        self._reported[request] = generated
        self._say(protocols.ToolCalled(request, generated, self._update(request)))

    def tool_returned(self, request: str, generated: int, causal_state: protocols.CausalState, context: int) -> None:
        self._say(protocols.ToolReturned(request, generated, causal_state, context, self._update(request)))

    def finished(self, request: str, generated: int, *, completed: bool) -> None:
        del self._rollouts[request], self._reported[request]
        self._say(protocols.RequestFinished(request, generated, completed))

    def _update(self, request: str) -> protocols.RolloutUpdate:
        return self._trackers[self._rollouts[request]].update()


@dataclass
class _Engine:
    """An instance, as the coordinator described it last."""

    name: str
    life: int
    client: protocols.EngineClient | None
    policy_version: int
    paused: bool
    answered: bool = False


class _Engines:
    """The instances that requests of this worker were placed on."""

    def __init__(self, say: Say, limits: config_lib.DeadlineConfig, cluster: protocols.Cluster) -> None:
        self._say = say
        self._limits = limits
        self._cluster = cluster
        self.engines: dict[str, _Engine] = {}
        self._clients: dict[str, tuple[protocols.ActorAddress, engines_client.EngineActorClient]] = {}

    def take(self, entry: protocols.EngineEntry) -> None:
        """Takes in what the coordinator says of an instance."""
        engine = self.engines.get(entry.name)
        if engine is None or engine.life != entry.life or (engine.client is None) != (entry.address is None):
            client = None if entry.address is None else self._client(entry.name, entry.address)
            # A stream holds the object of the life in which it began.
            if engine is not None:
                engine.client = None
            self.engines[entry.name] = _Engine(entry.name, entry.life, client, entry.policy_version, entry.paused)
            return
        engine.policy_version, engine.paused = entry.policy_version, entry.paused

    def _client(self, name: str, address: protocols.ActorAddress) -> protocols.EngineClient:
        """Returns the client of a process: the same in all of its lives, as an engine that slept goes on in it."""
        before = self._clients.get(name)
        if before is None or before[0] != address:
            client = engines_client.EngineActorClient(self._cluster, protocols.ActorSpec(name, "", {}), self._limits)
            client.reach(address)
            before = self._clients[name] = address, client
        return before[1]

    def answered(self, name: str, life: int) -> None:
        engine = self.engines[name]
        if engine.life == life and not engine.answered:
            engine.answered = True
            self._say(protocols.EngineAnswered(name, life))

    def failed(self, name: str, life: int, error: BaseException) -> None:
        engine = self.engines[name]
        # All streams of a lost instance fail; one report is enough.
        if engine.life == life and engine.client is not None:
            engine.client = None
            self._say(protocols.EngineFailed(name, life, _portable_error(error)))


class _Scope(background_tasks.BackgroundTasks):
    """The lifetime of the worker: a failure of background work ends the run."""

    def __init__(self, say: Say) -> None:
        super().__init__()
        self._say = say
        self._called = False

    @property
    def called(self) -> bool:
        return self._called

    def call(self, error: BaseException) -> None:
        if not self._called:
            self._called = True
            self._say(protocols.WorkerBroke(_portable_error(error)))


class _Recorder:
    """Sends spans and notes to the coordinator. The coordinator itself records all the rest."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._spans: list[protocols.Span] = []

    def span(self, track: str, name: str, start: float, end: float, arguments: Mapping[str, Any] | None = None) -> None:
        self._spans.append(protocols.Span(track, 0, name, start, end, arguments or {}))

    def take_spans(self) -> Sequence[protocols.Span]:
        """Returns the spans since the last call."""
        spans, self._spans = self._spans, []
        return spans

    def note(self, text: str) -> None:
        self._say(protocols.WorkerNoted(text))

    def status(self, worker: str, text: str) -> None:
        pass

    def metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        pass

    def trajectory(self, record: Mapping[str, Any]) -> None:
        pass

    sample = decision = transition = trajectory

    def pools(self, now: float, devices: Mapping[str, int]) -> None:
        pass

    def records(self) -> None:
        pass
