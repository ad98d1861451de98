"""The instances of one degree, in `pipeline`: what each sampled request costs on them, and which requests run.

All requests of a pool get their tokens at one pace. The pool therefore counts *ticks*: a tick is the time in which each
decoding request gets a token. A request is done after a fixed number of ticks, no matter how the pace changes, so an
event costs a few operations of a heap.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

SLACK = 1e-9
"""Slots by which rounding may exceed a pool."""


class RequestCosts(NamedTuple):
    """Costs of a sampled request on the instances of a pool.

    Attributes:
      ticks: ticks that it takes: its tokens, and its tools' time in ticks at the pace of full slots.
      share: share of these ticks in which it decodes.
      drag: seconds that it adds to each tick of its instance, by its context and its prefills.
      footprint: tokens of cache that it occupies, mean over its life.
      again: seconds of prefilling it again after a weight sync.
      recall: seconds that it adds to each tick if its context is prefilled again at each turn.
      turns: its turns; after each but the last it can be pushed out.
    """

    ticks: float
    share: float
    drag: float
    footprint: float
    again: float
    recall: float
    turns: float = 1.0


@dataclass(frozen=True, eq=False)
class DegreePool:
    """The instances of one degree, with their costs of each sampled request.

    Attributes:
      slots: requests that decode at once, on all instances.
      room: tokens of cache that the policy fills, on all instances.
      cache: tokens of cache, on all instances.
      fixed: seconds of an engine step by the decoding requests of one instance, without their contexts.
      pause: seconds in which a weight sync stops the instances.
    """

    instances: float
    slots: float
    room: float
    cache: float
    fixed: Sequence[float]
    pause: float
    requests: Sequence[RequestCosts]


class BusyPool:
    """A pool at work: its running requests by the tick at which each is done.

    Args:
      pool: the instances, and the costs of requests.

    Attributes:
      pool: the same.
      used: tokens of cache of the running requests.
      rate: seconds of a tick.
      next: seconds at which the next request is done; infinite if none runs.
      changed: `plan` has to be called before time goes on.
    """

    def __init__(self, pool: DegreePool) -> None:
        self.pool = pool
        # Attributes of their own, because searches take their time here.
        self._requests, self._fixed, self._instances = pool.requests, pool.fixed, pool.instances
        self._slots, self._room, self._max_lower = pool.slots + SLACK, pool.room, len(pool.fixed) - 2
        self._due: list[tuple[float, int]] = []  # tick and number of each running request, and of those that left
        self._stale_entries: dict[int, int] = {}  # number of entries of `_due` that count no more, by request
        self.at = self.tick = 0.0
        self.load = 0.0  # decoding requests
        self._drag = self._recall = self._again = 0.0
        self.used = 0.0  # tokens of cache of all requests
        self._tool_tokens = 0.0  # tokens of those whose tools run
        self.rate, self.next = pool.fixed[0], math.inf
        self.changed = False

    def admits(self, request: int) -> bool:
        """Returns whether a sampled request may start here."""
        if not self._due:
            return True  # or a pool of less than one slot, or a context larger than the room, would never be used
        costs = self._requests[request]
        return self.load + costs.share <= self._slots and self.used + costs.footprint <= self._room

    def lacks(self, request: int) -> bool:
        """Returns whether a sampled request finds no free slot, or no cache at all."""
        costs = self._requests[request]
        return self.load + costs.share > self._slots or self.used + costs.footprint > self.pool.cache

    def join(self, now: float, number: int, request: int, ticks: float) -> None:
        """Starts a request that takes `ticks`."""
        if now > self.at:  # as `_advance`, of which each request would be a call
            self.tick += (now - self.at) / self.rate
            self.at = now
        heapq.heappush(self._due, (self.tick + ticks, number))
        self._count(request, 1.0)

    def finish(self, request_of: Sequence[int]) -> int:
        """Ends the next request at `next`; returns its number."""
        if self.next > self.at:
            self.tick += (self.next - self.at) / self.rate
            self.at = self.next
        number = heapq.heappop(self._due)[1]
        self._count(request_of[number], -1.0)
        return number

    def leave(self, now: float, number: int, request: int, until: float) -> float:
        """Takes a running request off, which would be done at tick `until`; returns the share of it that is left."""
        self._advance(now)
        # If it comes back, it is due later than by this entry.
        self._stale_entries[number] = self._stale_entries.get(number, 0) + 1
        self._count(request, -1.0)
        return max(0.0, until - self.tick) / self._requests[request].ticks

    def stop(self, now: float, seconds: float) -> None:
        """Stops the pool for some seconds."""
        self._advance(now)
        self.at = max(self.at, now) + seconds
        self.changed = True

    def sync(self, now: float) -> None:
        """Takes new weights: the pool stops, and prefills all contexts again."""
        if self._due:
            # The pool has stopped while the weights came, before `now`: its requests are late by that time.
            self.stop(now, self.pool.pause + self._again / self.pool.instances)

    def _drop(self) -> None:
        """Drops the first entry of `_due`, which counts no more."""
        number = heapq.heappop(self._due)[1]
        self._stale_entries[number] -= 1
        if not self._stale_entries[number]:
            del self._stale_entries[number]

    def _advance(self, now: float) -> None:
        if now > self.at:  # the pool stands still until `at`
            self.tick += (now - self.at) / self.rate
            self.at = now

    def _count(self, request: int, sign: float) -> None:
        """Adds a request to the sums, or takes it off."""
        _, share, drag, footprint, again, recall, _ = self._requests[request]
        self.load += sign * share
        self._drag += sign * drag
        self._recall += sign * recall
        self._again += sign * again
        self.used += sign * footprint
        self._tool_tokens += sign * (1.0 - share) * footprint
        self.changed = True

    def plan(self) -> None:
        """Computes the pace, and when the next request is done. Call after changes, before time goes on."""
        due, pool = self._due, self.pool
        self.changed = False
        while self._stale_entries and due and self._stale_entries.get(due[0][1]):
            self._drop()
        if not due:
            # Rounding errors of many additions must not add up.
            self.load = self._drag = self._recall = self._again = self.used = self._tool_tokens = 0.0
            self.next = math.inf
            return
        instances, fixed = self._instances, self._fixed
        decoding, drag, slower = self.load / instances, self._drag, 1.0
        if self.used > pool.cache:
            running = self.used - self._tool_tokens
            drag += self._recall * min(1.0, (self.used - pool.cache) / max(self._tool_tokens, 1.0))
            slower = max(1.0, running / pool.cache)  # what does not fit waits
        lower = int(decoding)
        if lower > self._max_lower:
            lower = self._max_lower
        self.rate = slower * (fixed[lower] + (decoding - lower) * (fixed[lower + 1] - fixed[lower]))
        self.rate += drag / instances
        self.next = self.at + (due[0][0] - self.tick) * self.rate
