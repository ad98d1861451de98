"""Policies that know the true lengths, in simulations: a predictor of stated error, and two ceilings."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import TypeAlias

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.scheduling import buckets, cmlfq, requests, residents
from libra_jax.scheduling import costs as cost_model
from libra_jax.scheduling.prediction import prefix_tree

Remaining: TypeAlias = Callable[[str], int]
"""Maps a request id to the tokens that it has in truth still to generate: known to a simulator only."""


class LengthPredictor(residents.ResidentScheduler):
    """Buckets by a predicted length of stated error: the true one times a log-normal factor, drawn once a request.

    It stands for any model that predicts lengths from prompts. Slots that would idle serve the other buckets' requests.

    Args:
      config: `max_remaining_tokens` applies here.
      remaining: true remaining tokens.
      seed: seed of the errors; a request's error depends on its id and the seed alone.
      kinds: kinds of the layout's instances, if they are known.
      sigma: standard deviation of the logarithm of the error.
    """

    by_length = True
    lends = True

    def __init__(
        self,
        config: config_lib.SchedulerConfig,
        remaining: Remaining,
        *,
        seed: int = 0,
        kinds: Sequence[protocols.Kind] = (),
        sigma: float = 0.5,
    ) -> None:
        super().__init__(config, kinds=kinds)
        self._truth = remaining
        self._seed = seed
        self._sigma = sigma

    def route(self, request: requests.LiveRequest, now: float, *, returned: bool = False) -> int:
        error = _prediction_error(self._seed, request.request_id, self._sigma)
        request.remaining = self._truth(request.request_id) * error
        level = self.levels.of_length(request.remaining)
        request.target = self.home(request, level)
        return level

    def pick(self, request: requests.LiveRequest, bucket: buckets.Bucket) -> buckets.InstanceQueue:
        home = self.home(request, bucket.level)
        return bucket.least_busy() if home is None or home.full else home


@functools.lru_cache(maxsize=65_536)  # a request is routed at each tool return, and seeding costs more than the rest
def _prediction_error(seed: int, request_id: str, sigma: float) -> float:
    """Returns the factor by which a request's length is predicted wrongly."""
    return math.exp(random.Random(f"{seed}/{request_id}").gauss(0.0, sigma))


TURNOVER = 4
"""`Clairvoyant` draws its bands again after 1 / 4 of the live requests have come or gone."""

RESERVE = 0.1
"""Share of a bucket's slots that `Clairvoyant` keeps free of requests from narrower buckets."""

SEARCHES = 40
"""Halvings in which the time of the bands is found."""


