"""Runs rollouts on loop workers: sends them commands, takes their events, and restarts those that are lost.

A rollout stays on its worker, which has its environment. Its requests go to any instance. If a worker is lost, its
rollouts go on elsewhere, each after the last whole output that the worker had sent.
"""

from __future__ import annotations

import asyncio
import collections
import copy
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from libra_jax import protocols
from libra_jax.coordinator import dispatch, instances
from libra_jax.rollouts import loop_worker_client as worker_client
from libra_jax.rollouts import mirror, rollouts
from libra_jax.utils import deadlines, run_context


class _GoesOnElsewhere(Exception):
    """The worker of a rollout is gone. The rollout goes on elsewhere."""


@dataclass(eq=False)
class _Live:
    """A rollout on a worker.

    Attributes:
      trajectory: the coordinator's copy.
      end: done once its environment is closed, or the worker is lost.
      requests: its requests so far, in the order of their arrival.
    """

    trajectory: protocols.Trajectory
    end: asyncio.Future[None]
    requests: list[str] = field(default_factory=list)


@dataclass(eq=False)
class _Worker(protocols.PlacementSink):
    """A loop worker, across its restarts.

    Attributes:
      up: True while it takes rollouts.
      restarts: number of restarts.
      dead: True once no restart is left.
      live: its rollouts, by id.
      commands: commands that were not sent yet.
      due: set while there are commands to send.
      places: instance of each of its requests that decodes.
      generated: tokens of each of its requests, as told last.
      entries: the last entry of each instance that it was sent.
    """

    engines: instances.Instances
    spec: protocols.ActorSpec
    up: bool = False
    restarts: int = 0
    dead: bool = False
    live: dict[str, _Live] = field(default_factory=dict)
    commands: list[protocols.WorkerCommand] = field(default_factory=list)
    due: asyncio.Event = field(default_factory=asyncio.Event)
    places: dict[str, str] = field(default_factory=dict)
    generated: dict[str, int] = field(default_factory=dict)
    entries: dict[str, protocols.EngineEntry] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.spec.name

    def send(self, command: protocols.WorkerCommand) -> None:
        """Sends a command, after all earlier ones."""
        self.commands.append(command)
        self.due.set()

    def placed(self, placement: protocols.Placement, ask: int) -> None:
        if placement.instance:
            self.places[placement.request_id] = placement.instance
            self.describe(placement.instance)
        else:
            self.clear_place(placement.request_id)
        self.send(protocols.Place(placement, ask))

    def clear_place(self, request: str) -> None:
        """Notes that a request of this worker is on no instance."""
        self.places.pop(request, None)

    def describe(self, name: str) -> None:
        """Tells what the worker does not know yet of an instance."""
        engine = self.engines.engines.get(name)
        # An instance that a plan has ended: its requests were displaced before.
        if engine is None:
            return
        address = None if engine.client is None else engine.client.address
        entry = protocols.EngineEntry(name, engine.life, address, engine.policy_version, engine.paused)
        if self.entries.get(name) != entry:
            self.entries[name] = entry
            self.send(entry)

    def updated(self, name: str) -> None:
        """Tells that an instance has changed, if requests of this worker are there."""
        if name not in self.entries:
            return
        if name in self.places.values():
            self.describe(name)
        else:
            # Described again before the next placement there.
            del self.entries[name]

    def forget(self) -> None:
        """Forgets all that a lost process knew."""
        for memory in (self.live, self.commands, self.places, self.generated, self.entries):
            memory.clear()
        self.due.clear()


