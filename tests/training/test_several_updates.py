"""A batch that takes several updates: mini-batches, epochs, the proximal policy, and the metrics of each update."""

import dataclasses
import threading

import jax
import numpy as np
import pytest
import trainer_doubles

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.algorithms import corrections
from libra_jax.data import batch as batch_lib
from libra_jax.telemetry import metrics as metric_names
from libra_jax.training import learner as learner_lib
from libra_jax.training import shares, step

RATE = 0.05
DECOUPLED = {"objective": "decoupled", "correction": "truncated"}


def _config(small, trainer=None, **algorithm):
    return small.config(
        trainer={"rows_per_micro_batch": 2, **(trainer or {})},
        algorithm=config_lib.AlgorithmConfig(**algorithm),
        coordinator=config_lib.CoordinatorConfig(groups_per_step=3, group_size=4),
        optimizer=config_lib.OptimizerConfig(name="sgd", clip_norm=0.0),
    )


def _train(small, config, batch):
    learner = small.learner(config)
    prepared = batch_lib.prepare(config, batch, small.shape)
    metrics = learner.train(prepared.packed, RATE, prepared.extras, prepared.packed.minibatches)
    return learner, metrics


def _leaves(learner):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(learner.params)]


def _one_by_one(small, config, batch):
    """Takes the same updates as steps of a learner of one update a batch, with the advantages of the whole batch."""
    learner = small.learner(config)
    prepared = batch_lib.prepare(config, batch, small.shape)
    for _ in range(config.algorithm.epochs):
        for part in prepared.packed.minibatches:
            items = tuple(prepared.packed.micro_batches[index] for index in part)
            packed = dataclasses.replace(prepared.packed, micro_batches=items)
            learner.update("policy", packed, RATE, [prepared.extras[index] for index in part])
    return learner


def test_mini_batches_hold_whole_groups_and_each_trajectory_once(small):
    batch = trainer_doubles.batch(small)
    prepared = batch_lib.prepare(_config(small, minibatches=2), batch, small.shape)
    of_micro_batch = {index: number for number, part in enumerate(prepared.packed.minibatches) for index in part}
    assert sorted(of_micro_batch) == list(range(len(prepared.packed.micro_batches)))
    numbers = [of_micro_batch[place.micro_batch] for place in prepared.packed.places]
    assert numbers == [0] * 8 + [1] * 4
    whole = batch_lib.prepare(_config(small), batch, small.shape)
    for values, wanted in zip(prepared.advantages, whole.advantages, strict=True):
        np.testing.assert_array_equal(values, wanted)


def test_updates_are_those_of_separate_steps_on_the_mini_batches(small):
    config = _config(small, minibatches=2, epochs=2)
    batch = trainer_doubles.batch(small)
    learner, metrics = _train(small, config, batch)
    for leaf, wanted in zip(_leaves(learner), _leaves(_one_by_one(small, config, batch)), strict=True):
        np.testing.assert_array_equal(leaf, wanted)
    assert int(learner.state.step) == 1
    assert {name.split("/")[1] for name in metrics if name.startswith("update/")} == {"1", "2", "3", "4"}
    metric_names.check(metrics)


@pytest.mark.parametrize("algorithm", [{}, DECOUPLED], ids=["behaviour", "decoupled"])
def test_clips_bind_after_the_first_update_and_not_before(small, algorithm):
    config = _config(small, minibatches=3, epochs=2, clip_low=0.02, clip_high=0.02, **algorithm)
    _, metrics = _train(small, config, trainer_doubles.batch(small))
    clipped = [
        metrics[f"update/{number}/clip/low_fraction"] + metrics[f"update/{number}/clip/high_fraction"]
        for number in range(1, 7)
    ]
    assert min(clipped[3:]) > 0
    assert metrics["clip/low_fraction"] + metrics["clip/high_fraction"] > 0
    if algorithm:
        assert clipped[0] == 0
        assert metrics["update/1/ratio/max"] == pytest.approx(1, abs=1e-5)


