"""The batch of a simulated engine: decoding and prefilled requests, the cache, and the begin and end of steps.

Every decoding request gets one token a step. Between two changes of the batch, the times of the steps have a closed
form (`requests.BatchPace`). So the simulation looks at the time only when a request arrives, leaves, ends its prefill
or has tokens to stream. Changes take effect at the next step boundary, as in a real engine. The result is therefore the
same as simulating token by token.

Prefill is chunked: it shares steps with decoding and makes them longer. Requests that fit into one chunk together are
prefilled together. A returning request reuses the prefix of its context that its instance still holds
(`cache.CachedPrefixes`). If there is no room for one more step, the latest arrival is pre-empted and prefilled again
later. The common prompt of siblings is not shared, so each sibling pays for its own prefill. A segment that begins like
another one of its rollout reuses what the instance holds of that one. Both then occupy the cache with the tokens that
they share, which a real engine would keep once.

If the fleet keeps contexts in host memory (`offload.py`), a request whose context the instance lacks may fetch it. The
request then waits without a place in the batch, and the room of its context is reserved.
"""

from __future__ import annotations

import asyncio
import collections
import heapq
from typing import Any, cast

from libra_jax import protocols
from libra_jax.planning.costs import costs
from libra_jax.simulator import cache, offload, requests, trajectory

WATERMARK = 0.01
"""Share of the cache that must stay free after an admission, so that no new request is pre-empted at once (vLLM's
watermark)."""

LOG_PROB = -1.0
"""Log-probability that every simulated token reports."""


