"""Assigns requests to devices: consecutive runs of requests, longest first, one run an instance.

For a time T, let f(i) be the fewest devices on which the i longest requests can be served within T:

  f(0) = 0,    f(i) = min over degrees t of f(j_t(i)) + t

j_t(i) is the first request from which one instance of degree t still serves all up to the i-th within T. Costs grow
with every request, and so does f, so the farthest j is the best. The search then looks for T: a plan that fits has
its own slowest instance, whose time is the next T to beat. Buckets ask for wider instances to serve only longer
requests; then f is kept for each narrowest degree so far. The result is exact if the runs may begin at every
request. One evaluation takes O(requests log requests) for any number of devices. The published dynamic programming
over devices (arXiv 2606.03077) takes a table of devices times requests.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from libra_jax.planning.forecast.serving import Places, Values

Seconds = Callable[[int, Places, Places], Values]
"""(degree, first, last) to the seconds of each run; nondecreasing in the run's requests, 0 for an empty run."""

MOMENT = 1e-9
"""Seconds below which no search goes."""

NONE = 2**62
"""More devices than any cluster has: these requests cannot be served."""

MOST_EDGES = 513
"""Most edges for which the times of all runs are tabulated beforehand; with more edges they are computed on request."""

REMEMBERED = 32
"""Number of latest limits whose answers narrow the range for the next limit, since a search closes in on its limit."""

FEW_PARTS = 16
"""Number of parts for which computing the times costs about as much as for one."""

PRECISION = 1e-9
"""Relative width at which a search for the shortest time ends, unless told otherwise."""

ANY_SECONDS = float(np.finfo(np.float64).max)
"""A limit that every run meets, unless an instance cannot serve the run at all."""


Result = TypeVar("Result")


def shortest(
    attempt: Callable[[float], Result | None],
    low: float,
    high: float,
    seconds: Callable[[Result], float],
    *,
    precision: float = PRECISION,
) -> Result | None:
    """Returns the result for the shortest limit that can be met; None if even `high` cannot.

    Args:
      attempt: seconds to a result that meets them, or None; a result that meets a limit meets every longer limit.
      low: seconds that cannot be beaten.
      high: seconds to begin with.
      seconds: seconds that a result takes, which may be less than its limit.
      precision: relative width at which the search ends.
    """
    best = attempt(high)
    if best is None:
        return None
    high = seconds(best)
    while high > max(low, MOMENT) * (1.0 + precision):
        # The geometric mean, because times span orders of magnitude.
        middle = math.sqrt(low * high) if low else high / 2
        # No float is left in between.
        if not low < middle < high:
            break
        result = attempt(middle)
        if result is None:
            low = middle
        else:
            best, high = result, seconds(result)
    return best


@dataclass(frozen=True)
class RequestRun:
    """The requests first..last-1, served by one instance of this degree."""

    degree: int
    first: int
    last: int
    seconds: float


@dataclass(frozen=True)
class RequestPartition:
    """An assignment of all requests to instances.

    Attributes:
      runs: runs from the longest requests to the shortest, one for each instance.
      seconds: seconds of the slowest instance.
      devices: devices of all instances.
    """

    runs: tuple[RequestRun, ...]
    seconds: float
    devices: int


