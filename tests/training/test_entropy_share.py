"""Turns of low entropy are left out of the loss, and of nothing else; a replayed success gives a group its gradient."""

import dataclasses
from array import array

import jax
import numpy as np
import pytest
import trainer_doubles as doubles

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.algorithms import turn_selection
from libra_jax.data import batch as batch_lib


@pytest.fixture(scope="module")
def learner(small):
    return small.learner(_config(small))


def _config(small, **algorithm):
    return small.config(algorithm=config_lib.AlgorithmConfig(**algorithm))


def _rewarded(small):
    """The batch of the doubles, eight turns a group, with rewards that differ."""
    batch = doubles.batch(small, seed=5)
    for group in batch.groups:
        for sample, trajectory in enumerate(group.trajectories):
            trajectory.reward = float(sample)
    return batch


def _sums(small, learner, config, batch):
    """Sums of a batch, their report, and how the batch was prepared."""
    prepared = batch_lib.prepare(config, batch, small.shape)
    indices = range(len(prepared.packed.micro_batches))
    return *learner.sums("policy", learner.policy, prepared.packed, prepared.extras, indices), prepared


def test_the_gradient_is_that_of_the_turns_of_high_entropy_alone(small, learner):
    batch, config = _rewarded(small), _config(small, entropy_share=0.6)
    sums, _, prepared = _sums(small, learner, config, batch)
    members = [trajectory for group in batch.groups for trajectory in group.trajectories]
    masks = [np.array(item.loss_mask, bool) for item in members]
    log_probs = [np.array(item.log_probs, np.float32) for item in members]
    kept = turn_selection.highest_entropy(log_probs, masks, np.repeat(range(3), 4), 0.6)
    share = sum(map(np.sum, kept)) / sum(map(np.sum, masks))
    found = {name: counted / of for name, (counted, of) in prepared.described.items()}
    assert found == {"turns/trained_share": 5 / 8, "tokens/entropy_share": pytest.approx(share)}
    for trajectory, mask in zip(members, kept, strict=True):
        trajectory.loss_mask = array("b", mask.tolist())
    masked, _, _ = _sums(small, learner, _config(small), batch)
    assert float(sums.count) == float(masked.count) == sum(map(np.sum, kept))
    for leaf, wanted in zip(jax.tree.leaves(sums), jax.tree.leaves(masked), strict=True):
        np.testing.assert_allclose(leaf, wanted, rtol=1e-4, atol=1e-5)


def test_a_streamed_step_reports_the_share_of_all_turns_and_tokens(small):
    config, batch = _config(small, entropy_share=0.6), _rewarded(small)
    del batch.groups[0].trajectories[1:]
    parts = [batch.of([0]), batch.of([1, 2])]
    first, last = (batch_lib.prepare(config, part, small.shape) for part in parts)
    metrics = batch_lib.statistics([first, last])
    for name in ("turns/trained_share", "tokens/entropy_share"):
        (kept, of), (more, of_more) = first.described[name], last.described[name]
        assert metrics[name] == (kept + more) / (of + of_more)
        assert kept / of != more / of_more


@pytest.mark.parametrize("advantage", ["opo", "reinforce_plus_plus"])
def test_advantages_are_those_of_whole_rollouts(small, advantage):
    batch = _rewarded(small)
    some, whole = (
        batch_lib.prepare(_config(small, advantage=advantage, entropy_share=share), batch, small.shape)
        for share in (0.5, 1.0)
    )
    assert not whole.described
    for advantages, wanted in zip(some.advantages, whole.advantages, strict=True):
        np.testing.assert_array_equal(advantages, wanted)


def test_a_replayed_success_gives_a_group_of_failures_its_gradient(small, learner):
    (group, *_), config = _rewarded(small).groups, _config(small, replay="success")
    for trajectory in group.trajectories:
        trajectory.reward = 0.0
    batch = protocols.TrainBatch(0, (group,))
    _, _, prepared = _sums(small, learner, config, batch)
    assert all(np.all(advantages == 0) for advantages in prepared.advantages)
    success = dataclasses.replace(group.trajectories[0], reward=1.0, replayed=True, trajectory_id="old/0-replayed7")
    # The policy that sampled it gave its tokens a lower probability: the importance ratio knows.
    success.log_probs = array("f", (-4.0 if sampled else 0.0 for sampled in success.loss_mask))
    group.trajectories.append(success)
    sums, report, prepared = _sums(small, learner, config, batch)
    rewards = np.array([0.0] * 4 + [1.0])
    wanted = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    pairs = zip(prepared.advantages, group.trajectories, strict=True)
    found = [advantages[np.array(item.loss_mask, bool)][0] for advantages, item in pairs]
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    assert max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(sums.gradients)) > 0
    assert report["maxima"]["ratio/max"] > 2
