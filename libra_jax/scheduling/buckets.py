"""Buckets and queues: which instance of a bucket is free, and which request goes next.

A bucket is one level of the feedback queue (`levels.py`): the rollout instances of one tensor-parallel degree (and, in
a cluster of unlike accelerators, of one accelerator). Narrow instances (small degree) are many and serve short work;
wide instances are few and serve long work.

Inside a bucket, `scheduler.ordering` decides which request goes next, for every policy alike:
- `fcfs`: the request that began to wait first.
- `longest_first`, `shortest_first`: by the tokens that the policy expects still to be generated. A policy without
  expectations goes by the tokens generated so far: with heavy tails, a request that has run long has long to run.
- `oldest_longest_first`: the oldest dispatch version first, then the longest.
- `group_completion`: the oldest dispatch version first, then the group with the fewest live rollouts, then the longest.
  A training step waits for whole groups, and for groups at the staleness bound first.
Ageing overrides all of them (`slots.SlotScheduler`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from libra_jax import protocols
from libra_jax.scheduling import requests


class InstanceQueue:
    """An instance, the requests that decode there and the requests that wait for exactly this instance.

    Args:
      place: its place among the live instances, which breaks ties.

    Attributes:
      rates: seconds a token that its kind was asked for (`costs.CostRates`), if its policy goes by them.
      read: seconds that a prefilled token adds to its steps, if its policy goes by them.
      level: level of its bucket.
      load: requests that decode there.
      decoding: those requests, in the order in which they were placed.
      residents: requests whose context the instance holds, decoding or away (`residents`).
      context: context tokens of the residents.
      urgency: sum of the residents' urgencies.
      urgent_tokens: sum of the residents' urgency times expected tokens.
      footprint: tokens of the key-value cache that the residents are expected to hold.
      noted: smallest value under which its bucket's heap lists it; infinite if the heap does not list it.
      crowd: longest queue under which the heap of crowded instances lists it; 0 if that heap does not list it.
    """

    __slots__ = (
        "context",
        "crowd",
        "decoding",
        "footprint",
        "instance",
        "level",
        "load",
        "name",
        "noted",
        "place",
        "queue",
        "rates",
        "read",
        "residents",
        "slots",
        "urgency",
        "urgent_tokens",
    )

    def __init__(self, instance: protocols.Instance, place: int, queue: Queue) -> None:
        self.queue = queue
        self.level = 0
        self.load = 0
        self.decoding: dict[requests.LiveRequest, None] = {}
        self.residents = 0
        self.context = 0
        self.urgency = 0.0
        self.urgent_tokens = 0.0
        self.footprint = 0.0
        self.noted = math.inf
        self.crowd = 0
        self.rates: dict[int, float] = {}
        self.read = 0.0
        self.announce(instance, place)

    def announce(self, instance: protocols.Instance, place: int) -> None:
        """Takes the instance's present description and its place among the live instances."""
        self.instance, self.place = instance, place
        # Copies: the hot paths read these attributes for every decision.
        self.name, self.slots = instance.name, instance.slots

    @property
    def full(self) -> bool:
        """Whether no slot is free."""
        return self.load >= self.slots


HEAP_SLACK = 64
"""Stale entries that a heap may hold beyond a multiple of its live ones before it is built again."""


Rank = tuple[float, ...]
Entry = tuple[Any, ...]
"""A rank's numbers, the ticket, the request. Tickets differ, so a comparison never reaches the request."""

Order = Callable[[requests.LiveRequest], Rank]
"""Maps a request to its rank when it begins to wait. Smaller goes first; equal ranks go by their tickets."""


ORDERS: dict[str, Order] = {
    "fcfs": lambda request: (),  # all alike, so that their tickets decide
    "longest_first": lambda request: (-request.remaining,),
    "shortest_first": lambda request: (request.remaining,),
    "oldest_longest_first": lambda request: (request.dispatch_version, -request.remaining),
    "group_completion": lambda request: (request.dispatch_version, request.rollout.group.live, -request.remaining),
}
"""Orders by the name that `scheduler.ordering` gives them."""