class LoopWorkers(rollouts.RolloutRunner):
    """Runs rollouts on loop workers. Create it inside the event loop that it serves.

    Args:
      run: what the parts of the run share (`rollout`, `deadlines`). The recorder gets what the workers record. The run
        ends if no worker is left.
      agent: what the policy is asked to do; tasks and the teacher stay here.
      specs: one for each worker.
      dispatcher: places the requests.
    """

    def __init__(
        self,
        run: run_context.RunContext,
        agent: rollouts.Agent,
        specs: Sequence[protocols.ActorSpec],
        *,
        dispatcher: dispatch.Dispatcher,
        engines: instances.Instances,
    ) -> None:
        super().__init__(run, agent)
        self._cluster = run.cluster
        self._recorder = run.recorder
        self._scope = run.scope
        self._dispatcher = dispatcher
        self._engines = engines
        self._workers = [_Worker(engines, spec) for spec in specs]
        self._up = asyncio.Event()
        self._heard: dict[str, float] = {}  # by instance: time of its last tokens that are known
        self._counts = protocols.StreamCounts()
        self._voids: collections.Counter[str] = collections.Counter()
        run.events.subscribe(protocols.EngineUpdated, lambda event: self._updated(event.name))
        run.events.subscribe(protocols.EngineLost, lambda event: self._updated(event.name))
        for worker in self._workers:
            run.scope.start(self._keep(worker), worker.name)

    def take_counts(self) -> protocols.StreamCounts:
        """Returns what the workers have counted since the last call (`rollouts.RolloutRunner.take_counts`)."""
        counts, self._counts = self._counts, protocols.StreamCounts()
        return counts

    def take_voids(self) -> collections.Counter[str]:
        """Returns the number of rollouts that crashed since the last call, by prompt id."""
        voids, self._voids = self._voids, collections.Counter()
        return voids

    async def run(self, order: protocols.RolloutOrder) -> None:
        """Runs the rollout until it has a reward (`rollouts.RolloutRunner.run`)."""
        trajectory = order.trajectory
        trajectory.goes_on_at(self._clock())
        lost, limit = 0, self._config.task.environment_retries
        # A rollout restored from a checkpoint may have its reward already.
        while trajectory.reward is None:
            # What a rollout does may be what ends its worker: a segmentation fault, or all of the memory.
            if lost > limit:
                raise protocols.EnvironmentCrashed(
                    f"rollout {trajectory.trajectory_id}: {lost} loop workers were lost while they ran it "
                    f"(config.task.environment_retries = {limit})"
                )
            while not (workers := [worker for worker in self._workers if worker.up]):
                self._up.clear()
                await self._up.wait()
            try:
                # A copy, also where the worker is in this process: from now on, updates alone change this one.
                sent = dataclasses.replace(order, trajectory=copy.deepcopy(trajectory))
                await self._run_on(min(workers, key=lambda worker: len(worker.live)), trajectory, sent)
            except _GoesOnElsewhere:
                lost += 1

    async def _run_on(self, worker: _Worker, trajectory: protocols.Trajectory, order: protocols.RolloutOrder) -> None:
        name = trajectory.trajectory_id
        live = worker.live[name] = _Live(trajectory, asyncio.get_running_loop().create_future())
        worker.send(order)
        try:
            await asyncio.shield(live.end)
        except asyncio.CancelledError:
            # The rollout has left only when its environment is closed.
            worker.send(protocols.CancelRollout(name))
            await asyncio.wait({live.end})
            raise
        finally:
            if live.end.done():
                live.end.exception()

    # One worker ---------------------------------------------------------------------------------------------------

    async def _keep(self, worker: _Worker) -> None:
        """Starts a worker, and starts it again when it is lost."""
        try:
            await self._keep_running(worker)
        finally:
            # The run ends: the worker's own shutdown aborts its rollouts, and no one is left to tell of it.
            worker.up = False
            for rollout in worker.live.values():
                rollout.end.set_exception(_GoesOnElsewhere())

    async def _keep_running(self, worker: _Worker) -> None:
        error: protocols.LibraError = protocols.WorkerLost(f"{worker.name} ended")
        while True:
            client = worker_client.LoopWorkerClient(self._cluster, worker.spec, self._config.deadlines)
            try:
                self._recorder.status(worker.name, "starting")
                await client.make()
                await client.start(self._clock())
                await client.connect()
                self._recorder.status(worker.name, "running rollouts")
                worker.up = True
                self._up.set()
                await self._serve(worker, client)
            except (protocols.WorkerLost, protocols.DeadlineMissed) as failed:
                error = failed
            finally:
                client.close()
            worker.up = False
            # Before its rollouts go on elsewhere: a worker that only hung would call their tools a second time.
            try:
                await client.stop()
            except protocols.LibraError as unclean:
                self._recorder.note(f"Loop worker {worker.name} could not be stopped cleanly: {unclean}")
            self._lost(worker, error)
            if worker.restarts >= self._config.rollout.restarts:
                worker.dead = True
                self._recorder.status(worker.name, "dead")
                if all(other.dead for other in self._workers):
                    raise protocols.WorkerLost(
                        f"No loop worker is left: the last was {worker.name}, which was started again "
                        f"{worker.restarts} times (config.rollout.restarts) and ended with: {error}"
                    )
                return
            worker.restarts += 1

    async def _serve(self, worker: _Worker, client: worker_client.LoopWorkerClient) -> None:
        """Sends commands and takes events until the worker is lost. Raises WorkerLost or DeadlineMissed then."""
        work = (self._take(worker, client), self._send(worker, client), self._watch(worker, client))
        tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                deadlines.abandon(task)

    async def _send(self, worker: _Worker, client: worker_client.LoopWorkerClient) -> None:
        # One call at a time keeps their order, and lets commands gather meanwhile.
        while True:
            await worker.due.wait()
            worker.due.clear()
            commands, worker.commands = worker.commands, []
            await client.tell(commands)

    async def _take(self, worker: _Worker, client: worker_client.LoopWorkerClient) -> None:
        async for events in client.events():
            for event in events:
                self._happened(worker, event)

    async def _watch(self, worker: _Worker, client: worker_client.LoopWorkerClient) -> None:
        def silent() -> None:
            self._recorder.status(worker.name, "does not answer")
            self._recorder.note(
                f"Loop worker {worker.name} has not answered for {deadlines.SILENT_SECONDS:g} s, and its "
                f"{len(worker.live)} rollouts wait for it. It is given up after "
                f"{self._config.deadlines.first_token:g} s (config.deadlines.first_token)."
            )

        while True:
            await asyncio.sleep(self._config.rollout.health_seconds)
            with deadlines.noticing(silent):
                await client.health()
            self._recorder.status(worker.name, "running rollouts")

    def _happened(self, worker: _Worker, event: protocols.WorkerEvent) -> None:
        match event:
            case protocols.RequestProgressed(request, generated):
                worker.generated[request] = generated
                self._hear(worker, request)
                self._dispatcher.progressed(request, generated)
            case protocols.ToolCalled(request, generated, update):
                self._copy(worker, update)
                worker.generated[request] = generated
                self._hear(worker, request)
                worker.clear_place(request)
                self._dispatcher.tool_called(request, generated)
            case protocols.ToolReturned(request, generated, causal_state, context, update):
                self._copy(worker, update)
                self._dispatcher.tool_returned(request, generated, causal_state, context)
            case protocols.RequestArrived(info):
                worker.live[info.rollout_id].requests.append(info.request_id)
                worker.generated[info.request_id] = info.generated_tokens
                self._dispatcher.arrived(info, worker)
            case protocols.RequestFinished(request, generated, completed):
                del worker.generated[request]
                worker.clear_place(request)
                self._dispatcher.finished(request, generated, completed=completed)
            case protocols.RolloutLeft(update, error):
                self._left(worker, update, error)
            case protocols.WorkerSpans(spans):
                for span in spans:
                    self._recorder.span(span.track, span.name, span.start, span.end, span.arguments)
            case protocols.WorkerCounted(counts, voids):
                self._counts.add(counts)
                self._voids.update(voids)
            case protocols.EngineAnswered(name, life):
                self._engines.answered(name, life)
            case protocols.EngineFailed(name, life, error):
                self._failed(worker, name, life, error)
            case protocols.WorkerNoted(text):
                self._recorder.note(text)
            case protocols.WorkerBroke(error):
                self._scope.call(error)

    def _hear(self, worker: _Worker, request: str) -> None:
        """Notes that an instance has sent tokens."""
        if (name := worker.places.get(request)) is not None:
            self._heard[name] = self._clock()

    def _failed(self, worker: _Worker, name: str, life: int, error: protocols.LibraError) -> None:
        """Takes a failed instance out of service. One that other requests still hear from goes on."""
        silent = self._clock() - self._heard.get(name, -math.inf)
        if isinstance(error, protocols.DeadlineMissed) and silent < self._config.deadlines.first_token:
            worker.entries.pop(name, None)
            self._dispatcher.place_again(worker, name)
        else:
            self._engines.failed(name, life, error)

    def _copy(self, worker: _Worker, update: protocols.RolloutUpdate) -> None:
        mirror.apply(worker.live[update.trajectory_id].trajectory, update)

    def _left(self, worker: _Worker, update: protocols.RolloutUpdate, error: protocols.LibraError | None) -> None:
        live = worker.live.pop(update.trajectory_id)
        mirror.apply(live.trajectory, update)
        if error is None:
            live.end.set_result(None)
        else:
            live.end.set_exception(error)

    def _lost(self, worker: _Worker, error: BaseException) -> None:
        """Ends what was on a lost worker: its requests leave the scheduler, and its rollouts go on elsewhere."""
        live = list(worker.live.values())
        for rollout in live:
            # Children first, so that the scheduler never holds a segment whose parent it has forgotten. A rollout that
            # began again after a crash has its requests' names twice.
            for request in reversed(rollout.requests):
                if (generated := worker.generated.pop(request, None)) is not None:
                    self._dispatcher.finished(request, generated, completed=False)
        # Afterwards: a slot that came free may have been given to another of these requests.
        worker.forget()
        self._recorder.status(worker.name, protocols.LOST)
        if not self._scope.called:
            self._recorder.note(
                f"Loop worker {worker.name} was lost ({error}); its {len(live)} rollouts go on elsewhere, each after "
                "its last whole output."
            )
        for rollout in live:
            rollout.end.set_exception(_GoesOnElsewhere())

    def _updated(self, name: str) -> None:
        for worker in self._workers:
            worker.updated(name)
