"""Robust least squares with non-negative coefficients: a few bad measurements cannot drag them far."""

from __future__ import annotations

import itertools
from typing import Any, TypeAlias

import numpy as np

Values: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

ROUNDS = 25
"""Most rounds of reweighting the measurements."""


def fit(rows: Values, measured: Values) -> Values:
    """Returns the coefficients c >= 0 that minimise `sum rho(measured - rows @ c)`, rho the soft L1 loss.

    `rho(r) = 2 s^2 (sqrt(1 + (r / s)^2) - 1)` is squared for residuals below the scale s, and absolute beyond. The
    scale is the median size of the residuals. Solved by iteratively reweighted least squares (Holland and Welsch,
    1977).

    Args:
      rows: [N, K], one measurement a row; K at most 8.
      measured: [N].

    Returns:
      [K]; a coefficient on which no row depends is 0.

    Example:
      >>> steps = np.arange(1.0, 9.0)
      >>> measured = 1.0 + 2.0 * steps + 40.0 * (steps == 4)  # one step was disturbed
      >>> fit(np.stack([np.ones(8), steps], axis=1), measured).round(3)
      array([1., 2.])
    """
    weights = np.ones(len(measured))
    coefficients = np.zeros(rows.shape[1])
    for _ in range(ROUNDS):
        before, coefficients = coefficients, non_negative(rows * weights[:, None], measured * weights)
        residuals = np.abs(measured - rows @ coefficients)
        scale = float(np.median(residuals))
        # A perfect fit has no scale to weigh residuals by.
        if scale <= 1e-12 * float(np.abs(measured).max(initial=0.0)) or np.allclose(before, coefficients, 1e-9, 0.0):
            break
        weights = (1.0 + (residuals / scale) ** 2) ** -0.25  # square roots: the loss squares them again
    return coefficients


def non_negative(rows: Values, measured: Values) -> Values:
    """Returns the least-squares solution among coefficients >= 0.

    It equals the unconstrained solution over its positive coefficients. With few coefficients, trying every subset
    finds the best feasible one.
    """
    # Columns of unit length keep the digits if coefficients differ by orders of magnitude.
    sizes = np.sqrt((rows**2).sum(axis=0))
    used = [column for column in range(rows.shape[1]) if sizes[column] > 0]
    scaled = rows[:, used] / sizes[used]
    gram, moments = scaled.T @ scaled, scaled.T @ measured
    best, best_gain = np.zeros(rows.shape[1]), 0.0
    for count in range(1, len(used) + 1):
        for subset in itertools.combinations(range(len(used)), count):
            chosen = list(subset)
            try:
                solution = np.linalg.solve(gram[np.ix_(chosen, chosen)], moments[chosen])
            except np.linalg.LinAlgError:  # two columns are equivalent: a smaller subset fits as well
                continue
            gain = float(solution @ moments[chosen])  # reduction of the sum of squares
            if (solution >= 0).all() and gain > best_gain * (1 + 1e-12):
                best, best_gain = np.zeros(rows.shape[1]), gain
                best[[used[index] for index in chosen]] = solution / sizes[[used[index] for index in chosen]]
    return best
