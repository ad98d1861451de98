"""Predictions as logarithms, their losses, and a mixture of two predictors that trusts the one that predicted better.

The loss of a prediction is minus the base-2 logarithm of the probability that it gave to lengths within a quarter of
an octave of the true one: a log score of a fixed resolution, so that certainty beyond 19% earns nothing. Octaves are
those of 1 + tokens: a factor of two counts alike at any length. Between two quantiles the probability is uniform,
beyond the outer ones exponential. A little lies everywhere, so that no surprise costs more than about ten bits.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from libra_jax.scheduling.prediction import prefix_tree

OUTSIDE = 0.03
"""Mass that is spread evenly over all lengths."""

OCTAVES = 17.0
"""Width of that spread: lengths up to 131,072 tokens."""

LONGEST = 24.0
"""Logarithm of the longest length that is ever predicted."""

NEAR = 0.25
"""Octaves up to which a length counts as the one that was predicted."""

LOWER_RANGE, UPPER_RANGE = 1.6, 2.5
"""Range of the lowest three, and of the highest three quantiles, in scales of the tail beyond it."""

NARROWEST_TAIL = 0.15
"""Least scale of a tail in octaves."""

MEMORY = 60.0
"""Finished requests after which a loss counts 37%. A short memory lets a predictor that has learnt overtake soon."""


def logs_of(sketch: prefix_tree.Sketch) -> prefix_tree.Sketch:
    """Returns log2(1 + tokens) of each quantile."""
    log = math.log2
    return tuple([log(1.0 + tokens) for tokens in sketch])


def tokens_of(logs: Sequence[float]) -> prefix_tree.Sketch:
    """Returns the tokens of logarithms."""
    return tuple([2.0**log - 1.0 if 0.0 < log < LONGEST else 0.0 if log <= 0.0 else 2.0**LONGEST for log in logs])


def below(logs: Sequence[float], log: float) -> float:
    """Returns the probability that a prediction gives to this length and to all below.

    Args:
      logs: quantiles at `prefix_tree.LEVELS`, as logarithms.
      log: the logarithm of the length.
    """
    levels = prefix_tree.LEVELS
    place = bisect.bisect_right(logs, log)
    if place == 0:
        scale = (logs[2] - logs[0]) / LOWER_RANGE
        return levels[0] * math.exp((log - logs[0]) / (scale if scale > NARROWEST_TAIL else NARROWEST_TAIL))
    if place == len(levels):
        scale = (logs[-1] - logs[3]) / UPPER_RANGE
        tail = math.exp((logs[-1] - log) / (scale if scale > NARROWEST_TAIL else NARROWEST_TAIL))
        return 1.0 - (1.0 - levels[-1]) * tail
    low, start = levels[place - 1], logs[place - 1]
    return low + (levels[place] - low) * (log - start) / (logs[place] - start)


def loss(logs: Sequence[float], truth: float) -> float:
    """Returns the loss of a prediction in bits, given the logarithm of the true length."""
    near = below(logs, truth + NEAR) - below(logs, truth - NEAR)
    return -math.log2((1.0 - OUTSIDE) * near + OUTSIDE * 2.0 * NEAR / OCTAVES)


class Mixture:
    """Weighs two predictors by their losses: by 2 to the power of minus a loss that forgets (exponential weights).

    Predictions are averaged quantile by quantile, as logarithms.

    Args:
      lead: bits by which the second predictor leads at the beginning.

    Attributes:
      lead: bits by which it leads now.
      share: its weight; the first one has the rest.
    """

    def __init__(self, lead: float) -> None:
        self.lead = lead
        self.share = 0.0
        self.add(0.0, 0.0)

    def average(self, first: Sequence[float], second: Sequence[float]) -> list[float]:
        """Returns the average of logarithms of quantiles."""
        share = self.share
        return [old + share * (new - old) for old, new in zip(first, second)]  # noqa: B905 (equally many)

    def add(self, saved: float, weight: float) -> None:
        """Counts by how many bits the second prediction of a request was better, as those of `weight` requests."""
        if weight:
            self.lead += weight * saved - self.lead / MEMORY
        # A difference beyond these bits is a weight of 0 or 1.
        self.share = 1.0 / (1.0 + 2.0 ** -min(100.0, max(-100.0, self.lead)))
