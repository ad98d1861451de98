"""Losses and advantages of a user: trained with, and refused with the property that they break."""

import sys

import numpy as np
import pytest
import trainer_doubles

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.algorithms import contract, estimators
from libra_jax.build import preflight
from libra_jax.data import batch as batch_lib

MODULE = """
import jax
import jax.numpy as jnp


def surrogate(inputs):
    ratio = jnp.exp(jnp.clip(inputs.log_ratio_BxT, -20.0, 20.0))
    bounded = jnp.clip(ratio, 1 - inputs.clip_low, 1 + inputs.clip_high)
    return jnp.maximum(-inputs.advantages_BxT * ratio, -inputs.advantages_BxT * bounded)


def leave_one_out(inputs):
    same_NxN = (inputs.groups_N[:, None] == inputs.groups_N) & ~jnp.eye(len(inputs.groups_N), dtype=bool)
    others_N = jnp.maximum(same_NxN.sum(axis=1), 1)
    return inputs.rewards_N - (same_NxN * inputs.rewards_N).sum(axis=1) / others_N


def half(inputs, share=0.5):
    return jnp.full(inputs.rewards_N.shape, share)


def over_the_batch(inputs):
    return -inputs.log_probs_BxT * (inputs.advantages_BxT - inputs.advantages_BxT.mean())


def over_the_row(inputs):
    return -inputs.log_probs_BxT * inputs.advantages_BxT.mean(axis=1, keepdims=True)


def in_python(inputs):
    return inputs.log_probs_BxT if inputs.advantages_BxT[0, 0] > 0 else -inputs.log_probs_BxT


def summed(inputs):
    return jnp.sum(inputs.log_probs_BxT)


def constant(inputs):
    return jax.lax.stop_gradient(inputs.log_probs_BxT)


def infinite(inputs):
    return inputs.log_probs_BxT / 0.0


def raising(inputs):
    raise ValueError("not today")


def first_wins(inputs):
    return jnp.zeros_like(inputs.rewards_N).at[0].set(1.0)


def by_length(inputs):
    return inputs.rewards_N / inputs.mask_NxT.shape[1]
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_functions.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_functions", None)


def test_a_users_copy_of_a_built_in_function_takes_the_same_step(own, small, start_trainer):
    batch, found = trainer_doubles.batch(small), []
    for names in (
        {"loss": "clipped", "advantage": "rloo"},
        {"loss": "own_functions:surrogate", "advantage": "own_functions:leave_one_out"},
    ):
        actor = start_trainer(algorithm=config_lib.AlgorithmConfig(**names))
        metrics = actor.train_step(batch)
        found.append((metrics["loss"], trainer_doubles.params(actor)))
    assert found[1][0] == pytest.approx(found[0][0], abs=1e-6)
    for leaf, wanted in zip(found[1][1], found[0][1], strict=True):
        np.testing.assert_allclose(leaf, wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("over_the_batch", "must give a row the same loss in every micro-batch"),
        ("over_the_row", "must give a trajectory the same loss in every row"),
        ("in_python", "uses the value of an array in Python"),
        ("summed", r"must return the loss of each token, \[B, T\] = \(4, 16\), not an array of shape \(\)"),
        ("constant", r"must depend on inputs.log_probs_BxT or log_ratio_BxT"),
        ("infinite", "must be finite on every trained token"),
        ("raising", r"raised ValueError: not today \(.*own_functions.py, line \d+\)"),
        ("missing", "own_functions has no 'missing'"),
    ],
)
def test_a_loss_that_breaks_the_contract_is_refused_with_the_property(own, name, sentence):
    algorithm = config_lib.AlgorithmConfig(loss=f"own_functions:{name}")
    with pytest.raises(protocols.ConfigError, match=rf"config\.algorithm\.loss: .*{sentence}"):
        contract.check(algorithm)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("first_wins", "order of trajectories"), ("by_length", "must not depend on padding"), ("summed", "log_probs_BxT")],
)
def test_an_advantage_that_breaks_the_contract_is_refused_with_the_property(own, name, sentence):
    with pytest.raises(protocols.ConfigError, match=rf"config\.algorithm\.advantage: .*{sentence}"):
        contract.check(config_lib.AlgorithmConfig(advantage=f"own_functions:{name}"))


def test_a_baseline_of_your_own_is_subtracted_and_kept_to_the_contract(own):
    made = config_lib.AlgorithmConfig(
        advantage="grpo", baseline="own_functions:half", baseline_arguments={"share": 0.25}
    )
    contract.check(made)
    rewards, groups = np.array([1.0, 0.0, 1.0, 1.0, 3.0]), np.array([0, 0, 1, 1, 2])
    found = estimators.compute(made, rewards_N=rewards, groups_N=groups, mask_NxT=np.ones((5, 1)))[:, 0]
    # Equal rewards have no deviation to divide by, and a group of one no comparison.
    np.testing.assert_allclose(found, [0.75 / 0.5**0.5, -0.25 / 0.5**0.5, 0.75, 0.75, 3.0], rtol=1e-5)
    for name, sentence in (
        ("first_wins", "order of traj"),
        ("by_length", "depend on padding"),
        ("missing", "has no 'm"),
    ):
        with pytest.raises(protocols.ConfigError, match=rf"config\.algorithm\.baseline: .*{sentence}"):
            contract.check(config_lib.AlgorithmConfig(baseline=f"own_functions:{name}"))


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        ({"baseline": "minimal_variance"}, r"'minimal_variance' is not one of .* did you mean 'minimum_variance'"),
        (
            {"advantage": "rloo", "baseline": "length"},
            r"length has no effect with algorithm.advantage=rloo",
        ),
        (
            {"baseline": "length", "baseline_arguments": {"cap": 1}},
            r"baseline_arguments: .*length takes no argument .* it takes none",
        ),
        ({"baseline": "minimum_variance", "baseline_arguments": {"caps": 1}}, r"baseline_arguments: .*'caps'"),
    ],
)
def test_a_baseline_that_means_nothing_is_refused_with_the_fix(algorithm, sentence):
    with pytest.raises(protocols.ConfigError, match=sentence):
        contract.check(config_lib.AlgorithmConfig(**algorithm))


def test_hybrid_workers_and_gradients_of_single_rollouts_are_refused_together():
    groups = {"elastic": {"hybrid": 1}, "rollout": {"tensor_parallel": (1, 1)}}
    with pytest.raises(protocols.ConfigError, match=r"elastic.hybrid: training sides .* set elastic.hybrid=0"):
        config_lib.parse(config_lib.RunConfig, {"algorithm": {"baseline": "minimum_variance"}, **groups})


def test_the_trainer_refuses_it_before_the_first_step(own, start_trainer):
    with pytest.raises(protocols.ConfigError, match="breaks the contract"):
        start_trainer(algorithm=config_lib.AlgorithmConfig(loss="own_functions:over_the_batch"))


def test_an_unknown_name_is_refused_with_the_form_of_an_own_function():
    with pytest.raises(protocols.ConfigError, match=r"'cispp' is not one of .* did you mean 'cispo'.*package.module"):
        config_lib.AlgorithmConfig(loss="cispp")
    with pytest.raises(protocols.ConfigError, match=r"loss_arguments: .*'sharpness'"):
        contract.check(config_lib.AlgorithmConfig(loss="sapo", loss_arguments={"sharpness": 2.0}))


@pytest.mark.parametrize("loss", config_lib.BATCH_LOSSES)
def test_statistics_of_an_update_do_not_depend_on_its_split(small, loss):
    found = []
    for rows in (8, 1):
        config = small.config(
            trainer={"rows_per_micro_batch": rows},
            algorithm=config_lib.AlgorithmConfig(
                loss=loss, minibatches=2, epochs=2, loss_arguments={} if loss == "bapo" else {"share": 0.3}
            ),
            coordinator=config_lib.CoordinatorConfig(groups_per_step=3, group_size=4),
            optimizer=config_lib.OptimizerConfig(name="sgd", clip_norm=0.0),
        )
        learner = small.learner(config)
        prepared = batch_lib.prepare(config, trainer_doubles.batch(small), small.shape)
        metrics = learner.train(prepared.packed, 0.05, prepared.extras, prepared.packed.minibatches)
        found.append((len(prepared.packed.micro_batches), metrics, learner))
    (few, metrics, _), (many, others, _) = found
    assert few < many
    assert others["loss"] == pytest.approx(metrics["loss"], abs=1e-5)
    assert others["update/4/loss"] == pytest.approx(metrics["update/4/loss"], abs=1e-5)


def test_a_dry_run_refuses_a_function_that_does_not_exist_or_take_its_arguments(own):
    for algorithm, sentence in (
        ({"loss": "own_functions:missing"}, "algorithm.loss: own_functions has no 'missing'"),
        ({"advantage": "own_functions:leave_one_out", "advantage_arguments": {"k": 1}}, "advantage_arguments: .*'k'"),
    ):
        config = config_lib.RunConfig(algorithm=config_lib.AlgorithmConfig(**algorithm))
        with pytest.raises(protocols.ConfigError, match=sentence):
            preflight.validate(config, need_weights=False)


def test_an_argument_that_a_config_file_cannot_hold_is_refused():
    algorithm = config_lib.AlgorithmConfig(advantage="own_functions:x", advantage_arguments={"k": object()})
    with pytest.raises(protocols.ConfigError, match=r"advantage_arguments: must be numbers, texts, lists or mappings"):
        contract.check(algorithm)
