"""The life of the rollout engines: started, given weights, watched, restarted when they die, replaced by a plan."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from libra_jax import config as configuration
from libra_jax import deadlines, protocols, turns
from libra_jax.coordinator import failure
from libra_jax.engines import client as engines_client

SETTLE_SECONDS = 1.0
"""Between two looks at whether engines that are being started have come up."""

State = Literal["starting", "loaded", "serving", "asleep", "lost", "dead", "retired"]

MakeSpec = Callable[[int, int, Sequence[protocols.ActorSpec]], protocols.ActorSpec]
"""(number, tensor-parallel degree, specs of the others, the trainer's last) to how an engine is made, on devices that
those leave free."""


def make(
    make_spec: MakeSpec, numbers: Iterator[int], degree: int, others: Sequence[protocols.ActorSpec]
) -> protocols.ActorSpec:
    """The spec of the next engine whose name none of the others has."""
    taken = {other.name for other in others}
    return next(spec for number in numbers if (spec := make_spec(number, degree, others)).name not in taken)


_PASSES = re.compile(
    r"out of ?memory|memoryerror|(cannot|can't) allocate memory|free memory|resource_?exhausted"
    r"|connection|timeout|timed out|address already in use|broken ?pipe",
    re.IGNORECASE,
)
"""Errors by what others do at the moment: the same start may succeed later."""


def exception_told(text: str) -> str:
    """Returns the Python exception that an engine's error quotes, without paths; empty without one.

    The error of a killed process quotes none: vLLM then says only that its initialization failed. A further start may
    succeed. Nor is an exception told that passes by itself: others may give up memory, devices or ports.
    """
    found = re.search(r"\b\w*(?:Error|Exception): .+", " ".join(text.split()))
    if found is None or "Engine core initialization failed" in found[0] or _PASSES.search(found[0]):
        return ""
    return re.sub(r"/\S+", "PATH", found[0])


class NoRoom(protocols.LibraError):
    """A plan asks for an engine that no devices are left for, or none that share a host."""


@dataclass
class Engine:
    """One rollout instance, over all its restarts.

    Attributes:
      spec: how its actor is made.
      hybrid: its devices also help to train: plans leave it alone.
      state: starting -> loaded (processes up, no useful weights) -> serving; asleep while its devices train; lost until
        restarted; dead for good; retired by a plan, and out of `Instances.engines`.
      client: calls the engine's present life; None unless loaded, serving or asleep.
      info: what it told when it started.
      policy_version: version it serves; `NO_VERSION` before its first weights.
      paused: decoding is frozen for a weight update.
      restarts: times it was started again.
      answered: event-loop seconds of its first token, since it came back to service if it has slept.
      life: counts its starts, so that an error of an earlier life is not blamed on the present one.
      answered_life: last life that brought a token.
      fault: exception by which its last life ended before a token; empty where no exception was told.
      repeats: the last two lives ended by the same exception before a token, so that a further start is useless.
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
        """How many it has, as far as that is known."""
        return len(self.spec.devices) or (1 if self.info is None else self.info.tensor_parallel)


class Instances:
    """All rollout engines of a run.

    Attributes:
      changed: called when other engines serve.
      fewer: called when one was lost.
      weights: a lock, held while engines are given weights, and while one is taken out to sleep.

    Args:
      config: the run's configuration (`rollout`, `deadlines`).
      cluster: makes and ends the actors.
      specs: one entry an engine.
      hybrid: names of those whose devices also help to train.
      make_spec: makes engines that a plan adds; without it no plan can be followed.
      recorder: told of starts and losses.
      ending: told when no engine can ever serve again.
    """

    def __init__(
        self,
        config: configuration.RunConfig,
        *,
        cluster: protocols.Cluster,
        specs: Sequence[protocols.ActorSpec],
        recorder: protocols.Recorder,
        ending: failure.Ending,
        make_spec: MakeSpec | None = None,
        hybrid: Sequence[str] = (),
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._make_spec = make_spec
        self._numbers = itertools.count(len(specs))
        self._recorder = recorder
        self._ending = ending
        self.engines = {spec.name: Engine(spec, hybrid=spec.name in hybrid) for spec in specs}
        self.losses = 0  # of the engines that plans are about
        self.changed: Callable[[], None] = lambda: None
        self._trainer = protocols.ActorSpec("trainer", "", {})
        self.weights = asyncio.Lock()
        self.fewer: Callable[[], None] = lambda: None
        self.replanned: Callable[[Sequence[protocols.PlannedBucket]], None] = lambda rollout: None
        self.load_weights: Callable[[Engine], Awaitable[None]] | None = None

    async def start(self) -> None:
        """Starts every engine concurrently; one that dies while starting is restarted in the background."""
        await deadlines.together(*(self._start(engine) for engine in self.engines.values()))
        self._ending.start(self._watch(), "engine health")

    def serving(self) -> list[protocols.Instance]:
        """The instances that requests may be placed on."""
        return [
            protocols.Instance(engine.name, engine.info.tensor_parallel, engine.info.slots, engine.info.cache_tokens)
            for engine in self.engines.values()
            if engine.state == "serving" and engine.info is not None
        ]

    @property
    def settled(self) -> bool:
        """No engine that plans are about is being started or stopped: a plan may be followed."""
        return all(engine.state in ("serving", "dead") for engine in self.engines.values() if not engine.hybrid)

    @property
    def dead(self) -> bool:
        """Some engine that plans are about has died for good."""
        return any(engine.state == "dead" for engine in self.engines.values() if not engine.hybrid)

    def loadable(self) -> list[Engine]:
        """The engines that a weight update goes to."""
        return [engine for engine in self.engines.values() if engine.state in ("loaded", "serving")]

    def serve(self, engines: Iterable[Engine]) -> None:
        """These engines hold current weights: requests may go there from now on.

        Told once of all of them, because a scheduler takes up all instances anew each time: one by one, 2,560 engines
        that start together would cost that 2,560 times.
        """
        ready = [engine for engine in engines if engine.state == "loaded"]
        for engine in ready:
            engine.state = "serving"
        if ready:
            self.changed()

    def lost(self, engine: Engine, life: int, error: BaseException) -> None:
        """Takes an engine that failed in its life number `life` out of service and restarts it, while it may be."""
        if engine.life != life or engine.state in ("lost", "dead"):
            return
        engine.state = "lost"
        self.losses += not engine.hybrid
        fault = "" if engine.answered_life == engine.life else exception_told(str(error))
        engine.repeats, engine.fault = bool(fault) and fault == engine.fault, fault
        self._take_out(engine)
        self._recorder.status(engine.name, protocols.LOST)
        self.changed()
        if self._ending.called:  # nothing asks for tokens any more
            return
        left = self._config.rollout.restarts - engine.restarts
        what_next = "its requests resume elsewhere" if self.serving() else "its requests wait"
        if engine.repeats:
            what_next += ", and it is not started again: its last start ended so, too, before a token"
        elif left:
            what_next += f", and it is started again (restart {engine.restarts + 1} of {self._config.rollout.restarts})"
        self._recorder.note(f"Engine {engine.name} was lost ({error}); {what_next}.")
        self.fewer()
        self._ending.start(self._restart(engine, error), f"restart {engine.name}")

    async def sleep(self, name: str) -> None:
        """Takes a serving engine out of service and puts it to sleep; its requests go on elsewhere, or wait.

        Raises:
          LibraError: it does not serve; or it failed to go to sleep, and counts as lost.
        """
        engine = self.engines[name]
        with turns.queued():
            await self.weights.acquire()
        try:
            if engine.state != "serving":
                raise protocols.WorkerLost(
                    f"engine {name} does not serve (it is {engine.state}) and cannot be put to sleep"
                )
            # Another life: what was asked of it before, a health check say, may fail now and means nothing.
            engine.state, engine.life, engine.policy_version = "asleep", engine.life + 1, protocols.NO_VERSION
        finally:
            self.weights.release()  # no update goes to it any more: one that hangs holds up nobody's
        self.changed()
        self._recorder.status(name, "going to sleep")
        try:
            await _client(engine).sleep()
        except protocols.LibraError as error:
            if engine.state == "asleep":
                self.lost(engine, engine.life, error)
            raise
        self._recorder.status(name, "asleep: its devices train")

    async def wake(self, name: str) -> None:
        """Brings an engine that sleeps back to service, with current weights; one that died asleep is started again.

        Raises:
          DeadlineMissed: it did not serve in time.
          WorkerLost: it has died for good.
        """
        engine, seconds = self.engines[name], self._config.deadlines.transition
        if engine.state == "asleep":
            life = engine.life
            self._recorder.status(name, "waking up")
            try:
                await _client(engine).wake()
                engine.state = "loaded"
                if self.load_weights is not None:
                    await self.load_weights(engine)
            except protocols.LibraError as error:
                self.lost(engine, life, error)
        limit = asyncio.get_running_loop().time() + seconds + self._config.deadlines.engine_start
        while engine.state not in ("serving", "dead"):
            if asyncio.get_running_loop().time() >= limit:
                raise protocols.DeadlineMissed(
                    f"Engine {name} did not come back to service (it is {engine.state}) within {seconds:g} s and "
                    f"{self._config.deadlines.engine_start:g} s for another start: look at its log in the workdir, or "
                    "raise config.deadlines.transition or config.deadlines.engine_start."
                )
            await asyncio.sleep(SETTLE_SECONDS)
        if engine.state == "dead":
            raise protocols.WorkerLost(f"Engine {name} has died for good.")

    async def follow(self, rollout: Sequence[protocols.PlannedBucket]) -> None:
        """Makes the engines those of a plan: what it has no use for ends, and what it has more of is started.

        Requests of engines that end go on elsewhere, or wait for those that are started. Engines that have died for
        good are replaced, if the plan has use for their degree.

        Raises:
          ConfigError: there is nothing to make engines with.
          NoRoom: one that the plan adds has no place; all are as they were.
        """
        if self._make_spec is None:
            raise protocols.ConfigError("a plan cannot be followed: this run was not told how further engines are made")
        # An engine that is being started would come up unknown to all; each start has its own deadline.
        while not self.settled:  # noqa: ASYNC110 (states change in many places)
            await asyncio.sleep(SETTLE_SECONDS)
        wanted = {bucket.tensor_parallel: bucket.count for bucket in rollout}
        kept: collections.Counter[int] = collections.Counter()
        retired = []
        # A trainer that grows takes the devices next to its own, so the engines on those go first.
        for engine in sorted(self.engines.values(), key=lambda engine: engine.spec.devices, reverse=True):
            if engine.hybrid:
                continue
            degree = engine.info.tensor_parallel if engine.state == "serving" and engine.info is not None else 0
            if kept[degree] < wanted.get(degree, 0):
                kept[degree] += 1
            else:
                retired.append(engine)
        lacking = [degree for degree, count in wanted.items() for _ in range(count - kept[degree])]
        specs = self._specs(lacking, retired)  # before anybody gives devices up for what has no place
        for engine in retired:
            self._retire(engine)
        self.replanned(self.with_hybrid(rollout))
        await deadlines.together(*(self._stop(engine) for engine in retired))
        added = [Engine(spec) for spec in specs]
        self.engines.update({engine.name: engine for engine in added})
        await deadlines.together(*(self._start_and_load(engine) for engine in added))

    def await_first_token(self, name: str) -> None:
        """Notes when the engine's next token comes, in `Engine.answered`."""
        self.engines[name].answered = None

    def trainer_holds(self, devices: int) -> None:
        """The first so many of the run's devices are the trainer's: engines that are added leave them free."""
        self._trainer = dataclasses.replace(self._trainer, devices=tuple(range(devices)))

    def on_devices(self, below: int) -> list[str]:
        """Names of the engines that have one of the run's first `below` devices."""
        return [name for name, engine in self.engines.items() if any(device < below for device in engine.spec.devices)]

    def with_hybrid(self, rollout: Sequence[protocols.PlannedBucket]) -> tuple[protocols.PlannedBucket, ...]:
        """A plan's buckets, and one for each degree that only hybrid engines have: what the next wider serves."""
        buckets = {bucket.tensor_parallel: bucket for bucket in rollout}
        for engine in self.engines.values():
            if not engine.hybrid or engine.info is None or engine.info.tensor_parallel in buckets:
                continue
            degree = engine.info.tensor_parallel
            wider = [bucket for bucket in rollout if bucket.tensor_parallel > degree] or [rollout[-1]]
            buckets[degree] = protocols.PlannedBucket(degree, 1, wider[0].max_remaining_tokens)
        return tuple(buckets[degree] for degree in sorted(buckets))

    def _specs(self, degrees: Sequence[int], retired: Sequence[Engine]) -> list[protocols.ActorSpec]:
        """Of engines to be added, on devices that nobody has once others have retired."""
        assert self._make_spec is not None
        kept = [engine.spec for engine in self.engines.values() if engine not in retired]
        made: list[protocols.ActorSpec] = []
        try:
            for degree in degrees:
                made.append(make(self._make_spec, self._numbers, degree, [*kept, *made, self._trainer]))
        except protocols.LibraError as error:
            raise NoRoom(str(error)) from error
        return made

    def _retire(self, engine: Engine) -> None:
        engine.state = "retired"
        self._take_out(engine)
        del self.engines[engine.name]
        self._recorder.status(engine.name, "ended by a plan")

    @staticmethod
    def _take_out(engine: Engine) -> None:
        """The engine's present life is over."""
        engine.life += 1
        engine.client, engine.paused, engine.policy_version = None, False, protocols.NO_VERSION

    async def _start_and_load(self, engine: Engine) -> None:
        await self._start(engine)
        if engine.state == "loaded" and self.load_weights is not None:
            await self.load_weights(engine)

    async def _start(self, engine: Engine) -> None:
        engine.state = "starting"
        self._recorder.status(engine.name, "starting its process")
        life = engine.life
        client = engines_client.EngineClient(self._cluster, engine.spec, self._config.deadlines)
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

    async def _restart(self, engine: Engine, error: BaseException) -> None:
        await self._stop(engine)
        if engine.repeats or engine.restarts >= self._config.rollout.restarts:
            engine.state = "dead"
            self._recorder.status(engine.name, "dead")
            if all(other.state == "dead" for other in self.engines.values()):
                ended = f"it was started again {engine.restarts} times (config.rollout.restarts) and ended with"
                if engine.repeats:
                    ended = "two starts in a row ended with the same error before a token, and a third would, too"
                self._ending.call(
                    protocols.WorkerLost(f"No rollout engine is left: the last was {engine.name}; {ended}: {error}")
                )
            return
        engine.restarts += 1
        await self._start_and_load(engine)

    async def _stop(self, engine: Engine) -> None:
        try:
            await engines_client.EngineClient(self._cluster, engine.spec, self._config.deadlines).stop()
        except protocols.LibraError as error:
            self._recorder.note(f"Engine {engine.name} could not be stopped cleanly: {error}")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._config.rollout.health_seconds)
            await deadlines.together(*(self._check(engine) for engine in self.loadable()))

    async def _check(self, engine: Engine) -> None:
        life, client = engine.life, engine.client
        if client is None:  # lost since the check was due
            return
        try:
            health = await client.health()
        except protocols.LibraError as error:
            self.lost(engine, life, error)
            return
        if engine.life == life and "running" in health:
            running = f"{health['running']:.0f} requests running"
            loaded = engine.policy_version != protocols.NO_VERSION
            held = f"serving version {engine.policy_version}" if loaded else "no weights yet"
            self._recorder.status(engine.name, f"{held}, {running}")


def _client(engine: Engine) -> protocols.EngineClient:
    """Returns the client of the engine's present life. Raises WorkerLost if the engine has none."""
    if engine.client is None:
        raise protocols.WorkerLost(f"engine {engine.name} has no process (it is {engine.state})")
    return engine.client
