"""Heddle's rollout scheduling (arXiv 2603.28101): progressive priority, pre-emption, presorted placement.

- A request's priority is its predicted remaining length, the longest first, predicted again at each tool return. The
  predictions are those of `evidence`, so that what is compared is the scheduling.
- If no slot is free, a waiting request takes the place of the shortest one that decodes on its instance, provided that
  one is predicted `scheduler.preempt_ratio` times shorter.
- Placement: live requests, sorted by predicted length, are cut into consecutive runs, one an instance, the longest on
  the widest. Dynamic programming finds the cuts that minimise the largest run time, interference included. The cuts are
  computed again as the population turns over.
- A request whose rank has come to lie in the run of an instance of another degree goes there at its next tool return.
  Between instances that are as fast as each other it stays where its context is.

The paper also chooses the parallelism; here the layout fixes it.
"""

from __future__ import annotations

import bisect
import math
import operator
from collections.abc import Callable, Sequence
from typing import TypeVar

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.scheduling import buckets, evidence, prefix_tree, slots
from libra_jax.scheduling import costs as cost_model

Server = TypeVar("Server")

CHUNKS = 32
"""Runs of neighbours in length that the cuts keep together."""

TURNOVER = 4
"""The cuts are computed again after 1 / 4 of the live requests, and at least `CHUNKS`, were predicted again."""


class Heddle(slots.SlotScheduler):
    """See the module.

    Args:
      config: `preempt_ratio`, and what `evidence.Evidence` takes.
      costs: costs of decoding.
    """

    lends = True

    def __init__(self, config: configuration.SchedulerConfig, costs: cost_model.Costs) -> None:
        self.evidence = evidence.Evidence(config)
        super().__init__(config, order="longest_first", learner=self.evidence)
        self.rates = cost_model.Rates(costs)
        self._judged = 0
        self._floors: list[float] = []
        self._runs: list[buckets.Server] = []

    def on_instance_change(self, instances: Sequence[protocols.Instance], now: float) -> list[protocols.Placement]:
        self._floors, self._runs = [], []
        self.rates.clear()
        self._judged = len(self.requests)  # enough for the cuts to be computed again
        return super().on_instance_change(instances, now)

    def route(self, request: buckets.Request, now: float, *, returned: bool = False) -> int:
        assert request.track is not None
        sketch = self.evidence.predict(request.track, request.generated_tokens)
        request.remaining = sum(map(operator.mul, sketch, prefix_tree.MASSES))
        self._judged += 1
        request.wanted = None
        if self.servers:
            home, server = self.home(request, 0), self._run_of(request)
            request.wanted = home if home is not None and home.degree == server.degree else server
        return 0

    def pick(self, request: buckets.Request, bucket: buckets.Bucket) -> buckets.Server:
        server, home = self._run_of(request), self.home(request, bucket.level)
        if home is None or home.full:
            return bucket.least() if server.full else server
        return home if home.degree == server.degree or server.full else server

    def place(self, now: float) -> list[protocols.Placement]:
        """Fills the free slots, then pre-empts where a queue's longest request still waits."""
        # Read first: the base class forgets which instances were touched when it has filled the slots.
        joined = [server for server in self._touched if server.queue.size]
        placements = super().place(now)
        bucket = self.buckets[0]
        waiting = []
        if bucket.slots and (first := bucket.queue.first()) is not None:
            waiting.append((self._run_of(first[-1]), bucket.queue))
        waiting += [(server, server.queue) for server in joined]
        for server, queue in waiting:
            first = queue.first()
            if first is None or not server.full:
                continue
            longest = first[-1]
            shortest = min(server.decoding, key=lambda item: (item.remaining, -item.ticket))
            # An aged request keeps its place: it was placed because it had waited long enough.
            if not shortest.aged and longest.remaining > self.config.preempt_ratio * shortest.remaining:
                shortest.wanted = server  # it holds the context
                placements.append(self.displace(shortest, 0, now, protocols.MoveReason.PREEMPTED))
                # The base class's, which does not pre-empt again: one event displaces at most one request a queue.
                placements += super().place(now)
        return placements

    def _run_of(self, request: buckets.Request) -> buckets.Server:
        """Returns the instance whose run the request's length lies in; cuts the runs again after a turnover."""
        if not self._floors or self._judged * TURNOVER > max(len(self.requests), TURNOVER * CHUNKS):
            self._cut()
        # Floors are negated so that they ascend as bisection needs, the longest run first.
        place = bisect.bisect_left(self._floors, -request.remaining)
        # A request shorter than all that the cuts knew belongs to the shortest run.
        return self._runs[min(place, len(self._runs) - 1)]

    def _cut(self) -> None:
        """Sets `_runs`, the instances that serve anyone, and `_floors`, minus the shortest length of each run."""
        self._judged = 0
        servers = sorted(self.servers.values(), key=lambda item: (-item.instance.tensor_parallel, item.place))
        # Chunks of neighbours bound the search by `CHUNKS` squared, however many requests live.
        lengths = sorted((request.remaining for request in self.requests.values()), reverse=True)
        size = max(1, math.ceil(len(lengths) / CHUNKS))
        edges = [*range(0, len(lengths), size), len(lengths)]
        contexts = sum(item.context_tokens for item in self.requests.values()) // max(1, len(lengths))
        context = cost_model.rounded(contexts)

        def seconds(server: buckets.Server, first: int, last: int) -> float:
            """Returns the time of chunks [first, last): its longest request's, at the pace of a full instance."""
            count = edges[last] - edges[first]
            if not count:
                return 0.0
            instance = server.instance
            pace = self.rates.decode(instance, min(count, instance.slots), context)
            return lengths[edges[first]] * pace * max(1.0, count / instance.slots)

        cuts = presorted_cuts(servers, len(edges) - 1, seconds)
        self._runs, self._floors = [], []
        for server, (first, last) in zip(servers, cuts, strict=True):
            if last > first:
                self._runs.append(server)
                self._floors.append(-lengths[edges[last] - 1])


def presorted_cuts(
    servers: Sequence[Server], chunks: int, seconds: Callable[[Server, int, int], float]
) -> list[tuple[int, int]]:
    """Cuts chunks 0..chunks into consecutive runs, one a server (some empty), so that the slowest run is fastest.

    Args:
      servers: servers in the order of the runs.
      chunks: number of chunks, the longest first.
      seconds: maps (server, first, last) to the time of the run of chunks [first, last).

    Returns:
      (first, last) of each server's run.
    """
    # best[last] is the slowest run's time, if the servers so far serve chunks [0, last).
    best = [0.0] + [math.inf] * chunks
    choices: list[list[int]] = []
    for server in servers:
        following, choice = [math.inf] * (chunks + 1), [0] * (chunks + 1)
        for last in range(chunks + 1):
            for first in range(last, -1, -1):
                run = seconds(server, first, last)
                if run >= following[last]:  # a longer run is no faster
                    break
                worst = max(best[first], run)
                if worst < following[last]:
                    following[last], choice[last] = worst, first
        best = following
        choices.append(choice)
    # Backwards from the last server, which ends at the last chunk.
    cuts = []
    last = chunks
    for choice in reversed(choices):
        cuts.append((choice[last], last))
        last = choice[last]
    return cuts[::-1]
