"""Advantages against the published formulas, written out over trajectories in float64.

Letters: N trajectories, T tokens.
"""

import math
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.algorithms import advantages, estimators

SEEDS = st.integers(0, 10**6)
GROUP_ESTIMATORS = {name: jax.jit(getattr(advantages, name)) for name in ("grpo", "dr_grpo", "rloo")}
REINFORCE_PLUS_PLUS = jax.jit(advantages.reinforce_plus_plus)
REINFORCE_PLUS_PLUS_BASELINE = jax.jit(advantages.reinforce_plus_plus_baseline)
GAE = jax.jit(advantages.gae)
WITHOUT_CRITIC = [name for name in config_lib.ADVANTAGES if name not in (*config_lib.CRITIC_ADVANTAGES, "distillation")]


def draw(seed):
    """Rewards, group ids (unordered, any integers, singletons among them), mask, token values and token rewards."""
    rng = np.random.default_rng(seed)
    rewards = rng.normal(size=8)
    groups = rng.choice([-3, 7, 100, 8, 2], size=8)
    mask = (rng.random((8, 6)) < 0.7) * 1
    mask[rng.integers(8)] = 0
    mask[0, 2:4] = 1
    return rewards, groups, mask, rng.normal(size=(8, 6)), rng.normal(size=(8, 6))


def members(groups, index):
    return [other for other in range(len(groups)) if groups[other] == groups[index]]


def group_reference(name, rewards, groups):
    result = []
    for i, reward in enumerate(rewards):
        own = [rewards[j] for j in members(groups, i)]
        others = [rewards[j] for j in members(groups, i) if j != i]
        if not others:
            result.append(reward)
        elif name == "grpo":
            result.append((reward - statistics.fmean(own)) / (statistics.stdev(own) + 1e-6))
        elif name == "dr_grpo":
            result.append(reward - statistics.fmean(own))
        else:
            result.append(reward - statistics.fmean(others))
    return result


def trained(mask, i):
    return [t for t in range(mask.shape[1]) if mask[i, t]]


def whiten_reference(per_token):
    """Whitens {(i, t): value} over all its entries."""
    values = list(per_token.values())
    mean, variance = statistics.fmean(values), statistics.variance(values)
    return {key: (value - mean) / math.sqrt(variance + 1e-8) for key, value in per_token.items()}


def dense(per_token, shape):
    array = np.zeros(shape)
    for key, value in per_token.items():
        array[key] = value
    return array


def returns_reference(token_rewards, mask, discount):
    """Discounted sums, written forwards: G at the k-th trained token is Σ_j discount^(j-k) r at the j-th."""
    result = {}
    for i in range(len(mask)):
        steps = trained(mask, i)
        for k, t in enumerate(steps):
            result[i, t] = sum(discount ** (j - k) * token_rewards[i, u] for j, u in enumerate(steps) if j >= k)
    return result


def gae_reference(token_rewards, values, mask, discount, decay):
    """Advantages as the sum over l of (discount decay)^l δ_{t+l}."""
    result = {}
    for i in range(len(mask)):
        steps = trained(mask, i)
        v = [values[i, t] for t in steps] + [0.0]
        deltas = [token_rewards[i, t] + discount * v[k + 1] - v[k] for k, t in enumerate(steps)]
        for k, t in enumerate(steps):
            result[i, t] = sum((discount * decay) ** (j - k) * deltas[j] for j in range(k, len(steps)))
    return result


