"""A simulated rollout engine: continuous batching on virtual time (`batch.py`), weight updates, death; and their fleet.

New weights drop every key and value, and every running request is prefilled again. This is the default of a real
pause that keeps requests.
"""

from __future__ import annotations

import asyncio
import collections
import functools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, cast

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.planning.costs import costs
from libra_jax.simulator import batch, offload, requests, training_side, trajectory

REPLICA_BYTES = 6
"""Bytes of each parameter on a hybrid worker's training side: its synced value, and a gradient sum in float32."""


class SimulatedEngine(batch.InstanceBatch, protocols.RolloutEngine):
    """A rollout engine on virtual time. Lives on one event loop.

    Args:
      degree: tensor-parallel degree.
      slots: most requests that decode at once.
      max_context: longest context, in tokens.
      stream_interval: tokens between two deltas of a request.
      model: costs of steps, prefill and weights.
      counters: counters to continue, so that counts outlive a restart; None makes fresh ones.
      kv_tokens: tokens that its key-value cache holds; None asks the cost model.
      store: keeps contexts in host memory for the fleet; None prefills again what left the cache.
      accelerator: name of its accelerator, if instances have unlike ones.
      start_seconds: seconds until it serves.
      wake_seconds: seconds until a sleeping engine can take weights.

    Raises:
      ConfigError: its memory does not hold one whole context beside the weights.
    """

    def __init__(
        self,
        name: str,
        *,
        degree: int,
        slots: int,
        max_context: int,
        stream_interval: int,
        model: costs.Costs,
        counters: requests.Counters | None = None,
        kv_tokens: int | None = None,
        store: offload.Store | None = None,
        accelerator: str = "",
        start_seconds: float = 0.0,
        wake_seconds: float = 0.0,
    ) -> None:
        capacity = model.kv_tokens(degree) if kv_tokens is None else kv_tokens
        if capacity < max_context:
            raise protocols.ConfigError(
                f"config.rollout.max_context: {max_context} tokens do not fit into the key-value cache of {name}, "
                f"which holds {max(0, capacity)} beside the weights; raise its degree in rollout.tensor_parallel or "
                "lower the context"
            )
        super().__init__(
            name,
            degree=degree,
            slots=slots,
            stream_interval=stream_interval,
            model=model,
            kv_tokens=capacity,
            counters=requests.Counters() if counters is None else counters,
            store=store,
        )
        self._accelerator = accelerator
        self._max_context = max_context
        self._start_seconds = start_seconds
        self._wake_seconds = wake_seconds
        self._started = 0.0
        self._asleep = False
        self._arrivals = 0
        self._updating: int | None = None

    # The engine's life ------------------------------------------------------------------------------------------

    async def start(self) -> protocols.EngineInfo:
        """Begins to serve after `start_seconds`."""
        # Here, not when it is made: an actor may be made before its loop runs.
        self._loop = asyncio.get_running_loop()
        if self._start_seconds:
            await asyncio.sleep(self._start_seconds)
        self._alive, self._started = True, self._loop.time()
        if self._store is not None:
            assert isinstance(self._model, costs.CostModel)  # `world` makes a store for no other
            self._store.join(self.name, self._degree, self._model)
        return protocols.EngineInfo(
            self.name, self._degree, self._slots, self._max_context, (), self._capacity, self._accelerator
        )

    def kill(self) -> None:
        """Dies as a process would: every running and later call raises `WorkerLost`."""
        if not self._alive:
            return
        # Counts the tokens of complete steps, from which the next engine continues.
        done = self._done()
        for request in self._decoding:
            self._settle(request, self._steps + done)
        self._alive = False
        # A sleeping engine has given its devices up, so they do not count as its own.
        if not self._asleep:
            self.counters.alive_seconds += self._loop.time() - self._started
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._pace = None
        if self._store is not None:
            self._store.drop(self.name)
        fetching = list(self._fetches)
        for request in fetching:
            self._stop_fetch(request)
        for request in [*self._waiting, *fetching, *self._running()]:
            request.error = self._gone()
            request.rouse()
        if self._standing is not None and not self._standing.done():
            self._standing.set_exception(self._gone())

    async def shutdown(self) -> None:
        """Stops serving. Idempotent."""
        self.kill()

    async def health(self) -> Mapping[str, float]:
        """Returns the running and waiting requests, and the cache tokens used by running requests and held for
        others."""
        self._check()
        return {
            "running": len(self._running()),
            "waiting": len(self._waiting),
            "kv_used": self._used,
            "kv_held": self._held.tokens,
        }

    def _gone(self) -> protocols.WorkerLost:
        return protocols.WorkerLost(f"engine {self.name} is gone: start it again or resume its requests elsewhere")

    def _check(self, allowed: bool = True, problem: str = "") -> None:
        """Raises WorkerLost if the engine is dead, and LibraError about `problem` if the call is not allowed."""
        if not self._alive:
            raise self._gone()
        if not allowed:
            raise protocols.LibraError(f"engine {self.name}: {problem}")

    # Weights ----------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Freezes decoding at the end of the running step; keeps the requests."""
        self._check()
        self._paused = True
        if self._pace is not None:
            self._standing = self._loop.create_future()
            self._interrupt()
            await self._standing
        # The engine may have died while the step ended.
        self._check()

    async def resume(self) -> None:
        """Continues decoding; after new weights, prefills every request again first."""
        self._check()
        self._paused = False
        # Once for all updates of the pause: keys and values of the old weights are worth nothing under the new.
        if self._stale:
            running = [*self._running(), *self._fetches]
            self._fetches.clear()
            for request in running:
                if request.state == "decoding":
                    self._settle(request, self._steps)
                request.state = "waiting"
            # Oldest first: a request that had a place goes before those that arrived after it.
            everyone = sorted([*self._waiting, *running], key=lambda request: request.number)
            self._waiting = collections.deque(everyone)
            self._decoding.clear()
            self._prefill = None
            self._due.clear()
            self._held.clear()
            self._used = self._context = 0
            self._stale = False
        self._plan_soon()

    async def sleep(self) -> None:
        """Gives up its devices at the end of the running step."""
        await self.pause()
        self.counters.alive_seconds += self._loop.time() - self._started
        self._asleep = True

    async def wake(self) -> None:
        """Takes its devices back; the cache is empty."""
        self._check()
        await asyncio.sleep(self._wake_seconds)
        self._check()  # it may have died meanwhile
        self._asleep, self._started = False, self._loop.time()
        self._stale = True

    async def init_weight_transfer(self, transport: Mapping[str, Any]) -> None:
        """Does nothing: the first weight verb."""
        self._check()

    async def start_weight_update(self, policy_version: int) -> None:
        """Announces a version: the second weight verb."""
        self._check(self._updating is None, f"version {self._updating} is still being loaded")
        self._check(self._paused, "start_weight_update came before pause")
        self._updating = policy_version

    async def update_weights(self, chunk: protocols.WeightChunk) -> None:
        """Takes as long as the chunk's share of the snapshot: the third weight verb."""
        self._check(chunk.policy_version == self._updating, f"version {chunk.policy_version} was not announced")
        await asyncio.sleep(self._model.load_seconds(self._degree) / chunk.count * self.slowdown)
        self._check()

    async def finish_weight_update(self, policy_version: int) -> None:
        """Ends the update: the fourth weight verb. Tokens sampled from now on belong to the new version."""
        self._check(policy_version == self._updating, f"version {policy_version} was not being loaded")
        # Tokens sampled so far must be counted for the old version.
        for request in self._decoding:
            self._settle(request, self._steps)
        self._version, self._updating, self._stale = policy_version, None, True

    # Requests ---------------------------------------------------------------------------------------------------

    async def generate(self, request: protocols.GenerationRequest) -> AsyncIterator[protocols.TokenDelta]:
        """Streams the script's continuation; see `protocols.RolloutEngine`."""
        self._check()
        mine = self._arrive(request)
        try:
            while True:
                while not mine.deltas:
                    if mine.error is not None:
                        raise mine.error
                    mine.wake = self._loop.create_future()
                    await mine.wake
                delta = mine.deltas.popleft()
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            # The stream may end early: what was sampled and not delivered stays with the trajectory, which the next
            # engine continues, and its cache stays with the instance.
            before = mine.state
            if self._alive and before == "decoding":
                self._settle(mine, self._steps + self._done())
                self._keep(mine)  # now, because its next engine may ask before the step ends
            undelivered = [run for delta in mine.deltas for run in cast(trajectory.Runs, delta.policy_versions).runs()]
            mine.segment.unstreamed = undelivered + mine.spans
            mine.deltas.clear()
            mine.spans = []
            mine.state, mine.due = "gone", -1
            if before == "waiting":
                self._waiting.remove(mine)
            elif before == "fetching" and self._alive:
                self._stop_fetch(mine)
                self._plan_admission()  # others may wait for its room
            elif before == "decoding" and self._alive:
                self._leaving.append(mine)
                if self._pace is not None:
                    self._interrupt()  # the request keeps its place until the end of the step
                else:
                    self._retire_leaving()

    def _arrive(self, request: protocols.GenerationRequest) -> requests.BatchRequest:
        """Queues a request for the rest of its script's turn, within its limits."""
        context = request.token_ids
        if not isinstance(context, trajectory.Context):
            raise protocols.LibraError(f"engine {self.name}: {request.request_id} is no simulated trajectory")
        segment = context.segment
        scripted = segment.scripted(context.turn) - context.sampled
        # What the request may still generate, by its own limit and by the engine's.
        limit = min(request.sampling.max_tokens, self._max_context - len(context))
        # Tokens that the last engine sampled and did not stream belong to this request now.
        spans, segment.unstreamed = segment.unstreamed, []
        already = sum(count for _, count in spans)
        arrival = requests.BatchRequest(
            name=request.request_id,
            segment=segment,
            number=self._arrivals,
            length=len(context) + already,
            fresh=0 if already else context.fresh,
            remaining_tokens=min(scripted, limit) - already,
            reason="stop" if scripted <= limit else "length",
            spans=spans,
        )
        self._arrivals += 1
        # Nothing is left to sample: its last engine had sampled it all, or a limit is reached. Only the end is missing.
        if arrival.remaining_tokens <= 0:
            self._stream(arrival)
            return arrival
        self._waiting.append(arrival)
        self._plan_admission()
        return arrival


