"""Aggregation, KL estimators and importance corrections, each against its formula in float64; and the examples.

Letters: B rows, T tokens.
"""

import doctest
import importlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.algorithms import aggregation, corrections, kl

SEEDS = st.integers(0, 10**6)
MODULES = ("advantages", "aggregation", "corrections", "kl", "losses", "objective")


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run_as_printed(name):
    module = importlib.import_module(f"libra_jax.algorithms.{name}")
    failed, attempted = doctest.testmod(module)
    assert attempted > 0
    assert failed == 0


# --- aggregation -----------------------------------------------------------------------------------------------------


def aggregate_reference(mode, batch, constant):
    per_trajectory = [
        [value for value, trained in zip(item["entropy"], item["mask"], strict=True) if trained]
        for item in batch.trajectories
    ]
    per_trajectory = [values for values in per_trajectory if values]
    if mode == "token_mean":
        return sum(map(sum, per_trajectory)), sum(map(len, per_trajectory))
    if mode == "sequence_mean":
        return sum(sum(values) / len(values) for values in per_trajectory), len(per_trajectory)
    return sum(map(sum, per_trajectory)) / constant, len(per_trajectory)


@settings(max_examples=15)
@given(SEEDS)
@pytest.mark.parametrize("mode", config_lib.AGGREGATIONS)
def test_aggregation_of_packed_rows_equals_the_formula_over_trajectories(batch_of, mode, seed):
    batch = batch_of(seed)
    fields, segments = batch.packed(math.nan)
    with jax.enable_x64(True):
        total, count = aggregation.aggregate(
            *map(jnp.asarray, (fields["entropy"], fields["mask"], segments)), mode, max_segments=7, constant=3.0
        )
    expected_total, expected_count = aggregate_reference(mode, batch, 3.0)
    assert float(count) == expected_count
    np.testing.assert_allclose(float(total), expected_total, rtol=1e-12)


def test_tokens_outside_any_segment_are_not_trained_whatever_the_mask_says():
    segments = np.array([[1, 1, 0, 0]])
    for mode in config_lib.AGGREGATIONS:
        total, count = jax.jit(
            lambda values, segments, mode=mode: aggregation.aggregate(values, values, segments, mode, max_segments=1)
        )(np.ones((1, 4), np.float32), segments)
        assert (float(total), float(count)) == ((2, 2) if mode == "token_mean" else (2 if "sum" in mode else 1, 1))


def test_an_unknown_mode_is_refused_with_the_nearest_name():
    with pytest.raises(protocols.ConfigError, match="did you mean 'token_mean'"):
        aggregation.aggregate(jnp.ones((1, 1)), jnp.ones((1, 1)), jnp.ones((1, 1), int), "tokenmean", max_segments=1)


# --- KL --------------------------------------------------------------------------------------------------------------


@settings(max_examples=15)
@given(SEEDS)
def test_kl_estimators_equal_the_formulas(seed):
    rng = np.random.default_rng(seed)
    log_probs, reference = -rng.exponential(2.0, (2, 5)), -rng.exponential(2.0, (2, 5))
    d = reference - log_probs
    with jax.enable_x64(True):
        for name, expected in {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - d - 1}.items():
            result = kl.estimate(jnp.asarray(log_probs), jnp.asarray(reference), name)
            np.testing.assert_allclose(result, expected, rtol=1e-10, atol=1e-12)


