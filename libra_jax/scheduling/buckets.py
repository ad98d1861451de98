"""Buckets and queues: which level serves a length, which instance of it is free, and which request goes next.

A bucket is one level of the feedback queue: the rollout instances of one tensor-parallel degree. Narrow instances
(small degree) are many and serve short work; wide instances are few and serve long work. Bucket i serves requests with
up to `scheduler.max_remaining_tokens[i]` tokens to generate; the widest bucket serves all others.

Inside a bucket, `scheduler.ordering` decides which request goes next, for every policy alike:
- `fcfs`: the request that began to wait first.
- `longest_first`, `shortest_first`: by the tokens that the policy expects still to be generated. A policy without
  expectations goes by the tokens generated so far: with heavy tails, a request that has run long has long to run.
- `group_completion`: the oldest dispatch version first, then the group with the fewest live requests, then the longest.
  A training step waits for whole groups, and for groups at the staleness bound first.
Ageing overrides all of them (`slots.SlotScheduler`).
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from libra_jax import protocols
from libra_jax.scheduling import state

HEAP_SLACK = 64
"""Stale entries that a heap may hold beyond a multiple of its live ones before it is built again."""


def check(bounds: Sequence[int], degrees: Iterable[int]) -> None:
    """Refuses bounds that do not fit the instances; no bounds make one bucket of any instances.

    Raises:
      ConfigError: there is not one bound for each tensor-parallel degree but the largest.
    """
    levels = sorted(set(degrees))
    if bounds and len(bounds) != len(levels) - 1:
        raise protocols.ConfigError(
            f"config.scheduler.max_remaining_tokens: {len(bounds)} bounds do not separate the "
            f"{len(levels)} tensor-parallel degrees {', '.join(map(str, levels))} of rollout.tensor_parallel; "
            f"give {len(levels) - 1}, one for each degree but the largest, or none for a single bucket"
        )


class Levels:
    """Maps an instance's degree, and a length, to the level of a bucket.

    Args:
      bounds: `scheduler.max_remaining_tokens`.
      degrees: tensor-parallel degrees of the layout, if they are known. Otherwise a degree is known once an instance
        of it has been seen; until all are known, the lowest bounds apply.
    """

    def __init__(self, bounds: Sequence[int], degrees: Iterable[int] = ()) -> None:
        self.bounds = tuple(bounds)
        self.degrees = sorted(set(degrees))
        if self.degrees:
            check(self.bounds, self.degrees)

    @classmethod
    def planned(cls, buckets: Sequence[protocols.PlannedBucket]) -> Levels:
        """Returns the levels of a plan, the narrowest bucket first."""
        return cls(
            [bucket.max_remaining_tokens for bucket in buckets[:-1]], [bucket.tensor_parallel for bucket in buckets]
        )

    @property
    def count(self) -> int:
        """Number of buckets, at least one."""
        return max(1, len(self.degrees)) if self.bounds else 1

    def learn(self, instances: Sequence[protocols.Instance]) -> None:
        """Adds the degrees of the instances.

        A degree stays known when its last instance is lost, so that the other degrees keep their bounds.

        Raises:
          ConfigError: there are more degrees than the bounds can separate.
        """
        self.degrees = sorted({*self.degrees, *(instance.tensor_parallel for instance in instances)})
        if len(self.degrees) > len(self.bounds) + 1:
            check(self.bounds, self.degrees)

    def of_degree(self, degree: int) -> int:
        """Returns the level of an instance of this degree."""
        return self.degrees.index(degree) if self.bounds else 0

    def nearest(self, other: Levels, level: int) -> int:
        """Returns the level here for one of `other`: that of the same degree, else the next wider, else the widest."""
        if not other.bounds or not other.degrees:
            return min(level, self.count - 1)
        return min(bisect.bisect_left(self.degrees, other.degrees[level]), self.count - 1)

    def of_length(self, tokens: float) -> int:
        """Returns the level that serves a request with `tokens` to generate."""
        return min(bisect.bisect_left(self.bounds, tokens), self.count - 1)


Rank = tuple[float, ...]
Entry = tuple[Any, ...]
"""A rank's numbers, the ticket, the request. Tickets differ, so a comparison never reaches the request."""

Order = Callable[[state.Request], Rank]
"""Maps a request to its rank when it begins to wait. Smaller goes first; equal ranks go by their tickets."""


def fcfs(request: state.Request) -> Rank:
    """Ranks all requests alike, so that their tickets decide."""
    return ()


def longest_first(request: state.Request) -> Rank:
    """Ranks by remaining tokens, the most first."""
    return (-request.remaining,)


def shortest_first(request: state.Request) -> Rank:
    """Ranks by remaining tokens, the fewest first."""
    return (request.remaining,)


def group_completion(request: state.Request) -> Rank:
    """Ranks by dispatch version, then by live requests of the group, then by remaining tokens, the most first."""
    return (request.dispatch_version, request.group.live, -request.remaining)


ORDERS: dict[str, Order] = {
    "fcfs": fcfs,
    "longest_first": longest_first,
    "shortest_first": shortest_first,
    "group_completion": group_completion,
}


