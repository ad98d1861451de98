"""Buckets: the levels of the feedback queue. Each is the rollout instances of one tensor-parallel degree.

Narrow instances (small degree) are many and serve short work; wide ones are few and serve long work. Bucket i serves
requests with up to `scheduler.max_remaining_tokens[i]` tokens to generate, the widest all others.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Callable, Iterable, Sequence

from libra_jax import protocols
from libra_jax.scheduling import ordering, state


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
    """Which bucket an instance belongs to, and which a length asks for.

    Args:
      bounds: `scheduler.max_remaining_tokens`.
      degrees: tensor-parallel degrees of the layout, where they are known beforehand. Otherwise a degree is known
        once an instance of it has been seen, and while some are still to come the lowest bounds count.
    """

    def __init__(self, bounds: Sequence[int], degrees: Iterable[int] = ()) -> None:
        self.bounds = tuple(bounds)
        self.degrees = sorted(set(degrees))
        if self.degrees:
            check(self.bounds, self.degrees)

    @classmethod
    def planned(cls, buckets: Sequence[protocols.PlannedBucket]) -> Levels:
        """The levels of a plan, the narrowest bucket first."""
        return cls(
            [bucket.max_remaining_tokens for bucket in buckets[:-1]], [bucket.tensor_parallel for bucket in buckets]
        )

    @property
    def count(self) -> int:
        """Buckets, at least one."""
        return max(1, len(self.degrees)) if self.bounds else 1

    def learn(self, instances: Sequence[protocols.Instance]) -> None:
        """Takes new degrees in. A degree stays when its last instance is lost, so that the others keep their bounds.

        Raises:
          ConfigError: there are more degrees than the bounds can separate.
        """
        self.degrees = sorted({*self.degrees, *(instance.tensor_parallel for instance in instances)})
        if len(self.degrees) > len(self.bounds) + 1:
            check(self.bounds, self.degrees)

    def of_degree(self, degree: int) -> int:
        """The bucket of an instance."""
        return self.degrees.index(degree) if self.bounds else 0

    def nearest(self, other: Levels, level: int) -> int:
        """The level here for one of other levels: of the same degree, else of the next wider one, else the widest."""
        if not other.bounds or not other.degrees:
            return min(level, self.count - 1)
        return min(bisect.bisect_left(self.degrees, other.degrees[level]), self.count - 1)

    def of_length(self, tokens: float) -> int:
        """The bucket that so many tokens to generate ask for."""
        return min(bisect.bisect_left(self.bounds, tokens), self.count - 1)


def share_in_use(server: state.Server) -> float:
    """The share of an instance's slots in use."""
    return server.load / server.slots


class Bucket:
    """One level: its instances, by how busy they are, and the requests that wait for it.

    A heap holds the instances that have a free slot, and is put right lazily: of each there is an entry whose value is
    not above its present one, so that the first entry that tells the truth is the least of all.

    Args:
      level: its place among the buckets.
      queue: of those who wait for it.
      busy: how busy an instance is.
    """

    def __init__(self, level: int, queue: ordering.Queue, busy: Callable[[state.Server], float] = share_in_use) -> None:
        self.level = level
        self.queue = queue
        self.servers: list[state.Server] = []
        self.slots = 0
        self.free = 0
        self._busy = busy
        self._heap: list[tuple[float, int, int, state.Server]] = []

    def add(self, server: state.Server) -> None:
        """Takes an instance in, with the load that it has."""
        server.level = self.level
        server.noted = math.inf
        self.servers.append(server)
        self.slots += server.slots
        self.free += server.slots - server.load
        self.eased(server)

    def least(self) -> state.Server:
        """The least busy instance that has a free slot, then the one with more slots, then the first.

        Only where `free` is positive.
        """
        heap = self._heap
        while True:
            value, _, _, server = heap[0]
            if server.load >= server.slots:  # it is noted again when a slot comes free
                server.noted = math.inf
                heapq.heappop(heap)
                continue
            busy = self._busy(server)
            if busy == value:
                return server
            server.noted = busy
            heapq.heapreplace(heap, (busy, -server.slots, server.place, server))

    def occupy(self, server: state.Server) -> None:
        """A request begins to decode on the instance."""
        server.load += 1
        self.free -= 1

    def release(self, server: state.Server) -> None:
        """A request no longer decodes on the instance."""
        server.load -= 1
        self.free += 1
        self.eased(server)

    def eased(self, server: state.Server) -> None:
        """The instance may have become less busy."""
        if server.load >= server.slots:
            return
        busy = self._busy(server)
        if busy < server.noted:
            server.noted = busy
            heap = self._heap
            heapq.heappush(heap, (busy, -server.slots, server.place, server))
            if len(heap) > 8 * len(self.servers) + 64:
                self._heap = [
                    (item.noted, -item.slots, item.place, item) for item in self.servers if item.noted < math.inf
                ]
                heapq.heapify(self._heap)


class Crowds:
    """The instances that requests wait for in particular, the longest queue first: a heap that is put right lazily."""

    def __init__(self, servers: Sequence[state.Server]) -> None:
        self._servers = servers
        self._heap: list[tuple[int, int, state.Server]] = []
        for server in servers:
            server.crowd = 0

    def joined(self, server: state.Server) -> None:
        """A request began to wait for the instance."""
        size = server.queue.size
        if size > server.crowd:
            server.crowd = size
            heapq.heappush(self._heap, (-size, server.place, server))
            if len(self._heap) > 8 * len(self._servers) + 64:
                self._heap = [(-item.crowd, item.place, item) for item in self._servers if item.crowd]
                heapq.heapify(self._heap)

    def longest(self) -> state.Server | None:
        """The instance that most wait for, if anyone waits for any."""
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
