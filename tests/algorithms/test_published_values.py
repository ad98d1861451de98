"""Losses and advantages against the numbers of verl 0.9.1 and of methods' authors (`published_values.py`)."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import published_values
import pytest

from libra_jax import config as config_lib
from libra_jax.algorithms import advantages, batch_statistics, contract, corrections, estimators, losses, objective
from libra_jax.training import critic

CASES = json.loads(published_values.FILE.read_text())


def _statistics(config, fields):
    """Statistics of the loss over all trained tokens, spread over [B, T]."""
    found, mask = batch_statistics.find(config), np.array(fields["mask"]) > 0
    if found is None:
        return {}
    arrays = {name: np.array(fields[name])[mask] for name in ("log_probs", "behaviour", "advantages")}
    tokens = batch_statistics.BatchTokens(
        arrays["log_probs"], arrays["log_probs"] - arrays["behaviour"], arrays["advantages"]
    )
    spread = {}
    for name, value in found(tokens, np.random.default_rng(0)).items():
        spread[name] = np.zeros(mask.shape)
        spread[name][mask] = value
    assert tuple(spread) == batch_statistics.NAMES[config.loss]
    return spread


def _objective(config, fields, log_probs, rows=slice(None), statistics=None):
    lengths, tokens = np.array(fields["lengths"]), np.arange(published_values.TOKENS)
    statistics = _statistics(config, fields) if statistics is None else statistics
    return objective.policy_objective(
        config,
        log_probs_BxT=log_probs[rows],
        behaviour_log_probs_BxT=jnp.array(fields["behaviour"])[rows],
        advantages_BxT=jnp.array(fields["advantages"])[rows],
        mask_BxT=jnp.array(fields["mask"])[rows] > 0,
        segments_BxT=jnp.array(tokens < lengths[:, None], jnp.int32)[rows],
        max_segments=1,
        statistics={name: jnp.array(value)[rows] for name, value in statistics.items()},
    )


@pytest.mark.parametrize("name", published_values.LOSSES)
@pytest.mark.parametrize("case", CASES, ids=["seed0", "seed1"])
def test_losses_and_gradients_are_the_published_ones(case, name):
    config = config_lib.AlgorithmConfig(**published_values.LOSSES[name][2])
    wanted, fields = case["losses"][name], case["batch"]
    with jax.enable_x64(True):
        log_probs = jnp.array(fields["log_probs"])

        def mean(log_probs):
            sums = _objective(config, fields, log_probs)
            return sums.loss_sum / sums.count

        loss, gradient = jax.value_and_grad(mean)(log_probs)
    assert float(loss) == pytest.approx(wanted["loss"], abs=1e-6)
    np.testing.assert_allclose(gradient, wanted["gradient"], atol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=["seed0", "seed1"])
def test_the_critics_loss_is_the_published_one(case):
    fields, mask = case["batch"], np.array(case["batch"]["mask"]) > 0
    batch = {
        "mask": jnp.array(mask),
        "returns": jnp.array(case["advantages"]["gae_returns"], jnp.float32),
        "values": jnp.array(fields["behaviour"], jnp.float32),
    }
    sums = critic.loss({}, batch, values=lambda params, batch: jnp.array(fields["values"], jnp.float32), clip=0.3)
    assert sums.loss_sum / sums.count == pytest.approx(case["advantages"]["value_loss"][0][0], rel=1e-5)
    fraction = sums.metrics["clip_fraction"]
    assert fraction[0] / fraction[1] == pytest.approx(case["advantages"]["clip_fraction"][0][0], abs=1e-6)


@pytest.mark.parametrize("name", published_values.CORRECTIONS)
@pytest.mark.parametrize("case", CASES, ids=["seed0", "seed1"])
def test_importance_weights_are_the_published_ones(case, name):
    fields, config = case["batch"], config_lib.AlgorithmConfig(**published_values.CORRECTIONS[name][1])
    mask = np.array(fields["mask"]) > 0
    segments = np.array(np.arange(published_values.TOKENS) < np.array(fields["lengths"])[:, None], np.int32)
    with jax.enable_x64(True):
        log_ratio = jnp.where(mask, jnp.array(fields["log_probs"]) - jnp.array(fields["behaviour"]), 0.0)
        level = corrections.of_level(log_ratio, mask, segments, config.correction_level, max_segments=1)
        limits = {"cap": config.correction_cap, "floor": config.correction_floor}
        found = np.where(mask, corrections.weights(level, config.correction, **limits), 0.0)
    wanted = np.array(case["corrections"][name])
    if config.correction_level == "geometric":
        found = (found > 0).astype(float)
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert 0 < np.count_nonzero(found) <= mask.sum()


def test_the_effective_sample_size_is_that_of_whole_trajectories():
    fields, config = CASES[0]["batch"], config_lib.AlgorithmConfig()
    with jax.enable_x64(True):
        sums = _objective(config, fields, jnp.array(fields["log_probs"]))
    mask = np.array(fields["mask"])
    weights = np.exp(((np.array(fields["log_probs"]) - np.array(fields["behaviour"])) * mask).sum(axis=1))
    wanted = weights.sum() ** 2 / (len(weights) * (weights**2).sum())
    assert objective.effective_share(sums.metrics) == pytest.approx(wanted, rel=1e-6)
    assert 0 < wanted < 1


@pytest.mark.parametrize("name", ["bapo", "clip_cov", "kl_cov", "gmpo"])
def test_a_split_of_the_batch_adds_up_to_the_same_sums(name):
    config = config_lib.AlgorithmConfig(**published_values.LOSSES[name][2])
    fields = CASES[0]["batch"]
    statistics = _statistics(config, fields)
    assert name == "gmpo" or any(np.any(value) for value in statistics.values())
    with jax.enable_x64(True):
        log_probs = jnp.array(fields["log_probs"])
        whole = _objective(config, fields, log_probs).loss_sum
        parts = [
            _objective(config, fields, log_probs, rows, statistics).loss_sum for rows in (slice(2), slice(2, None))
        ]
        added = float(parts[0]) + float(parts[1])
    assert added == pytest.approx(float(whole), abs=1e-12)


@pytest.mark.parametrize("case", CASES, ids=["seed0", "seed1"])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "reinforce_plus_plus"])
def test_advantages_are_the_published_ones(case, name):
    fields = case["batch"]
    found = estimators.compute(
        config_lib.AlgorithmConfig(advantage=name),
        rewards_N=np.array(fields["rewards"]),
        groups_N=np.array(fields["groups"]),
        mask_NxT=np.array(fields["mask"]),
    )
    np.testing.assert_allclose(found, case["advantages"][name], atol=2e-6)


@pytest.mark.parametrize("case", CASES, ids=["seed0", "seed1"])
def test_generalised_advantages_are_the_published_ones(case):
    fields, mask = case["batch"], np.array(case["batch"]["mask"])
    rewards = advantages.spread_rewards(np.array(fields["rewards"], np.float32), mask)
    values = jnp.array(fields["values"], jnp.float32)
    found, returns = advantages.gae(rewards, values, mask, discount=0.97, trace_decay=0.9)
    np.testing.assert_allclose(advantages.whiten(found, mask), case["advantages"]["gae_whitened"], atol=2e-6)
    np.testing.assert_allclose(returns, case["advantages"]["gae_returns"], atol=2e-6)


@pytest.mark.parametrize("case", CASES, ids=["seed0", "seed1"])
def test_advantages_of_truncated_rollouts_are_the_authors(case):
    fields, lengths = case["batch"], np.array(published_values.WINDOW_LENGTHS)
    arguments = {"trace_decay": 0.9, "length_scale": 2.0, "ignored_tokens": 2}
    config, cut_N = (
        config_lib.AlgorithmConfig(advantage="egae", advantage_arguments=arguments),
        lengths == lengths.max(),
    )
    mask = np.arange(published_values.TOKENS) < lengths[:, None]
    given = {"rewards_N": np.array(fields["rewards"]), "mask_NxT": mask, "values_NxT": np.array(fields["values"])}
    found = estimators.compute(config, **given, groups_N=np.array(fields["groups"]), truncated_N=cut_N)
    np.testing.assert_allclose(found, case["truncated"]["advantages"], atol=2e-6)
    returns = estimators.value_targets(config, **given)
    np.testing.assert_allclose(np.where(cut_N[:, None], 0, returns), case["truncated"]["returns"], atol=2e-6)


@pytest.mark.parametrize("name", published_values.BASELINES)
@pytest.mark.parametrize("case", CASES, ids=["seed0", "seed1"])
def test_baselines_of_minimum_variance_are_the_authors(case, name):
    fields, arguments = case["batch"], published_values.BASELINES[name][1]
    config = config_lib.AlgorithmConfig(advantage="dr_grpo", baseline="minimum_variance", baseline_arguments=arguments)
    mask, rewards = np.array(fields["mask"]), np.array(fields["rewards"])
    log_ratio = np.where(mask, np.array(fields["log_probs"]) - np.array(fields["behaviour"]), 0.0)
    scores = estimators.Scores(np.array(fields["norms"]), log_ratio.sum(axis=1))
    groups = np.array(fields["groups"])
    found = estimators.compute(config, rewards_N=rewards, groups_N=groups, mask_NxT=mask, scores=scores)
    wanted = (rewards - np.array(case["baselines"][name]))[:, None] * mask
    np.testing.assert_allclose(found, wanted, atol=2e-6)


def test_what_the_built_in_functions_compute_keeps_the_contract_of_users_functions():
    for name in set(config_lib.ADVANTAGES) - set(config_lib.CRITIC_ADVANTAGES):
        contract.check_advantage(config_lib.AlgorithmConfig(advantage=name))
    for name in config_lib.LOSSES:
        if name not in config_lib.BATCH_LOSSES:
            contract.check_loss(config_lib.AlgorithmConfig(loss=name))
    assert set(losses.LossInputs._fields) >= {"log_probs_BxT", "log_ratio_BxT", "segments_BxT"}
