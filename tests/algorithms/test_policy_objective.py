"""The objective and its losses against the published formulas, written out over trajectories in float64.

Letters: B rows, T tokens.
"""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import policy_reference as reference
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.algorithms import losses, objective

# Those whose formula is written out here; test_published_values has all others.
TOKEN_LOSSES = ("clipped", "gspo", "cispo", "sapo")
CONFIGS = st.builds(
    config_lib.AlgorithmConfig,
    loss=st.sampled_from(TOKEN_LOSSES),
    clip_low=st.sampled_from([0.1, 0.2, 1.0]),
    clip_high=st.sampled_from([0.2, 0.4]),
    dual_clip=st.sampled_from([0.0, 1.5]),
    aggregation=st.sampled_from(config_lib.AGGREGATIONS),
    sequence_length_constant=st.just(5.0),
    objective=st.sampled_from(["behaviour", "decoupled"]),
    correction=st.sampled_from(config_lib.CORRECTIONS),
    correction_cap=st.sampled_from([0.85, 1.3, 2.0]),
    kl_coefficient=st.sampled_from([0.0, 0.3]),
    kl_estimator=st.sampled_from(config_lib.KL_ESTIMATORS),
    kl_in_reward=st.booleans(),
    entropy_coefficient=st.sampled_from([0.0, 0.2]),
)
SEEDS = st.integers(0, 10**6)


@settings(max_examples=40)
@given(CONFIGS, SEEDS)
def test_objective_equals_the_formula(batch_of, config, seed):
    batch = batch_of(seed)
    with jax.enable_x64(True):
        sums = reference.evaluate(config, batch)
    total, count = reference.reference_loss(config, batch)
    assert float(sums.count) == count
    np.testing.assert_allclose(float(sums.loss_sum), total, rtol=1e-10, atol=1e-10)


@settings(max_examples=20)
@given(CONFIGS, SEEDS)
def test_gradient_equals_finite_differences(batch_of, differences, config, seed):
    batch = batch_of(seed)
    lengths = np.cumsum([len(item["mask"]) for item in batch.trajectories])[:-1]
    flat = np.concatenate([item["log_probs"] for item in batch.trajectories])
    expected = differences(lambda point: reference.reference_loss(config, batch, np.split(point, lengths))[0], flat)
    fields, segments = batch.packed()
    with jax.enable_x64(True):
        gradient = jax.grad(lambda x: reference.evaluate(config, batch, log_probs=x).loss_sum)(
            jnp.asarray(fields["log_probs"])
        )
    taken = [np.asarray(gradient)[row][segments[row] == s] for row, s in reference.places(batch)]
    np.testing.assert_allclose(np.concatenate(taken), expected, rtol=1e-5, atol=1e-7)


@settings(max_examples=12)
@given(CONFIGS, SEEDS)
def test_packed_rows_equal_one_trajectory_a_row(batch_of, config, seed):
    batch = batch_of(seed)
    with jax.enable_x64(True):
        packed, unpacked = reference.evaluate(config, batch), reference.evaluate(config, batch.unpacked())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), packed, unpacked)


@settings(max_examples=12)
@given(CONFIGS, SEEDS, st.sampled_from([1, 2]))
def test_the_parts_of_any_split_add_up(batch_of, config, seed, cut):
    batch = batch_of(seed)
    with jax.enable_x64(True):
        first, second = (
            reference.evaluate(config, batch, keep=slice(cut)),
            reference.evaluate(config, batch, keep=slice(cut, None)),
        )
        whole = reference.evaluate(config, batch)
    added = jax.tree.map(np.add, first, second)._replace(maxima=jax.tree.map(np.maximum, first.maxima, second.maxima))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), added, whole)


@pytest.mark.parametrize("loss", config_lib.LOSSES)
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_what_stands_at_untrained_tokens_changes_neither_loss_nor_gradient(batch_of, loss, aggregation, garbage):
    batch = batch_of(3)
    config = config_lib.AlgorithmConfig(
        loss=loss, aggregation=aggregation, kl_coefficient=0.1, entropy_coefficient=0.1, correction="truncated"
    )
    results = []
    for untrained in (0.0, garbage):
        fields, _ = batch.packed(untrained)
        with jax.enable_x64(True):
            results.append(
                jax.value_and_grad(
                    lambda x, u=untrained: reference.evaluate(config, batch, untrained=u, log_probs=x).loss_sum
                )(jnp.asarray(fields["log_probs"]))
            )
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert np.all(np.isfinite(results[0][1]))
    assert np.any(np.asarray(results[0][1]) != 0)