class InstanceBatch:
    """Steps and cache of one instance; `engine.SimulatedEngine` adds the methods that the coordinator calls.

    Attributes:
      counters: totals of what the instance did.
      slowdown: factor on the time of each step begun from now on; 1 is healthy.
    """

    _loop: asyncio.AbstractEventLoop  # set in `Engine.start`

    def __init__(
        self,
        name: str,
        *,
        degree: int,
        slots: int,
        stream_interval: int,
        model: costs.Costs,
        kv_tokens: int,
        counters: requests.Counters,
        store: offload.Store | None = None,
    ) -> None:
        self.name = name
        self.counters = counters
        self.slowdown = 1.0
        self._degree = degree
        self._slots = slots
        self._interval = stream_interval
        self._model = model
        self._capacity = kv_tokens
        self._per_context = model.context_seconds(degree)
        self._fixed: dict[int, float] = {}
        self._steps = 0
        self._waiting: collections.deque[requests.BatchRequest] = collections.deque()
        self._decoding: dict[requests.BatchRequest, None] = {}
        self._prefill: requests.Prefill | None = None
        self._leaving: list[
            requests.BatchRequest
        ] = []  # left or ended; they keep their place until the end of the step
        self._due: list[tuple[int, int, int, requests.BatchRequest]] = []  # step, arrival, push, request
        self._pushes = 0
        self._held = cache.CachedPrefixes()
        self._store = store
        self._fetches = cache.Fetches()
        self._used = 0  # tokens of the cache that running and fetching requests occupy
        self._context = 0  # tokens of `_used` that belong to decoding requests
        self._pace: requests.BatchPace | None = None  # None: no step is running
        self._began = 0.0
        self._factor = 1.0
        self._planned = 0
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._paused = False
        self._standing: asyncio.Future[None] | None = None  # resolved when the last step before a pause has ended
        self._version = protocols.NO_VERSION
        self._stale = False  # weights changed, so every key and value is outdated
        self._alive = False

    def _running(self) -> list[requests.BatchRequest]:
        prefilling = self._prefill.requests if self._prefill is not None else []
        return [request for request in (*self._decoding, *prefilling) if request.state != "gone"]

    # Tokens -----------------------------------------------------------------------------------------------------

    def _done(self) -> int:
        """Returns the number of planned steps that are complete now."""
        if self._pace is None:
            return 0
        # At a boundary the timer may not have fired yet, and no step beyond the planned ones has begun.
        return min(self._planned, self._pace.steps((self._loop.time() - self._began) / self._factor))

    def _settle(self, request: requests.BatchRequest, step: int) -> None:
        """Counts the tokens of a decoding request up to the end of a step."""
        count = step - request.since
        # A request that left gets no more tokens, though it keeps its place until the step's end.
        if count and request.state != "gone":
            self._sample(request, count)
        request.since = step

    def _sample(self, request: requests.BatchRequest, count: int) -> None:
        # Spans of one version merge, so that thousands of tokens stay a few spans.
        if request.spans and request.spans[-1][0] == self._version:
            count_before = request.spans.pop()[1]
            request.spans.append((self._version, count_before + count))
        else:
            request.spans.append((self._version, count))
        request.remaining_tokens -= count
        request.length += count
        self.counters.generated += count

    def _stream(self, request: requests.BatchRequest) -> None:
        """Streams the tokens sampled since the last delta, if they fill one or are the last; notes the next due step.

        The last token of a request gets the finish reason.
        """
        count, done = request.unstreamed, request.remaining_tokens <= 0
        if done or count >= self._interval:
            # The stop token counts as a sampled one; it is the last.
            stops = done and request.reason == "stop"
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
        if request.state != "gone":
            # At least one step: the boundary that has just passed cannot be due again.
            request.due = self._steps + max(1, min(request.remaining_tokens, self._interval - request.unstreamed))
            self._pushes += 1
            heapq.heappush(self._due, (request.due, request.number, self._pushes, request))

    # Steps ------------------------------------------------------------------------------------------------------

    def _plan_soon(self) -> None:
        """Begins a step at this instant, after everything that arrives at this instant."""
        # Siblings arrive at one instant; begun at once, the first step would hold only one of them.
        if self._timer is None and not self._paused and self._alive:
            self._timer = self._loop.call_soon(self._begin)

    def _plan_admission(self) -> None:
        """Sees to it that waiting requests are looked at soon."""
        if self._pace is None:
            self._plan_soon()
        elif self._prefill is None:  # a prefill under way ends before the next admission anyway
            self._interrupt()

    def _interrupt(self) -> None:
        """Ends the present run of steps at the next boundary."""
        if self._pace is None:
            return
        done = self._done()
        # A step that has begun cannot be cut short, as in a real engine.
        if done + 1 < self._planned:
            self._plan(done + 1)

    def _plan(self, steps: int) -> None:
        assert self._pace is not None
        if self._timer is not None:
            self._timer.cancel()
        # From the beginning of the run, not from now, so that rounding does not add up over interruptions.
        self._planned = steps
        self._timer = self._loop.call_at(self._began + self._pace.seconds(steps) * self._factor, self._boundary)

    def _boundary(self) -> None:
        """Ends the planned steps: counts tokens, ends prefills, streams what is due, and removes leaving requests."""
        assert self._pace is not None
        steps, decoding = self._planned, len(self._decoding)
        self.counters.busy_seconds += self._loop.time() - self._began
        self._steps += steps
        self._used += steps * decoding
        self._context += steps * decoding
        self._timer = self._pace = None
        # Before anything is streamed, because a prefill's first token is sampled in the step that ends here.
        if self._prefill is not None:
            self._prefill.steps -= steps
            if self._prefill.steps <= 0:
                prefill, self._prefill = self._prefill, None
                for request in prefill.requests:
                    if request.state == "gone":
                        self._used -= request.length
                        self._hold(request)
                        continue
                    # The step of the last chunk samples the first token, as in vLLM.
                    self._sample(request, 1)
                    self._used += 1
                    self._context += request.length
                    request.state, request.since = "decoding", self._steps
                    self._decoding[request] = None
                    self._stream(request)
        while self._due and self._due[0][0] <= self._steps:
            due, _, _, request = heapq.heappop(self._due)
            # The heap keeps outdated entries; only an entry that matches `request.due` counts.
            if request.due == due and request.state == "decoding":
                self._settle(request, self._steps)
                self._stream(request)
        self._retire_leaving()
        if not self._paused:
            self._begin()
        elif self._standing is not None and not self._standing.done():
            self._standing.set_result(None)

    def _begin(self) -> None:
        """Plans steps up to the next moment at which anything changes."""
        self._timer = None
        if self._paused or not self._alive or self._pace is not None:
            return
        # One prefill at a time: the next requests are admitted when it has ended.
        if self._prefill is None:
            self._admit()
        steps = self._make_room()
        decoding = len(self._decoding)
        if not decoding and self._prefill is None:
            return
        if self._prefill is None:
            # Without prefill the fixed time depends only on the number of requests, so it is cached.
            fixed = self._fixed.get(decoding) or self._fixed.setdefault(
                decoding, self._model.fixed_seconds(self._degree, decoding)
            )
        else:
            fixed = self._model.fixed_seconds(self._degree, decoding, self._prefill.tokens) + self._prefill.seconds
        self._pace = requests.BatchPace(fixed, self._per_context, self._context, decoding)
        self._began, self._factor = self._loop.time(), self.slowdown
        self._plan(steps)

    # The cache --------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Takes waiting requests, oldest first, as far as slots, room and one chunk of prefill allow."""
        chunk, tokens, seconds = self._model.chunk_tokens, 0, 0.0
        admitted: list[requests.BatchRequest] = []
        while self._waiting and len(self._decoding) + len(admitted) < self._slots:
            request = self._waiting[0]
            cached_tokens = self._held.prefix(request)
            # Even a fully cached context computes its last token again, to sample the next one.
            new = max(1, request.length - cached_tokens)
            idle = not self._decoding and not admitted
            # An idle instance must take any request that fits, or a long one would wait for ever.
            spare = 0 if idle else int(WATERMARK * self._capacity)
            if self._used + request.length + spare > self._capacity:
                break
            if self._store is not None and self._fetch(self._store, request, cached_tokens):
                continue
            if admitted and tokens + new > chunk:
                break
            self._waiting.popleft()
            # The held prefix becomes a part of the running request, so it is not counted twice.
            self._held.release(request.key)
            self._used += request.length
            self._held.evict(self._capacity - self._used)
            self.counters.prefilled += new
            # A request's fresh tokens have never been computed; all other prefilled tokens were computed before.
            self.counters.prefilled_again += max(0, new - max(1, request.fresh))
            request.state, request.fresh = "prefilling", 0
            admitted.append(request)
            tokens += new
            seconds += self._model.attention_seconds(self._degree, new, request.length - new)
        if admitted:
            # Tokens and attention are spread evenly over the chunks.
            steps = -(-tokens // chunk)
            self._prefill = requests.Prefill(admitted, steps, tokens / steps, seconds / steps)

    def _fetch(self, store: offload.Store, request: requests.BatchRequest, cached_tokens: int) -> bool:
        """Begins to fetch the first waiting request's context, if that is faster than prefilling it.

        Returns:
          Whether a fetch has begun.
        """
        source, tokens = store.longest(request.segment, request.length, self._version, cached_tokens)
        if not source:
            return False
        model, degree, length, now = self._model, self._degree, request.length, self._loop.time()
        # All that is known may be the whole context, whose last token is computed again in any case.
        saved = model.prefill_seconds(degree, max(1, length - cached_tokens), cached_tokens)
        saved -= model.prefill_seconds(degree, max(1, length - tokens), tokens)
        begin = max(now, self._fetches.end)
        end = begin + store.fetch_seconds(source, self.name, tokens - cached_tokens) * self.slowdown
        if end - now >= saved:
            return False
        self._waiting.popleft()
        self._held.release(request.key)
        self._used += length
        self._held.evict(self._capacity - self._used)
        request.state = "fetching"
        self._fetches.begin(request, self._loop.call_at(end, self._fetched, request, tokens, tokens - cached_tokens))
        return True

    def _fetched(self, request: requests.BatchRequest, tokens: int, new: int) -> None:
        """Ends a fetch of `new` tokens: the context is held, and its request goes first."""
        self._stop_fetch(request)
        self.counters.fetched += new
        # Instead of what a segment of the same key may have left meanwhile.
        self._held.hold(request.key, tokens)
        self._held.evict(self._capacity - self._used)
        request.state = "waiting"
        self._waiting.appendleft(request)
        self._plan_admission()

    def _stop_fetch(self, request: requests.BatchRequest) -> None:
        """Ends a fetch, or cuts it off; frees the room that is reserved for it."""
        self._fetches.stop(request)
        self._used -= request.length

    def _retire_leaving(self) -> None:
        """Removes ended and departed requests from the batch; holds their prefixes in case they return."""
        # Only between steps: a step computes their tokens to its end, and takes the time for them.
        for request in self._leaving:
            del self._decoding[request]
            request.length += self._steps - request.since  # plus the step that was running when it left
            self._used -= request.length
            self._context -= request.length
            self._hold(request)
        self._leaving.clear()

    def _make_room(self) -> int:
        """Makes room for at least one more step; returns the steps until the room ends or anything changes.

        Drops held prefixes first, then pre-empts the latest arrivals.
        """
        while True:
            growth = len(self._decoding) + (len(self._prefill.requests) if self._prefill is not None else 0)
            if not growth:
                return 0
            if self._used + growth <= self._capacity:
                break
            if (dropped := self._fetches.latest()) is not None:  # what is computed already has the room
                self._stop_fetch(dropped)
                dropped.state = "waiting"
                self._waiting.appendleft(dropped)
                continue
            # A single request always continues: pre-empting it would free nothing for another one.
            if growth == 1:
                break
            latest = max(self._running(), key=lambda request: request.number)
            self.counters.preempted += 1
            if latest.state == "decoding":
                self._settle(latest, self._steps)
                del self._decoding[latest]
                self._context -= latest.length
                self._keep(latest)
            elif self._prefill is not None:
                self._prefill.requests.remove(latest)
                if not self._prefill.requests:
                    self._prefill = None
            self._used -= latest.length
            latest.state, latest.due = "waiting", -1
            # To the front, because it arrived before all requests that wait.
            self._waiting.appendleft(latest)
        decoding = len(self._decoding)
        room = self._capacity - self._used - (growth - decoding)  # a prefill that ends adds one token
        # Entries of requests that left or were rescheduled are outdated.
        while self._due and (self._due[0][3].due != self._due[0][0] or self._due[0][3].state != "decoding"):
            heapq.heappop(self._due)
        changes = [self._due[0][0] - self._steps] if self._due else []
        if self._prefill is not None:
            changes.append(self._prefill.steps)
        steps = min(max(1, room // max(1, decoding)), *changes)
        self._held.evict(room - steps * decoding)
        return steps

    def _hold(self, request: requests.BatchRequest) -> None:
        """Keeps a request's prefix while there is room, in case that its segment returns."""
        self._held.hold(request.key, request.length)
        self._held.evict(self._capacity - self._used)
        self._keep(request)

    def _keep(self, request: requests.BatchRequest) -> None:
        """Keeps the context in host memory, if the fleet does so."""
        # Between new weights and the end of the pause, contexts are those of the weights before.
        if self._store is not None and not self._stale:
            self._store.keep(self.name, request.key, request.length, self._version)
