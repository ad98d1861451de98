"""Which devices serve which requests: consecutive runs of them, longest first, one an instance.

For a time T, let f(i) be the fewest devices on which the i longest requests can be served within it:

  f(0) = 0,    f(i) = min over degrees t of f(j_t(i)) + t

j_t(i) being the first request from which one instance of degree t still serves all up to the i-th within T. Costs grow
with every request, and so does f, so the farthest j is the best. T is then searched for: a plan that fits tells its
own slowest instance, which is the next T to beat. That is exact where the runs may begin at every request, and takes
O(requests log requests) an attempt however many devices there are, where dynamic programming over devices, as published
(arXiv 2606.03077), takes a table of devices times requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from libra_jax.planning.demand import Places, Values

Seconds = Callable[[int, Places, Places], Values]
"""(degree, first, last) to the seconds of each run; nondecreasing in what it holds, 0 of nothing."""

PRECISION = 1e-9
"""Relative width at which the search for the shortest time ends."""

ANY_SECONDS = float(np.finfo(np.float64).max)
"""A limit that only what cannot be served at all exceeds."""


@dataclass(frozen=True)
class Run:
    """The requests first..last-1, served by one instance of this degree."""

    degree: int
    first: int
    last: int
    seconds: float


@dataclass(frozen=True)
class Partition:
    """Runs from the longest requests to the shortest; an instance each."""

    runs: tuple[Run, ...]

    @property
    def seconds(self) -> float:
        """Of the slowest instance."""
        return max(run.seconds for run in self.runs)

    @property
    def devices(self) -> int:
        """Of all instances."""
        return sum(run.degree for run in self.runs)


class Partitions:
    """Partitions of the same requests.

    Args:
      seconds: of each run.
      edges: places between requests at which runs may begin and end, from 0 to their number.
      degrees: that instances may have.
    """

    def __init__(self, seconds: Seconds, edges: Places, degrees: Sequence[int]) -> None:
        self._seconds = seconds
        self._edges = np.asarray(edges, np.int64)
        self._degrees = tuple(sorted(degrees))
        first, last = self._edges[:-1], self._edges[1:]
        each = np.stack([seconds(degree, first, last) for degree in self._degrees])
        self.least_seconds = float(each.min(axis=0).max())
        """However many devices there are, it takes so long; infinite where no instance serves some request."""

    def within(self, limit: float) -> Partition | None:
        """The partition with the fewest devices that takes at most `limit` seconds; None if there is none."""
        count = len(self._edges) - 1
        begins = [self._begins(degree, limit).tolist() for degree in self._degrees]
        fewest, choice = [0] * (count + 1), [(0, 0)] * (count + 1)
        for last in range(1, count + 1):
            best = None
            for degree, begin in zip(self._degrees, begins, strict=True):
                first = begin[last]
                if first < last and (best is None or fewest[first] + degree < best):
                    best = fewest[first] + degree
                    choice[last] = degree, first
            if best is None:
                return None
            fewest[last] = best
        runs, last = [], count
        while last:
            degree, first = choice[last]
            runs.append((degree, first, last))
            last = first
        return Partition(tuple(self._run(*run) for run in reversed(runs)))

    def fastest(self, devices: int, *, above: float = 0.0, below: float = np.inf) -> Partition | None:
        """The partition over at most so many devices whose slowest instance is fastest; None if none fits them.

        Args:
          devices: at most.
          above: seconds that no partition over so many devices beats, if that is known.
          below: a partition that takes longer is not wanted.
        """
        low, high = max(above, self.least_seconds), min(below, ANY_SECONDS)
        best = self._fitting(high, devices)
        if best is None:
            return None
        high = best.seconds
        while high > low * (1.0 + PRECISION):
            middle = math.sqrt(low * high) if low else high / 2
            if not low < middle < high:
                break
            found = self._fitting(middle, devices)
            if found is None:
                low = middle
            else:
                best, high = found, found.seconds
        return best

    def _fitting(self, limit: float, devices: int) -> Partition | None:
        found = self.within(limit)
        return found if found is not None and found.devices <= devices else None

    def _begins(self, degree: int, limit: float) -> Places:
        """For each edge, the first edge from which a run up to it takes at most `limit` seconds."""
        last = np.arange(len(self._edges))
        low, high = np.zeros_like(last), last.copy()  # the answer is in [low, high]
        for _ in range(len(last).bit_length()):
            middle = (low + high) // 2
            within = self._seconds(degree, self._edges[middle], self._edges[last]) <= limit
            high = np.where(within, middle, high)
            low = np.where(within, low, np.minimum(middle + 1, high))
        return high

    def _run(self, degree: int, first: int, last: int) -> Run:
        begin, end = self._edges[first : first + 1], self._edges[last : last + 1]
        return Run(degree, int(begin[0]), int(end[0]), float(self._seconds(degree, begin, end)[0]))
