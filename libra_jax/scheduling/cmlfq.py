"""C-MLFQ: buckets by expected cost, under all the evidence there is (`evidence`).

A training step waits for its last groups, so what counts is not the mean time to finish but its upper tail. A request
that needs an instance is charged, for each bucket, with

  E[(elapsed + wait + move + R s(n + 1)) ^ p]  +  what its presence adds to the same sum over the n requests there,

R being its remaining tokens (a distribution), s(n) the seconds a token takes with n requests decoding, p
`scheduler.tail_power`; the cheapest bucket is its own. With p > 1 a long request is worth more speed than a short one,
and a short one keeps off an instance where long ones decode, although it would finish sooner there: wide instances
serve the tail as soon as it is known, and nobody else while they are needed.

The feedback half: a request that generates more since its last tool return than its bucket is for is judged again at
that point, on what is left of its distribution, and moves if another bucket has become cheaper and has room.

Free slots whose own queue is empty go to others' requests, save two cases, each bounded by `scheduler.ageing_seconds`:
the last `scheduler.reserve` of a bucket's slots are kept from narrower work, and a request waiting for a wider bucket
waits on while that costs it less than a turn at the narrower pace.
"""

from __future__ import annotations

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

AFFINITY = 0.05
"""Excess share of slots in use up to which a request returns to the instance that holds its context."""


class Rates:
    """Seconds a token, by degree, number decoding and context (to an eighth): each asked of the costs once."""

    def __init__(self, costs: cost_model.Costs) -> None:
        self._costs = costs
        self._decode: dict[tuple[int, int, int], float] = {}
        self._move: dict[tuple[int, int], float] = {}

    def clear(self) -> None:
        """Forgets, so that costs that were recalibrated are asked again."""
        self._decode.clear()
        self._move.clear()

    def decode(self, instance: protocols.Instance, decoding: int, context: int) -> float:
        """Seconds a token of one of `decoding` requests with this (rounded) context each."""
        key = instance.tensor_parallel, decoding, context
        rate = self._decode.get(key)
        if rate is None:
            seconds = self._costs.decode_seconds(instance, decoding, context, RATE_TOKENS)
            rate = self._decode[key] = seconds / RATE_TOKENS
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
    shift = max(0, context_tokens.bit_length() - 3)
    return (context_tokens >> shift) << shift


