"""C-MLFQ: buckets by expected cost, under all the evidence there is (`evidence`).

A training step waits for its last groups, so what counts is not the mean time to finish but its upper tail. A request
that needs an instance is charged, for the one that holds its context and for each bucket that has room, with

  E[(elapsed + wait + move + R s(n + 1)) ^ p]  +  what its presence adds to the same sum over the n requests there,

R being its remaining tokens (a distribution), s(n) the seconds a token takes with n requests decoding, p
`scheduler.tail_power`; the cheapest bucket is its own. With p > 1 a long request is worth more speed than a short one,
and a short one keeps off an instance where long ones decode, although it would finish sooner there: wide instances
serve the tail, and nobody else while they are needed. Where nothing is free it waits for the instance that holds its
context: to price the wait for the other buckets as well was tried and gained nothing.

The feedback half: a request that generates more since its last tool return than its bucket is for is judged again at
that point, on what is left of its distribution, and moves if another bucket has become cheaper and has room.

An instance takes no more requests than its key-value cache is expected to hold: what does not fit is evicted while
tools run and prefilled again at each turn, which costs more than waiting. Each is counted with its context and half of
what it has yet to grow, since they are at all stages; if the contexts outgrow the cache all the same, who returns from
a tool waits for room anywhere.

Free slots whose own queue is empty go to others' requests, of the nearest bucket and then of the most crowded instance
(looked for at every fourth event), save two cases, each bounded by `scheduler.ageing_seconds`: the last
`scheduler.reserve` of a bucket's slots are kept from narrower work, and a request waits on for a wider bucket while
that costs it less than a turn at the narrower pace.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.scheduling import buckets, evidence, prefix_tree, slots, state
from libra_jax.scheduling import costs as cost_model

RATE_TOKENS = 256
"""Tokens over which a decode rate is taken."""

TURN_SHARE = 0.02
"""Weight of the latest turn in the mean length of a turn."""


GROWN = 0.5
"""Share of the context that a request has yet to grow by which it is counted."""

GROWTH, GROWTH_SHARE = 2.0, 0.01
"""Tokens of context a generated token, before any request has finished, and the weight of the latest in the mean."""

OVERFLOW_EVERY = 4
"""Events between two looks for someone who would gain by being served elsewhere than where he waits."""


class Rates:
    """Seconds a token, by degree, number decoding and context (to an eighth): each asked of the costs once.

    Attributes:
      known: (degree, number decoding, rounded context) to seconds.
    """

    def __init__(self, costs: cost_model.Costs) -> None:
        self._costs = costs
        self.known: dict[tuple[int, int, int], float] = {}
        self._move: dict[tuple[int, int], float] = {}

    def clear(self) -> None:
        """Forgets, so that costs that were recalibrated are asked again."""
        self.known.clear()
        self._move.clear()

    def decode(self, instance: protocols.Instance, decoding: int, context: int) -> float:
        """Seconds a token of one of `decoding` requests with this (rounded) context each."""
        key = instance.tensor_parallel, decoding, context
        rate = self.known.get(key)
        if rate is None:
            seconds = self._costs.decode_seconds(instance, decoding, context, RATE_TOKENS)
            rate = self.known[key] = seconds / RATE_TOKENS
        return rate

    def move(self, source: str, target: protocols.Instance, context: int) -> float:
        """Seconds to bring a (rounded) context there; 0 if it is there or nowhere."""
        if not source or source == target.name:
            return 0.0
        key = target.tensor_parallel, context
        seconds = self._move.get(key)
        if seconds is None:
            seconds = self._move[key] = self._costs.move_seconds(source, target, context)
        return seconds


def rounded(context_tokens: int) -> int:
    """The context to three significant bits."""
    shift = context_tokens.bit_length() - 3
    return context_tokens >> shift << shift if shift > 0 else context_tokens


class Cmlfq(slots.SlotScheduler):
    """See the module.

    Args:
      config: its settings.
      costs: of decoding and moving.
      degrees: tensor-parallel degrees of the layout, if known.
    """

    by_length = True

    def __init__(
        self, config: configuration.SchedulerConfig, costs: cost_model.Costs, *, degrees: Sequence[int] = ()
    ) -> None:
        super().__init__(config, bounds=config.max_remaining_tokens, order="group_completion", degrees=degrees)
        self.evidence = evidence.Evidence(config)
        self.rates = Rates(costs)
        self._paces = self.rates.known
        self._turn_tokens = 256.0
        self._growth = GROWTH
        self._urgency = 0.0
        self._events = 0

    masses: tuple[float, ...] = prefix_tree.MASSES
    """Probability mass of each point of what `expect` returns."""

    def expect(self, request: state.Request) -> prefix_tree.Sketch:
        """The distribution of the tokens still to be generated: so many with each of `masses`."""
        track = request.track
        assert track is not None
        return self.evidence.predict(track, request.generated_tokens)

    def on_instance_change(self, instances: Sequence[protocols.Instance], now: float) -> list[protocols.Placement]:
        self.rates.clear()
        live = {instance.name for instance in instances}
        for request in self.requests.values():
            if request.home is not None and request.home.name not in live:
                self._evict(request)
        return super().on_instance_change(instances, now)

    def arrived(self, request: state.Request, now: float) -> None:
        request.track = self.evidence.start(request.prompt_id, request.generated_tokens)

    def returned(self, request: state.Request, causal_state: protocols.CausalState) -> None:
        assert request.track is not None
        self.evidence.observe(request.track, causal_state, request.generated_tokens)
        home = request.home
        if home is not None and self.config.cache_share and 0 < home.instance.cache_tokens < home.context:
            self._evict(request)
            request.last = ""  # the engine has evicted it, or another in its place

    def finished(self, request: state.Request, completed: bool) -> None:
        assert request.track is not None
        if completed and request.generated_tokens:
            self._growth += GROWTH_SHARE * (request.context_now / request.generated_tokens - self._growth)
        self._evict(request)
        self.evidence.finish(request.track, request.generated_tokens, learn=completed)

    def on_tool_call(self, request_id: str, generated_tokens: int, now: float) -> list[protocols.Placement]:
        request = self.requests[request_id]
        request.generated_tokens = generated_tokens
        self._turn_tokens += TURN_SHARE * (generated_tokens - request.turn_start - self._turn_tokens)
        self._leave(request)
        return self._place(now)

    def on_progress(self, request_id: str, generated_tokens: int, now: float) -> list[protocols.Placement]:
        request = self.requests[request_id]
        server = request.server
        request.generated_tokens = generated_tokens
        if generated_tokens < request.mark or server is None or len(self.buckets) == 1:
            return []
        self.route(request, now)
        wanted, request.wanted = request.wanted, None
        if wanted is None or wanted is server:
            self.seated(request, server)  # what is known of it has changed
            return []
        if wanted.full or not self.admits(request, wanted):
            return []
        return [self.move(request, wanted), *self._place(now)]

    def route(self, request: state.Request, now: float) -> int:
        points = self.expect(request)
        request.remaining = sum(map(operator.mul, points, self.masses))
        level = self._cheapest(request, points, now)
        bounds = self.levels.bounds
        if bounds:  # it is judged again once it has generated as much again as its bucket is for
            request.mark = request.generated_tokens + bounds[min(level, len(bounds) - 1)]
        return level

    def pick(self, request: state.Request, bucket: buckets.Bucket) -> state.Server:
        home = request.home
        return bucket.least() if home is None or home.level != bucket.level or home.full else home

    @staticmethod
    def busy(server: state.Server) -> float:
        return server.context

    def seated(self, request: state.Request, server: state.Server) -> None:
        context, urgency, remaining = request.context_now, request.urgency, request.remaining
        footprint = self._footprint(request)
        if request.home is server:
            context_then, urgency_then, remaining_then, footprint_then = request.held
            server.footprint += footprint - footprint_then
            server.context += context - context_then
            server.urgency += urgency - urgency_then
            server.urgent_tokens += urgency * remaining - urgency_then * remaining_then
            if context < context_then:
                self.buckets[server.level].eased(server)
        else:
            self._evict(request)
            request.home = server
            server.residents += 1
            server.footprint += footprint
            server.context += context
            server.urgency += urgency
            server.urgent_tokens += urgency * remaining
        request.held = context, urgency, remaining, footprint

    def _evict(self, request: state.Request) -> None:
        """The request is no longer a resident of its home."""
        server = request.home
        if server is None:
            return
        request.home = None
        context, urgency, remaining, footprint = request.held
        server.residents -= 1
        server.footprint -= footprint
        server.context -= context
        server.urgency -= urgency
        server.urgent_tokens -= urgency * remaining
        if not server.residents:  # so that rounding does not add up
            server.context, server.urgency, server.urgent_tokens, server.footprint = 0, 0.0, 0.0, 0.0
        self.buckets[server.level].eased(server)

    def overflow(self, placements: list[protocols.Placement]) -> None:
        self._events += 1
        if self._events % OVERFLOW_EVERY:
            return
        super().overflow(placements)

    def admits(self, request: state.Request, server: state.Server) -> bool:
        room = self.config.cache_share * server.instance.cache_tokens
        if not room or request.home is server or not server.residents:
            return True
        return server.footprint + self._footprint(request) <= room

    def _footprint(self, request: state.Request) -> float:
        """Tokens of the cache that the request is counted with."""
        return request.context_now + GROWN * self._growth * request.remaining

    def serves(self, bucket: buckets.Bucket, request: state.Request) -> bool:
        own, wanted = self.buckets[request.level], request.wanted
        if own.level < bucket.level and bucket.free <= self.config.reserve * bucket.slots:
            return False
        server = bucket.least()
        if not self.admits(request, server):
            return False
        context = rounded(request.context_tokens)
        move = self.config.move_margin * self.rates.move(request.last, server.instance, context)
        here = self._pace(server, server.residents + 1, request.context_tokens)
        if wanted is not None:
            there, queue, count = self._pace(wanted, wanted.instance.slots, 0), wanted.queue.size, wanted.instance.slots
        else:
            there, queue, count = (
                self._pace(own.servers[0], own.servers[0].instance.slots, 0),
                own.queue.size,
                own.slots,
            )
        wait = queue * self._turn_tokens * there / count
        return wait > self._turn_tokens * (here - there) + move * (1 + server.residents)

    def snapshot(self) -> Mapping[str, Any]:
        return self.evidence.snapshot()

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        self.evidence.restore(snapshot)

    def merge(self, snapshot: Mapping[str, Any]) -> None:
        other = evidence.Evidence(self.config)
        other.restore(snapshot)
        self.evidence.merge(other)

    def _cheapest(self, request: state.Request, points: prefix_tree.Sketch, now: float) -> int:
        """The cheapest bucket; `request.wanted` is the instance in it, if it is to be a particular one."""
        elapsed = now - request.arrived
        home = request.home
        best, level = float("inf"), request.level
        request.wanted = None
        if home is not None:
            wait = 0.0
            if request.server is None and home.load >= home.slots:
                wait = self._wait_at(home.queue.ahead(request), home, home.slots)
            if self._full():  # it stays where its context is, whatever that costs
                request.wanted = home
                request.urgency = self._urgency_at(request, home, points, elapsed + wait)
                return home.level
            best = self._cost(request, home, points, elapsed, wait)
            level, request.wanted = home.level, home
            urgency = self._urgency
        for bucket in self.buckets:
            if not bucket.slots:
                continue
            server, wait, roomy = bucket.servers[0], 0.0, False
            if bucket.free > 0:
                server = bucket.least()
                if server is home:
                    continue
                roomy = self.admits(request, server)
            if not roomy:
                if home is not None:
                    continue  # its own place comes free as soon as another, and has its context
                wait = self._wait_at(bucket.queue.ahead(request), server, bucket.slots)
            cost = self._cost(request, server, points, elapsed, wait)
            if cost < best:
                best, level, urgency = cost, bucket.level, self._urgency
                request.wanted = server if roomy else None
        if best < float("inf"):
            request.urgency = urgency
        return level

    def _full(self) -> bool:
        """No slot is free."""
        for bucket in self.buckets:  # noqa: SIM110 (a generator costs more than the rest)
            if bucket.free > 0:
                return False
        return True

    def _wait_at(self, ahead: float, server: state.Server, count: int) -> float:
        """Seconds until a slot comes free for who has so many before it, `count` slots turning over."""
        return (ahead + 1.0) * self._turn_tokens * self._pace(server, server.residents, 0) / count

    def _pace(self, server: state.Server, decoding: int, joining: int) -> float:
        """Seconds a token on the server with so many decoding, a context of `joining` tokens come to those there."""
        decoding = 1 if decoding < 1 else server.slots if decoding > server.slots else decoding
        context = (server.context + joining) // decoding
        shift = context.bit_length() - 3
        if shift > 0:
            context = context >> shift << shift
        pace = self._paces.get((server.degree, decoding, context))
        return self.rates.decode(server.instance, decoding, context) if pace is None else pace

    def _urgency_at(
        self, request: state.Request, home: state.Server, points: prefix_tree.Sketch, start: float
    ) -> float:
        """What a second costs that a resident loses; see `_cost`, of which this is a part."""
        power = self.config.tail_power
        exponent, pace = power - 1.0, self._pace(home, home.residents, request.context_now - request.held[0])
        urgency = 0.0
        for tokens, mass in zip(points, self.masses):  # noqa: B905 (they are as many)
            urgency += mass * (start + tokens * pace) ** exponent
        return power * urgency

    def _cost(
        self,
        request: state.Request,
        server: state.Server,
        points: prefix_tree.Sketch,
        elapsed: float,
        wait: float,
    ) -> float:
        """Expected seconds to the power p: the request's own, and what it adds to those of the requests there.

        Leaves in `_urgency` what a second would cost that the request lost there.
        """
        power, context = self.config.tail_power, request.context_now
        here = request.home is server
        others = server.residents - here
        pace = self._pace(server, others + 1, context - request.held[0] if here else context)
        move = self.config.move_margin * self.rates.move(request.last, server.instance, rounded(context))
        start = elapsed + wait + move
        own = urgency = shared = 0.0
        theirs = server.urgent_tokens / server.urgency if server.urgency > 0 else 0.0
        exponent = power - 1.0
        for tokens, mass in zip(points, self.masses):  # noqa: B905 (they are as many)
            seconds = start + tokens * pace
            weight = mass * seconds**exponent
            own += weight * seconds
            urgency += weight
            shared += mass * (tokens if tokens < theirs else theirs)
        self._urgency = power * urgency
        if not others:
            return own
        slower = pace - self._pace(server, others, -request.held[0] if here else 0)
        return own + server.urgency * (max(0.0, slower) * shared + move)