def test_the_proximal_policy_is_that_of_before_the_first_update(small):
    config = _config(small, minibatches=2, epochs=2, clip_low=0.02, clip_high=0.02, **DECOUPLED)
    batch = trainer_doubles.batch(small)
    learner, metrics = _train(small, config, batch)
    # The same by hand: the proximal log-probabilities are scored once, by a learner that takes no update.
    still, by_hand = small.learner(config), small.learner(config)
    prepared = batch_lib.prepare(config, batch, small.shape)
    extras = [
        {**extra, "proximal": np.asarray(still.programs.proximal(still.params, still.programs.put(vars(item))))}
        for item, extra in zip(prepared.packed.micro_batches, prepared.extras, strict=True)
    ]
    for part in [*prepared.packed.minibatches, *prepared.packed.minibatches]:
        items = tuple(prepared.packed.micro_batches[index] for index in part)
        packed = dataclasses.replace(prepared.packed, micro_batches=items)
        by_hand.update("policy", packed, RATE, [extras[index] for index in part])
    for leaf, wanted in zip(_leaves(learner), _leaves(by_hand), strict=True):
        np.testing.assert_array_equal(leaf, wanted)
    # The engine is compared with the weights that it sampled from, not with those of a later update.
    first = _train(small, _config(small, **DECOUPLED), batch)[1]
    assert metrics["mismatch/kl"] == pytest.approx(first["mismatch/kl"], rel=1e-4)
    assert metrics["mismatch/ratio_max"] == pytest.approx(first["mismatch/ratio_max"], rel=1e-5)


def test_without_a_proximal_policy_only_the_first_update_measures_the_mismatch(small):
    batch = trainer_doubles.batch(small)
    several = _train(small, _config(small, epochs=3), batch)[1]
    once = _train(small, _config(small), batch)[1]
    assert several["mismatch/kl"] == pytest.approx(once["mismatch/kl"], rel=1e-5)
    assert several["update/1/kl/behaviour"] == pytest.approx(once["kl/behaviour"], rel=1e-5)
    assert several["update/3/kl/behaviour"] != pytest.approx(once["kl/behaviour"], rel=1e-3)


@pytest.mark.parametrize("stale", [0, 3])
def test_an_interpolated_proximal_policy_lies_between_by_staleness(small, stale):
    rng = np.random.default_rng(0)
    log_probs, behaviour = rng.normal(size=(2, 2, 5)).astype(np.float32)
    found = corrections.interpolated_proximal(log_probs, behaviour, np.full((2, 5), stale, np.float32))
    wanted = behaviour + (stale / (stale + 1)) * (log_probs - behaviour)
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    config = _config(small, proximal="interpolate", minibatches=2, **DECOUPLED)
    prepared = batch_lib.prepare(config, trainer_doubles.batch(small, 5, sampled_by=5 - stale), small.shape)
    for item, extra in zip(prepared.packed.micro_batches, prepared.extras, strict=True):
        np.testing.assert_array_equal(extra["staleness"], np.where(item.mask, stale, extra["staleness"]))
    _train(small, config, trainer_doubles.batch(small, 5, sampled_by=5 - stale))


def test_one_update_with_clips_that_cannot_bind_is_refused(small):
    with pytest.raises(protocols.ConfigError, match=r"clip_high: 0.3 never binds .* set algorithm.minibatches"):
        _config(small, clip_high=0.3, **DECOUPLED)
    for allowed in ({"minibatches": 2}, {"epochs": 2}, {"proximal": "interpolate"}):
        _config(small, clip_high=0.3, **DECOUPLED, **allowed)
    with pytest.raises(protocols.ConfigError, match=r"minibatches: 5 parts of whole groups .*groups_per_step = 3"):
        _config(small, minibatches=5)
    with pytest.raises(protocols.ConfigError, match=r"proximal: interpolate has no effect with .*objective=behaviour"):
        _config(small, proximal="interpolate")