@dataclass(eq=False)
class Queue:
    """Requests that wait for one bucket or one instance.

    A request that leaves is only counted out; its heap entry is skipped later. An entry is stale if its request waits
    elsewhere or has drawn another ticket since.

    Attributes:
      order: decides which request goes next.
      size: number of requests that wait here.
    """

    order: Order
    # A factory, because mypyc drops plain defaults of fields that are no arguments.
    size: int = field(default_factory=int, init=False)
    _heap: list[Entry] = field(default_factory=list, init=False)
    _versions: dict[int, int] = field(default_factory=dict, init=False)  # dispatch version -> waiting requests
    _residents: dict[requests.LiveRequest, None] = field(
        default_factory=dict, init=False
    )  # those whose context has a home

    def push(self, request: requests.LiveRequest) -> None:
        """Adds a request that has drawn its ticket."""
        request.queue = self
        self.size += 1
        versions, version = self._versions, request.dispatch_version
        versions[version] = versions.get(version, 0) + 1
        if request.home is not None:
            self._residents[request] = None
        heapq.heappush(self._heap, (*self.order(request), request.ticket, request))
        # A sweep at a multiple of the live entries costs each push a constant time in the mean.
        if len(self._heap) > 4 * self.size + HEAP_SLACK:
            self._heap = [entry for entry in self._heap if entry[-1].queue is self and entry[-1].ticket == entry[-2]]
            heapq.heapify(self._heap)

    def discard(self, request: requests.LiveRequest) -> None:
        """Removes a request that waits here."""
        request.queue = None  # makes its heap entry stale
        self._residents.pop(request, None)
        self.size -= 1
        versions, version = self._versions, request.dispatch_version
        # Versions only grow, so entries at zero would pile up over a run.
        if versions[version] == 1:
            del versions[version]
        else:
            versions[version] -= 1

    def ahead(self, request: requests.LiveRequest) -> float:
        """Returns about how many requests would go before one that began to wait here now."""
        if self.order is not ORDERS["group_completion"]:
            return float(self.size)
        mine, ahead = request.dispatch_version, 0.0
        # Within its own version it stands in the middle, because the rest of the order is not known before it waits.
        for version, count in self._versions.items():
            if version <= mine:
                ahead += count if version < mine else count / 2
        return ahead

    def first(self) -> Entry | None:
        """Returns the entry of the request that goes next, which stays in the queue; None if nothing waits."""
        heap = self._heap
        # With no one waiting all entries are stale; `push` sweeps them when they are many.
        while self.size and heap:
            first = heap[0]
            request = first[-1]
            if request.queue is self and request.ticket == first[-2]:
                return first
            heapq.heappop(heap)  # stale
        return None

    def first_resident(self, level: int, server: InstanceQueue | None = None) -> requests.LiveRequest | None:
        """Returns the request that goes next of those whose context lies on an instance with a free slot.

        Takes time linear in the residents that wait here.

        Args:
          level: level of the instance.
          server: the instance; None: any of the level.
        """
        first: requests.LiveRequest | None = None
        for request in self._residents:
            home = request.home
            if home is None or home.level != level or home.full or (server is not None and home is not server):
                continue
            if first is None or self._rank(request) < self._rank(first):
                first = request
        return first

    def _rank(self, request: requests.LiveRequest) -> Rank:
        return (*self.order(request), request.ticket)


def share_in_use(server: InstanceQueue) -> float:
    """Returns the share of an instance's slots in use."""
    return server.load / server.slots


@dataclass(eq=False)
class Bucket:
    """One level: its instances by how busy they are, and the requests that wait for any of them.

    A heap holds the instances with a free slot and is corrected lazily. Invariant: each such instance has an entry
    whose value is at most its present one. So the first entry with a true value is the least busy instance.

    Attributes:
      level: its place among the buckets.
      queue: requests that wait for the bucket.
      busy: maps an instance to how busy it is.
      slots: slots of all its instances.
      free: slots of all its instances that are free.
    """

    level: int
    queue: Queue
    busy: Callable[[InstanceQueue], float] = share_in_use
    servers: list[InstanceQueue] = field(default_factory=list, init=False)
    slots: int = field(default_factory=int, init=False)
    free: int = field(default_factory=int, init=False)
    _heap: list[tuple[float, int, int, InstanceQueue]] = field(default_factory=list, init=False)

    def add(self, server: InstanceQueue) -> None:
        """Adds an instance with the load that it has."""
        server.level = self.level
        server.noted = math.inf  # an entry in the heap of its former bucket is gone with that bucket
        self.servers.append(server)
        self.slots += server.slots
        self.free += server.slots - server.load
        self.eased(server)

    def least_busy(self) -> InstanceQueue:
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
            busy = self.busy(server)
            if busy == value:  # every other entry is at most its instance's true value, and no less than this one
                return server
            server.noted = busy
            heapq.heapreplace(heap, (busy, -server.slots, server.place, server))

    def occupy(self, server: InstanceQueue) -> None:
        """Takes one of the instance's slots."""
        server.load += 1
        self.free -= 1

    def release(self, server: InstanceQueue) -> None:
        """Frees one of the instance's slots."""
        server.load -= 1
        self.free += 1
        self.eased(server)

    def eased(self, server: InstanceQueue) -> None:
        """Notes that the instance may be less busy than before. Call after each such change: the invariant needs it."""
        if server.load >= server.slots:
            return
        busy = self.busy(server)
        # An entry below the present value is corrected when it surfaces (`least_busy`). One above it would not be.
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

    def __init__(self, servers: Sequence[InstanceQueue]) -> None:
        self._servers = servers
        self._heap: list[tuple[int, int, InstanceQueue]] = []
        for server in servers:
            server.crowd = 0

    def joined(self, server: InstanceQueue) -> None:
        """Notes that a request began to wait for the instance."""
        size = server.queue.size
        # Up to its noted size the instance has an entry that is high enough; `longest` corrects it downwards.
        if size > server.crowd:
            server.crowd = size
            heapq.heappush(self._heap, (-size, server.place, server))
            if len(self._heap) > 8 * len(self._servers) + HEAP_SLACK:
                self._heap = [(-item.crowd, item.place, item) for item in self._servers if item.crowd]
                heapq.heapify(self._heap)

    def longest(self) -> InstanceQueue | None:
        """Returns the instance with the longest queue; None if no request waits for an instance."""
        heap = self._heap
        while heap:
            noted, place, server = heap[0]
            size = server.queue.size
            if size == -noted:
                return server
            server.crowd = size  # queues shrink without a note, so an entry is at least the true size
            if size:
                heapq.heapreplace(heap, (-size, place, server))
            else:
                heapq.heappop(heap)
        return None
