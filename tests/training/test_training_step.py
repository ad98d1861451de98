"""What a step does to the state: sums over any split, donation, skipping, schedules, the reference model."""

import warnings

import jax
import numpy as np
import optax
import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.data import packing
from libra_jax.training import optimizer, resize, state


def _batch(small, config, count=10, seed=0):
    examples = small.examples(count, seed)
    packed = packing.pack(examples, config.trainer)
    advantages = np.random.default_rng(seed).normal(size=count)
    return packed, [{"advantages": array} for array in packed.scatter(list(advantages))]


def _leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize(
    "algorithm",
    [
        config_lib.AlgorithmConfig(aggregation="sequence_mean", entropy_coefficient=0.01),
        config_lib.AlgorithmConfig(loss="gspo", aggregation="token_mean"),
    ],
    ids=["sequence_mean", "gspo"],
)
def test_any_split_into_micro_batches_and_rows_takes_the_same_step(small, algorithm):
    results = []
    for trainer in (
        {"rows_per_micro_batch": 8},
        {"rows_per_micro_batch": 2},
        {"rows_per_micro_batch": 3, "pack": False},
    ):
        config = small.config(trainer=trainer, algorithm=algorithm, optimizer=config_lib.OptimizerConfig(name="sgd"))
        learner = small.learner(config)
        packed, extras = _batch(small, config)
        results.append((learner.update("policy", packed, 0.1, extras), _leaves(learner.params), packed))
    assert [len(packed.micro_batches) for _, _, packed in results] == [1, 2, 4]
    assert [packed.micro_batches[0].segments.max() > 1 for _, _, packed in results] == [True, True, False]
    metrics, params, _ = results[0]
    for other_metrics, other_params, _ in results[1:]:
        assert other_metrics.keys() == metrics.keys()
        for name in metrics:
            assert other_metrics[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), name
        for leaf, other in zip(params, other_params, strict=True):
            np.testing.assert_allclose(other, leaf, atol=1e-6)


def test_both_programs_consume_what_they_replace(small):
    config = small.config(trainer={"fsdp": 2})
    learner = small.learner(config)
    packed, extras = _batch(small, config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "Some donated buffers were not usable"
        before = learner.state
        sums = learner.programs.zeros()
        arrays = learner.programs.put({**vars(packed.micro_batches[0]), **extras[0]})
        added, _ = learner.programs.grad_step("policy", before.params, sums, arrays)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(sums))
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(before))
        after, zeroed, _ = learner.programs.apply_step(before, added, 1e-3)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((before, added)))
    assert not any(np.any(leaf) for leaf in _leaves(zeroed))
    assert int(after.step) == 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_step_that_is_not_finite_changes_nothing_but_the_step_number(small, value):
    config = small.config()
    learner = small.learner(config)
    packed, extras = _batch(small, config)
    learner.update("policy", packed, 1e-3, extras)
    before = _leaves((learner.state.params, learner.state.opt_state))
    poisoned = [{"advantages": np.where(packed.micro_batches[0].mask, value, 0).astype(np.float32)}, *extras[1:]]
    metrics = learner.update("policy", packed, 1e-3, poisoned)
    assert metrics["skipped"] == 1
    assert not np.isfinite(metrics["grad_norm"])
    for leaf, old in zip(_leaves((learner.state.params, learner.state.opt_state)), before, strict=True):
        np.testing.assert_array_equal(leaf, old)
    assert int(learner.state.step) == 2
    good = learner.update("policy", packed, 1e-3, extras)
    assert good["skipped"] == 0
    assert np.isfinite(good["loss"])
    assert int(learner.state.step) == 3


def test_a_step_is_the_one_optax_takes(small):
    config = small.config(optimizer=config_lib.OptimizerConfig(weight_decay=0.1, decay_all=True, clip_norm=0.5))
    learner = small.learner(config)
    packed, extras = _batch(small, config)
    assert len(packed.micro_batches) == 1
    arrays = learner.programs.put({**vars(packed.micro_batches[0]), **extras[0]})
    zeros = learner.programs.zeros()
    sums, _ = learner.programs.grad_step("policy", learner.params, zeros, arrays)
    gradients = jax.tree.map(lambda leaf: np.asarray(leaf) / np.asarray(sums.count), sums.gradients)
    settings = config.optimizer
    reference = optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.adamw(1e-2, b1=settings.beta1, b2=settings.beta2, eps=settings.eps, weight_decay=0.1),
    )
    updates, _ = reference.update(gradients, reference.init(small.params), small.params)
    wanted = optax.apply_updates(small.params, updates)
    metrics = learner.update("policy", packed, 1e-2, extras)
    assert metrics["grad_norm"] == pytest.approx(float(optax.tree.norm(gradients)), rel=1e-5)
    for leaf, expected in zip(_leaves(learner.params), _leaves(wanted), strict=True):
        np.testing.assert_allclose(leaf, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {0: 1.0, 50: 1.0, 99: 1.0}),
        ({"warmup_steps": 4}, {0: 0.25, 1: 0.5, 3: 1.0, 99: 1.0}),
        ({"schedule": "linear", "warmup_steps": 4}, {0: 0.25, 4: 1.0, 52: 0.5, 100: 0.0}),
        ({"schedule": "cosine"}, {0: 1.0, 50: 0.5, 100: 0.0}),
        ({"schedule": "cosine", "min_ratio": 0.2}, {0: 1.0, 50: 0.6, 100: 0.2}),
        ({"schedule": "linear", "min_ratio": 0.5}, {0: 1.0, 50: 0.75, 100: 0.5}),
        ({"schedule": "wsd", "warmup_steps": 4, "min_ratio": 0.1}, {0: 0.25, 4: 1.0, 80: 1.0, 90: 0.55, 100: 0.1}),
    ],
)
def test_schedules_rise_and_decay_as_documented(fields, expected):
    schedule = optimizer.schedule(config_lib.OptimizerConfig(learning_rate=1.0, **fields), steps=100)
    for at, rate in expected.items():
        assert float(schedule(at)) == pytest.approx(rate, abs=1e-6), at


