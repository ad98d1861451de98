"""Steps that begin on some groups before the others are there take the update of the whole batch."""

import dataclasses

import jax
import numpy as np
import pytest
import trainer_doubles as doubles

from libra_jax import config as config_lib
from libra_jax import protocols

ONE, EIGHT = {}, {"data": 2, "fsdp": 2, "tensor": 2}
OPTIMIZER = config_lib.OptimizerConfig(learning_rate=1e-3, eps=1e-6)
STEPS, MOVED = 5, 3


def begun(actor, batch, parts):
    """The batch after the actor has begun on these parts of its groups."""
    for numbers in parts:
        actor.accumulate(batch.of(numbers))
    return dataclasses.replace(batch, begun=tuple(number for numbers in parts for number in numbers))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [ONE, EIGHT], ids=["one device", "eight devices"])
def test_five_streamed_steps_with_a_resize_between_change_parameters_as_whole_batches_do(small, start_trainer, mesh):
    whole, streamed = (
        start_trainer(trainer={"stream": stream, **mesh}, optimizer=OPTIMIZER) for stream in ("off", "group")
    )
    ways = [[(2,), (0,)], [(1,)], [(0, 2)], [(2, 1)], [(1,), (2,)]]
    for version in range(STEPS):
        batch = doubles.batch(small, version, seed=version)
        wanted = whole.train_step(batch)
        given = begun(streamed, batch, ways[version])
        if version == MOVED:  # the sums on the former mesh are gone, and the step computes them again
            streamed.begin_resize(protocols.MeshSizes(1, 2, 2))
            streamed.finish_resize(300.0)
        got = streamed.train_step(given)
        for name in (
            "loss",
            "grad_norm",
            "tokens/processed",
            "groups/without_gradient",
            "advantage/std",
            "kl/behaviour",
        ):
            assert got[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), (version, name)
    assert streamed.policy_version() == STEPS
    for leaf, other in zip(doubles.params(streamed), doubles.params(whole), strict=True):
        np.testing.assert_allclose(leaf, other, atol=1e-6, rtol=0)


def test_a_trainer_that_has_lost_the_sums_or_was_aborted_computes_the_whole_step(small, start_trainer):
    batch = doubles.batch(small)
    wanted = start_trainer(optimizer=OPTIMIZER)
    wanted.train_step(batch)
    actor = start_trainer(optimizer=OPTIMIZER)
    before = doubles.params(actor)
    given = begun(actor, batch, [(0,), (1,)])
    actor.running().learner.abort.set()
    with pytest.raises(protocols.StepAborted):
        actor.train_step(given)
    for leaf, other in zip(doubles.params(actor), before, strict=True):
        np.testing.assert_array_equal(leaf, other)
    begun(actor, batch, [(2,)])  # of a batch that was never formed
    metrics = actor.train_step(given)
    assert metrics["groups/without_gradient"] == wanted_share(batch)
    for leaf, other in zip(doubles.params(actor), doubles.params(wanted), strict=True):
        np.testing.assert_allclose(leaf, other, atol=1e-6, rtol=0)


def test_an_abort_drops_the_sums_of_begun_groups_and_the_step_computes_them_again(small, start_trainer):
    batch, actor = doubles.batch(small), start_trainer(optimizer=OPTIMIZER)
    actor.accumulate(batch.of((0,)))
    actor.running().learner.abort.set()
    with pytest.raises(protocols.StepAborted):
        actor.accumulate(batch.of((1,)))
    assert not actor.running().learner.has_begun
    actor.accumulate(batch.of((1,)))
    actor.train_step(dataclasses.replace(batch, begun=(0, 1)))
    wanted = start_trainer(optimizer=OPTIMIZER)
    wanted.train_step(batch)
    for leaf, other in zip(doubles.params(actor), doubles.params(wanted), strict=True):
        np.testing.assert_allclose(leaf, other, atol=1e-6, rtol=0)


def test_an_abort_while_a_step_computes_lost_sums_aborts_the_step(small, start_trainer, monkeypatch):
    batch, actor = doubles.batch(small), start_trainer(optimizer=OPTIMIZER)
    learner = actor.running().learner
    ready = jax.block_until_ready

    def late(arrays):
        """The abort comes after the last micro-batch of the lost sums was queued."""
        monkeypatch.setattr(jax, "block_until_ready", ready)
        learner.abort.set()
        return ready(arrays)

    monkeypatch.setattr(jax, "block_until_ready", late)
    with pytest.raises(protocols.StepAborted):
        actor.train_step(dataclasses.replace(batch, begun=(0,)))
    assert actor.policy_version() == 0
    actor.train_step(dataclasses.replace(batch, begun=(0,)))
    assert actor.policy_version() == 1


def test_a_streamed_step_without_a_trained_token_ends_with_a_sentence(small, start_trainer):
    batch, actor = doubles.batch(small), start_trainer(trainer={"stream": "group"})
    for trajectory in [one for group in batch.groups for one in group.trajectories]:
        trajectory.disown(0, len(trajectory.token_ids))
    given = begun(actor, batch, [(0,)])
    with pytest.raises(protocols.LibraError, match="no token of the batch's 12 sequences is under the loss mask"):
        actor.train_step(given)


def test_a_resize_counts_the_sums_of_begun_groups_as_held(small, start_trainer):
    actor, batch = start_trainer(trainer=EIGHT), doubles.batch(small)
    actor.train_step(batch)
    estimates = []
    for version in (1, 1):
        estimates.append(actor.begin_resize(protocols.MeshSizes(1, 2, 2)))
        actor.cancel_resize()
        actor.accumulate(doubles.batch(small, version).of((0,)))
    assert estimates[0] == estimates[1]


def wanted_share(batch):
    rewards = [{each.reward for each in group.trajectories} for group in batch.groups]
    return np.mean([len(found) == 1 for found in rewards])


def test_groups_for_another_version_are_refused(small, start_trainer):
    actor = start_trainer()
    with pytest.raises(protocols.LibraError, match="for policy version 1 and the trainer holds 0"):
        actor.accumulate(doubles.batch(small, 1))
    assert not actor.running().learner.has_begun


@pytest.mark.parametrize(
    ("group", "field", "value"),
    [
        ("algorithm", "advantage", "reinforce_plus_plus"),
        ("algorithm", "advantage", "package.module:function"),
        ("algorithm", "epochs", 2),
        ("algorithm", "minibatches", 2),
        ("algorithm", "loss", "clip_cov"),
    ],
)
def test_what_looks_at_the_whole_batch_is_refused_by_name(group, field, value):
    config = config_lib.RunConfig(trainer=config_lib.TrainerConfig(stream="group"))
    with pytest.raises(protocols.ConfigError, match=rf"{group}\.{field}.*trainer\.stream=off"):
        dataclasses.replace(config, algorithm=config_lib.AlgorithmConfig(**{field: value}))