@pytest.mark.parametrize("loss", config_lib.LOSSES)
@pytest.mark.parametrize("aggregation", config_lib.AGGREGATIONS)
def test_a_batch_without_trained_tokens_gives_zero_loss_and_zero_gradient(batch_of, loss, aggregation):
    batch = batch_of(0)
    for trajectory in batch.trajectories:
        trajectory["mask"][:] = 0
    config = config_lib.AlgorithmConfig(
        loss=loss, aggregation=aggregation, kl_coefficient=0.1, entropy_coefficient=0.1, correction="masked"
    )
    fields, _ = batch.packed(math.nan)
    with jax.enable_x64(True):
        sums = reference.evaluate(config, batch, untrained=math.nan)
        gradient = jax.grad(lambda x: reference.evaluate(config, batch, untrained=math.nan, log_probs=x).loss_sum)(
            jnp.asarray(fields["log_probs"])
        )
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves((sums, gradient)))


@settings(max_examples=10)
@given(CONFIGS, SEEDS)
def test_the_parts_of_the_loss_are_reported_and_add_up_to_it(batch_of, config, seed):
    with jax.enable_x64(True):
        sums = reference.evaluate(config, batch_of(seed))
    parts = [value for name, value in sums.metrics.items() if name.startswith("loss/")]
    assert all(float(count) == float(sums.count) for _, count in parts)
    np.testing.assert_allclose(sum(float(part) for part, _ in parts), float(sums.loss_sum), rtol=1e-10, atol=1e-12)


def test_metrics_count_what_their_names_say(batch_of):
    config = config_lib.AlgorithmConfig(correction="masked", correction_cap=1.5, dual_clip=1.6, clip_high=0.3)
    batch = batch_of(2)
    expected = dict.fromkeys(("low", "high", "dual", "capped", "kl", "reference", "entropy", "mismatch"), 0.0)
    ratios, same_ratios = [], []
    for item in batch.trajectories:
        for t in np.flatnonzero(item["mask"]):
            ratio = math.exp(item["log_probs"][t] - item["behaviour"][t])
            ratios.append(ratio)
            advantage = item["advantages"][t]
            expected["low"] += advantage < 0 and ratio < 0.8
            expected["high"] += advantage > 0 and ratio > 1.3
            expected["dual"] += advantage < 0 and ratio > 1.6
            expected["capped"] += ratio > 1.5
            behaviour_kl = ratio - 1 - math.log(ratio)
            expected["kl"] += behaviour_kl
            expected["reference"] += reference.kl_value("k3", item["log_probs"][t], item["reference"][t])
            expected["entropy"] += item["entropy"][t]
            if item["same_version"][t]:
                expected["mismatch"] += behaviour_kl
                same_ratios.append(ratio)
    assert min(expected[name] for name in ("low", "high", "dual", "capped")) > 0, "the batch must exercise each count"
    with jax.enable_x64(True):
        sums = reference.evaluate(config, batch)
    names = {
        "clip/low_fraction": "low",
        "clip/high_fraction": "high",
        "clip/dual_fraction": "dual",
        "correction/capped_fraction": "capped",
        "kl/behaviour": "kl",
        "kl/reference": "reference",
        "entropy": "entropy",
        "mismatch/kl": "mismatch",
    }
    for name, key in names.items():
        np.testing.assert_allclose(float(sums.metrics[name][0]), expected[key], rtol=1e-10, err_msg=name)
        count = len(same_ratios) if key == "mismatch" else len(ratios)
        assert float(sums.metrics[name][1]) == count, name
    np.testing.assert_allclose(float(sums.maxima["ratio/max"]), max(ratios), rtol=1e-12)
    np.testing.assert_allclose(float(sums.maxima["mismatch/ratio_max"]), max(same_ratios), rtol=1e-12)


def test_extreme_log_probs_stay_finite(batch_of):
    batch = batch_of(5)
    for item in batch.trajectories:
        item["behaviour"] = item["log_probs"] - 300.0
        item["reference"] = item["log_probs"] + 300.0
    for loss, correction in zip(config_lib.LOSSES, itertools.cycle(config_lib.CORRECTIONS)):
        config = config_lib.AlgorithmConfig(loss=loss, correction=correction, kl_coefficient=0.1)
        fields, _ = batch.packed()
        value, gradient = jax.jit(
            jax.value_and_grad(lambda x, c=config: reference.evaluate(c, batch, log_probs=x).loss_sum)
        )(np.float32(fields["log_probs"]))
        assert np.isfinite(value)
        assert np.all(np.isfinite(gradient))