def test_estimators_have_the_expectation_and_gradient_they_claim():
    """Over a whole vocabulary, with exact expectations: values estimate KL(π ‖ π_ref); gradients as documented."""
    rng = np.random.default_rng(0)
    logits, reference_logits = rng.normal(size=6), rng.normal(size=6)
    with jax.enable_x64(True):
        reference = jax.nn.log_softmax(jnp.asarray(reference_logits))
        fixed = jax.nn.softmax(jnp.asarray(logits))

        def expected_estimate(x, name):
            return jnp.sum(fixed * kl.estimate(jax.nn.log_softmax(x), reference, name))

        def forward_kl(x):
            return jnp.sum(jax.nn.softmax(x) * (jax.nn.log_softmax(x) - reference))

        def backward_kl(x):
            return jnp.sum(jnp.exp(reference) * (reference - jax.nn.log_softmax(x)))

        @jax.jit
        def values_and_gradients(x):
            estimates = {name: jax.value_and_grad(expected_estimate)(x, name) for name in config_lib.KL_ESTIMATORS}
            return estimates, jax.value_and_grad(forward_kl)(x), jax.grad(backward_kl)(x)

        estimates, (forward, forward_gradient), backward_gradient = values_and_gradients(jnp.asarray(logits))
    for name in ("k1", "k3", "k1+", "k3+"):
        np.testing.assert_allclose(estimates[name][0], forward, rtol=1e-10)
    for name in ("k2", "k1+", "k3+"):
        np.testing.assert_allclose(estimates[name][1], forward_gradient, atol=1e-10)
    np.testing.assert_allclose(estimates["k3"][1], backward_gradient, atol=1e-10)
    np.testing.assert_allclose(estimates["k1"][1], 0, atol=1e-10)


@pytest.mark.parametrize("distance", [1e-4, -1e-4, 3e-3, -3e-3, 0.1])
def test_k3_keeps_its_digits_in_single_precision_where_policies_nearly_agree(distance):
    log_probs = np.float32(-0.5)
    reference = np.float32(log_probs + np.float32(distance))
    d = float(reference) - float(log_probs)
    result = float(kl.estimate(jnp.asarray([[log_probs]]), jnp.asarray([[reference]]), "k3")[0, 0])
    np.testing.assert_allclose(result, math.expm1(d) - d, rtol=2e-3)


# --- corrections -----------------------------------------------------------------------------------------------------


@settings(max_examples=15)
@given(SEEDS, st.sampled_from([0.8, 1.5, 3.0]))
def test_importance_weights_and_their_diagnostics_equal_the_formulas(seed, cap):
    rng = np.random.default_rng(seed)
    log_ratio, mask = rng.normal(0, 1, (2, 6)), rng.random((2, 6)) < 0.6
    mask[0, 0] = True
    ratios = np.exp(log_ratio)
    expected = {"none": np.ones((2, 6)), "truncated": np.minimum(ratios, cap), "masked": ratios * (ratios <= cap)}
    with jax.enable_x64(True):
        for name, weights in expected.items():
            result = corrections.weights(jnp.asarray(log_ratio), name, cap=cap)
            np.testing.assert_allclose(result, weights, rtol=1e-12)
            metrics = corrections.diagnostics(jnp.asarray(log_ratio), result, jnp.asarray(mask), cap=cap)
            sums = {key: float(total) for key, (total, _) in metrics.items()}
            kept = weights[mask]
            np.testing.assert_allclose(sums["correction/weight"], kept.sum())
            np.testing.assert_allclose(sums["correction/weight_squared"], (kept**2).sum())
            np.testing.assert_allclose(sums["correction/capped_fraction"], (ratios[mask] > cap).sum())
            assert {float(count) for _, count in metrics.values()} == {mask.sum()}


def test_weights_carry_no_gradient():
    for name in ("truncated", "masked"):
        gradient = jax.grad(lambda x, n=name: corrections.weights(x, n, cap=2.0).sum())(jnp.array([[0.1, 3.0]]))
        assert np.all(np.asarray(gradient) == 0)


def test_a_truncated_ratio_keeps_the_gradient_of_its_logarithm():
    log_ratio = jnp.log(jnp.array([[0.5, 8.0]]))
    value, gradient = jax.value_and_grad(lambda x: jnp.exp(corrections.cap_log_ratio(x, cap=2.0)).sum())(log_ratio)
    np.testing.assert_allclose(value, 2.5, rtol=1e-6)
    np.testing.assert_allclose(gradient, [[0.5, 2.0]], rtol=1e-6)
