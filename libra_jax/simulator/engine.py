"""A simulated rollout engine: continuous batching on virtual time (`batch.py`), weight updates, death.

New weights drop every key and value, and every running request is prefilled again. This is the default of a real
pause that keeps requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

from libra_jax import protocols
from libra_jax.planning import costs
from libra_jax.simulator import batch, records, trajectory

Counters = records.Counters


class Engine(batch.Batch, protocols.RolloutEngine):
    """A rollout engine on virtual time; made by `create`. Lives on one event loop."""

    def __init__(
        self, name: str, *, max_context: int, start_seconds: float = 0.0, wake_seconds: float = 0.0, **settings: Any
    ) -> None:
        super().__init__(name, **settings)
        self._max_context = max_context
        self._start_seconds = start_seconds
        self._wake_seconds = wake_seconds
        self._started = 0.0
        self._asleep = False
        self._arrivals = 0
        self._standing: asyncio.Future[None] | None = None
        self._updating: int | None = None

    # The engine's life ------------------------------------------------------------------------------------------

    async def start(self) -> protocols.EngineInfo:
        """Begins to serve after `start_seconds`."""
        self._loop = asyncio.get_running_loop()
        if self._start_seconds:
            await asyncio.sleep(self._start_seconds)
        self._alive, self._started = True, self._loop.time()
        return protocols.EngineInfo(self.name, self._degree, self._slots, self._max_context, (), self._capacity)

    def kill(self) -> None:
        """Dies as a process would: every running and later call raises `WorkerLost`."""
        if not self._alive:
            return
        # Counts the tokens of complete steps, from which the next engine continues.
        self._settle_now(list(self._decoding))
        self._alive = False
        if not self._asleep:
            self.counters.alive_seconds += self._loop.time() - self._started
        self._rest()
        for request in [*self._waiting, *self._running()]:
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
        self._check_alive()
        return {
            "running": len(self._running()),
            "waiting": len(self._waiting),
            "kv_used": self._used,
            "kv_held": self._held_tokens,
        }

    def _gone(self) -> protocols.WorkerLost:
        return protocols.WorkerLost(f"engine {self.name} is gone: start it again or resume its requests elsewhere")

    def _check_alive(self) -> None:
        if not self._alive:
            raise self._gone()

    # Weights ----------------------------------------------------------------------------------------------------

    async def hand_over(self, request: protocols.GenerationRequest) -> Mapping[str, Any]:
        """Refuses always: moves of keys and values are not simulated."""
        raise protocols.LibraError(f"engine {self.name} keeps no keys and values of {request.request_id}")

    async def pause(self) -> None:
        """Freezes decoding at the end of the running step; keeps the requests."""
        self._check_alive()
        self._paused = True
        if self._pace is not None:
            self._standing = self._loop.create_future()
            self._interrupt()
            await self._standing
        # The engine may have died while the step ended.
        self._check_alive()

    async def resume(self) -> None:
        """Continues decoding; after new weights, prefills every request again first."""
        self._check_alive()
        self._paused = False
        if self._stale:
            self._drop_cache()
        self._plan_soon()

    async def sleep(self) -> None:
        """Gives up its devices at the end of the running step."""
        await self.pause()
        self.counters.alive_seconds += self._loop.time() - self._started
        self._asleep = True

    async def wake(self) -> None:
        """Takes its devices back; the cache is empty."""
        self._check_alive()
        await asyncio.sleep(self._wake_seconds)
        self._check_alive()
        self._asleep, self._started = False, self._loop.time()
        self._stale = True

    async def init_weight_transfer(self, transport: Mapping[str, Any]) -> None:
        """Does nothing: the first weight verb."""
        self._check_alive()

    async def start_weight_update(self, policy_version: int) -> None:
        """Announces a version: the second weight verb."""
        self._check_alive()
        self._require(self._updating is None, f"version {self._updating} is still being loaded")
        self._require(self._paused, "start_weight_update came before pause")
        self._updating = policy_version

    async def update_weights(self, chunk: protocols.WeightChunk) -> None:
        """Takes as long as the chunk's share of the snapshot: the third weight verb."""
        self._check_alive()
        self._require(chunk.policy_version == self._updating, f"version {chunk.policy_version} was not announced")
        await asyncio.sleep(self._model.load_seconds(self._degree) / chunk.count * self.slowdown)
        self._check_alive()

    async def finish_weight_update(self, policy_version: int) -> None:
        """Ends the update: the fourth weight verb. Tokens sampled from now on belong to the new version."""
        self._check_alive()
        self._require(policy_version == self._updating, f"version {policy_version} was not being loaded")
        # Tokens sampled so far must be counted for the old version.
        for request in self._decoding:
            self._settle(request, self._steps)
        self._version, self._updating, self._stale = policy_version, None, True

    def _require(self, condition: bool, problem: str) -> None:
        if not condition:
            raise protocols.LibraError(f"engine {self.name}: {problem}")

    def _stood(self) -> None:
        if self._standing is not None and not self._standing.done():
            self._standing.set_result(None)

    # Requests ---------------------------------------------------------------------------------------------------

    async def generate(self, request: protocols.GenerationRequest) -> AsyncIterator[protocols.TokenDelta]:
        """Streams the script's continuation; see `protocols.RolloutEngine`."""
        self._check_alive()
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
            self._leave(mine)

    def _arrive(self, request: protocols.GenerationRequest) -> records.Request:
        context = request.token_ids
        if not isinstance(context, trajectory.Context):
            raise protocols.LibraError(f"engine {self.name}: {request.request_id} is no simulated trajectory")
        attempt = context.trajectory
        turns, at = attempt.script.turns, context.turn
        # A turn beyond the script is one stop token: a tool that timed out took the place of the script's end.
        scripted = (max(1, turns[at].generated_tokens) if at < len(turns) else 1) - context.sampled
        limit = min(request.sampling.max_tokens, self._max_context - len(context))
        # Tokens that the last engine sampled and did not stream belong to this request now.
        spans, attempt.unstreamed = attempt.unstreamed, []
        already = sum(count for _, count in spans)
        made = records.Request(
            name=request.request_id,
            trajectory=attempt,
            number=self._arrivals,
            length=len(context) + already,
            fresh=0 if already else context.fresh,
            left=min(scripted, limit) - already,
            reason="stop" if scripted <= limit else "length",
            spans=spans,
        )
        self._arrivals += 1
        if made.left <= 0:
            self._emit(made)
        else:
            self._waiting.append(made)
            self._admit_at_next_boundary()
        return made

    def _leave(self, request: records.Request) -> None:
        """Ends the stream: undelivered tokens stay with the trajectory, and its cache stays with the instance."""
        if request.state == "gone":
            self._give_back(request)
            return
        if self._alive and request.state == "decoding":
            self._settle_now([request])
        self._give_back(request)
        before, request.state, request.due = request.state, "gone", -1
        if before == "waiting":
            self._waiting.remove(request)
        elif before == "decoding" and self._alive:
            self._leaving.append(request)
            if self._pace is not None:
                self._interrupt()  # the request keeps its place until the end of the step
            else:
                self._retire_leaving()

    def _give_back(self, request: records.Request) -> None:
        undelivered = [run for delta in request.deltas for run in cast(trajectory.Runs, delta.policy_versions).runs()]
        request.trajectory.unstreamed = undelivered + request.spans
        request.deltas.clear()
        request.spans = []


