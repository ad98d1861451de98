"""Predicts the steps of a run: follows requests through slots, groups through batches, and versions through training.

A step trains on the groups that were dispatched `staleness` steps before, and waits for all of them. So if their
slowest request takes `path` seconds after its dispatch, then over `staleness` + 1 steps
T >= (path + train + sync) / (staleness + 1). `path` is no constant. A request first waits for a slot, and then shares
its instance. Both depend on what the other steps left unfinished, so long and short steps alternate. A formula of
means misses this, so `step_seconds` follows some steps, request by request, on sampled requests.

Requests start in the order of their dispatch, on the pool with the most free slots that has room in its cache. A
request that is predicted to belong to a pool starts there if it can, and otherwise moves there as soon as there is room
(`confusion`). All requests of a pool get their tokens at one pace. The pool therefore counts *ticks*: a tick is the
time in which each decoding request gets a token. A request is done after a fixed number of ticks, no matter how the
pace changes, so an event costs a few operations of a heap.

If contexts outgrow the cache all the same, those of requests whose tools run are evicted and prefilled again at the
next turn, and decoding requests wait.
"""

from __future__ import annotations

import collections
import heapq
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

WARM, TAKEN = 2, 2
"""Multiples of staleness + 1 in steps: those that only fill the slots, and those whose mean counts."""

LEAST_STEPS = 4
"""Fewest steps whose mean counts."""

SLACK = 1e-9
"""Slots by which rounding may exceed a pool."""

_next = operator.attrgetter("next")


class Request(NamedTuple):
    """Costs of a sampled request on the instances of a pool.

    Attributes:
      ticks: ticks that it takes: its tokens, and its tools' time in ticks at the pace of full slots.
      share: share of these ticks in which it decodes.
      drag: seconds that it adds to each tick of its instance, by its context and its prefills.
      footprint: tokens of cache that it occupies, mean over its life.
      again: seconds of prefilling it again after a weight sync.
      recall: seconds that it adds to each tick if its context is prefilled again at each turn.
    """

    ticks: float
    share: float
    drag: float
    footprint: float
    again: float
    recall: float


@dataclass(frozen=True, eq=False)
class Pool:
    """The instances of one degree, with their costs of each sampled request.

    Attributes:
      instances: number of instances.
      slots: requests that decode at once, on all instances.
      room: tokens of cache that the policy fills, on all instances.
      cache: tokens of cache, on all instances.
      fixed: seconds of an engine step by the decoding requests of one instance, without their contexts.
      pause: seconds in which a weight sync stops the instances.
      requests: costs of each sampled request.
    """

    instances: float
    slots: float
    room: float
    cache: float
    fixed: Sequence[float]
    pause: float
    requests: Sequence[Request]


@dataclass(frozen=True)
class Cycle:
    """The trainer's side of a step, and the coordinator's rules.

    Attributes:
      groups: groups of a training step.
      size: requests of a group.
      staleness: max staleness.
      train: seconds from a complete batch to the next version on the instances.
    """

    groups: int
    size: int
    staleness: int
    train: float

    @property
    def steps(self) -> tuple[int, int]:
        """Steps to follow before the mean begins, and steps of the mean."""
        window = self.staleness + 1
        # Steps of max staleness 0 leave nothing to the next one.
        return (WARM * window if self.staleness else 0), max(LEAST_STEPS, TAKEN * window)

    @property
    def requests(self) -> int:
        """Requests that `step_seconds` follows."""
        # The last steps are as full as all others.
        return (sum(self.steps) + self.staleness + 1) * self.groups * self.size


