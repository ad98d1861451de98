"""Ridge regression that learns online, by its normal equations, in pure Python.

The weights w minimise  sum of weight (target - w . x)^2 + prior |w|^2  over all samples so far. The samples are kept as
sums, A = sum of weight x x^T and b = sum of weight target x. So a sample costs one pass over A, sums of several
coordinators add up exactly, and old samples fade by one factor. The solution is approached by coordinate descent
(Gauss-Seidel on (A + prior I) w = b), one sweep at a time from the present weights. A sweep costs as much as a sample.
"""

from __future__ import annotations

import bisect
import operator
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from libra_jax.scheduling.prediction import prefix_tree

FEWEST_ERRORS = 16
"""Errors that a window holds before it begins to drop any."""


class Ridge:
    """A linear predictor of one number from `size` features.

    Args:
      size: number of features.
      prior: weight of the belief that every weight is 0, in samples whose features are 1.

    Attributes:
      weights: one for each feature.
    """

    def __init__(self, size: int, prior: float) -> None:
        self.size = size
        self.prior = prior
        self.weights = [0.0] * size
        # Row i holds A from its diagonal on: A is symmetric.
        self._products = [[0.0] * (size - place) for place in range(size)]
        self._targets = [0.0] * size

    def predict(self, features: Sequence[float]) -> float:
        """Returns the predicted number."""
        return sum(map(operator.mul, self.weights, features))

    def add(self, features: Sequence[float], target: float, weight: float) -> None:
        """Adds a sample; it changes predictions from the next `sweep` on."""
        products, targets = self._products, self._targets
        for place, feature in enumerate(features):
            if feature:  # many features are 0, and then their row stays as it is
                scaled = weight * feature
                rest = features[place:]
                products[place] = [old + scaled * value for old, value in zip(products[place], rest)]  # noqa: B905
                targets[place] += scaled * target

    def sweep(self, growth: float = 1.0) -> None:
        """Moves the weights towards the minimum, each in turn to its best value given the others.

        Args:
          growth: weight of a sample now, which is what the prior's samples weigh, too.
        """
        weights, prior, products = self.weights, growth * self.prior, self._products
        for place, (half, target) in enumerate(zip(products, self._targets, strict=True)):
            row = [products[earlier][place - earlier] for earlier in range(place)]
            row += half
            diagonal = half[0]
            rest = sum(map(operator.mul, row, weights)) - diagonal * weights[place]
            weights[place] = (target - rest) / (diagonal + prior)

    def fade(self, share: float) -> None:
        """Lets every sample so far weigh `share` of what it weighs."""
        self._products = [[share * value for value in row] for row in self._products]
        self._targets = [share * value for value in self._targets]

    def snapshot(self) -> dict[str, Any]:
        """Returns JSON-able state."""
        products = [list(row) for row in self._products]
        return {"weights": list(self.weights), "products": products, "targets": list(self._targets)}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Replaces the state by a snapshot's, which has as many features."""
        self._products = [[float(value) for value in row] for row in snapshot["products"]]
        self._targets = [float(value) for value in snapshot["targets"]]
        self.weights = [float(value) for value in snapshot["weights"]]

    def merge(self, other: Ridge, share: float) -> None:
        """Adds another predictor's samples; the weights become the average, of which ours are this share."""
        self._products = [
            [mine + theirs for mine, theirs in zip(ours, their_row, strict=True)]
            for ours, their_row in zip(self._products, other._products, strict=True)
        ]
        self._targets = [mine + theirs for mine, theirs in zip(self._targets, other._targets, strict=True)]
        both = zip(self.weights, other.weights, strict=True)
        self.weights = [share * mine + (1.0 - share) * theirs for mine, theirs in both]


class Residuals:
    """The window of the latest errors of a predictor, and their quantiles.

    It holds half of all errors at most: those of a predictor that had learnt next to nothing go first.

    Args:
      window: most errors kept.

    Attributes:
      quantiles: quantiles at `prefix_tree.LEVELS`; empty before the first error.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.quantiles: prefix_tree.Sketch = ()
        self._latest: deque[float] = deque()
        self._ordered: list[float] = []
        self._changes = 0
        self._seen = 0

    def add(self, error: float) -> None:
        """Adds an error; the oldest leaves a full window."""
        self._seen += 1
        self._latest.append(error)
        bisect.insort(self._ordered, error)
        if len(self._latest) > min(self.window, max(FEWEST_ERRORS, (self._seen + 1) // 2)):
            del self._ordered[bisect.bisect_left(self._ordered, self._latest.popleft())]
        self._changes += 1
        # A share of 1 / 16 of the window changes a quantile by little.
        if self._changes * 16 >= len(self._ordered):
            self.settle()

    def settle(self) -> None:
        """Brings the quantiles up to date."""
        self._changes = 0
        self.quantiles = prefix_tree.sketch_of(self._ordered) if self._ordered else ()

    def snapshot(self) -> dict[str, Any]:
        """Returns JSON-able state: the errors, the oldest first, and the number of all so far."""
        return {"latest": list(self._latest), "seen": self._seen}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Replaces the state by a snapshot's."""
        self._latest = deque(float(error) for error in snapshot["latest"][-self.window :])
        self._ordered = sorted(self._latest)
        self._seen = int(snapshot["seen"])
        self.settle()

    def merge(self, other: Residuals) -> None:
        """Adds another predictor's errors, as if they had been seen first."""
        self._latest = deque([*other._latest, *self._latest][-self.window :])
        self._ordered = sorted(self._latest)
        self._seen += other._seen
        self.settle()