def create(
    name: str,
    *,
    degree: int,
    slots: int,
    max_context: int,
    stream_interval: int,
    model: costs.Costs,
    counters: Counters | None = None,
    kv_tokens: int | None = None,
    start_seconds: float = 0.0,
    wake_seconds: float = 0.0,
) -> Engine:
    """Makes a simulated engine.

    Args:
      name: name of the instance.
      degree: tensor-parallel degree.
      slots: most requests that decode at once.
      max_context: longest context, in tokens.
      stream_interval: tokens between two deltas of a request.
      model: costs of steps, prefill and weights.
      counters: counters to continue, so that counts outlive a restart; None makes fresh ones.
      kv_tokens: tokens that its key-value cache holds; None asks the cost model.
      start_seconds: seconds until it serves.
      wake_seconds: seconds until a sleeping engine can take weights.

    Raises:
      ConfigError: its memory does not hold one whole context beside the weights.
    """
    capacity = model.kv_tokens(degree) if kv_tokens is None else kv_tokens
    if capacity < max_context:
        raise protocols.ConfigError(
            f"config.rollout.max_context: {max_context} tokens do not fit into the key-value cache of {name}, which "
            f"holds {max(0, capacity)} beside the weights; raise its degree in rollout.tensor_parallel or lower the "
            "context"
        )
    return Engine(
        name,
        degree=degree,
        slots=slots,
        max_context=max_context,
        start_seconds=start_seconds,
        wake_seconds=wake_seconds,
        stream_interval=stream_interval,
        model=model,
        kv_tokens=capacity,
        counters=Counters() if counters is None else counters,
    )
