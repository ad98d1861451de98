"""A simulated rollout engine: continuous batching as a fluid that knows where its steps begin and end.

All decoding requests get one token a step. Between two changes of the batch the steps' times have a closed form
(`pace.py`), so the engine wakes up only when a request arrives, leaves, ends its prefill or has tokens to stream;
changes take hold at the next step boundary, as in a real engine, so the result is that of a simulation token by token.

Prefill is chunked: it shares steps with decoding and makes them longer; requests that fit into one chunk together are
prefilled together. A request that comes back finds what its instance still holds of its context; held prefixes are
dropped least recently used first when room is needed. Out of room for one more step, the latest arrival is pre-empted
and prefilled again. New weights drop every key and value. Siblings' common prompt is not shared, which charges each of
them its own prefill.
"""

from __future__ import annotations

import asyncio
import collections
import heapq
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from libra_jax import protocols
from libra_jax.simulator import costs, pace, trajectory

WATERMARK = 0.01
"""Share of the cache that a newcomer leaves free, so that it is not pre-empted at once (vLLM's watermark)."""


@dataclass
class Counters:
    """What an instance did, over all its lives.

    Attributes:
      generated: tokens sampled.
      prefilled: tokens prefilled.
      prefilled_again: of these, tokens whose keys and values some instance had computed before.
      moved_in: tokens of context of requests that another instance served before.
      preempted: requests that lost their place for want of cache.
      busy_seconds: spent in steps.
    """

    generated: int = 0
    prefilled: int = 0
    prefilled_again: int = 0
    moved_in: int = 0
    preempted: int = 0
    busy_seconds: float = 0.0


@dataclass(eq=False)
class _Request:
    """A request from its arrival to its departure; `length` tokens of context at step `since`."""

    name: str
    trajectory: trajectory.Trajectory
    number: int
    length: int
    fresh: int
    left: int
    reason: protocols.FinishReason
    spans: list[tuple[int, int]]
    state: Literal["waiting", "prefilling", "decoding", "gone"] = "waiting"
    since: int = 0
    due: int = -1
    deltas: collections.deque[protocols.TokenDelta] = field(default_factory=collections.deque)
    wake: asyncio.Future[None] | None = None
    error: BaseException | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.trajectory.trajectory_id, self.trajectory.life

    @property
    def unstreamed(self) -> int:
        return sum(count for _, count in self.spans)

    def rouse(self) -> None:
        if self.wake is not None and not self.wake.done():
            self.wake.set_result(None)


@dataclass
class _Prefill:
    """Requests prefilled together in `steps` more steps, each of which takes `seconds` of attention besides."""

    requests: list[_Request]
    steps: int
    tokens: float
    seconds: float


