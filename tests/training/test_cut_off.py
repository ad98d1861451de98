"""Rollouts that a limit of the run cut off teach nothing, and change nothing for the rollouts beside them."""

import dataclasses

import numpy as np
import pytest
import small_model
import trainer_doubles as doubles

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.data import batch as batch_lib
from libra_jax.data import batch_advantages
from libra_jax.data import sequences as sequences_lib
from libra_jax.training import shares

MASKED = {0: (1, 3), 1: (0,)}
"""Group to the samples in it that are cut off."""


def _batch(small, cut=MASKED, finish="max_seconds"):
    """The batch of the doubles: samples in `cut` ended by `finish`, all others by an answer. Rewards differ."""
    batch = doubles.batch(small)
    for number, group in enumerate(batch.groups):
        for sample, trajectory in enumerate(group.trajectories):
            trajectory.finish = finish if sample in cut.get(number, ()) else "answered"
            trajectory.reward = 0.25 * sample + number
    return batch


def _without(batch, cut=MASKED):
    """The same batch as if the samples in `cut` had never been."""
    kept = [
        dataclasses.replace(group, trajectories=[t for n, t in enumerate(group.trajectories) if n not in cut[number]])
        if number in cut
        else group
        for number, group in enumerate(batch.groups)
    ]
    return protocols.TrainBatch(batch.policy_version, tuple(kept))


def _prepared(small, batch, advantage="grpo", **task):
    config = small.config(algorithm=config_lib.AlgorithmConfig(advantage=advantage), task=config_lib.TaskConfig(**task))
    return batch_lib.prepare(config, batch, small_model.shape())


@pytest.mark.parametrize(
    "advantage", [name for name in config_lib.ADVANTAGES if name not in ("gae", "egae", "distillation")]
)
def test_masked_rollouts_leave_baselines_and_tokens_of_others_alone(small, advantage):
    batch = _batch(small)
    masked, removed = _prepared(small, batch, advantage), _prepared(small, _without(batch), advantage)
    for array, wanted in zip(masked.packed.micro_batches, removed.packed.micro_batches, strict=True):
        np.testing.assert_array_equal(array.tokens, wanted.tokens)
        np.testing.assert_array_equal(array.mask, wanted.mask)
    for extra, wanted in zip(masked.extras, removed.extras, strict=True):
        np.testing.assert_allclose(extra["advantages"], wanted["advantages"], atol=1e-6)
    trained = _prepared(small, batch, advantage, cut_off="zero")
    assert sum(item.mask.sum() for item in trained.packed.micro_batches) > sum(
        item.mask.sum() for item in masked.packed.micro_batches
    )


@pytest.mark.parametrize(
    ("finish", "task", "masked"),
    [
        ("max_seconds", {}, True),
        ("max_context", {}, True),
        ("length", {}, False),
        ("max_tokens", {}, False),
        ("max_turns", {}, False),
        ("length", {"cut_off_limits": ("length",)}, True),
        ("max_context", {"cut_off_limits": ("length",)}, False),
        ("max_context", {"cut_off": "zero"}, False),
    ],
)
def test_the_config_says_which_limits_mask_a_rollout(small, finish, task, masked):
    prepared = _prepared(small, _batch(small, {0: (2,)}, finish), **task)
    placed = [place.example for place in prepared.packed.places]
    assert (2 not in placed) == masked
    assert placed[-len(prepared.sequences.examples[3:]) :] == list(range(3, len(prepared.sequences.examples)))


def test_limits_that_do_not_exist_are_refused():
    with pytest.raises(protocols.ConfigError, match=r"task\.cut_off_limits: 'answered' is not one of length"):
        config_lib.TaskConfig(cut_off_limits=("answered",))
    with pytest.raises(protocols.ConfigError, match=r"task\.cut_off: 'masked' .* did you mean 'mask'"):
        config_lib.TaskConfig(cut_off="masked")


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo"])
def test_a_rollout_left_alone_in_its_group_has_no_advantage(small, advantage):
    prepared = _prepared(small, _batch(small, {0: (0, 1, 3)}), advantage)
    assert prepared.packed.places[2] is not None, "it is a whole rollout, which KL and entropy may still look at"
    np.testing.assert_array_equal(prepared.advantages[2], 0.0)
    assert np.abs(prepared.advantages[4]).max() > 0


def test_distillation_compares_no_rollout_that_is_left_alone(small):
    batch = _batch(small, {0: (0, 1, 3)})
    sequences = sequences_lib.BatchSequences.from_batch(config_lib.TaskConfig(), batch, small.shape)
    taught = [0.1 * np.arange(len(example.tokens_N)) for example in sequences.examples]
    found = []
    for weight in (0.0, 1.0):
        algorithm = config_lib.AlgorithmConfig(
            advantage="distillation",
            advantage_arguments={"reward_weight": weight},
            kl_coefficient=0.5,
            kl_in_reward=True,
            kl_estimator="k1",
        )
        found.append(batch_advantages.token_advantages(algorithm, sequences, taught)[0])
    np.testing.assert_array_equal(found[1][2], found[0][2])
    assert np.abs(found[1][2]).max() > 0, "its penalties stay"
    assert np.abs(found[1][4] - found[0][4]).max() > 0


def test_a_step_whose_rollouts_are_all_cut_off_changes_no_weight(small, start_trainer):
    batch = _batch(small, {0: range(4), 1: range(4), 2: range(4)})
    prepared = _prepared(small, batch)
    own, others = shares.split(prepared.work, [protocols.Share("r", 0, 0.5)])
    assert (len(own), len(others)) == (1, 0)
    actor = start_trainer()
    before = doubles.params(actor)
    metrics = actor.train_step(batch)
    assert (metrics["loss"], metrics["grad_norm"], metrics["skipped"]) == (0.0, 0.0, 1.0)
    assert metrics["groups/without_gradient"] == 1.0
    assert all(np.isfinite(value) for value in metrics.values())
    assert actor.policy_version() == 1
    for leaf, wanted in zip(doubles.params(actor), before, strict=True):
        np.testing.assert_array_equal(leaf, wanted)


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo"])
def test_groups_without_a_gradient_are_counted(small, advantage):
    batch = _batch(small, {0: (0, 1, 2)})
    for trajectory in batch.groups[2].trajectories:
        trajectory.reward = 0.1  # no multiple of a power of two: rounding must not pass for a difference
    prepared = _prepared(small, batch, advantage)
    found = batch_lib.statistics([prepared])
    assert found["groups/without_gradient"] == pytest.approx(2 / 3), "one is left alone, one has equal rewards"
    assert found["advantage/min"] < 0 < found["advantage/max"]