class Cmlfq(slots.SlotScheduler):
    """See the module.

    Args:
      config: its settings.
      costs: of decoding and moving.
      degrees: tensor-parallel degrees of the layout, if known.
    """

    def __init__(
        self, config: configuration.SchedulerConfig, costs: cost_model.Costs, *, degrees: Sequence[int] = ()
    ) -> None:
        super().__init__(config, bounds=config.max_remaining_tokens, order="group_completion", degrees=degrees)
        self.evidence = evidence.Evidence(config)
        self.rates = Rates(costs)
        self._turn_tokens = 256.0

    def expect(self, request: state.Request) -> Sequence[tuple[float, float]]:
        """The distribution of the tokens still to be generated: (tokens, probability mass) pairs."""
        track = request.track
        assert track is not None
        return tuple(zip(self.evidence.predict(track, request.generated_tokens), prefix_tree.MASSES, strict=True))

    def on_instance_change(self, instances: Sequence[protocols.Instance], now: float) -> list[protocols.Placement]:
        self.rates.clear()
        return super().on_instance_change(instances, now)

    def arrived(self, request: state.Request, now: float) -> None:
        request.track = self.evidence.start(request.info.prompt_id, request.generated_tokens)

    def returned(self, request: state.Request, causal_state: protocols.CausalState) -> None:
        assert request.track is not None
        self.evidence.observe(request.track, causal_state, request.generated_tokens)

    def finished(self, request: state.Request) -> None:
        assert request.track is not None
        learn = request.info.group_id != slots.EVALUATION_GROUP
        self.evidence.finish(request.track, request.generated_tokens, learn=learn)

    def on_tool_call(self, request_id: str, generated_tokens: int, now: float) -> list[protocols.Placement]:
        turn = generated_tokens - self.requests[request_id].turn_start
        self._turn_tokens += TURN_SHARE * (turn - self._turn_tokens)
        return super().on_tool_call(request_id, generated_tokens, now)

    def on_progress(self, request_id: str, generated_tokens: int, now: float) -> list[protocols.Placement]:
        request = self.requests[request_id]
        request.generated_tokens = generated_tokens
        server = request.server
        if generated_tokens < request.mark or server is None or len(self.buckets) == 1:
            return []
        bucket = self.buckets[self.route(request, now)]
        if bucket.level == server.level or bucket.free <= 0:
            return []
        return [self.move(request, self.pick(request, bucket)), *self._place(now)]

    def route(self, request: state.Request, now: float) -> int:
        points = self.expect(request)
        request.remaining = sum([tokens * mass for tokens, mass in points])
        if len(self.buckets) == 1:
            return 0
        level = self._cheapest(request, points, now)
        bounds = self.levels.bounds
        # It is judged again once it has generated as much again as its bucket is for.
        request.mark = request.generated_tokens + bounds[min(level, len(bounds) - 1)]
        return level

    def pick(self, request: state.Request, bucket: buckets.Bucket) -> state.Server:
        least, home = bucket.least(), self.servers.get(request.last)
        if home is None or home is least or home.level != bucket.level or home.load >= home.instance.slots:
            return least
        excess = home.load / home.instance.slots - least.load / least.instance.slots
        return home if excess <= AFFINITY else least

    def serves(self, bucket: buckets.Bucket, request: state.Request) -> bool:
        own = self.buckets[request.level]
        if own.level < bucket.level:
            return bucket.free > self.config.reserve * bucket.slots
        context = rounded(request.context_tokens)
        there = self.rates.decode(own.servers[0].instance, own.servers[0].instance.slots, context)
        server = bucket.least()
        here = self.rates.decode(server.instance, server.load + 1, context)
        return own.queue.size * there / own.slots > here - there

    def snapshot(self) -> Mapping[str, Any]:
        return self.evidence.snapshot()

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        self.evidence.restore(snapshot)

    def _cheapest(self, request: state.Request, points: Sequence[tuple[float, float]], now: float) -> int:
        context, elapsed = rounded(request.context_now), now - request.arrived
        best, level = float("inf"), request.level
        for bucket in self.buckets:
            if not bucket.slots:
                continue
            if bucket.free > 0:
                server, wait = self.pick(request, bucket), 0.0
            else:
                server = bucket.servers[0]
                rate = self.rates.decode(server.instance, server.instance.slots, context)
                wait = (bucket.queue.ahead(request) + 1.0) * self._turn_tokens * rate / bucket.slots
            if request.server is not None and request.server.level == bucket.level:
                server, wait = request.server, 0.0
            cost = self._cost(request, server, points, context, elapsed, wait)
            if cost < best:
                best, level = cost, bucket.level
        return level

    def _cost(
        self,
        request: state.Request,
        server: state.Server,
        points: Sequence[tuple[float, float]],
        context: int,
        elapsed: float,
        wait: float,
    ) -> float:
        """Expected seconds to the power p: the request's own, and what it adds to those of the requests there."""
        power, instance = self.config.tail_power, server.instance
        others = server.load - (request.server is server)
        others = min(others, instance.slots - 1)
        pace = self.rates.decode(instance, others + 1, context)
        move = self.rates.move(request.last, instance, context)
        start = elapsed + wait + move
        own = 0.0
        if not others:
            for tokens, mass in points:
                own += mass * (start + tokens * pace) ** power
            return own
        theirs = server.expected / server.load
        shared = 0.0
        for tokens, mass in points:
            own += mass * (start + tokens * pace) ** power
            shared += mass * (tokens if tokens < theirs else theirs)
        slower = (pace - self.rates.decode(instance, others, context)) * shared + move
        return own + others * slower * power * (elapsed + theirs * pace) ** (power - 1.0)