def test_a_step_that_has_taken_an_update_is_not_aborted(small):
    config = _config(small, minibatches=2)
    learner = small.learner(config)
    prepared = batch_lib.prepare(config, trainer_doubles.batch(small), small.shape)
    before = _leaves(learner)
    learner.abort.set()
    with pytest.raises(protocols.StepAborted):
        learner.train(prepared.packed, RATE, prepared.extras, prepared.packed.minibatches)
    for leaf, wanted in zip(_leaves(learner), before, strict=True):
        np.testing.assert_array_equal(leaf, wanted)
    # Asked in the middle of the second update, whose micro-batches come after the first update was applied.
    applied, apply = threading.Event(), learner.programs.apply_step

    def asking(*arguments):
        applied.set()
        learner.abort.set()
        return apply(*arguments)

    learner.programs.apply_step = asking
    learner.train(prepared.packed, RATE, prepared.extras, prepared.packed.minibatches)
    assert applied.is_set()
    assert int(learner.state.step) == 1
    assert not learner.abort.is_set()


def test_updates_are_the_same_on_a_mesh(small):
    algorithm = {"minibatches": 2, "epochs": 2, "clip_low": 0.02, "clip_high": 0.02, **DECOUPLED}
    batch = trainer_doubles.batch(small)
    alone, metrics = _train(small, _config(small, **algorithm), batch)
    mesh, others = _train(small, _config(small, trainer={"data": 2, "fsdp": 1, "tensor": 2}, **algorithm), batch)
    for leaf, wanted in zip(_leaves(mesh), _leaves(alone), strict=True):
        np.testing.assert_allclose(leaf, wanted, atol=1e-5)
    assert others["loss"] == pytest.approx(metrics["loss"], abs=1e-5)


@pytest.mark.parametrize(("rule", "power"), [("sqrt", 0.5), ("linear", 1.0)])
def test_the_step_shrinks_with_the_effective_sample_size(small, rule, power):
    batch, found = trainer_doubles.batch(small), {}
    for scaling in ("off", rule):
        learner, metrics = _train(small, _config(small, ess_scaling=scaling), batch)
        before = _leaves(small.learner(_config(small)))
        found[scaling] = metrics, [leaf - old for leaf, old in zip(_leaves(learner), before, strict=True)]
    metrics, moved = found[rule]
    plain, moved_plain = found["off"]
    assert 0 < metrics["ess"] < 0.99
    assert metrics["ess"] == plain["ess"]
    scale = metrics["ess"] ** power
    assert metrics["learning_rate"] == pytest.approx(RATE * scale)
    assert plain["learning_rate"] == RATE
    for leaf, wanted in zip(moved, moved_plain, strict=True):
        np.testing.assert_allclose(leaf, scale * wanted, atol=1e-7)


def test_a_hybrid_worker_shares_in_the_first_update_alone(small):
    config = _config(
        small, trainer={"rows_per_micro_batch": 1}, minibatches=2, clip_low=0.02, clip_high=0.02, **DECOUPLED
    )
    batch = trainer_doubles.batch(small)
    alone, wanted = _train(small, config, batch)
    core = small.learner(config)
    side = learner_lib.Learner(config, small.shape, jax.devices(), first_update_only=True)
    prepared = batch_lib.prepare(config, batch, small.shape)
    own, theirs = shares.split(prepared.work, [protocols.Share("r", 1, 0.5)])
    assert len(prepared.work) == len(prepared.packed.minibatches[0])
    assert own
    assert theirs
    # The worker holds the weights of before the step, and scores no proximal policy.
    params = jax.device_put(small.params, side.layout.everywhere)
    sums, report = side.sums("policy", params, prepared.packed, prepared.extras, theirs)
    received = step.Received([np.asarray(leaf) for leaf in jax.tree.leaves(sums)], report)
    metrics = core.train(
        prepared.packed, RATE, prepared.extras, prepared.packed.minibatches, own, lambda seconds: iter([received])
    )
    for leaf, other in zip(_leaves(core), _leaves(alone), strict=True):
        np.testing.assert_allclose(leaf, other, atol=1e-6)
    assert metrics["update/2/clip/low_fraction"] == pytest.approx(wanted["update/2/clip/low_fraction"], abs=1e-6)