class Partitions:
    """Partitions of the same requests.

    Args:
      seconds: gives the seconds of each run.
      edges: places between requests at which runs may begin and end, from 0 to the number of requests.
      degrees: degrees that instances may have.
      ordered: forbids a narrower instance for a longer request.
    """

    def __init__(self, seconds: Seconds, edges: Places, degrees: Sequence[int], *, ordered: bool = True) -> None:
        self._seconds = seconds
        self._ordered = ordered
        self._edges = np.asarray(edges, np.int64)
        self._degrees = tuple(sorted(degrees))
        self._tables: dict[int, Values] = {}
        self._earlier_answers: dict[int, collections.deque[tuple[float, Places]]] = {
            degree: collections.deque(maxlen=REMEMBERED) for degree in self._degrees
        }
        if len(self._edges) <= MOST_EDGES:
            begin, end = self._edges[:, None], self._edges[None, :]
            shape = np.broadcast(begin, end).shape
            begin, end = np.broadcast_to(begin, shape).ravel(), np.broadcast_to(end, shape).ravel()
            self._tables = {degree: seconds(degree, begin, end).reshape(shape) for degree in self._degrees}
        first, last = self._edges[:-1], self._edges[1:]
        part_seconds = np.stack([seconds(degree, first, last) for degree in self._degrees])
        self.least_seconds = float(part_seconds.min(axis=0).max())
        """Seconds that no number of devices can beat; infinite if no instance serves some request."""

    def within(self, limit: float) -> RequestPartition | None:
        """Returns the partition with the fewest devices that takes at most `limit` seconds; None if there is none."""
        count, widest = len(self._edges) - 1, len(self._degrees) - 1
        begins = [self._begins(degree, limit).tolist() for degree in self._degrees]
        # For each degree: the fewest devices if no run so far is of a narrower degree, and the last run's degree and
        # first request. If the order does not matter, only the entries of the narrowest degree count.
        kinds = range(widest, -1, -1)
        fewest = [[0] + [NONE] * count for _ in self._degrees]
        choice = [[(0, 0)] * (count + 1) for _ in self._degrees]
        for last in range(1, count + 1):
            best, chosen = NONE, (0, 0)
            for kind in kinds:
                first = begins[kind][last]
                before = fewest[kind if self._ordered else 0][first]
                if first < last and before + self._degrees[kind] < best:
                    best, chosen = before + self._degrees[kind], (kind, first)
                fewest[kind][last], choice[kind][last] = best, chosen
            if best == NONE:
                return None
        runs, kind, last = [], 0, count
        while last:
            kind, first = choice[kind if self._ordered else 0][last]
            runs.append((self._degrees[kind], first, last))
            last = first
        return self._partition(runs[::-1])

    def fastest(
        self, devices: int, *, above: float = 0.0, below: float = np.inf, precision: float = PRECISION
    ) -> RequestPartition | None:
        """Returns the partition over at most `devices` devices whose slowest instance is fastest; None if none fits.

        Args:
          devices: most devices.
          above: seconds that no partition over `devices` devices beats, if known.
          below: seconds above which a partition is not wanted.
          precision: share by which the slowest instance may be slower than need be.
        """
        low, high = max(above, self.least_seconds), min(below, ANY_SECONDS)

        def fitting(limit: float) -> RequestPartition | None:
            candidate = self.within(limit)
            return candidate if candidate is not None and candidate.devices <= devices else None

        return shortest(fitting, low, high, lambda candidate: candidate.seconds, precision=precision)

    def over(self, instances: Sequence[int]) -> RequestPartition | None:
        """Returns the partition over instances of these degrees whose slowest is fastest, wider ones for longer
        requests.

        Args:
          instances: degree of each instance; some may get nothing.
        """
        order = sorted(instances, reverse=True)
        return shortest(lambda limit: self._greedy(order, limit), 0.0, ANY_SECONDS, lambda candidate: candidate.seconds)

    def _greedy(self, order: Sequence[int], limit: float) -> RequestPartition | None:
        """Gives each instance as many of the longest remaining requests as it serves within the limit; None if some
        remain."""
        runs: list[tuple[int, int, int]] = []
        first, count, parts = 0, len(self._edges) - 1, 0
        for degree in order:
            # The next instance serves about as many parts as the one before, so the first look spans twice as many.
            window, parts = max(FEW_PARTS, 2 * parts), 0
            while True:
                # Runs from one edge grow with their end, so the runs within the limit come first.
                ends = self._edges[first + parts + 1 : first + parts + 1 + window]
                within = self._seconds(degree, np.full(len(ends), self._edges[first]), ends) <= limit
                new_parts = len(ends) if within.all() else int(within.argmin())
                parts += new_parts
                if new_parts < window:
                    break
                window *= 2
            if parts:
                runs.append((degree, first, first + parts))
                first += parts
            if first == count:
                return self._partition(runs)
        return None

    def _begins(self, degree: int, limit: float) -> Places:
        """Returns for each edge the first edge from which a run up to it takes at most `limit` seconds."""
        last = np.arange(len(self._edges))
        if degree in self._tables:  # the answer is one after the last edge from which the run takes longer
            over = self._tables[degree][::-1] > limit
            back = over.argmax(axis=0)
            return np.where(over[back, last], len(last) - back, 0)
        # Answers for earlier limits bound this one: a longer limit lets runs begin earlier, a shorter one later.
        answers = self._earlier_answers[degree]
        longer = min((answer for answer in answers if answer[0] >= limit), key=lambda answer: answer[0], default=None)
        shorter = max((answer for answer in answers if answer[0] <= limit), key=lambda answer: answer[0], default=None)
        low = np.zeros_like(last) if longer is None else longer[1].copy()
        high = last.copy() if shorter is None else shorter[1].copy()
        unsure = np.flatnonzero(low < high)  # edges whose answer is not known yet; it is in [low, high]
        while len(unsure):
            middle = (low[unsure] + high[unsure]) // 2
            within = self._seconds(degree, self._edges[middle], self._edges[unsure]) <= limit
            high[unsure] = np.where(within, middle, high[unsure])
            low[unsure] = np.where(within, low[unsure], middle + 1)
            unsure = unsure[low[unsure] < high[unsure]]
        self._earlier_answers[degree].append((limit, high))
        return high

    def _partition(self, runs: Sequence[tuple[int, int, int]]) -> RequestPartition:
        """Returns the partition of runs given as degree, first edge and last edge."""
        kinds, first, last = np.array(runs).T
        begin, end = self._edges[first], self._edges[last]
        seconds = np.zeros(len(runs))
        for degree in set(kinds.tolist()):
            ours = kinds == degree
            seconds[ours] = self._seconds(degree, begin[ours], end[ours])
        columns = kinds.tolist(), begin.tolist(), end.tolist(), seconds.tolist()
        timed_runs = tuple(RequestRun(*run) for run in zip(*columns, strict=True))
        return RequestPartition(
            timed_runs, max(run.seconds for run in timed_runs), sum(run.degree for run in timed_runs)
        )
