"""Heddle's rollout scheduling (arXiv 2603.28101): progressive priority, pre-emption, presorted placement, migration.

- A request's priority is its predicted remaining length, the longest first, predicted again at each tool return
  (section 4). The predictions are those of `evidence`, so that what is compared is the scheduling.
- If no slot is free, a waiting request takes the place of the shortest one that decodes on its instance, if that one
  is predicted `preempt_ratio` times shorter (algorithm 1; the published ratio is 1). One at an event.
- Placement (section 5.2): live requests, sorted by predicted length, are cut into consecutive runs, one an instance,
  the longest on the widest. Dynamic programming finds the cuts that minimise the largest run time, interference
  included.
- The cuts are made once for the prompts of a training step, as the paper makes them at the start of a rollout. Here
  steps overlap, so requests of a new dispatch version, and a doubled number of live requests, have them made again.
- Afterwards only ranks change (section 5.3): a request's rank among the live ones, in runs that shrink in proportion
  with their number, names its instance. It goes there at its next tool return, and waits for a slot of that instance.

The paper also chooses the parallelism; here the layout fixes it. It moves caches while tools run; here a fetch begins
at the tool's return (`simulation.kv_cache=offload`).
"""

from __future__ import annotations

import bisect
import math
import operator
from collections.abc import Callable, Sequence
from typing import TypeVar

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.scheduling import buckets, requests, residents
from libra_jax.scheduling import costs as cost_model
from libra_jax.scheduling.prediction import evidence, prefix_tree

Server = TypeVar("Server")

CHUNKS = 32
"""Runs of neighbours in length that the cuts keep together."""


class Heddle(residents.ResidentScheduler):
    """See the module.

    Args:
      config: what `evidence.Evidence` takes applies here.
      costs: costs of decoding.
      preempt_ratio: ratio of predicted lengths at which a waiting request displaces a running one.
    """

    predicts = True

    def __init__(
        self, config: config_lib.SchedulerConfig, costs: cost_model.Costs, *, preempt_ratio: float = 1.0
    ) -> None:
        self.evidence = evidence.Evidence(config)
        super().__init__(config, order="longest_first", learner=self.evidence)
        self.rates = cost_model.CostRates(costs)
        self._preempt_ratio = preempt_ratio
        self._ranks: list[tuple[float, str]] = []  # (minus the predicted length, request id) of the live requests
        self._version = -1
        self._runs: list[buckets.InstanceQueue] = []  # instances that serve a run, the longest lengths first
        self._ends: list[int] = []  # end of each run among the requests that were cut
        self._cut_at = 0  # requests that were cut

    def on_instance_change(self, instances: Sequence[protocols.Instance], now: float) -> list[protocols.Placement]:
        self._runs = []
        self.rates.clear()
        return super().on_instance_change(instances, now)

    def on_finish(
        self, request_id: str, generated_tokens: int, now: float, *, completed: bool = True
    ) -> list[protocols.Placement]:
        self._forget(self.requests[request_id])
        return super().on_finish(request_id, generated_tokens, now, completed=completed)

    def route(self, request: requests.LiveRequest, now: float, *, returned: bool = False) -> int:
        assert request.track is not None
        self._forget(request)
        sketch = self.evidence.predict(request.track, request.generated_tokens)
        request.remaining = sum(map(operator.mul, sketch, prefix_tree.MASSES))
        bisect.insort(self._ranks, (-request.remaining, request.request_id))
        if request.dispatch_version > self._version or len(self._ranks) >= 2 * self._cut_at:
            self._runs, self._version = [], max(self._version, request.dispatch_version)
        request.target = self._run_of(request) if self.servers else None
        return 0

    def place(self, now: float) -> list[protocols.Placement]:
        """Fills the free slots, then pre-empts where a queue's longest request still waits."""
        # Read first: the base class forgets which instances were touched when it has filled the slots.
        joined = [server for server in self._touched if server.queue.size]
        placements = super().place(now)
        for server in joined:
            first = server.queue.first()
            if first is None or not server.full:
                continue
            longest = first[-1]
            shortest = min(server.decoding, key=lambda item: (item.remaining, -item.ticket))
            # An aged request keeps its place: it was placed because it had waited long enough.
            longer = longest.remaining > self._preempt_ratio * shortest.remaining
            if longer and not shortest.aged and self.admits(longest, server):
                shortest.target = server  # it holds the context
                placements.append(self.displace(shortest, 0, now, protocols.MoveReason.PREEMPTED))
                # The base class's, which does not pre-empt again: one event displaces at most one request a queue.
                placements += super().place(now)
        return placements

    def _forget(self, request: requests.LiveRequest) -> None:
        """Takes the request's last prediction out of the ranks."""
        entry = (-request.remaining, request.request_id)
        place = bisect.bisect_left(self._ranks, entry)
        if place < len(self._ranks) and self._ranks[place] == entry:
            del self._ranks[place]

    def _run_of(self, request: requests.LiveRequest) -> buckets.InstanceQueue:
        """Returns the instance whose run the request's rank lies in."""
        if not self._runs:
            self._cut()
        rank = bisect.bisect_left(self._ranks, (-request.remaining, request.request_id))
        # Runs shrink with the number of live requests.
        place = bisect.bisect_right(self._ends, rank * self._cut_at // len(self._ranks))
        return self._runs[min(place, len(self._runs) - 1)]

    def _cut(self) -> None:
        """Sets `_runs` and `_ends`."""
        servers = sorted(self.servers.values(), key=lambda item: (-item.instance.tensor_parallel, item.place))
        # Chunks of neighbours bound the search by `CHUNKS` squared, however many requests live.
        lengths = [-negative for negative, _ in self._ranks]
        self._cut_at = len(lengths)
        size = max(1, math.ceil(len(lengths) / CHUNKS))
        edges = [*range(0, len(lengths), size), len(lengths)]
        contexts = sum(item.context_tokens for item in self.requests.values()) // max(1, len(lengths))
        context = cost_model.rounded(contexts)

        def seconds(server: buckets.InstanceQueue, first: int, last: int) -> float:
            """Returns the time of chunks [first, last): its longest request's, at the pace of a full instance."""
            count = edges[last] - edges[first]
            if not count:
                return 0.0
            instance = server.instance
            pace = self.rates.decode(instance, min(count, instance.slots), context)
            return lengths[edges[first]] * pace * max(1.0, count / instance.slots)

        cuts = presorted_cuts(servers, len(edges) - 1, seconds)
        used = [(server, edges[last]) for server, (first, last) in zip(servers, cuts, strict=True) if last > first]
        self._runs = [server for server, _ in used]
        self._ends = [end for _, end in used]


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
