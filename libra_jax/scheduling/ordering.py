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
from typing import Any

from libra_jax.scheduling import state

Rank = tuple[float, ...]
Entry = tuple[Any, ...]
"""A rank's numbers, the ticket, the request: compared from the left, the ticket at the latest tells two apart."""

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
        self._heap: list[Entry] = []
        self._versions: dict[int, int] = {}
        self.size = 0

    def push(self, request: state.Request) -> None:
        """The request, its ticket drawn and its state waiting, begins to wait here."""
        request.queue = self
        self.size += 1
        versions, version = self._versions, request.dispatch_version
        versions[version] = versions.get(version, 0) + 1
        heapq.heappush(self._heap, (*self._order(request), request.ticket, request))
        if len(self._heap) > 4 * self.size + 64:
            self._heap = [entry for entry in self._heap if entry[-1].queue is self and entry[-1].ticket == entry[-2]]
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
        mine, ahead = request.dispatch_version, 0.0
        for version, count in self._versions.items():
            if version <= mine:
                ahead += count if version < mine else count / 2
        return ahead

    def first(self) -> Entry | None:
        """Who goes next, behind his rank and ticket; he stays."""
        heap = self._heap
        while heap:
            first = heap[0]
            request = first[-1]
            if request.queue is self and request.ticket == first[-2]:
                return first
            heapq.heappop(heap)
        return None

    def head(self) -> state.Request | None:
        """Who goes next; it stays."""
        first = self.first() if self.size else None
        return None if first is None else first[-1]
