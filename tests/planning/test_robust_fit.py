"""The robust non-negative fit: against scipy's, and with measurements that lie."""

import doctest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax.planning.costs import calibration

optimize = pytest.importorskip("scipy.optimize")


def test_the_example_in_its_docstring():
    assert doctest.testmod(calibration).failed == 0


@given(st.integers(0, 10**6), st.integers(1, 5))
@settings(max_examples=100)
def test_non_negative_least_squares_is_scipys(seed, columns):
    rng = np.random.default_rng(seed)
    rows, measured = rng.normal(size=(12, columns)), rng.normal(size=12)
    ours, (theirs, norm) = calibration.non_negative_fit(rows, measured), optimize.nnls(rows, measured)
    assert (ours >= 0).all()
    assert np.linalg.norm(measured - rows @ ours) == pytest.approx(norm)
    np.testing.assert_allclose(ours, theirs, atol=1e-8)


@given(st.integers(0, 10**6), st.floats(0.0, 0.15))
@settings(max_examples=50)
def test_a_few_disturbed_measurements_do_not_drag_it(seed, disturbed):
    rng = np.random.default_rng(seed)
    rows = np.stack([np.ones(200), rng.uniform(0, 10, 200), rng.uniform(0, 3, 200)], axis=1)
    truth = rng.uniform(0.5, 2.0, 3)
    measured = rows @ truth + rng.normal(0, 0.01, 200)
    lying = rng.random(200) < disturbed
    measured[lying] += rng.uniform(5, 50, lying.sum())
    np.testing.assert_allclose(calibration.robust_fit(rows, measured), truth, rtol=0.1, atol=0.05)


def test_what_nothing_tells_is_zero():
    rows = np.array([[1.0, 0.0, 2.0], [2.0, 0.0, 4.0], [3.0, 0.0, 6.0]])  # no second term, the third as the first
    fitted = calibration.robust_fit(rows, np.array([2.0, 4.0, 6.0]))
    assert fitted[1] == 0
    np.testing.assert_allclose(rows @ fitted, [2, 4, 6])
    np.testing.assert_array_equal(calibration.robust_fit(rows, np.zeros(3)), 0)
    np.testing.assert_array_equal(calibration.robust_fit(rows, -np.ones(3)), 0)
