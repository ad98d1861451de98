"""Buckets: the levels of the feedback queue. Each is the rollout instances of one tensor-parallel degree.

Narrow instances (small degree) are many and serve short work; wide ones are few and serve long work. Bucket i serves
requests with up to `scheduler.max_remaining_tokens[i]` tokens to generate, the widest all others.
"""

from __future__ import annotations

import bisect
import heapq
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

    def of_length(self, tokens: float) -> int:
        """The bucket that so many tokens to generate ask for."""
        return min(bisect.bisect_left(self.bounds, tokens), self.count - 1)


class Bucket:
    """One level: its instances, by load, and the requests that wait for it."""

    def __init__(self, level: int, queue: ordering.Queue) -> None:
        self.level = level
        self.queue = queue
        self.servers: list[state.Server] = []
        self.slots = 0
        self.free = 0
        self._by_load: list[tuple[float, int, int, int, state.Server]] = []

    def add(self, server: state.Server) -> None:
        """Takes an instance in, with the load that it has."""
        server.level = self.level
        self.servers.append(server)
        self.slots += server.instance.slots
        self.free += server.instance.slots - server.load
        self._note(server)

    def least(self) -> state.Server:
        """The instance with the smallest share of its slots in use, then the one with more slots, then the first.

        Only where `free` is positive.
        """
        heap = self._by_load
        while heap[0][3] != heap[0][4].load:
            heapq.heappop(heap)
        return heap[0][4]

    def occupy(self, server: state.Server) -> None:
        """A request begins to decode on the instance."""
        server.load += 1
        self.free -= 1
        self._note(server)

    def release(self, server: state.Server) -> None:
        """A request no longer decodes on the instance."""
        server.load -= 1
        self.free += 1
        self._note(server)

    def _note(self, server: state.Server) -> None:
        load, slots = server.load, server.instance.slots
        if load < slots:
            heapq.heappush(self._by_load, (load / slots, -slots, server.place, load, server))
            if len(self._by_load) > 8 * len(self.servers) + 64:
                self._by_load = [
                    (item.load / item.instance.slots, -item.instance.slots, item.place, item.load, item)
                    for item in self.servers
                    if item.load < item.instance.slots
                ]
                heapq.heapify(self._by_load)


class Index:
    """The instance with the least value of something that changes all the time: a heap, cleared of the past lazily.

    A value must be pushed whenever it has changed.
    """

    def __init__(self, servers: Sequence[state.Server]) -> None:
        self._servers = servers
        self._heap: list[tuple[float, int, state.Server]] = []

    def push(self, server: state.Server, value: float) -> None:
        """The server's value is now this."""
        heapq.heappush(self._heap, (value, server.place, server))

    def first(self, value: Callable[[state.Server], float | None]) -> state.Server | None:
        """The server with the least value; None says that a server has none at present."""
        heap = self._heap
        if len(heap) > 16 * len(self._servers) + 64:
            now = [(value(server), server.place, server) for server in self._servers]
            heap[:] = [(least, place, server) for least, place, server in now if least is not None]
            heapq.heapify(heap)
        while heap:
            least, place, server = heap[0]
            actual = value(server)
            if actual == least:
                return server
            if actual is None or actual < least:  # a fresher entry is, or will be, pushed
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (actual, place, server))
        return None