@pytest.mark.parametrize("available", [0, 3])
def test_too_few_devices_are_told_in_numbers(available):
    config = config_lib.TrainerConfig(data=2, tensor=2)
    with pytest.raises(protocols.ConfigError, match=rf"data 2 x tensor 2\) needs 4 devices and there are {available}"):
        state.make_mesh(config, jax.devices()[:available])


def test_rows_that_do_not_divide_over_their_parts_are_refused_by_name():
    sizes = config_lib.TrainerConfig(data=2, tensor=2, context=4, row_tokens=64, row_buckets=(96,))
    assert (sizes.devices, sizes.replica_devices) == (16, 8)
    with pytest.raises(
        protocols.ConfigError,
        match=r"trainer.row_tokens: 66 does not divide over context x tensor = 4 x 1; use 72, the .* of 1, 3, 11 or 33",
    ):
        config_lib.TrainerConfig(context=4, row_tokens=66)
    with pytest.raises(
        protocols.ConfigError, match=r"trainer.row_buckets: 68 does not divide over context x tensor = 4 x 2"
    ):
        config_lib.TrainerConfig(context=4, tensor=2, row_tokens=64, row_buckets=(68,))
    with pytest.raises(protocols.ConfigError, match=r"trainer.context: must be positive"):
        config_lib.TrainerConfig(context=0)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_training_elsewhere_than_asked_for_is_refused(platform):
    with pytest.raises(protocols.ConfigError, match=rf"platform: JAX finds no {platform} device here, only cpu"):
        state.make_mesh(config_lib.TrainerConfig(platform=platform), jax.devices())


def test_a_reference_model_exists_only_above_coefficient_zero_and_pulls_the_policy_back(small):
    config = small.config(algorithm=config_lib.AlgorithmConfig(kl_coefficient=0.0))
    assert small.learner(config).state.reference is None
    config = small.config(algorithm=config_lib.AlgorithmConfig(kl_coefficient=10.0, kl_estimator="k2"))
    learner = small.learner(config)
    packed, extras = _batch(small, config)
    divergences = []
    for extra, array in zip(extras, learner.reference_log_probs(packed, extras), strict=True):
        extra["reference"] = array
    for _ in range(3):
        learner.update("policy", packed, 1e-2, extras)
    still = [{**extra, "advantages": np.zeros_like(extra["advantages"])} for extra in extras]
    for _ in range(6):
        divergences.append(learner.update("policy", packed, 2e-3, still)["kl/reference"])
    assert divergences[0] > 1e-4
    assert divergences[-1] < 0.7 * divergences[0]
    for leaf, original in zip(_leaves(learner.state.reference), _leaves(small.params), strict=True):
        np.testing.assert_array_equal(leaf, original)


def test_the_reference_model_is_kept_in_bfloat16_and_scores_to_the_same_bit(small):
    bfloat16 = {"compute_dtype": "bfloat16"}
    config = small.config(model=bfloat16, algorithm=config_lib.AlgorithmConfig(kl_coefficient=1.0))
    learner, without = small.learner(config), small.learner(small.config(model=bfloat16))
    stored = jax.tree_util.tree_leaves_with_path(learner.state.reference)
    assert {leaf.dtype.name for path, leaf in stored if "norm" in str(path)} == {"float32"}
    assert {leaf.dtype.name for path, leaf in stored if "norm" not in str(path)} == {"bfloat16"}
    packed, extras = _batch(small, config)
    for got, item in zip(learner.reference_log_probs(packed, extras), packed.micro_batches, strict=True):
        wanted = without.programs.score(without.params, without.programs.put(vars(item)))
        np.testing.assert_array_equal(got, wanted)
    begins = resize.MeshChange(learner, protocols.MeshSizes(2, 1, 1), jax.devices())
    moved, _ = begins.take_over(120.0)
    for leaf, (_, before) in zip(jax.tree.leaves(moved.state.reference), stored, strict=True):
        assert leaf.dtype == before.dtype


def test_supervised_steps_learn_the_sequences(small):
    config = small.config()
    learner = small.learner(config)
    packed = packing.pack(small.examples(4), config.trainer)
    losses = [learner.update("supervised", packed, 1e-2)["loss"] for _ in range(40)]
    assert losses[0] == pytest.approx(np.log(small.vocabulary), rel=0.1)
    assert losses[-1] < 0.5 * losses[0]