class Fleet:
    """All instances that a run has had, those that plans add included, and their counters.

    Attributes:
      counters: counters of each instance. They are kept here, because an engine's restarts make new engines.
      degrees: tensor-parallel degree of each instance.
    """

    def __init__(
        self,
        config: config_lib.RunConfig,
        slots: Sequence[int],
        model: costs.Costs,
        warm_seconds: float = 0.0,
        store: offload.Store | None = None,
        models_by_accelerator: Mapping[str, costs.CostModel] | None = None,
    ) -> None:
        self._models_by_accelerator = models_by_accelerator or {}
        self._warm_seconds = warm_seconds
        self._config = config
        self._model = model
        self._slots = slots
        self._by_degree = config_lib.slots_by_degree(config.rollout.tensor_parallel, self._slots)
        self._store = store
        self.counters: list[requests.Counters] = []
        self.degrees: list[int] = []

    def spec(
        self, number: int, degree: int, running_specs: Sequence[protocols.ActorSpec] | None = None
    ) -> protocols.ActorSpec:
        """Returns the spec of an instance; its slots are those of the config's instance, or of its degree.

        Args:
          number: number of the instance.
          degree: its tensor-parallel degree.
          running_specs: the instances beside which a plan adds this one, whose start then takes time; None if the
            layout has it from the beginning.
        """
        rollout, at_first = self._config.rollout, number < len(self._slots)
        # Kept here by number: restarts make the engine again from this spec, and go on counting.
        accelerator = rollout.accelerators[number] if rollout.accelerators else ""
        self.counters.append(requests.Counters())
        self.degrees.append(degree)
        arguments = {
            "name": f"engine-{number}",
            "degree": degree,
            "slots": self._slots[number] if at_first else self._by_degree.get(degree, rollout.slots),
            "max_context": rollout.max_context,
            "stream_interval": rollout.stream_interval,
            "model": self._models_by_accelerator.get(accelerator, self._model),
            "accelerator": accelerator,
            "counters": self.counters[-1],
            "store": self._store,
            "start_seconds": 0.0 if running_specs is None else self._config.planner.start_seconds,
            "wake_seconds": self._config.planner.start_seconds,
        }
        return protocols.ActorSpec(f"engine-{number}", "libra_jax.simulator.engine:SimulatedEngine", arguments)

    def training_side(
        self,
        engine_spec: protocols.ActorSpec,
        channels: training_side.SimulatedChannels,
        train_seconds: Callable[[int, Sequence[int]], float],
    ) -> protocols.ActorSpec:
        """Returns the spec of a hybrid worker's training side.

        Args:
          engine_spec: spec of its rollout side.
          channels: gradient channels to the trainer.
          train_seconds: (devices, sequence lengths) to training seconds.

        Raises:
          ConfigError: its devices do not hold the parameters and gradient sums.
        """
        degree, worker = engine_spec.arguments["degree"], engine_spec.name
        if isinstance(self._model, costs.CostModel):  # costs fitted to a recording know no memory
            need = REPLICA_BYTES * self._model.parameters / degree
            room = self._model.sheet.memory_bytes * self._model.coefficients.memory_fraction
            if need > room:
                raise protocols.ConfigError(
                    f"config.elastic.hybrid: a training side on {degree} {self._model.sheet.name} needs "
                    f"{need / 1e9:.0f} GB a device for parameters and gradient sums, and has {room / 1e9:.0f}; make "
                    "wider instances hybrid"
                )
        arguments = {
            "worker": worker,
            "devices": degree,
            "model": self._model,
            "channels": channels,
            "train_seconds": functools.partial(train_seconds, degree),
            "warm_seconds": self._warm_seconds,
            "masks": self._config.task.masks,
        }
        return protocols.ActorSpec(
            f"hybrid-{worker}", "libra_jax.simulator.training_side:SimulatedTrainingSide", arguments
        )

    def busy_share(self, seconds: float) -> float:
        """Returns the share of the device-seconds in which instances ran steps."""
        busy = sum(degree * count.busy_seconds for degree, count in zip(self.degrees, self.counters, strict=True))
        # A fixed layout counts all devices for the whole run; a changing layout counts each instance while it lives.
        if not self._config.planner.period and not self._config.elastic.hybrid:
            return busy / (sum(self.degrees) * seconds)
        return busy / sum(
            degree * count.alive_seconds for degree, count in zip(self.degrees, self.counters, strict=True)
        )
