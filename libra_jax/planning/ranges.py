"""Maxima over ranges of an array, many at a time."""

from __future__ import annotations

import numpy as np

from libra_jax.planning.demand import Places, Values


class Maxima:
    """A sparse table (Bender and Farach-Colton, 2000): log2(n) rows, each range answered by two of its entries.

    Args:
      values: of which ranges are asked for.
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
        self._levels = np.frexp(np.arange(len(values) + 1))[1] - 1  # of each width, the largest power of two in it

    def over(self, first: Places, last: Places) -> Values:
        """The largest of values[first:last] of each pair; minus infinity where that is empty."""
        width = last - first
        some = width > 0
        level = np.where(some, self._levels[width], 0)
        left = self._rows[level, np.where(some, first, 0)]
        right = self._rows[level, np.where(some, last - (1 << level), 0)]
        return np.where(some, np.maximum(left, right), -np.inf)