class Queue:
    """Requests that wait for one bucket or one instance.

    A request that leaves is only counted out; its heap entry is skipped later. An entry is stale if its request waits
    elsewhere or has drawn another ticket since.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._heap: list[Entry] = []
        self._versions: dict[int, int] = {}  # dispatch version -> waiting requests
        self.size = 0

    def push(self, request: state.Request) -> None:
        """Adds a request that has drawn its ticket."""
        request.queue = self
        self.size += 1
        versions, version = self._versions, request.dispatch_version
        versions[version] = versions.get(version, 0) + 1
        heapq.heappush(self._heap, (*self._order(request), request.ticket, request))
        if len(self._heap) > 4 * self.size + HEAP_SLACK:
            self._heap = [entry for entry in self._heap if entry[-1].queue is self and entry[-1].ticket == entry[-2]]
            heapq.heapify(self._heap)

    def discard(self, request: state.Request) -> None:
        """Removes a request that waits here."""
        request.queue = None
        self.size -= 1
        versions, version = self._versions, request.dispatch_version
        if versions[version] == 1:
            del versions[version]
        else:
            versions[version] -= 1

    def ahead(self, request: state.Request) -> float:
        """Returns about how many requests would go before one that began to wait here now."""
        if self._order is not group_completion:
            return float(self.size)
        mine, ahead = request.dispatch_version, 0.0
        for version, count in self._versions.items():
            if version <= mine:
                ahead += count if version < mine else count / 2
        return ahead

    def first(self) -> Entry | None:
        """Returns the entry of the request that goes next, which stays in the queue."""
        heap = self._heap
        while heap:
            first = heap[0]
            request = first[-1]
            if request.queue is self and request.ticket == first[-2]:
                return first
            heapq.heappop(heap)
        return None

    def head(self) -> state.Request | None:
        """Returns the request that goes next, which stays in the queue."""
        first = self.first() if self.size else None
        return None if first is None else first[-1]


def share_in_use(server: state.Server) -> float:
    """Returns the share of an instance's slots in use."""
    return server.load / server.slots


class Bucket:
    """One level: its instances by how busy they are, and the requests that wait for any of them.

    A heap holds the instances with a free slot and is corrected lazily. Invariant: each such instance has an entry
    whose value is at most its present one. So the first entry with a true value is the least busy instance.

    Args:
      level: its place among the buckets.
      queue: requests that wait for the bucket.
      busy: maps an instance to how busy it is.
    """

    def __init__(self, level: int, queue: Queue, busy: Callable[[state.Server], float] = share_in_use) -> None:
        self.level = level
        self.queue = queue
        self.servers: list[state.Server] = []
        self.slots = 0
        self.free = 0
        self._busy = busy
        self._heap: list[tuple[float, int, int, state.Server]] = []

    def add(self, server: state.Server) -> None:
        """Adds an instance with the load that it has."""
        server.level = self.level
        server.noted = math.inf
        self.servers.append(server)
        self.slots += server.slots
        self.free += server.slots - server.load
        self.eased(server)

    def least(self) -> state.Server:
        """Returns the least busy instance with a free slot; ties go to the one with more slots, then to the first.

        Call only if `free` is positive.
        """
        heap = self._heap
        while True:
            value, _, _, server = heap[0]
            if server.load >= server.slots:  # `release` notes it again when a slot comes free
                server.noted = math.inf
                heapq.heappop(heap)
                continue
            busy = self._busy(server)
            if busy == value:
                return server
            server.noted = busy
            heapq.heapreplace(heap, (busy, -server.slots, server.place, server))

    def occupy(self, server: state.Server) -> None:
        """Takes one of the instance's slots."""
        server.load += 1
        self.free -= 1

    def release(self, server: state.Server) -> None:
        """Frees one of the instance's slots."""
        server.load -= 1
        self.free += 1
        self.eased(server)

    def eased(self, server: state.Server) -> None:
        """Notes that the instance may be less busy than before. Call after each such change: the invariant needs it."""
        if server.load >= server.slots:
            return
        busy = self._busy(server)
        if busy < server.noted:
            server.noted = busy
            heap = self._heap
            heapq.heappush(heap, (busy, -server.slots, server.place, server))
            if len(heap) > 8 * len(self.servers) + HEAP_SLACK:
                self._heap = [
                    (item.noted, -item.slots, item.place, item) for item in self.servers if item.noted < math.inf
                ]
                heapq.heapify(self._heap)


class Crowds:
    """Finds the instance that most requests wait for in particular, by a heap that is corrected lazily."""

    def __init__(self, servers: Sequence[state.Server]) -> None:
        self._servers = servers
        self._heap: list[tuple[int, int, state.Server]] = []
        for server in servers:
            server.crowd = 0

    def joined(self, server: state.Server) -> None:
        """Notes that a request began to wait for the instance."""
        size = server.queue.size
        if size > server.crowd:
            server.crowd = size
            heapq.heappush(self._heap, (-size, server.place, server))
            if len(self._heap) > 8 * len(self._servers) + HEAP_SLACK:
                self._heap = [(-item.crowd, item.place, item) for item in self._servers if item.crowd]
                heapq.heapify(self._heap)

    def longest(self) -> state.Server | None:
        """Returns the instance with the longest queue; None if no request waits for an instance."""
        heap = self._heap
        while heap:
            noted, place, server = heap[0]
            size = server.queue.size
            if size == -noted:
                return server
            server.crowd = size
            if size:
                heapq.heapreplace(heap, (-size, place, server))
            else:
                heapq.heappop(heap)
        return None
