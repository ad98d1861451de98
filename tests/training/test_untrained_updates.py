"""Updates without one trained token move nothing: no parameter, no moment, no count of an optimizer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trainer_doubles as doubles

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.data import packing
from libra_jax.training import step

OPTIMIZERS = {
    "adamw": {"weight_decay": 0.1, "offload": True},
    "sgd": {"arguments": {"momentum": 0.9, "nesterov": True}},
    "adafactor": {"arguments": {"momentum": 0.9, "min_dim_size_to_factor": 8}},
    "muon": {"weight_decay": 0.1},
    "lion": {"weight_decay": 0.1},
}


def leaves(state):
    """All numbers that a step may change but its own number."""
    return [np.array(leaf) for leaf in jax.tree.leaves(dataclasses.replace(state, step=None))]


def assert_equal(found, wanted):
    for leaf, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(leaf, other)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_optimizer_moves_without_a_trained_token(small, name):
    learner = small.learner(small.config(optimizer=config_lib.OptimizerConfig(name=name, **OPTIMIZERS[name])))
    rng = np.random.default_rng(0)
    zeros = learner.programs.zeros()
    gradients = jax.tree.map(lambda leaf: leaf + rng.normal(size=leaf.shape), zeros.gradients)
    sums = dataclasses.replace(zeros, gradients=gradients, loss=jnp.float32(1.0), count=jnp.float32(3.0))
    state, sums, report = learner.programs.apply_step(learner.state, sums, 0.01)
    assert report["skipped"] == 0
    moved = leaves(state)
    state, _, report = learner.programs.apply_step(state, sums, 0.01)
    assert_equal(leaves(state), moved)
    assert (report["skipped"], report["loss"], report["grad_norm"]) == (1, 0, 0)
    assert state.step == 2, "the version counts the steps taken"


def emptied(batch, groups):
    """The batch without a trained token in some groups."""
    for number in groups:
        for trajectory in batch.groups[number].trajectories:
            trajectory.disown(0, len(trajectory.token_ids))
    return batch


def cut(batch, samples=range(4)):
    """The batch, some rollouts of whose groups a limit cut off."""
    for group in batch.groups:
        for index, trajectory in enumerate(group.trajectories):
            trajectory.finish = "max_context" if index in samples else "answered"
    return batch


def state_of(actor, part="learner"):
    return leaves(getattr(actor.running(), part).train_state())


def test_steps_whose_rollouts_are_all_masked_move_nothing_and_go_on(small, start_trainer):
    actor = start_trainer(trainer={"stream": "group", "max_skipped_steps": 0})
    actor.train_step(doubles.batch(small))
    before = state_of(actor)
    for version in (1, 2):
        batch = cut(doubles.batch(small, version))
        if version == 2:  # begun on a group before the others are there
            actor.accumulate(batch.of((1,)))
            batch = dataclasses.replace(batch, begun=(1,))
        metrics = actor.train_step(batch)
        assert metrics["skipped"] == 1
        assert_equal(state_of(actor), before)
    assert actor.policy_version() == 3
    assert actor.train_step(doubles.batch(small, 3))["skipped"] == 0


def test_a_streamed_group_without_a_trained_token_leaves_the_step_to_the_others(small, start_trainer):
    streamed, whole = (start_trainer(trainer={"stream": stream}) for stream in ("group", "off"))
    batch = emptied(doubles.batch(small), [0])
    streamed.accumulate(batch.of((0,)))
    got, wanted = streamed.train_step(dataclasses.replace(batch, begun=(0,))), whole.train_step(batch)
    assert (got["skipped"], got["loss"]) == (0, pytest.approx(wanted["loss"], rel=1e-5))
    for leaf, other in zip(doubles.params(streamed), doubles.params(whole), strict=True):
        np.testing.assert_allclose(leaf, other, atol=1e-6)


def test_a_mini_batch_without_a_trained_token_is_left_out(small, start_trainer):
    groups = {"coordinator": config_lib.CoordinatorConfig(groups_per_step=3)}
    several = start_trainer(algorithm=config_lib.AlgorithmConfig(minibatches=3), **groups)
    once = start_trainer(algorithm=config_lib.AlgorithmConfig(minibatches=1), **groups)
    for version in (0, 1):
        batch = emptied(doubles.batch(small, version), [0, 2])
        got, wanted = several.train_step(batch), once.train_step(batch)
        assert got["skipped"] == pytest.approx(2 / 3)
        assert [got[f"update/{number}/skipped"] for number in (1, 2, 3)] == [1, 0, 1]
        for name in ("loss", "grad_norm"):
            assert got[name] == pytest.approx(wanted[name], rel=1e-5)
        assert_equal(state_of(several), state_of(once))


def test_a_critic_without_a_finished_rollout_stays(small, start_trainer):
    actor = start_trainer(
        algorithm=config_lib.AlgorithmConfig(advantage="egae", advantage_arguments={"ignored_tokens": 1}),
        critic=config_lib.CriticConfig(enabled=True),
        task=config_lib.TaskConfig(cut_off="bootstrap"),
        trainer={"max_skipped_steps": 0},
    )
    actor.train_step(cut(doubles.batch(small), (0,)))
    critic, policy = state_of(actor, "critic"), state_of(actor)
    metrics = actor.train_step(cut(doubles.batch(small, 1)))
    assert (metrics["critic/skipped"], metrics["skipped"]) == (1, 0)
    assert_equal(state_of(actor, "critic"), critic)
    assert any(np.any(leaf != other) for leaf, other in zip(state_of(actor), policy, strict=True))


def test_sums_without_trained_tokens_from_a_hybrid_worker_move_nothing(small):
    learner = small.learner(small.config())
    empty = packing.empty((8, small.row_tokens))
    packed = packing.pack(small.examples(3), learner.config.trainer)
    extra = {"advantages": np.ones(empty.tokens.shape, np.float32)}
    learner.train(packed, 0.01, [extra], [range(1)])
    before = leaves(learner.state)
    packed = dataclasses.replace(packed, micro_batches=(empty, empty))
    sums, report = learner.sums(step.POLICY, learner.params, packed, [extra] * 2, [1])
    received = step.Received([np.asarray(leaf) for leaf in jax.tree.leaves(sums)], report)
    metrics = learner.train(packed, 0.01, [extra] * 2, [range(2)], range(1), lambda seconds: iter([received]))
    assert metrics["skipped"] == 1
    assert_equal(leaves(learner.state), before)


def test_a_batch_without_any_trained_token_is_still_refused(small, start_trainer):
    groups = {"coordinator": config_lib.CoordinatorConfig(groups_per_step=3)}
    actor = start_trainer(algorithm=config_lib.AlgorithmConfig(minibatches=3), **groups)
    with pytest.raises(protocols.LibraError, match=r"no token of the batch's .* sequences is under the loss mask"):
        actor.train_step(emptied(doubles.batch(small), range(3)))