@settings(max_examples=20)
@given(SEEDS)
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_group_advantages_equal_the_formula(name, seed):
    rewards, groups, *_ = draw(seed)
    with jax.enable_x64(True):
        result = GROUP_ESTIMATORS[name](jnp.asarray(rewards), jnp.asarray(groups))
    np.testing.assert_allclose(result, group_reference(name, rewards, groups), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", [*GROUP_ESTIMATORS, "reinforce_plus_plus_baseline"])
def test_group_advantages_of_16k_trajectories_hold_no_array_of_all_pairs(name):
    count = 1 << 14
    rng = np.random.default_rng(0)
    rewards, groups = rng.normal(size=count).astype(np.float32), rng.integers(-9, 2000, count).astype(np.int32)
    mask = () if name in GROUP_ESTIMATORS else (np.ones((count, 1), bool),)
    program = jax.jit(getattr(advantages, name)).lower(rewards, groups, *mask).compile()
    assert program.memory_analysis().temp_size_in_bytes < 100 * 4 * count
    if name in GROUP_ESTIMATORS:
        expected = np.zeros(count)
        for group in np.unique(groups):
            (inside,) = np.nonzero(groups == group)
            expected[inside] = group_reference(name, rewards[inside].astype(float), groups[inside])
        np.testing.assert_allclose(program(rewards, groups), expected, rtol=1e-5, atol=1e-6)


@settings(max_examples=15)
@given(SEEDS, st.sampled_from([1.0, 0.9]))
def test_reinforce_plus_plus_equals_the_formula(seed, discount):
    _, _, mask, _, token_rewards = draw(seed)
    with jax.enable_x64(True):
        result = REINFORCE_PLUS_PLUS(jnp.asarray(token_rewards), jnp.asarray(mask), discount=discount)
    expected = whiten_reference(returns_reference(token_rewards, mask, discount))
    np.testing.assert_allclose(result, dense(expected, mask.shape), rtol=1e-9, atol=1e-11)


@settings(max_examples=15)
@given(SEEDS)
def test_reinforce_plus_plus_baseline_equals_the_formula(seed):
    rewards, groups, mask, *_ = draw(seed)
    with jax.enable_x64(True):
        result = REINFORCE_PLUS_PLUS_BASELINE(jnp.asarray(rewards), jnp.asarray(groups), jnp.asarray(mask))
    centred = group_reference("dr_grpo", rewards, groups)
    expected = whiten_reference({(i, t): centred[i] for i in range(len(rewards)) for t in trained(mask, i)})
    np.testing.assert_allclose(result, dense(expected, mask.shape), rtol=1e-9, atol=1e-11)


@settings(max_examples=15)
@given(SEEDS, st.sampled_from([(1.0, 1.0), (0.95, 0.9), (1.0, 0.0)]))
def test_gae_equals_the_formula(seed, factors):
    _, _, mask, values, token_rewards = draw(seed)
    with jax.enable_x64(True):
        result, returns = GAE(
            *map(jnp.asarray, (token_rewards, values, mask)), discount=factors[0], trace_decay=factors[1]
        )
    expected = dense(gae_reference(token_rewards, values, mask, *factors), mask.shape)
    np.testing.assert_allclose(result, expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(returns, np.where(mask, expected + values, 0), rtol=1e-10, atol=1e-12)


@settings(max_examples=10)
@given(SEEDS, st.sampled_from([(1.0, 1.0), (0.95, 0.9)]))
def test_egae_equals_the_formula_whatever_stands_at_untrained_tokens(seed, factors):
    rewards, groups, mask, values, _ = draw(seed)
    (discount, decay), scale, ignored = factors, 0.7, 2
    cut = np.arange(8) % 2 == 0
    arguments = {"discount": discount, "trace_decay": decay, "length_scale": scale, "ignored_tokens": ignored}
    result = estimators.compute(
        config_lib.AlgorithmConfig(advantage="egae", advantage_arguments={**arguments, "bound": 0.9}),
        rewards_N=np.where(cut, 99.0, rewards),  # no reward of a truncated rollout counts
        groups_N=groups,
        mask_NxT=mask,
        values_NxT=np.where(mask, values, np.nan),
        truncated_N=cut,
    )
    expected = {}
    for i in range(8):
        steps = trained(mask, i)
        length = len(steps) + (len(steps) // 2 if cut[i] else 0)
        own = max(decay, 1 - 1 / (scale * max(length, 1)))
        v = [values[i, t] for t in steps]
        after = [*v[1:], v[-1] if cut[i] else 0.0] if steps else []
        deltas = [discount * after[k] - v[k] for k in range(len(steps))]
        if steps and not cut[i]:
            deltas[-1] += rewards[i]
        for k, t in enumerate(steps[: len(steps) - ignored] if cut[i] else steps):
            expected[i, t] = sum((discount * own) ** (j - k) * deltas[j] for j in range(k, len(steps)))
    expected = {key: np.clip(value, -0.9, 0.9) for key, value in whiten_reference(expected).items()}
    np.testing.assert_allclose(result, dense(expected, mask.shape), atol=1e-5)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("reward", [0.1, 0.7, 1.0, 1e3, -3.3e5])
def test_equal_rewards_of_a_group_teach_nothing_despite_rounding(name, reward):
    for size in (2, 3, 7, 14):
        rewards = jnp.asarray([reward] * size + [5.0, 6.0] * ((16 - size) // 2 + 1), jnp.float32)[:16]
        groups = jnp.asarray([4] * size + [9] * (16 - size))
        assert np.max(np.abs(GROUP_ESTIMATORS[name](rewards, groups)[:size])) < 1e-6


@pytest.mark.parametrize("reward", [1.0, 0.1, -37.7])
def test_distillation_of_equal_rewards_is_the_penalty_alone(reward):
    kl = np.random.default_rng(0).normal(0.3, 1.0, (8, 2048)).astype(np.float32)
    result = estimators.compute(
        config_lib.AlgorithmConfig(
            advantage="distillation",
            advantage_arguments={"reward_weight": 1.0},
            teacher="http://host:1/v1",
            kl_coefficient=0.7,
            kl_in_reward=True,
            kl_estimator="k1",
        ),
        rewards_N=np.full(8, reward),
        groups_N=np.zeros(8, int),
        mask_NxT=np.ones(kl.shape),
        kl_NxT=kl,
    )
    np.testing.assert_allclose(result, -0.7 * kl, atol=1e-6)


def float32_mean(inputs):
    """A user's baseline: the mean of all rewards, summed one by one in float32."""
    return jnp.broadcast_to(jnp.cumsum(inputs.rewards_N)[-1] / 7, inputs.rewards_N.shape)


@settings(max_examples=60)
@given(
    st.sampled_from([(name, "mean") for name in WITHOUT_CRITIC] + [("reinforce_plus_plus_baseline", "own")]),
    st.floats(0.01, 1e6),
    st.booleans(),
    st.lists(st.sampled_from([-1, 0, 1]), min_size=7, max_size=7),
    st.booleans(),
)
def test_rewards_that_differ_by_rounding_alone_teach_nothing(estimator, size, negative, ulps, penalised):
    advantage, baseline = estimator
    reward = np.float32(-size if negative else size)
    # As user's sums give them: some a unit of float32 higher or lower.
    rewards = np.array([np.nextafter(reward, np.float32(ulp * np.inf)) if ulp else reward for ulp in ulps], np.float32)
    name = f"{__name__}:float32_mean" if baseline == "own" else baseline
    # A policy that is its reference: the estimates of the KL are float32's rounding of zero.
    kl = np.random.default_rng(len(ulps)).normal(0, 1e-9, (7, 4))
    result = estimators.compute(
        config_lib.AlgorithmConfig(advantage=advantage, baseline=name, kl_coefficient=1.0, kl_in_reward=penalised),
        rewards_N=rewards,
        groups_N=np.zeros(7, int),
        mask_NxT=np.ones((7, 4)),
        kl_NxT=kl,
    )
    # Of estimators that divide by no deviation, what is left is smaller than the rewards' own rounding.
    np.testing.assert_allclose(result, 0, atol=1e-4 + 1e-6 * size * (advantage in ("dr_grpo", "rloo", "opo")))
    assert protocols.equal_rewards(rewards.tolist())


@pytest.mark.parametrize(("difference", "equal"), [(0.9, False), (0.6, False), (0.125, True), (0.0, True)])
def test_rewards_that_differ_by_more_units_than_sums_round_are_unequal(difference, equal):
    assert protocols.equal_rewards([1e6, 1e6 + difference]) == equal


@settings(max_examples=40)
@given(SEEDS, st.sampled_from(["grpo", "reinforce_plus_plus_baseline"]), st.sampled_from([0.0, 1.0, 1e3]))
def test_small_differences_of_rewards_still_teach(seed, name, offset):
    rng = np.random.default_rng(seed)
    rewards = offset + rng.integers(0, 2, 7) * max(1e-3, 1e-4 * offset)
    result = estimators.compute(
        config_lib.AlgorithmConfig(advantage=name),
        rewards_N=rewards,
        groups_N=np.zeros(7, int),
        mask_NxT=np.ones((7, 1)),
    )[:, 0]
    spread = statistics.stdev(rewards)
    expected = (rewards - rewards.mean()) / (spread + 1e-6 if name == "grpo" else math.sqrt(spread**2 + 1e-8))
    np.testing.assert_allclose(result, expected, atol=5e-3)


def test_whitening_gives_mean_zero_and_variance_one_over_the_mask_only():
    rng = np.random.default_rng(0)
    values, mask = rng.normal(3.0, 2.0, (4, 9)).astype(np.float32), rng.random((4, 9)) < 0.5
    values[~mask] = np.nan
    result = np.asarray(advantages.whiten(jnp.asarray(values), jnp.asarray(mask)))
    np.testing.assert_allclose(result[mask].mean(), 0, atol=1e-6)
    np.testing.assert_allclose(result[mask].var(ddof=1), 1, rtol=1e-5)
    assert np.all(result[~mask] == 0)


@pytest.mark.parametrize("ones", [0, 1])
def test_whitening_fewer_than_two_tokens_gives_zero(ones):
    mask = np.zeros((2, 3))
    mask[0, :ones] = 1
    assert np.all(np.asarray(advantages.whiten(jnp.full((2, 3), 7.0), jnp.asarray(mask))) == 0)


@settings(max_examples=20)
@given(
    SEEDS,
    st.sampled_from([name for name in WITHOUT_CRITIC if name != "opo"]),
    st.booleans(),
)
def test_compute_equals_the_formula_with_and_without_kl_in_the_reward(seed, name, kl_in_reward):
    rewards, groups, mask, kl, _ = draw(seed)
    config = config_lib.AlgorithmConfig(advantage=name, kl_coefficient=0.3, kl_in_reward=kl_in_reward)
    kl = np.where(mask, kl, np.nan)  # what stands at untrained tokens must not matter
    result = estimators.compute(
        config, rewards_N=rewards, groups_N=groups, mask_NxT=mask, kl_NxT=kl if kl_in_reward else None
    )
    penalties = 0.3 * np.where(mask, kl, 0) * kl_in_reward
    every = [(i, t) for i in range(len(rewards)) for t in trained(mask, i)]
    if name == "reinforce_plus_plus":
        token_rewards = -penalties
        for i in range(len(rewards)):
            if trained(mask, i):
                token_rewards[i, trained(mask, i)[-1]] += rewards[i]
        expected = whiten_reference(returns_reference(token_rewards, mask, 1.0))
    else:
        scores = rewards - penalties.sum(axis=1)
        baseline = name == "reinforce_plus_plus_baseline"
        per_trajectory = group_reference("dr_grpo" if baseline else name, scores, groups)
        expected = {(i, t): per_trajectory[i] for i, t in every}
        expected = whiten_reference(expected) if baseline else expected
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, dense(expected, mask.shape), rtol=2e-3, atol=2e-4)


def test_the_baseline_of_minimum_variance_has_the_least_squared_gradients():
    rng = np.random.default_rng(0)
    gradients, log_weights, rewards = rng.normal(size=(6, 9)), rng.normal(size=6), rng.normal(size=6)
    config = config_lib.AlgorithmConfig(advantage="dr_grpo", baseline="minimum_variance")
    found = estimators.compute(
        config,
        rewards_N=rewards,
        groups_N=np.zeros(6, int),
        mask_NxT=np.ones((6, 1)),
        scores=estimators.Scores(np.linalg.norm(gradients, axis=1), log_weights),
    )[:, 0]
    (baseline,) = {round(float(item), 5) for item in rewards - found}

    def squares(b):
        return np.square(np.exp(log_weights)[:, None] * gradients * (rewards - b)[:, None]).sum()

    assert squares(baseline) < min(squares(baseline - 1e-3), squares(baseline + 1e-3), squares(rewards.mean()))


@pytest.mark.parametrize("advantage", config_lib.BASELINE_ADVANTAGES)
@pytest.mark.parametrize("baseline", config_lib.BASELINES)
@pytest.mark.parametrize("norms", [[1.0, 2.0, 3.0, 0.0], [0.0] * 4, [1.0, np.nan, 1.0, 1.0], [np.inf, 1.0, 1.0, 1.0]])
def test_a_baseline_leaves_equal_rewards_nothing_whatever_the_norms(advantage, baseline, norms):
    if advantage == "dr_grpo" and baseline in ("leave_one_out", "length"):
        with pytest.raises(protocols.ConfigError, match=r"baseline: dr_grpo with .* is algorithm.advantage=(rloo|opo)"):
            config_lib.AlgorithmConfig(advantage=advantage, baseline=baseline)
        return
    result = estimators.compute(
        config_lib.AlgorithmConfig(advantage=advantage, baseline=baseline),
        rewards_N=np.array([0.7] * 4 + [1.0, 0.0]),
        groups_N=np.array([0] * 4 + [1, 2]),
        mask_NxT=np.array([[1, 0], [1, 1], [1, 1], [1, 1], [1, 1], [0, 0]]),
        scores=estimators.Scores(np.array([*norms, 5.0, 0.0], np.float32), np.zeros(6, np.float32)),
    )
    assert np.isfinite(result).all()
    if advantage != "reinforce_plus_plus_baseline":  # whitening moves the mean of the batch to 0
        np.testing.assert_allclose(result, [[0, 0]] * 4 + [[1, 1], [0, 0]], atol=1e-6)


def test_group_ids_beyond_32_bits_are_told_apart():
    ids = np.array([2**40, 2**40, 2**40 + 2**32, 2**40 + 2**32])
    result = estimators.compute(
        config_lib.AlgorithmConfig(advantage="dr_grpo"),
        rewards_N=np.array([1.0, 0.0, 10.0, 10.0]),
        groups_N=ids,
        mask_NxT=np.ones((4, 1)),
    )
    np.testing.assert_allclose(result[:, 0], [0.5, -0.5, 0, 0])


@pytest.mark.parametrize("name", WITHOUT_CRITIC)
def test_trajectories_without_trained_tokens_have_no_advantage_and_break_nothing(name):
    result = estimators.compute(
        config_lib.AlgorithmConfig(advantage=name),
        rewards_N=np.array([1.0, 0.0, 3.0]),
        groups_N=np.array([0, 0, 1]),
        mask_NxT=np.zeros((3, 5)),
    )
    assert result.shape == (3, 5)
    assert np.all(result == 0)


def test_a_reward_that_is_not_finite_is_refused_by_position():
    with pytest.raises(protocols.LibraError, match=r"rewards_N\[1\] is nan"):
        estimators.compute(
            config_lib.AlgorithmConfig(),
            rewards_N=np.array([0.0, np.nan]),
            groups_N=np.array([0, 0]),
            mask_NxT=np.ones((2, 1)),
        )


def test_kl_in_the_reward_without_estimates_is_refused_by_field():
    with pytest.raises(protocols.ConfigError, match="kl_in_reward"):
        estimators.compute(
            config_lib.AlgorithmConfig(kl_in_reward=True, kl_coefficient=0.1),
            rewards_N=np.zeros(1),
            groups_N=np.zeros(1, int),
            mask_NxT=np.ones((1, 1)),
        )


@pytest.mark.parametrize(
    ("rewards", "groups", "words"),
    [
        (np.zeros(3), np.zeros(2, int), "groups_N has shape"),
        (np.zeros(2), np.zeros(2), "groups_N must hold integers"),
        (np.zeros(2, int), np.zeros(2, int), "rewards_N must hold floating-point"),
        (np.zeros((2, 1)), np.zeros((2, 1), int), "rewards_N must have 1 dimensions"),
    ],
)
def test_wrong_shapes_and_dtypes_are_refused_by_name(rewards, groups, words):
    with pytest.raises(protocols.LibraError, match=words):
        advantages.grpo(jnp.asarray(rewards), jnp.asarray(groups))
