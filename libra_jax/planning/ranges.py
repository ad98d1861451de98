"""Answers maxima over many ranges of an array at a time."""

from __future__ import annotations

import numpy as np

from libra_jax.planning.demand import Places, Values


class Maxima:
    """A sparse table (Bender and Farach-Colton, 2000): log2(n) rows, each range answered by two of its entries.

    Args:
      values: the array.
    """

    def __init__(self, values: Values) -> None:
        rows = [np.asarray(values, np.float64)]
        while 2 * (width := 1 << (len(rows) - 1)) <= len(values):
            last = rows[-1]
            joined = np.full(len(values), -np.inf)
            joined[: len(values) - 2 * width + 1] = np.maximum(
                last[: len(values) - 2 * width + 1], last[width : len(values) - width + 1]
            )
            rows.append(joined)
        self._rows = np.stack(rows)
        self._levels = np.frexp(np.arange(len(values) + 1))[1] - 1  # log2 of each width, rounded down

    def over(self, first: Places, last: Places) -> Values:
        """Returns the largest of values[first:last] for each pair; minus infinity if the range is empty."""
        width = last - first
        some = width > 0
        level = np.where(some, self._levels[width], 0)
        # Two overlapping windows of 2^level cover the range; the overlap does not change a maximum.
        left = self._rows[level, np.where(some, first, 0)]
        right = self._rows[level, np.where(some, last - (1 << level), 0)]
        return np.where(some, np.maximum(left, right), -np.inf)
