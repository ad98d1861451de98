"""Predicts the steps of a run: follows requests through slots, groups through batches, and versions through training.

A step trains on the groups that were dispatched `staleness` steps before, and waits for all of them. So if their
slowest request takes `path` seconds after its dispatch, then over `staleness` + 1 steps
T >= (path + train + sync) / (staleness + 1). `path` is no constant. A request first waits for a slot, and then shares
its instance. Both depend on what the other steps left unfinished, so long and short steps alternate. A formula of
means misses this, so `follow` follows some steps, request by request, on sampled requests.

With `Cycle.early` the trainer streams: while it waits for the oldest batch, it takes all groups of this batch that have
finished, again and again. So at max staleness 0 a step takes rollout + train less what it trained before the last group
ended. No step trains groups of a later batch: the bound of staleness leaves no room for that once all slots are full.

Requests start in the order of their dispatch, on the pool with the most free slots that has room in its cache. A
request that is predicted to belong to a pool starts there if it can, and otherwise moves there as soon as there is room
(`confusion`).

If contexts outgrow the cache all the same, those of requests whose tools run are evicted and prefilled again at the
next turn, and decoding requests wait.

A request that has waited for `Cycle.ageing` seconds starts without room. If it finds no free slot or the cache is full,
it pushes out the request that has been there longest, at the end of a turn. That request waits and ages in turn, and
its context is prefilled again. So where many wait, all advance a few turns at a time, and short requests finish first.
"""

from __future__ import annotations

import collections
import heapq
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from libra_jax.planning.forecast import degree_queues

Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

WARM, COUNTED = 2, 2
"""Multiples of staleness + 1 in steps: those that only fill the slots, and those whose mean counts."""

LEAST_STEPS = 4
"""Fewest steps whose mean counts."""

WAITED = 0.2
"""Share of the time in which the trainer waits, from which on rollout alone sets the pace of steps."""

_next = operator.attrgetter("next")


@dataclass(frozen=True)
class Cycle:
    """The trainer's side of a step, and the coordinator's rules.

    Attributes:
      groups: groups of a training step.
      size: requests of a group.
      staleness: max staleness.
      train: seconds from a complete batch to the next version on the instances.
      ageing: seconds of waiting after which a request starts without room.
      early: seconds of `train` that may be spent on finished groups of an incomplete batch; 0: none.
      part: seconds of each part of a step beyond its share of `early`.
      min_part_share: share of a batch's tokens that a part before the last has at least.
    """

    groups: int
    size: int
    staleness: int
    train: float
    ageing: float = math.inf
    early: float = 0.0
    part: float = 0.0
    min_part_share: float = 0.0

    @property
    def steps(self) -> tuple[int, int]:
        """Steps to follow before the mean begins, and steps of the mean."""
        window = self.staleness + 1
        # Steps of max staleness 0 leave nothing to the next one.
        return (WARM * window if self.staleness else 0), max(LEAST_STEPS, COUNTED * window)

    @property
    def requests(self) -> int:
        """Requests that `step_seconds` follows."""
        # The last steps are as full as all others.
        return (sum(self.steps) + self.staleness + 1) * self.groups * self.size


@dataclass(frozen=True)
class Steps:
    """Mean times of the followed steps.

    Attributes:
      seconds: seconds of a step.
      train: seconds of a step in which the trainer trains and syncs weights.
    """

    seconds: float
    train: float


class _UntrainedGroups:
    """The finished groups that the trainer has not begun, by batch, and the share of each batch that it has begun."""

    def __init__(self, sequence: Sequence[int], tokens: Sequence[float], cycle: Cycle) -> None:
        self._cycle = cycle
        size, groups = cycle.size, cycle.groups
        starts = range(0, len(sequence) - size + 1, size)
        self._tokens = [sum([tokens[request] for request in sequence[start : start + size]]) for start in starts]
        self._open = [size] * len(self._tokens)  # unfinished requests of each group
        batches = range(0, len(self._tokens) - groups + 1, groups)
        self._batch_tokens = [sum(self._tokens[first : first + groups]) for first in batches]
        self._ready, self._started_shares = [0.0] * len(self._batch_tokens), [0.0] * len(self._batch_tokens)

    def finished(self, number: int) -> None:
        """Counts a finished request."""
        group = number // self._cycle.size
        self._open[group] -= 1
        if not self._open[group]:
            batch = group // self._cycle.groups
            self._ready[batch] += self._tokens[group] / self._batch_tokens[batch]

    def part_seconds(self, batch: int) -> float:
        """Returns the seconds of the part of an incomplete batch that the trainer begins now; -1 if it waits."""
        cycle, share = self._cycle, self._ready[batch]
        if share <= 0.0 or share < cycle.min_part_share:
            return -1.0
        self._ready[batch] = 0.0
        self._started_shares[batch] += share
        return cycle.part + share * (cycle.early - cycle.part)

    def rest_seconds(self, batch: int) -> float:
        """Returns the seconds from a complete batch to the next version."""
        cycle, started_share = self._cycle, self._started_shares[batch]
        if not started_share:
            return cycle.train
        return cycle.train - cycle.early + cycle.part + (1.0 - started_share) * (cycle.early - cycle.part)


