"""Manages the life of the rollout engines: start, weights, health, restart after a crash, replacement by a plan."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from libra_jax import protocols
from libra_jax.engines import client as engines_client
from libra_jax.utils import deadlines, run_context, turns

SETTLE_SECONDS = 1.0
"""Seconds between two looks at engines that are being started."""

State = Literal["starting", "loaded", "serving", "asleep", "lost", "dead", "retired"]

MakeSpec = Callable[[int, int, Sequence[protocols.ActorSpec]], protocols.ActorSpec]
"""Makes the spec of an engine, from (number, tensor-parallel degree, specs of the others with the trainer's last).

The engine gets devices that the others leave free.
"""


def make(
    make_spec: MakeSpec, numbers: Iterator[int], degree: int, other_specs: Sequence[protocols.ActorSpec]
) -> protocols.ActorSpec:
    """Returns the spec of the next engine, with a name that no other engine has."""
    used_names = {actor.name for actor in other_specs}
    return next(spec for number in numbers if (spec := make_spec(number, degree, other_specs)).name not in used_names)


_PASSES = re.compile(
    r"out of ?memory|memoryerror|(cannot|can't) allocate memory|free memory|resource_?exhausted"
    r"|connection|timeout|timed out|address already in use|broken ?pipe",
    re.IGNORECASE,
)
"""Errors that other processes cause for a while, so that the same start may succeed later."""


class NoRoom(protocols.LibraError):
    """Raised if no devices, or none on one host, are free for an engine of a plan."""


@dataclass
class RolloutInstance:
    """One rollout instance, across all its restarts.

    Attributes:
      hybrid: True if its devices also train; plans leave such an engine alone.
      state: starting -> loaded (processes up, no useful weights) -> serving; asleep while its devices train; lost until
        restarted; dead for good; retired by a plan, and out of `Instances.engines`.
      client: calls the present process; None unless loaded, serving or asleep.
      info: what the engine reported at its start.
      policy_version: version of its weights; `NO_VERSION` before its first weights.
      paused: True while decoding is frozen for a weight update.
      restarts: number of restarts.
      answered: event-loop time of its first token; after a sleep, of the first token since it serves again.
      life: number of the present life, so that a late error of an earlier life is ignored.
      answered_life: last life that produced a token.
      fault: exception that ended its last life before a token; empty if the error held none.
      repeats: True if the last two lives ended with the same exception before a token. A further start is then useless.
    """

    spec: protocols.ActorSpec
    hybrid: bool = False
    state: State = "starting"
    client: protocols.EngineClient | None = None
    info: protocols.EngineInfo | None = None
    policy_version: int = protocols.NO_VERSION
    paused: bool = False
    restarts: int = 0
    life: int = 0
    answered: float | None = None
    answered_life: int = -1
    fault: str = ""
    repeats: bool = False

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def devices(self) -> int:
        """Number of its devices, as far as known."""
        return len(self.spec.devices) or (1 if self.info is None else self.info.tensor_parallel)


class Instances:
    """All rollout engines of a run.

    Args:
      run: what the parts of the run share (`rollout`, `deadlines`). Events get EnginesChanged, EnginesReplanned,
        EngineUpdated, EngineLost, and EngineLoaded for each engine that needs weights. The run ends if no engine can
        ever serve again.
      make_spec: makes engines that a plan adds. Without it, no plan can be followed.
      hybrid: names of the engines whose devices also train.

    Attributes:
      engines: the engines, by name; those that a plan has ended are gone.
      losses: number of losses of engines that are not hybrid.
      weights: lock held while engines receive weights, and while an engine is taken out to sleep.
    """

    def __init__(
        self,
        run: run_context.RunContext,
        specs: Sequence[protocols.ActorSpec],
        *,
        make_spec: MakeSpec | None = None,
        hybrid: Sequence[str] = (),
    ) -> None:
        self._config = run.config
        self._cluster = run.cluster
        self._recorder = run.recorder
        self._scope = run.scope
        self._clock = run.clock
        self._events = run.events
        self._make_spec = make_spec
        self._numbers = itertools.count(len(specs))
        self.engines = {spec.name: RolloutInstance(spec, hybrid=spec.name in hybrid) for spec in specs}
        self.losses = 0
        self._trainer = protocols.ActorSpec("trainer", "", {})
        self.weights = asyncio.Lock()

    async def start(self) -> None:
        """Starts all engines concurrently. An engine that dies while starting is restarted in the background."""
        # Without weights: the run's first weight sync loads all engines together.
        await deadlines.together(*(self._start(engine, load=False) for engine in self.engines.values()))
        self._scope.start(self._watch(), "engine health")

    def serving(self) -> list[protocols.Instance]:
        """Returns the instances on which requests may be placed."""
        return [
            protocols.Instance(info.name, info.tensor_parallel, info.slots, info.cache_tokens, info.accelerator)
            for engine in self.engines.values()
            if engine.state == "serving" and (info := engine.info) is not None
        ]

    @property
    def settled(self) -> bool:
        """True if no engine is being started or stopped (hybrid engines aside), so that a plan may be followed."""
        return all(engine.state in ("serving", "dead") for engine in self.engines.values() if not engine.hybrid)

    @property
    def dead(self) -> bool:
        """True if an engine that is not hybrid has died for good."""
        return any(engine.state == "dead" for engine in self.engines.values() if not engine.hybrid)

    def loadable(self) -> list[RolloutInstance]:
        """Returns the engines that receive a weight update."""
        return [engine for engine in self.engines.values() if engine.state in ("loaded", "serving")]

    def serve(self, engines: Iterable[RolloutInstance]) -> None:
        """Lets requests go to engines that now hold current weights.

        One call serves all of them, because a scheduler rebuilds its instances at each change. One by one, 2,560
        engines that start together would cost 2,560 rebuilds.
        """
        ready = [engine for engine in engines if engine.state == "loaded"]
        for engine in ready:
            engine.state = "serving"
        if ready:
            self._events.announce(protocols.EnginesChanged(self.serving()))

    def lost(self, engine: RolloutInstance, life: int, error: BaseException) -> None:
        """Takes a failed engine out of service and restarts it if restarts are left. Ignores earlier lives."""
        if engine.life != life or engine.state in ("lost", "dead"):
            return
        engine.state = "lost"
        self.losses += not engine.hybrid
        # The Python exception that ended the start, without paths; empty if a further start may succeed. A life that
        # produced a token started well, so its end says nothing about the next start. The error of a killed process
        # holds no exception: vLLM then says only that its initialization failed.
        match = re.search(r"\b\w*(?:Error|Exception): .+", " ".join(str(error).split()))
        message = "" if match is None or engine.answered_life == engine.life else match[0]
        passes = "Engine core initialization failed" in message or _PASSES.search(message)
        fault = "" if passes else re.sub(r"/\S+", "PATH", message)
        engine.repeats, engine.fault = bool(fault) and fault == engine.fault, fault
        self._take_out(engine)
        self._recorder.status(engine.name, protocols.LOST)
        self._events.announce(protocols.EnginesChanged(self.serving()))
        # If the run ends, no request needs the engine.
        if self._scope.called:
            return
        restarts_left = self._config.rollout.restarts - engine.restarts
        what_next = "its requests resume elsewhere" if self.serving() else "its requests wait"
        if engine.repeats:
            what_next += ", and it is not started again: its last start ended so, too, before a token"
        elif restarts_left:
            what_next += f", and it is started again (restart {engine.restarts + 1} of {self._config.rollout.restarts})"
        self._recorder.note(f"Engine {engine.name} was lost ({error}); {what_next}.")
        self._events.announce(protocols.EngineLost(engine.name))
        self._scope.start(self._restart(engine, error), f"restart {engine.name}")

    async def sleep(self, name: str) -> None:
        """Takes a serving engine out of service and puts it to sleep. Its requests resume elsewhere, or wait.

        Raises:
          LibraError: the engine does not serve, or it failed to go to sleep and counts as lost.
        """
        engine = self.engines[name]
        with turns.queued():
            await self.weights.acquire()
        try:
            if engine.state != "serving":
                raise protocols.WorkerLost(
                    f"engine {name} does not serve (it is {engine.state}) and cannot be put to sleep"
                )
            # A new life, because calls still under way (a health check, for instance) may now fail without meaning.
            engine.state, engine.life, engine.policy_version = "asleep", engine.life + 1, protocols.NO_VERSION
        finally:
            # The engine gets no more updates, so a hanging sleep blocks no one.
            self.weights.release()
        self._events.announce(protocols.EnginesChanged(self.serving()))
        self._recorder.status(name, "going to sleep")
        try:
            await _client(engine).sleep()
        except protocols.LibraError as error:
            if engine.state == "asleep":
                self.lost(engine, engine.life, error)
            raise
        self._recorder.status(name, "asleep: its devices train")

    async def wake(self, name: str) -> None:
        """Brings a sleeping engine back to service with current weights. If it died asleep, it is started again.

        Raises:
          DeadlineMissed: the engine did not serve in time.
          WorkerLost: the engine has died for good.
        """
        engine, seconds = self.engines[name], self._config.deadlines.transition
        if engine.state == "asleep":
            life = engine.life
            self._recorder.status(name, "waking up")
            try:
                await _client(engine).wake()
                engine.state = "loaded"
                await self._events.deliver(protocols.EngineLoaded(name))
            except protocols.LibraError as error:
                self.lost(engine, life, error)
        # An engine that died meanwhile has another start before it.
        limit = self._clock() + seconds + self._config.deadlines.engine_start
        while engine.state not in ("serving", "dead"):
            if self._clock() >= limit:
                raise protocols.DeadlineMissed(
                    f"Engine {name} did not come back to service (it is {engine.state}) within {seconds:g} s and "
                    f"{self._config.deadlines.engine_start:g} s for another start: look at its log in the workdir, or "
                    "raise config.deadlines.transition or config.deadlines.engine_start."
                )
            await asyncio.sleep(SETTLE_SECONDS)
        if engine.state == "dead":
            raise protocols.WorkerLost(f"Engine {name} has died for good.")

    async def follow(self, rollout: Sequence[protocols.PlannedBucket]) -> None:
        """Changes the engines to those of a plan: stops surplus engines and starts missing ones.

        Requests of stopped engines resume elsewhere, or wait for new engines. Engines that have died for good are
        replaced if the plan needs their degree.

        Raises:
          ConfigError: the run was given no `make_spec`.
          NoRoom: no devices are free for an added engine; nothing has changed.
        """
        if self._make_spec is None:
            raise protocols.ConfigError("a plan cannot be followed: this run was not told how further engines are made")
        # An engine in its start would come up unnoticed by the plan. Each start has its own deadline.
        while not self.settled:  # noqa: ASYNC110 (states change in many places)
            await asyncio.sleep(SETTLE_SECONDS)
        planned_counts = {bucket.tensor_parallel: bucket.count for bucket in rollout}
        kept_counts: collections.Counter[int] = collections.Counter()
        retired = []
        # A growing trainer takes the devices next to its own, so engines on these devices stop first.
        for engine in sorted(self.engines.values(), key=lambda engine: engine.spec.devices, reverse=True):
            if engine.hybrid:
                continue
            degree = engine.info.tensor_parallel if engine.state == "serving" and engine.info is not None else 0
            if kept_counts[degree] < planned_counts.get(degree, 0):
                kept_counts[degree] += 1
            else:
                retired.append(engine)
        lacking = [degree for degree, count in planned_counts.items() for _ in range(count - kept_counts[degree])]
        other_specs = [engine.spec for engine in self.engines.values() if engine not in retired]
        specs: list[protocols.ActorSpec] = []
        try:
            # Before any engine stops, so that NoRoom changes nothing. Devices of engines to retire count as free.
            for degree in lacking:
                specs.append(make(self._make_spec, self._numbers, degree, [*other_specs, *specs, self._trainer]))
        except protocols.LibraError as error:
            raise NoRoom(str(error)) from error
        for engine in retired:
            engine.state = "retired"
            self._take_out(engine)
            del self.engines[engine.name]
            self._recorder.status(engine.name, "ended by a plan")
        self._events.announce(protocols.EnginesReplanned(self.with_hybrid(rollout)))
        await deadlines.together(*(self._stop(engine) for engine in retired))
        added = [RolloutInstance(spec) for spec in specs]
        self.engines.update({engine.name: engine for engine in added})
        await deadlines.together(*(self._start(engine) for engine in added))

    def answered(self, name: str, life: int) -> None:
        """Takes in that a life of an engine has sent a first token (`protocols.StreamEngines.answered`)."""
        engine = self.engines.get(name)
        if engine is None or engine.life != life:
            return
        # A life with a token clears the fault, so that another restart makes sense.
        engine.answered_life, engine.fault = life, ""
        engine.answered = engine.answered or self._clock()

    def failed(self, name: str, life: int, error: BaseException) -> None:
        """Takes a failed engine out of service (`protocols.StreamEngines.failed`)."""
        if (engine := self.engines.get(name)) is not None:
            self.lost(engine, life, error)

    def froze(self, engine: RolloutInstance) -> None:
        """Takes in that decoding of an engine is frozen, for a weight update."""
        engine.paused = True
        self._events.announce(protocols.EngineUpdated(engine.name))

    def went_on(self, engine: RolloutInstance, version: int) -> None:
        """Takes in that decoding of an engine goes on, under the weights of this version."""
        engine.policy_version, engine.paused = version, False
        self._events.announce(protocols.EngineUpdated(engine.name))

    def await_first_token(self, name: str) -> None:
        """Resets `RolloutInstance.answered`, which then records the engine's next token."""
        self.engines[name].answered = None

    def trainer_holds(self, devices: int) -> None:
        """Reserves the run's first `devices` devices for the trainer. Added engines leave them free."""
        self._trainer = dataclasses.replace(self._trainer, devices=tuple(range(devices)))

    def with_hybrid(self, rollout: Sequence[protocols.PlannedBucket]) -> tuple[protocols.PlannedBucket, ...]:
        """Returns a plan's buckets, plus one bucket for each degree that only hybrid engines have.

        An added bucket serves the lengths of the next wider bucket.
        """
        buckets = {bucket.tensor_parallel: bucket for bucket in rollout}
        for engine in self.engines.values():
            if not engine.hybrid or engine.info is None or engine.info.tensor_parallel in buckets:
                continue
            degree = engine.info.tensor_parallel
            wider = [bucket for bucket in rollout if bucket.tensor_parallel > degree] or [rollout[-1]]
            buckets[degree] = protocols.PlannedBucket(degree, 1, wider[0].max_remaining_tokens)
        return tuple(buckets[degree] for degree in sorted(buckets))

    @staticmethod
    def _take_out(engine: RolloutInstance) -> None:
        """Ends the engine's present life: later errors of it are ignored."""
        engine.life += 1
        engine.client, engine.paused, engine.policy_version = None, False, protocols.NO_VERSION

    async def _start(self, engine: RolloutInstance, *, load: bool = True) -> None:
        """Starts an engine's process, and gets it the current weights if `load`. A failed start is a lost engine."""
        engine.state = "starting"
        self._recorder.status(engine.name, "starting its process")
        life = engine.life
        client = engines_client.EngineActorClient(self._cluster, engine.spec, self._config.deadlines)
        try:
            await client.make()
            self._recorder.status(engine.name, "loading the inference engine and the model")
            engine.info = await client.start()
            self._recorder.status(engine.name, "opening the weight transport")
            await client.init_weight_transfer({"kind": self._config.rollout.transport})
        except (protocols.WorkerLost, protocols.DeadlineMissed) as error:
            self.lost(engine, life, error)
            return
        engine.client, engine.state = client, "loaded"
        self._recorder.status(engine.name, "started, waits for its first weights")
        if load:
            await self._events.deliver(protocols.EngineLoaded(engine.name))

    async def _restart(self, engine: RolloutInstance, error: BaseException) -> None:
        await self._stop(engine)
        if engine.repeats or engine.restarts >= self._config.rollout.restarts:
            engine.state = "dead"
            self._recorder.status(engine.name, "dead")
            if all(instance.state == "dead" for instance in self.engines.values()):
                reason = f"it was started again {engine.restarts} times (config.rollout.restarts) and ended with"
                if engine.repeats:
                    reason = "two starts in a row ended with the same error before a token, and a third would, too"
                self._scope.call(
                    protocols.WorkerLost(f"No rollout engine is left: the last was {engine.name}; {reason}: {error}")
                )
            return
        engine.restarts += 1
        await self._start(engine)

    async def _stop(self, engine: RolloutInstance) -> None:
        try:
            await engines_client.EngineActorClient(self._cluster, engine.spec, self._config.deadlines).stop()
        except protocols.LibraError as error:
            self._recorder.note(f"Engine {engine.name} could not be stopped cleanly: {error}")

    async def _watch(self) -> None:
        """Asks every engine for its health now and then, and takes out those that do not answer."""

        async def check(engine: RolloutInstance) -> None:
            life, client = engine.life, engine.client
            # Lost since the check was due.
            if client is None:
                return

            def silent() -> None:
                self._recorder.status(engine.name, "does not answer")
                self._recorder.note(
                    f"Engine {engine.name} has not answered for {deadlines.SILENT_SECONDS:g} s. It is given up after "
                    f"{self._config.deadlines.first_token:g} s (config.deadlines.first_token)."
                )

            try:
                with deadlines.noticing(silent):
                    health = await client.health()
            except protocols.LibraError as error:
                self.lost(engine, life, error)
                return
            # A late answer of an earlier life must not set the status.
            if engine.life == life and "running" in health:
                running = f"{health['running']:.0f} requests running"
                loaded = engine.policy_version != protocols.NO_VERSION
                weights = f"serving version {engine.policy_version}" if loaded else "no weights yet"
                self._recorder.status(engine.name, f"{weights}, {running}")

        while True:
            await asyncio.sleep(self._config.rollout.health_seconds)
            await deadlines.together(*(check(engine) for engine in self.loadable()))


def _client(engine: RolloutInstance) -> protocols.EngineClient:
    """Returns the client of the engine's present life. Raises WorkerLost if the engine has none."""
    if engine.client is None:
        raise protocols.WorkerLost(f"engine {engine.name} has no process (it is {engine.state})")
    return engine.client