def test_half_precision_log_probs_are_compared_in_single_precision(batch_of):
    batch = batch_of(7)
    fields, segments = batch.packed()
    arrays = {name: jnp.asarray(fields[name], jnp.bfloat16) for name in ("log_probs", "behaviour", "advantages")}
    sums = objective.policy_objective(
        config_lib.AlgorithmConfig(),
        log_probs_BxT=arrays["log_probs"],
        behaviour_log_probs_BxT=arrays["behaviour"],
        advantages_BxT=arrays["advantages"],
        mask_BxT=jnp.asarray(fields["mask"]),
        segments_BxT=jnp.asarray(segments),
        max_segments=batch.max_segments,
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(sums)} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"objective": "decoupled"}, "algorithm.objective"),
        ({"kl_coefficient": 0.1}, "algorithm.kl_coefficient"),
        ({"entropy_coefficient": 0.1}, "algorithm.entropy_coefficient"),
    ],
)
def test_an_input_the_config_needs_and_nobody_gave_is_refused_by_field(change, field):
    zeros = jnp.zeros((1, 2))
    with pytest.raises(protocols.ConfigError, match=field):
        objective.policy_objective(
            config_lib.AlgorithmConfig(**change),
            log_probs_BxT=zeros,
            behaviour_log_probs_BxT=zeros,
            advantages_BxT=zeros,
            mask_BxT=zeros,
            segments_BxT=jnp.zeros((1, 2), jnp.int32),
            max_segments=1,
        )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"advantages_BxT": jnp.zeros((1, 3))}, "advantages_BxT has shape"),
        ({"segments_BxT": jnp.zeros((1, 2))}, "segments_BxT must hold integers"),
        ({"log_probs_BxT": jnp.zeros((1, 2), jnp.int32)}, "log_probs_BxT must hold floating-point"),
        ({"log_probs_BxT": jnp.zeros(2)}, "log_probs_BxT must have 2 dimensions"),
    ],
)
def test_a_wrong_shape_or_dtype_is_refused_by_name(change, words):
    zeros = jnp.zeros((1, 2))
    arguments = {
        "log_probs_BxT": zeros,
        "behaviour_log_probs_BxT": zeros,
        "advantages_BxT": zeros,
        "mask_BxT": zeros,
        "segments_BxT": jnp.zeros((1, 2), jnp.int32),
    }
    with pytest.raises(protocols.LibraError, match=words):
        objective.policy_objective(config_lib.AlgorithmConfig(), **(arguments | change), max_segments=1)


def test_gspo_moves_every_token_of_a_trajectory_by_the_same_gradient(batch_of):
    """Length-normalised sequence ratio: ∂ log s / ∂ log π_t = 1/|y| for each trained token, however they differ."""
    batch = batch_of(2)
    fields, segments = batch.packed()
    config = dataclasses.replace(
        config_lib.AlgorithmConfig(loss="gspo", aggregation="sequence_mean"), clip_low=1.0, clip_high=1e6
    )
    with jax.enable_x64(True):
        gradient = np.asarray(
            jax.grad(lambda x: reference.evaluate(config, batch, log_probs=x).loss_sum)(
                jnp.asarray(fields["log_probs"])
            )
        )
        log_ratio = losses.sequence_log_ratio(
            jnp.asarray(fields["log_probs"] - fields["behaviour"]),
            jnp.asarray(fields["mask"]),
            jnp.asarray(segments),
            max_segments=batch.max_segments,
        )
    for item, (row, segment) in zip(batch.trajectories, reference.places(batch), strict=True):
        own = (segments[row] == segment) & (fields["mask"][row] > 0)
        if not own.any():
            continue
        ratio = reference.sequence_ratio(item["behaviour"], item["log_probs"], np.flatnonzero(item["mask"]))
        np.testing.assert_allclose(np.exp(np.asarray(log_ratio)[row][own]), ratio, rtol=1e-12)
        np.testing.assert_allclose(gradient[row][own], -item["advantages"][0] * ratio / own.sum(), rtol=1e-10)


@pytest.mark.parametrize("aggregation", ["sequence_mean", "sequence_sum"])
def test_rows_sharded_over_devices_need_no_gather(batch_of, aggregation):
    """Per-sequence reductions stay inside a row, hence inside the device that holds it."""
    config = config_lib.AlgorithmConfig(loss="gspo", aggregation=aggregation)
    rng = np.random.default_rng(0)
    shape = (8, 16)
    arrays = [rng.normal(size=shape).astype(np.float32) for _ in range(3)]
    segments = np.sort(rng.integers(0, 4, shape), axis=1).astype(np.int32)

    def loss_sum(log_probs, behaviour, advantages, segments_BxT):
        return objective.policy_objective(
            config,
            log_probs_BxT=log_probs,
            behaviour_log_probs_BxT=behaviour,
            advantages_BxT=advantages,
            mask_BxT=segments_BxT > 0,
            segments_BxT=segments_BxT,
            max_segments=3,
        ).loss_sum

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    placed = [jax.device_put(array, sharding) for array in (*arrays, segments)]
    step = jax.jit(jax.value_and_grad(loss_sum), out_shardings=(None, sharding))
    value, gradient = step(*placed)
    expected_value, expected_gradient = jax.value_and_grad(loss_sum)(*map(jnp.asarray, (*arrays, segments)))
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-7)
    assert "all-gather" not in step.lower(*placed).compile().as_text()