class _Line:
    """A pool at work: its running requests by the tick at which each is done."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._requests = pool.requests
        self._due: list[tuple[float, int]] = []  # tick and number of each running request, and of those that left
        self._left: set[int] = set()
        self.at = self.tick = 0.0
        self.load = 0.0  # decoding requests
        self._drag = self._recall = self._again = 0.0
        self._used = 0.0  # tokens of cache of all requests
        self._held = 0.0  # tokens of those whose tools run
        self.rate, self.next = pool.fixed[0], math.inf
        self.changed = False

    def admits(self, request: int) -> bool:
        """Returns whether a sampled request may start here."""
        if not self._due:
            return True  # or a pool of less than one slot, or a context larger than the room, would never be used
        pool, costs = self.pool, self._requests[request]
        return self.load + costs.share <= pool.slots + SLACK and self._used + costs.footprint <= pool.room

    def join(self, now: float, number: int, request: int, ticks: float) -> None:
        """Starts a request that takes `ticks`."""
        self._advance(now)
        heapq.heappush(self._due, (self.tick + ticks, number))
        self._count(request, 1.0)

    def finish(self, request_of: Sequence[int]) -> int:
        """Ends the next request at `next`; returns its number."""
        self._advance(self.next)
        number = heapq.heappop(self._due)[1]
        self._count(request_of[number], -1.0)
        return number

    def leave(self, now: float, number: int, request: int, until: float) -> float:
        """Takes a running request off, which would be done at tick `until`; returns the share of it that is left."""
        self._advance(now)
        self._left.add(number)
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

    def _advance(self, now: float) -> None:
        if now > self.at:  # the pool stands still until `at`
            self.tick += (now - self.at) / self.rate
            self.at = now

    def _count(self, request: int, sign: float) -> None:
        """Adds a request to the sums, or takes it off."""
        _, share, drag, footprint, again, recall = self._requests[request]
        self.load += sign * share
        self._drag += sign * drag
        self._recall += sign * recall
        self._again += sign * again
        self._used += sign * footprint
        self._held += sign * (1.0 - share) * footprint
        self.changed = True

    def plan(self) -> None:
        """Computes the pace, and when the next request is done. Call after changes, before time goes on."""
        due, pool = self._due, self.pool
        self.changed = False
        while due and due[0][1] in self._left:
            self._left.discard(heapq.heappop(due)[1])
        if not due:
            # Rounding errors of many additions must not add up.
            self.load = self._drag = self._recall = self._again = self._used = self._held = 0.0
            self.next = math.inf
            return
        decoding, drag, slower = self.load / pool.instances, self._drag, 1.0
        if self._used > pool.cache:
            running = self._used - self._held
            drag += self._recall * min(1.0, (self._used - pool.cache) / max(self._held, 1.0))
            slower = max(1.0, running / pool.cache)  # what does not fit waits
        fixed = pool.fixed
        whole = min(int(decoding), len(fixed) - 2)
        self.rate = slower * (fixed[whole] + (decoding - whole) * (fixed[whole + 1] - fixed[whole]))
        self.rate += drag / pool.instances
        self.next = self.at + (due[0][0] - self.tick) * self.rate


class _Run:
    """The requests of a run on their way through the pools."""

    def __init__(self, pools: Sequence[Pool], sequence: Sequence[int], wanted: Sequence[int], cycle: Cycle) -> None:
        self._sequence, self._wanted, self._cycle = sequence, wanted, cycle
        self._lines = [_Line(pool) for pool in pools]
        self._place: dict[int, tuple[int, float]] = {}  # line of each running request, and the tick of its end
        self._strays: list[collections.deque[int]] = [collections.deque() for _ in pools]
        self._batch = cycle.groups * cycle.size
        self._open = [self._batch] * (len(sequence) // self._batch)  # unfinished requests of each batch
        self._sent = self._begun = 0  # dispatched batches, and begun requests

    def seconds(self) -> float:
        """Returns the mean seconds of a step."""
        warm, taken = self._cycle.steps
        now, trained, ends = 0.0, math.inf, [0.0]
        self._sent = self._cycle.staleness + 1
        self._start(now)
        for line in self._lines:
            line.plan()
        while len(ends) <= warm + taken:
            # A step trains on the oldest batch, and waits for all of it.
            if trained == math.inf and not self._open[len(ends) - 1]:
                trained = now + self._cycle.train
            line = min(self._lines, key=_next)
            if trained == line.next == math.inf:
                return math.inf  # some request fits no pool
            if trained <= line.next:
                now, trained = trained, math.inf
                ends.append(now)
                self._sent += 1
                for line in self._lines:
                    line.sync(now)
            else:
                now = line.next
                number = line.finish(self._sequence)
                own, _ = self._place.pop(number)
                self._open[number // self._batch] -= 1
                if self._strays[own]:
                    self._gather(now, own)
            self._start(now)
            for line in self._lines:
                if line.changed:
                    line.plan()
        return (ends[-1] - ends[warm]) / taken

    def _start(self, now: float) -> None:
        """Starts dispatched requests in their order, until one finds no place."""
        last = self._sent * self._batch
        while self._begun < last:
            number = self._begun
            request, own = self._sequence[number], self._wanted[number]
            chosen = own
            if own < 0 or not self._lines[own].admits(request):
                chosen, least = -1, math.inf
                for index, line in enumerate(self._lines):
                    if line.changed:
                        line.plan()
                    if line.rate < least and line.admits(request):
                        chosen, least = index, line.rate
                if chosen < 0:
                    return
                if own >= 0:
                    self._strays[own].append(number)
            self._join(now, number, chosen, 1.0)
            self._begun += 1

    def _join(self, now: float, number: int, chosen: int, left: float) -> None:
        line, request = self._lines[chosen], self._sequence[number]
        ticks = left * line.pool.requests[request].ticks
        line.join(now, number, request, ticks)
        self._place[number] = chosen, line.tick + ticks

    def _gather(self, now: float, own: int) -> None:
        """Moves strays to the pool that they are predicted to belong to, while there is room."""
        line, strays = self._lines[own], self._strays[own]
        while strays:
            number = strays[0]
            place = self._place.get(number)
            if place is not None:  # else it is done
                request = self._sequence[number]
                if not line.admits(request):
                    return
                left = self._lines[place[0]].leave(now, number, request, place[1])
                self._join(now, number, own, left)
                line.stop(now, line.pool.requests[request].again / line.pool.instances)  # its context is prefilled here
            strays.popleft()


def step_seconds(pools: Sequence[Pool], sequence: Sequence[int], wanted: Sequence[int], cycle: Cycle) -> float:
    """Returns the mean seconds of a training step.

    Args:
      pools: the instances.
      sequence: sampled request of each dispatched one, at least `cycle.requests`; members of a group follow each other.
      wanted: number of the pool that each dispatched request is predicted to belong to; -1 if nothing is predicted.
      cycle: the trainer's side.
    """
    return _Run(pools, sequence, wanted, cycle).seconds()
