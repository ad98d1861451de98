"""Who goes next inside a bucket: a choice of config, the same code for every policy.

- `fcfs`: in the order in which they began to wait.
- `longest_first`, `shortest_first`: by the policy's expectation of the tokens still to be generated. A policy that
  expects nothing goes by the tokens generated so far: with heavy tails, what has run long has long to run.
- `group_completion`: the oldest dispatch version first, then the group with the fewest members left, then the longest:
  a training step waits for whole groups, and for those at the staleness bound first.

Ageing overrides all of them (`slots.SlotScheduler`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from libra_jax.scheduling import state

Rank = tuple[float, ...]
Order = Callable[[state.Request], Rank]
"""Smaller goes first; ties go to who began to wait first. Taken once, when the request begins to wait."""


def fcfs(request: state.Request) -> Rank:
    """As they came."""
    return ()


def longest_first(request: state.Request) -> Rank:
    """The most tokens to go."""
    return (-request.remaining,)


def shortest_first(request: state.Request) -> Rank:
    """The fewest tokens to go."""
    return (request.remaining,)


def group_completion(request: state.Request) -> Rank:
    """The oldest version, the group nearest to its end, the most tokens to go."""
    return (request.dispatch_version, request.group.live, -request.remaining)


ORDERS: dict[str, Order] = {
    "fcfs": fcfs,
    "longest_first": longest_first,
    "shortest_first": shortest_first,
    "group_completion": group_completion,
}


class Queue:
    """Requests waiting for one bucket. Who leaves other than by `pop` is only counted, and skipped later."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._heap: list[tuple[Rank, int, state.Request]] = []
        self._versions: dict[int, int] = {}
        self.size = 0

    def push(self, request: state.Request) -> None:
        """The request, its ticket drawn and its state waiting, begins to wait here."""
        request.queue = self
        self.size += 1
        versions, version = self._versions, request.dispatch_version
        versions[version] = versions.get(version, 0) + 1
        heapq.heappush(self._heap, (self._order(request), request.ticket, request))
        if len(self._heap) > 4 * self.size + 64:
            self._heap = [entry for entry in self._heap if entry[2].queue is self and entry[2].ticket == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, request: state.Request) -> None:
        """The request no longer waits here."""
        request.queue = None
        self.size -= 1
        versions, version = self._versions, request.dispatch_version
        if versions[version] == 1:
            del versions[version]
        else:
            versions[version] -= 1

    def ahead(self, request: state.Request) -> float:
        """About how many would go before a request that began to wait here now."""
        if self._order is not group_completion:
            return float(self.size)
        mine = request.dispatch_version
        return sum(
            count if version < mine else count / 2 for version, count in self._versions.items() if version <= mine
        )

    def first(self) -> tuple[Rank, int, state.Request] | None:
        """Rank, ticket and who goes next; it stays."""
        heap = self._heap
        while heap:
            _, ticket, request = heap[0]
            if request.queue is self and request.ticket == ticket:
                return heap[0]
            heapq.heappop(heap)
        return None

    def head(self) -> state.Request | None:
        """Who goes next; it stays."""
        first = self.first()
        return None if first is None else first[2]