class Clairvoyant(residents.ResidentScheduler):
    """Bands by true lengths, the longest request first, and wide slots that are reserved for it.

    What knowledge of lengths is worth: a request goes to the narrowest degree on which it ends within the time T, and
    stays. T is the shortest time in which every degree gets through its requests, at the pace of full instances.
    `Oracle` follows the rule of `cmlfq` instead; the better of both is the ceiling that results are compared with.

    Args:
      costs: costs of decoding.
      remaining: true remaining tokens.
      kinds: kinds of the layout's instances, if they are known.
    """

    by_length = True
    by_cache = True
    counts_residents = True
    predicts = True

    def __init__(
        self,
        config: config_lib.SchedulerConfig,
        costs: cost_model.Costs,
        remaining: Remaining,
        *,
        kinds: Sequence[protocols.Kind] = (),
    ) -> None:
        super().__init__(config, order="oldest_longest_first", kinds=kinds)
        self._truth = remaining
        self._rates = cost_model.CostRates(costs)
        self._bounds: list[float] | None = None  # longest request of each level but the widest; None: not drawn
        self._changes = 0

    def on_instance_change(self, instances: Sequence[protocols.Instance], now: float) -> list[protocols.Placement]:
        self._bounds = None
        self._rates.clear()
        return super().on_instance_change(instances, now)

    def on_finish(
        self, request_id: str, generated_tokens: int, now: float, *, completed: bool = True
    ) -> list[protocols.Placement]:
        self._changes += 1
        return super().on_finish(request_id, generated_tokens, now, completed=completed)

    def route(self, request: requests.LiveRequest, now: float, *, returned: bool = False) -> int:
        request.remaining = float(self._truth(request.request_id))
        if request.home is not None:
            request.target = request.home
            return request.home.level
        self._changes += 1
        request.target = None
        if len(self.buckets) == 1:
            return 0
        if self._bounds is None or self._changes * TURNOVER > len(self.requests):
            self._bounds = self._drawn()
            self._changes = 0
        return min(bisect.bisect_left(self._bounds, request.remaining), len(self.buckets) - 1)

    def serves(self, bucket: buckets.Bucket, request: requests.LiveRequest) -> bool:
        # Wider slots that no longer request waits for, but for `RESERVE` of them; narrower ones never.
        return (
            request.home is None
            and bucket.level > request.level
            and bucket.free > RESERVE * bucket.slots
            and not any(wider.queue.size for wider in self.buckets[bucket.level :])
        )

    def _drawn(self) -> list[float]:
        """Returns the bands of the live requests."""
        lengths = sorted(self._truth(name) for name in self.requests)
        contexts = [item.context_now for item in self.requests.values()]
        context = max(sum(contexts) / max(1, len(contexts)), self._final_context / 2)
        paces, slots = [], []
        for bucket in self.buckets:
            decoding = 0.0
            for server in bucket.servers:
                room = self.config.cache_share * server.instance.cache_tokens or math.inf
                decoding += min(server.slots, max(1.0, room / max(1.0, context)))
            if not bucket.servers:
                paces.append(math.inf)
                slots.append(0.0)
                continue
            requests_per_server = max(1, round(decoding / len(bucket.servers)))
            paces.append(
                self._rates.decode(bucket.servers[0].instance, requests_per_server, cost_model.rounded(round(context)))
            )
            slots.append(decoding)
        sums = [0, *itertools.accumulate(lengths)]

        def bounds_of(limit: float) -> list[float] | None:
            """Returns the bands for a time limit; None if a degree does not get through its requests in time."""
            bounds: list[float] = []
            start = 0
            for pace, count in zip(paces, slots, strict=True):
                if not count:
                    bounds.append(bounds[-1] if bounds else 0.0)
                    continue
                longest = limit / pace
                end = bisect.bisect_right(lengths, longest, start)
                # No more than its slots generate in time; the rest goes to the next wider degree.
                end = min(end, bisect.bisect_right(sums, sums[start] + count * longest) - 1)
                bounds.append(float(lengths[end - 1]) if end > start else (bounds[-1] if bounds else 0.0))
                start = max(start, end)
            return bounds[:-1] if start == len(lengths) else None

        low, high = 0.0, 1.0
        while (bands := bounds_of(high)) is None and high < 1e9:
            high *= 2
        for _ in range(SEARCHES):
            middle = (low + high) / 2
            candidate = bounds_of(middle)
            if candidate is None:
                low = middle
            else:
                high, bands = middle, candidate
        return bands or []


class Oracle(cmlfq.Cmlfq):
    """C-MLFQ's cost rule with the true remaining lengths: what the rule would do if it had nothing to learn.

    Args:
      costs: costs of decoding and moving.
      remaining: true remaining tokens.
      kinds: kinds of the layout's instances, if they are known.
      arguments: those of `cmlfq.Cmlfq`.
    """

    masses: tuple[float, ...] = (1.0,)

    def __init__(
        self,
        config: config_lib.SchedulerConfig,
        costs: cost_model.Costs,
        remaining: Remaining,
        *,
        kinds: Sequence[protocols.Kind] = (),
        **arguments: float,
    ) -> None:
        super().__init__(config, costs, kinds=kinds, **arguments)
        self._truth = remaining

    def expect(self, request: requests.LiveRequest) -> prefix_tree.Sketch:
        return (float(self._truth(request.request_id)),)