class _Run:
    """The requests of a run on their way through the pools."""

    def __init__(
        self,
        layout: Sequence[degree_queues.DegreePool],
        sequence: Sequence[int],
        predicted_pools: Sequence[int],
        cycle: Cycle,
        tokens: Sequence[float],
    ) -> None:
        self._sequence, self._predicted_pools, self._cycle = sequence, predicted_pools, cycle
        self._lines = [degree_queues.BusyPool(pool) for pool in layout]
        self._place: dict[int, tuple[int, float]] = {}  # line of each running request, and the tick of its end
        self._strays: list[collections.deque[int]] = [collections.deque() for _ in layout]
        self._batch = cycle.groups * cycle.size
        self._open = [self._batch] * (len(sequence) // self._batch)  # unfinished requests of each batch
        self._finished_work = [0.0] * len(self._open)  # ticks of each batch's finished requests
        self._dispatch_times: list[float] = []  # time at which each batch was dispatched
        self._next_number = 0  # number of the next request that begins
        self._out: dict[int, tuple[float, float]] = {}  # of each request that was pushed out, since when, and its rest
        self._by_age: collections.deque[tuple[float, int]] = collections.deque()
        self._by_number: list[int] = []
        self._joined: list[collections.deque[tuple[int, float]]] = [collections.deque() for _ in layout]
        self._stream = _UntrainedGroups(sequence, tokens, cycle) if cycle.early else None

    def steps(self) -> Steps:
        """Returns the means of the counted steps."""
        warm_steps, counted_steps = self._cycle.steps
        now, train_end, ends = 0.0, math.inf, [0.0]
        is_complete, busy, train, stream = False, 0.0, self._cycle.train, self._stream
        before, single = 0.0, self._lines[0] if len(self._lines) == 1 else None
        self._dispatch_times = [now] * (self._cycle.staleness + 1)
        self._start(now)
        for line in self._lines:
            line.plan()
        while len(ends) <= warm_steps + counted_steps:
            # A step trains on the oldest batch, and waits for all of it.
            if train_end == math.inf:
                batch = len(ends) - 1
                is_complete, seconds = not self._open[batch], train
                if stream is not None:
                    seconds = stream.rest_seconds(batch) if is_complete else stream.part_seconds(batch)
                if is_complete or (stream is not None and seconds >= 0.0):
                    train_end = now + seconds
                    busy += seconds if batch >= warm_steps else 0.0
            line = single or min(self._lines, key=_next)
            if train_end == line.next == math.inf:
                return Steps(math.inf, train)  # some request fits no pool
            if train_end <= line.next and not is_complete:  # a part of a step is summed
                now, train_end = train_end, math.inf
                continue
            if train_end <= line.next:
                now, train_end = train_end, math.inf
                ends.append(now)
                if len(ends) == warm_steps + 1:
                    before = sum(self._finished_work)
                self._dispatch_times.append(now)
                for line in self._lines:
                    line.sync(now)
            else:
                now = line.next
                number = line.finish(self._sequence)
                self._finished(now, number)
            self._start(now)
            for line in self._lines:
                if line.changed:
                    line.plan()
        mean = (ends[-1] - ends[warm_steps]) / counted_steps
        # Where steps wait for rollout, one of several waits for the slowest requests of them all. Requests finish more
        # evenly than steps end, so few steps tell the rate of finished work better than the mean step.
        ratio = sum(self._finished_work[warm_steps : warm_steps + counted_steps]) / (sum(self._finished_work) - before)
        train = train if stream is None else busy / counted_steps
        waits = min(1.0, (1.0 - train / mean) / WAITED)
        return Steps(mean * (1.0 + waits * (ratio - 1.0)), train)

    def _finished(self, now: float, number: int) -> None:
        """Counts a finished request; its place may go to one that is predicted to belong there."""
        place, _ = self._place.pop(number)
        batch = number // self._batch
        self._open[batch] -= 1
        if self._stream is not None:
            self._stream.finished(number)
        # On any pool, but one for all.
        self._finished_work[batch] += self._lines[0].pool.requests[self._sequence[number]].ticks
        if self._strays[place]:
            self._gather(now, place)

    def _start(self, now: float) -> None:
        """Starts waiting requests in the order of their dispatch, until one finds no place."""
        next_number, last = self._next_number, len(self._dispatch_times) * self._batch
        if next_number == last and not self._out:
            return
        if self._by_age or (
            next_number < last and self._dispatch_times[next_number // self._batch] <= now - self._cycle.ageing
        ):
            self._start_aged(now)
        lines = self._lines
        while True:
            number = self._first() if self._out else self._next_number
            if number == last:
                return
            request, predicted = self._sequence[number], self._predicted_pools[number]
            chosen = predicted
            if predicted < 0 or not lines[predicted].admits(request):
                chosen, lowest_rate = -1, math.inf
                for index, line in enumerate(lines):
                    if line.admits(request):
                        if line.changed and len(lines) > 1:  # a pool alone is chosen at any pace
                            line.plan()
                        if line.rate < lowest_rate:
                            chosen, lowest_rate = index, line.rate
                if chosen < 0:
                    return
                if predicted >= 0:
                    self._strays[predicted].append(number)
            if number == self._next_number:
                self._next_number += 1
                self._join(now, number, chosen, 1.0)
            else:
                self._resume(now, number, chosen)

    def _first(self) -> int:
        """Returns the waiting request that was dispatched first; the next one to be dispatched if none waits."""
        waiting = self._by_number
        while waiting and waiting[0] not in self._out:
            heapq.heappop(waiting)
        return waiting[0] if waiting else self._next_number  # it had begun before all that did not

    def _resume(self, now: float, number: int, chosen: int) -> None:
        """Starts a request again that was pushed out, and prefills its context."""
        _, remaining_share = self._out.pop(number)
        line = self._lines[chosen]
        self._join(now, number, chosen, remaining_share)
        line.stop(now, line.pool.requests[self._sequence[number]].again / line.pool.instances)

    def _start_aged(self, now: float) -> None:
        """Starts requests that have waited for `ageing` seconds, the oldest first, in the places of others."""
        limit, ages = now - self._cycle.ageing, self._by_age
        while True:
            while ages and self._out.get(ages[0][1], (-1.0,))[0] != ages[0][0]:
                ages.popleft()
            since, number = ages[0] if ages else (math.inf, -1)
            if (
                self._next_number < len(self._dispatch_times) * self._batch
                and self._dispatch_times[self._next_number // self._batch] <= since
            ):
                since, number = self._dispatch_times[self._next_number // self._batch], self._next_number
            if since > limit:
                return
            chosen = min(
                range(len(self._lines)), key=lambda index: self._lines[index].used / self._lines[index].pool.cache
            )
            line, request = self._lines[chosen], self._sequence[number]
            while line.lacks(request):
                if not self._push_out(now, chosen):
                    return
            if number == self._next_number:
                self._next_number += 1
                self._join(now, number, chosen, 1.0)
            else:
                self._resume(now, number, chosen)

    def _push_out(self, now: float, chosen: int) -> bool:
        """Pushes out the request that has been on a pool longest, if one of its turns has ended; returns whether."""
        line, joined = self._lines[chosen], self._joined[chosen]
        while joined:
            number, tick = joined[0]
            place = self._place.get(number)
            request = self._sequence[number]
            costs = line.pool.requests[request]
            if place is None or place[0] != chosen or costs.turns <= 1.0:
                joined.popleft()
                continue
            if line.tick < tick + costs.ticks / costs.turns:
                return False
            joined.popleft()
            del self._place[number]
            remaining_share = line.leave(now, number, request, place[1])
            self._out[number] = now, remaining_share
            self._by_age.append((now, number))
            heapq.heappush(self._by_number, number)
            return True
        return False

    def _join(self, now: float, number: int, chosen: int, remaining_share: float) -> None:
        line, request = self._lines[chosen], self._sequence[number]
        ticks = remaining_share * line.pool.requests[request].ticks
        line.join(now, number, request, ticks)
        self._place[number] = chosen, line.tick + ticks
        self._joined[chosen].append((number, line.tick))

    def _gather(self, now: float, home: int) -> None:
        """Moves strays to the pool that they are predicted to belong to, while there is room."""
        line, strays = self._lines[home], self._strays[home]
        while strays:
            number = strays[0]
            place = self._place.get(number)
            if place is not None:  # else it is done
                request = self._sequence[number]
                if not line.admits(request):
                    return
                remaining_share = self._lines[place[0]].leave(now, number, request, place[1])
                self._join(now, number, home, remaining_share)
                line.stop(now, line.pool.requests[request].again / line.pool.instances)  # its context is prefilled here
            strays.popleft()


def step_seconds(
    layout: Sequence[degree_queues.DegreePool], sequence: Sequence[int], predicted_pools: Sequence[int], cycle: Cycle
) -> float:
    """Returns the mean seconds of a training step; see `follow`."""
    return follow(layout, sequence, predicted_pools, cycle).seconds


def follow(
    layout: Sequence[degree_queues.DegreePool],
    sequence: Sequence[int],
    predicted_pools: Sequence[int],
    cycle: Cycle,
    tokens: Sequence[float] | None = None,
) -> Steps:
    """Follows some training steps.

    Args:
      layout: the instances of each degree.
      sequence: sampled request of each dispatched one, at least `cycle.requests`; members of a group follow each other.
      predicted_pools: number of the pool that each dispatched request is predicted to belong to; -1 if nothing is
        predicted.
      cycle: the trainer's side.
      tokens: trained tokens of each sampled request, for `Cycle.early`; None: all have equally many.
    """
    if tokens is None:
        tokens = [1.0] * (max(sequence) + 1) if cycle.early else []
    return _Run(layout, sequence, predicted_pools, cycle, tokens).steps()