class Engine:
    """A `protocols.RolloutEngine` on virtual time; made by `create`. Lives on one event loop.

    Attributes:
      slowdown: factor on the time of each step begun from now on; 1 is healthy.
    """

    def __init__(
        self,
        name: str,
        *,
        degree: int,
        slots: int,
        max_context: int,
        stream_interval: int,
        model: costs.CostModel,
        kv_tokens: int,
        counters: Counters,
    ) -> None:
        self.name = name
        self.counters = counters
        self.slowdown = 1.0
        self._degree = degree
        self._slots = slots
        self._max_context = max_context
        self._interval = stream_interval
        self._model = model
        self._capacity = kv_tokens
        self._per_context = model.context_seconds(degree)
        self._fixed: dict[int, float] = {}
        self._steps = 0
        self._arrivals = 0
        self._waiting: collections.deque[_Request] = collections.deque()
        self._decoding: dict[_Request, None] = {}
        self._prefill: _Prefill | None = None
        self._leaving: list[_Request] = []  # gone, with their place until the end of the step
        self._due: list[tuple[int, int, int, _Request]] = []  # step, arrival, push, request
        self._pushes = 0
        self._held: collections.OrderedDict[tuple[str, int], int] = collections.OrderedDict()
        self._held_tokens = 0
        self._used = 0  # tokens of the cache that running requests take
        self._context = 0  # of these, the decoding ones'
        self._pace: pace.Pace | None = None  # None: no step is running
        self._began = 0.0
        self._factor = 1.0
        self._planned = 0
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._paused = False
        self._standing: asyncio.Future[None] | None = None
        self._version = protocols.NO_VERSION
        self._updating: int | None = None
        self._stale = False  # weights changed, so no key or value is worth anything
        self._alive = False

    # The engine's life ------------------------------------------------------------------------------------------

    async def start(self) -> protocols.EngineInfo:
        """Begins to serve."""
        self._loop = asyncio.get_running_loop()
        self._alive = True
        return protocols.EngineInfo(self.name, self._degree, self._slots, self._max_context, ())

    def kill(self) -> None:
        """Dies as a process would: every running and later call raises `WorkerLost`."""
        if not self._alive:
            return
        self._settle_now(list(self._decoding))
        self._alive = False
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
        """Requests running and waiting, and tokens of cache in use by the running and held for others."""
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

    async def pause(self) -> None:
        """Freezes decoding at the end of the step under way; requests are kept."""
        self._check_alive()
        self._paused = True
        if self._pace is not None:
            self._standing = self._loop.create_future()
            self._interrupt()
            await self._standing
        self._check_alive()

    async def resume(self) -> None:
        """Goes on decoding; after new weights, every request is prefilled again first."""
        self._check_alive()
        self._paused = False
        if self._stale:
            self._drop_cache()
        self._plan_soon()

    async def init_weight_transfer(self, transport: Mapping[str, Any]) -> None:
        """First weight verb."""
        self._check_alive()

    async def start_weight_update(self, policy_version: int) -> None:
        """Second weight verb."""
        self._check_alive()
        self._require(self._updating is None, f"version {self._updating} is still being loaded")
        self._require(self._paused, "start_weight_update came before pause")
        self._updating = policy_version

    async def update_weights(self, bucket: protocols.WeightBucket) -> None:
        """Third weight verb: takes as long as its share of the snapshot."""
        self._check_alive()
        self._require(bucket.policy_version == self._updating, f"version {bucket.policy_version} was not announced")
        await asyncio.sleep(self._model.load_seconds(self._degree) / bucket.count * self.slowdown)
        self._check_alive()

    async def finish_weight_update(self, policy_version: int) -> None:
        """Fourth weight verb: tokens sampled from now on are the new version's."""
        self._check_alive()
        self._require(policy_version == self._updating, f"version {policy_version} was not being loaded")
        for request in self._decoding:
            self._settle(request, self._steps)
        self._version, self._updating, self._stale = policy_version, None, True

    def _require(self, condition: bool, problem: str) -> None:
        if not condition:
            raise protocols.LibraError(f"engine {self.name}: {problem}")

    def _drop_cache(self) -> None:
        """New weights make keys and values worthless: whoever was running is prefilled again, oldest first."""
        for request in self._running():
            if request.state == "decoding":
                self._settle(request, self._steps)
            request.state = "waiting"
        self._waiting = collections.deque(sorted(self._requests(), key=lambda request: request.number))
        self._decoding.clear()
        self._prefill = None
        self._due.clear()
        self._held.clear()
        self._held_tokens = self._used = self._context = 0
        self._stale = False

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

    def _arrive(self, request: protocols.GenerationRequest) -> _Request:
        context = request.token_ids
        if not isinstance(context, trajectory.Context):
            raise protocols.LibraError(f"engine {self.name}: {request.request_id} is no simulated trajectory")
        attempt = context.trajectory
        turns, at = attempt.script.turns, context.turn
        scripted = (max(1, turns[at].generated_tokens) if at < len(turns) else 1) - context.sampled
        limit = min(request.sampling.max_tokens, self._max_context - len(context))
        spans, attempt.unstreamed = attempt.unstreamed, []
        already = sum(count for _, count in spans)
        made = _Request(
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

    def _leave(self, request: _Request) -> None:
        """The stream is over: what it did not deliver stays with the trajectory, its cache with the instance."""
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
                self._interrupt()  # it keeps its place to the end of the step
            else:
                self._retire_leaving()

    def _give_back(self, request: _Request) -> None:
        undelivered = [run for delta in request.deltas for run in cast(trajectory.Runs, delta.policy_versions).runs()]
        request.trajectory.unstreamed = undelivered + request.spans
        request.deltas.clear()
        request.spans = []

    def _requests(self) -> list[_Request]:
        return [*self._waiting, *self._running()]

    def _running(self) -> list[_Request]:
        prefilling = self._prefill.requests if self._prefill is not None else []
        return [request for request in (*self._decoding, *prefilling) if request.state != "gone"]

    # Tokens -----------------------------------------------------------------------------------------------------

    def _done(self) -> int:
        """Of the planned steps, those that are complete at this moment."""
        if self._pace is None:
            return 0
        return min(self._planned, self._pace.steps((self._loop.time() - self._began) / self._factor))

    def _settle_now(self, requests: Sequence[_Request]) -> None:
        """Counts these decoding requests' tokens of all steps that are complete at this moment."""
        done = self._done()
        for request in requests:
            self._settle(request, self._steps + done)

    def _settle(self, request: _Request, step: int) -> None:
        count = step - request.since
        if count and request.state != "gone":
            self._sample(request, count)
        request.since = step

    def _sample(self, request: _Request, count: int) -> None:
        if request.spans and request.spans[-1][0] == self._version:
            count_before = request.spans.pop()[1]
            request.spans.append((self._version, count_before + count))
        else:
            request.spans.append((self._version, count))
        request.left -= count
        request.length += count
        self.counters.generated += count

    def _emit(self, request: _Request) -> None:
        """Streams what has been sampled since the last delta; with the last token, the finish reason."""
        done = request.left <= 0
        count, stops = request.unstreamed, done and request.reason == "stop"
        runs = [(trajectory.SAMPLED, count - 1), (trajectory.STOP, 1)] if stops else [(trajectory.SAMPLED, count)]
        delta = protocols.TokenDelta(
            cast(Any, trajectory.Runs(runs)),
            cast(Any, trajectory.Runs([(LOG_PROB, count)])),
            cast(Any, trajectory.Runs(request.spans)),
            request.reason if done else None,
        )
        request.spans = []
        request.deltas.append(delta)
        if done:
            if request.state == "decoding":
                self._leaving.append(request)
            request.state = "gone"
        request.rouse()

    # Steps ------------------------------------------------------------------------------------------------------

    def _admit_at_next_boundary(self) -> None:
        if self._pace is None:
            self._plan_soon()
        elif self._prefill is None:
            self._interrupt()

    def _plan_soon(self) -> None:
        """Begins a step at this very instant, once everything that arrives in it has arrived."""
        if self._timer is None and not self._paused and self._alive:
            self._timer = self._loop.call_soon(self._begin)

    def _interrupt(self) -> None:
        """Ends the present run of steps at the next boundary."""
        if self._pace is None:
            return
        done = self._done()
        if done + 1 < self._planned:
            self._plan(done + 1)

    def _plan(self, steps: int) -> None:
        assert self._pace is not None
        if self._timer is not None:
            self._timer.cancel()
        self._planned = steps
        self._timer = self._loop.call_at(self._began + self._pace.seconds(steps) * self._factor, self._boundary)

    def _rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._pace = None

    def _boundary(self) -> None:
        """The planned steps are over: tokens are counted, prefills end, requests come and go."""
        assert self._pace is not None
        steps, decoding = self._planned, len(self._decoding)
        self.counters.busy_seconds += self._loop.time() - self._began
        self._steps += steps
        self._used += steps * decoding
        self._context += steps * decoding
        self._timer = self._pace = None
        if self._prefill is not None:
            self._prefill.steps -= steps
            if self._prefill.steps <= 0:
                self._end_prefill(self._prefill)
        while self._due and self._due[0][0] <= self._steps:
            due, _, _, request = heapq.heappop(self._due)
            if request.due == due and request.state == "decoding":
                self._settle(request, self._steps)
                self._stream(request)
        self._retire_leaving()
        if self._paused:
            if self._standing is not None and not self._standing.done():
                self._standing.set_result(None)
        else:
            self._begin()

    def _begin(self) -> None:
        """Plans steps up to the next moment at which anything changes."""
        self._timer = None
        if self._paused or not self._alive or self._pace is not None:
            return
        if self._prefill is None:
            self._admit()
        steps = self._make_room()
        decoding = len(self._decoding)
        if not decoding and self._prefill is None:
            return
        if self._prefill is None:
            fixed = self._fixed.get(decoding) or self._fixed.setdefault(
                decoding, self._model.fixed_seconds(self._degree, decoding)
            )
        else:
            fixed = self._model.fixed_seconds(self._degree, decoding, self._prefill.tokens) + self._prefill.seconds
        self._pace = pace.Pace(fixed, self._per_context, self._context, decoding)
        self._began, self._factor = self._loop.time(), self.slowdown
        self._plan(steps)

    def _stream(self, request: _Request) -> None:
        """A decoding request's tokens are due: its last ones, or as many as one delta holds."""
        self._emit(request)
        if request.state != "gone":
            self._make_due(request)

    def _make_due(self, request: _Request) -> None:
        request.due = self._steps + max(1, min(request.left, self._interval - request.unstreamed))
        self._pushes += 1
        heapq.heappush(self._due, (request.due, request.number, self._pushes, request))

    # The cache --------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Takes waiting requests, oldest first, as far as slots, room and one chunk of prefill go."""
        chunk, tokens, seconds = self._model.coefficients.chunk_tokens, 0, 0.0
        requests: list[_Request] = []
        while self._waiting and len(self._decoding) + len(requests) < self._slots:
            request = self._waiting[0]
            held = min(self._held.get(request.key, 0), request.length)
            new = max(1, request.length - held)
            idle = not self._decoding and not requests
            spare = 0 if idle else int(WATERMARK * self._capacity)
            if (requests and tokens + new > chunk) or self._used + request.length + spare > self._capacity:
                break
            self._waiting.popleft()
            self._release(request.key)
            self._used += request.length
            self._evict(self._capacity - self._used)
            self.counters.prefilled += new
            self.counters.prefilled_again += max(0, new - max(1, request.fresh))
            if request.trajectory.served_by not in ("", self.name):
                self.counters.moved_in += request.length - request.fresh
            request.trajectory.served_by = self.name
            request.state, request.fresh = "prefilling", 0
            requests.append(request)
            tokens += new
            seconds += self._model.attention_seconds(self._degree, new, request.length - new)
        if requests:
            steps = -(-tokens // chunk)
            self._prefill = _Prefill(requests, steps, tokens / steps, seconds / steps)

    def _end_prefill(self, prefill: _Prefill) -> None:
        """The last chunk's step samples each request's first token."""
        self._prefill = None
        for request in prefill.requests:
            if request.state == "gone":
                self._used -= request.length
                self._hold(request)
                continue
            self._sample(request, 1)
            self._used += 1
            self._context += request.length
            request.state, request.since = "decoding", self._steps
            self._decoding[request] = None
            if request.left <= 0 or request.unstreamed >= self._interval:
                self._emit(request)
            if request.state != "gone":
                self._make_due(request)

    def _retire_leaving(self) -> None:
        """Requests that have ended or left go out of the batch; their prefixes are held for their return."""
        for request in self._leaving:
            del self._decoding[request]
            request.length += self._steps - request.since  # the step under way when it left
            self._used -= request.length
            self._context -= request.length
            self._hold(request)
        self._leaving.clear()

    def _make_room(self) -> int:
        """Room for at least one more step, by dropping held prefixes and then the latest arrivals; steps it allows."""
        while True:
            growth = len(self._decoding) + (len(self._prefill.requests) if self._prefill is not None else 0)
            if not growth:
                return 0
            if self._used + growth <= self._capacity or growth == 1:
                break
            self._preempt(max(self._running(), key=lambda request: request.number))
        decoding = len(self._decoding)
        room = self._capacity - self._used - (growth - decoding)  # prefills that end take a token each
        steps = min(max(1, room // max(1, decoding)), self._next_change())
        self._evict(room - steps * decoding)
        return steps

    def _next_change(self) -> int:
        """Steps until a prefill ends or a decoding request has tokens due."""
        while self._due and (self._due[0][3].due != self._due[0][0] or self._due[0][3].state != "decoding"):
            heapq.heappop(self._due)
        until = [self._due[0][0] - self._steps] if self._due else []
        return min([*until, self._prefill.steps] if self._prefill is not None else until)

    def _preempt(self, request: _Request) -> None:
        self.counters.preempted += 1
        if request.state == "decoding":
            self._settle(request, self._steps)
            del self._decoding[request]
            self._context -= request.length
        elif self._prefill is not None:
            self._prefill.requests.remove(request)
            if not self._prefill.requests:
                self._prefill = None
        self._used -= request.length
        request.state, request.due = "waiting", -1
        self._waiting.appendleft(request)

    def _hold(self, request: _Request) -> None:
        self._release(request.key)
        self._held[request.key] = request.length
        self._held_tokens += request.length
        self._evict(self._capacity - self._used)

    def _release(self, key: tuple[str, int]) -> None:
        self._held_tokens -= self._held.pop(key, 0)

    def _evict(self, room: int) -> None:
        """Drops held prefixes, least recently used first, until they fit into `room` tokens."""
        while self._held_tokens > room:
            self._held_tokens -= self._held.popitem(last=False)[1]


LOG_PROB = -1.0
"""The log-probability that a simulated token reports."""


def create(
    name: str,
    *,
    degree: int,
    slots: int,
    max_context: int,
    stream_interval: int,
    model: costs.CostModel,
    counters: Counters | None = None,
    kv_tokens: int | None = None,
) -> Engine:
    """Makes a simulated engine.

    Args:
      name: the instance's name.
      degree: tensor-parallel degree.
      slots: most requests that decode at once.
      max_context: longest context, in tokens.
      stream_interval: tokens between two deltas of a request.
      model: what steps, prefill and weights cost.
      counters: where it counts, so that counts outlive a restart.
      kv_tokens: tokens that its key-value cache holds; None asks the cost model.

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
        stream_interval=stream_interval,
        model=model,
        kv_tokens=capacity,
        counters=Counters() if counters is None else counters,
    )
