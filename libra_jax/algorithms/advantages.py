"""Advantages: the reward of a trajectory, or of a token, relative to the expected reward.

Letters: N trajectories, T tokens.

Group estimators map one reward per trajectory and the id of its group to one advantage per trajectory. Token estimators
map rewards per token to advantages per token. `mask_NxT` is true on trained tokens. Tool and prompt tokens between them
are skipped, as if a trajectory's trained tokens were adjacent. A group of one has no comparison: its baseline is 0 and
its scale 1, so its advantage is its reward.

The trainer calls `compute`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.agents import resolving
from libra_jax.algorithms import checks


class AdvantageInputs(NamedTuple):
    """The argument of an advantage estimator: the whole batch.

    Attributes:
      rewards_N: one reward per trajectory. With `kl_in_reward`, less the KL penalties of its tokens.
      groups_N: number of each trajectory's group, int32, from 0. A trajectory left out of the loss has its own.
      mask_NxT: true on trained tokens.
      token_rewards_NxT: the reward on the last trained token, less the KL penalty of each trained token.
      penalties_NxT: the KL penalty of each trained token; 0 without `kl_in_reward`.
      values_NxT: the critic's value before each token; None without a critic.
    """

    rewards_N: jax.Array
    groups_N: jax.Array
    mask_NxT: jax.Array
    token_rewards_NxT: jax.Array
    penalties_NxT: jax.Array
    values_NxT: jax.Array | None = None


def _centred(rewards_N: jax.Array, groups_N: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns rewards minus their group's mean (a group of one keeps its reward), group sizes, and group numbers.

    The mean is subtracted twice: the second pass removes the rounding error of the first. If all rewards of a group are
    equal, division by the standard deviation would blow that error up. Group numbers are below N.
    """
    rewards_N = checks.floats(rewards_N, "rewards_N")
    checks.rank(1, rewards_N=rewards_N)
    checks.same_shape(rewards_N=rewards_N, groups_N=groups_N)
    checks.integer(groups_N=groups_N)
    # Numbered 0, 1, ... by a sort, so that time and memory grow with N, not with N squared.
    _, number_N = jnp.unique(groups_N, return_inverse=True, size=groups_N.shape[0])
    size_N = _group_sum(jnp.ones_like(rewards_N), number_N)
    centred_N = rewards_N
    for _ in range(2):
        centred_N = centred_N - _group_sum(centred_N, number_N) / size_N
    return jnp.where(size_N > 1, centred_N, rewards_N), size_N, number_N


def _group_sum(values_N: jax.Array, number_N: jax.Array) -> jax.Array:
    """Returns, for each trajectory, the sum over its group."""
    return jax.ops.segment_sum(values_N, number_N, num_segments=values_N.shape[0])[number_N]


def grpo(rewards_N: jax.Array, groups_N: jax.Array, *, eps: float = 1e-6) -> jax.Array:
    """Computes group-relative advantages: A_i = (R_i - mean(R)) / (std(R) + eps) over i's group.

    Uses the sample standard deviation (divisor n - 1), as in verl; the paper does not specify it.

    Args:
      rewards_N: one reward per trajectory.
      groups_N: integer id of each trajectory's group; any integers, in any order.
      eps: constant added to the standard deviation.

    Returns:
      Advantages of shape [N].

    Raises:
      LibraError: shapes or dtypes do not match.

    Example:
      >>> import jax.numpy as jnp
      >>> print(grpo(jnp.array([1.0, 0.0, 2.0]), jnp.array([5, 5, 9])).round(3))
      [ 0.707 -0.707  2.   ]

    References:
      Shao et al. (DeepSeekMath), arXiv 2402.03300, section 4.1.2.
    """
    centred_N, size_N, number_N = _centred(rewards_N, groups_N)
    # The maximum avoids 0 / 0 in a group of one, whose scale is set below.
    variance_N = _group_sum(jnp.square(centred_N), number_N) / jnp.maximum(size_N - 1, 1)
    # With equal rewards the centred rewards are exactly 0, so eps gives 0 / eps = 0.
    scale_N = jnp.where(size_N > 1, jnp.sqrt(variance_N) + eps, 1.0)
    return centred_N / scale_N


def dr_grpo(rewards_N: jax.Array, groups_N: jax.Array) -> jax.Array:
    """Computes A_i = R_i - mean(R) over i's group, without GRPO's standard deviation ("GRPO done right").

    Division by the standard deviation gives more weight to prompts that are nearly solved or nearly hopeless.

    Args:
      rewards_N: one reward per trajectory.
      groups_N: integer id of each trajectory's group.

    Returns:
      Advantages of shape [N].

    Raises:
      LibraError: shapes or dtypes do not match.

    Example:
      >>> import jax.numpy as jnp
      >>> print(dr_grpo(jnp.array([1.0, 0.0]), jnp.array([0, 0])))
      [ 0.5 -0.5]

    References:
      Liu et al., arXiv 2503.20783, section 3; belongs with aggregation `sequence_sum`.
    """
    return _centred(rewards_N, groups_N)[0]


def rloo(rewards_N: jax.Array, groups_N: jax.Array) -> jax.Array:
    """Computes leave-one-out advantages: A_i = R_i - mean of the others in i's group = n / (n - 1) (R_i - mean(R)).

    Args:
      rewards_N: one reward per trajectory.
      groups_N: integer id of each trajectory's group.

    Returns:
      Advantages of shape [N].

    Raises:
      LibraError: shapes or dtypes do not match.

    Example:
      >>> import jax.numpy as jnp
      >>> print(rloo(jnp.array([3.0, 0.0, 0.0]), jnp.array([0, 0, 0])))
      [ 3.  -1.5 -1.5]

    References:
      Ahmadian et al., arXiv 2402.14740.
    """
    centred_N, size_N, _ = _centred(rewards_N, groups_N)
    # R_i minus the mean of the others is R_i minus the whole mean, times this factor.
    return jnp.where(size_N > 1, centred_N * size_N / jnp.maximum(size_N - 1, 1), centred_N)


def opo(rewards_N: jax.Array, groups_N: jax.Array, mask_NxT: jax.Array) -> jax.Array:
    """Computes A_i = R_i - b, with the length-weighted mean reward of i's group as baseline: b = Σ l_i R_i / Σ l_i.

    b minimises the variance of an on-policy gradient if the squared gradient norm of a trajectory grows with its
    number of trained tokens l_i.

    Args:
      rewards_N: one reward per trajectory.
      groups_N: integer id of each trajectory's group.
      mask_NxT: true (non-zero) on trained tokens.

    Returns:
      Advantages of shape [N].

    Raises:
      LibraError: shapes or dtypes do not match.

    References:
      Hao et al. (OPO), arXiv 2505.23585, eq. 9.
    """
    _, size_N, number_N = _centred(rewards_N, groups_N)
    length_N = jnp.sum(mask_NxT != 0, axis=1, dtype=rewards_N.dtype)
    total_N = jnp.maximum(_group_sum(length_N, number_N), 1)
    baseline_N = _group_sum(length_N * rewards_N, number_N) / total_N
    # A second pass removes the rounding error of the first, as in `_centred`.
    centred_N = rewards_N - baseline_N
    centred_N = centred_N - _group_sum(length_N * centred_N, number_N) / total_N
    return jnp.where(size_N > 1, centred_N, rewards_N)


def whiten(values_NxT: jax.Array, mask_NxT: jax.Array, *, eps: float = 1e-8) -> jax.Array:
    """Computes (x - mean) / sqrt(variance + eps), with mean and sample variance over all masked tokens of the batch.

    Args:
      values_NxT: per-token values.
      mask_NxT: true (non-zero) on the tokens that count.
      eps: constant added to the variance.

    Returns:
      Whitened values of shape [N, T]; zero outside the mask, and everywhere if fewer than two tokens count.

    Raises:
      LibraError: shapes or dtypes do not match.

    Example:
      >>> import jax.numpy as jnp
      >>> print(whiten(jnp.array([[1.0, 3.0, 99.0]]), jnp.array([[1, 1, 0]])).round(3))
      [[-0.707  0.707  0.   ]]
    """
    checks.same_shape(values_NxT=values_NxT, mask_NxT=mask_NxT)
    counted_NxT = mask_NxT != 0
    centred_NxT = jnp.where(counted_NxT, checks.floats(values_NxT, "values_NxT"), 0.0)
    count = jnp.sum(counted_NxT)
    for _ in range(2):  # twice, for the reason given in _centred
        mean = jnp.sum(centred_NxT) / jnp.maximum(count, 1)
        centred_NxT = jnp.where(counted_NxT, centred_NxT - mean, 0.0)
    # The maximum avoids 0 / 0 with a single token, whose centred value is 0.
    variance = jnp.sum(jnp.square(centred_NxT)) / jnp.maximum(count - 1, 1)
    return centred_NxT * jax.lax.rsqrt(variance + eps)


def spread_rewards(rewards_N: jax.Array, mask_NxT: jax.Array, penalties_NxT: jax.Array | None = None) -> jax.Array:
    """Spreads outcome rewards over tokens: R_i on the last trained token, minus a penalty on every trained token.

    Args:
      rewards_N: one reward per trajectory.
      mask_NxT: true (non-zero) on trained tokens.
      penalties_NxT: penalty of each token, such as a coefficient times its KL estimate.

    Returns:
      Rewards of shape [N, T], zero on untrained tokens. A trajectory without a trained token gets no reward.

    Raises:
      LibraError: shapes or dtypes do not match.

    Example:
      >>> import jax.numpy as jnp
      >>> print(spread_rewards(jnp.array([2.0]), jnp.array([[1, 0, 1, 0]]), jnp.full((1, 4), 0.5)))
      [[-0.5  0.   1.5  0. ]]
    """
    checks.rank(2, mask_NxT=mask_NxT)
    checks.same_shape(mask_NxT=mask_NxT, penalties_NxT=penalties_NxT)
    rewards_N = checks.floats(rewards_N, "rewards_N")
    trained_NxT = mask_NxT != 0
    # Counted from the end, the last trained token has count 1.
    trained_after_NxT = jnp.cumsum(trained_NxT[:, ::-1], axis=1)[:, ::-1]
    last_NxT = trained_NxT & (trained_after_NxT == 1)
    token_rewards_NxT = jnp.where(last_NxT, rewards_N[:, None], 0.0)
    if penalties_NxT is None:
        return token_rewards_NxT
    # A penalty of a token that the policy did not choose would be noise, so it is dropped.
    return token_rewards_NxT - jnp.where(trained_NxT, penalties_NxT, 0.0)


def discounted_returns(token_rewards_NxT: jax.Array, mask_NxT: jax.Array, *, discount: float = 1.0) -> jax.Array:
    """Returns G_t = r_t + discount · G_{next trained token}; shape [N, T], zero on untrained tokens."""
    checks.same_shape(token_rewards_NxT=token_rewards_NxT, mask_NxT=mask_NxT)
    rewards_NxT = checks.floats(token_rewards_NxT, "token_rewards_NxT")

    def step(following_N: jax.Array, token: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        reward_N, trained_N = token
        return_N = reward_N + discount * following_N
        # An untrained token passes the later return on unchanged, as if the trained tokens were adjacent.
        return jnp.where(trained_N, return_N, following_N), jnp.where(trained_N, return_N, 0.0)

    # Transposed, because a scan runs over the first axis.
    start_N = jnp.zeros_like(rewards_NxT[:, 0])
    _, returns_TxN = jax.lax.scan(step, start_N, (rewards_NxT.T, mask_NxT.T != 0), reverse=True)
    return returns_TxN.T


def reinforce_plus_plus(
    token_rewards_NxT: jax.Array, mask_NxT: jax.Array, *, discount: float = 1.0, eps: float = 1e-8
) -> jax.Array:
    """Computes REINFORCE++: discounted returns per token, whitened over all trained tokens of the batch. No groups.

    Args:
      token_rewards_NxT: rewards per token (see `spread_rewards`); rewards at untrained tokens are ignored.
      mask_NxT: true (non-zero) on trained tokens.
      discount: discount factor per trained token.
      eps: constant added to the variance.

    Returns:
      Advantages of shape [N, T].

    Raises:
      LibraError: shapes or dtypes do not match.

    References:
      Hu et al., arXiv 2501.03262.
    """
    return whiten(discounted_returns(token_rewards_NxT, mask_NxT, discount=discount), mask_NxT, eps=eps)


def reinforce_plus_plus_baseline(
    rewards_N: jax.Array, groups_N: jax.Array, mask_NxT: jax.Array, *, eps: float = 1e-8
) -> jax.Array:
    """Computes REINFORCE++ with baseline: R_i - mean(R) of i's group on every trained token, whitened over the batch.

    Args:
      rewards_N: one reward per trajectory.
      groups_N: integer id of each trajectory's group.
      mask_NxT: true (non-zero) on trained tokens.
      eps: constant added to the variance.

    Returns:
      Advantages of shape [N, T].

    Raises:
      LibraError: shapes or dtypes do not match.

    References:
      Hu et al., arXiv 2501.03262.
    """
    centred_N = _centred(rewards_N, groups_N)[0]
    return whiten(jnp.broadcast_to(centred_N[:, None], mask_NxT.shape), mask_NxT, eps=eps)


def gae(
    token_rewards_NxT: jax.Array,
    values_NxT: jax.Array,
    mask_NxT: jax.Array,
    *,
    discount: float = 1.0,
    trace_decay: float = 1.0,
    turn_discount: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes generalised advantage estimation over the trained tokens, not whitened.

    δ_t = r_t + γ V_{t+1} - V_t;  A_t = δ_t + γ λ A_{t+1};  return_t = A_t + V_t. Here t + 1 is the next trained token,
    and V and A are 0 after the last. From the last token of a turn to the first of the next, γ is `turn_discount`.

    Args:
      token_rewards_NxT: rewards per token; rewards at untrained tokens are ignored.
      values_NxT: V, the critic's estimates.
      mask_NxT: true (non-zero) on trained tokens.
      discount: γ.
      trace_decay: λ.
      turn_discount: γ between two turns, which untrained tokens separate; None: the same.

    Returns:
      Advantages and returns, both of shape [N, T], zero on untrained tokens.

    Raises:
      LibraError: shapes or dtypes do not match.

    Example:
      >>> import jax.numpy as jnp
      >>> advantages, returns = gae(jnp.array([[0.0, 1.0]]), jnp.array([[0.25, 0.5]]), jnp.array([[1, 1]]))
      >>> print(advantages, returns)
      [[0.75 0.5 ]] [[1. 1.]]

    References:
      Schulman et al., arXiv 1506.02438, eq. 16.
    """
    checks.same_shape(token_rewards_NxT=token_rewards_NxT, values_NxT=values_NxT, mask_NxT=mask_NxT)
    rewards_NxT = checks.floats(token_rewards_NxT, "token_rewards_NxT")
    values_NxT = checks.floats(values_NxT, "values_NxT")
    # The dtype of the sum: a scan refuses a carry that changes its dtype.
    zeros_N = jnp.zeros_like(rewards_NxT[:, 0] + values_NxT[:, 0])

    between_turns = discount if turn_discount is None else turn_discount

    def step(
        following: tuple[jax.Array, jax.Array, jax.Array], token: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
        next_value_N, next_advantage_N, apart_N = following
        reward_N, value_N, trained_N = token
        discount_N = jnp.where(apart_N, between_turns, discount)
        delta_N = reward_N + discount_N * next_value_N - value_N
        advantage_N = delta_N + discount_N * trace_decay * next_advantage_N
        # An untrained token passes the later values on unchanged, as if the trained tokens were adjacent.
        kept = jnp.where(trained_N, value_N, next_value_N), jnp.where(trained_N, advantage_N, next_advantage_N)
        return (*kept, ~trained_N), jnp.where(trained_N, advantage_N, 0.0)

    trained_NxT = mask_NxT != 0
    xs = (rewards_NxT.T, values_NxT.T, trained_NxT.T)
    _, advantages_TxN = jax.lax.scan(step, (zeros_N, zeros_N, jnp.zeros_like(trained_NxT[:, 0])), xs, reverse=True)
    return advantages_TxN.T, jnp.where(trained_NxT, advantages_TxN.T + values_NxT, 0.0)


def compute(
    config: config_lib.AlgorithmConfig,
    *,
    rewards_N: np.ndarray,
    groups_N: np.ndarray,
    mask_NxT: np.ndarray,
    kl_NxT: np.ndarray | None = None,
    values_NxT: np.ndarray | None = None,
) -> np.ndarray:
    """Computes the advantages of a whole training batch with the config's estimator: host arrays in, host arrays out.

    Call it once per step on the unpacked batch, because groups and whitening need the whole batch. T is rounded up to a
    power of two inside, so that batches of all lengths share a few compiled programs.

    Args:
      config: `advantage` names the estimator. With `kl_in_reward`, the rewards are reduced by `kl_coefficient` times
        `kl_NxT`: token by token for `reinforce_plus_plus`, summed per trajectory for the others.
      rewards_N: one finite reward per trajectory.
      groups_N: integer id of each trajectory's group.
      mask_NxT: true (non-zero) on trained tokens.
      kl_NxT: estimate of KL(π ‖ π_ref) per token (`kl.estimate`); required with `kl_in_reward` and a coefficient.
      values_NxT: the critic's value before each token; required by `gae`.

    Returns:
      Advantages of shape [N, T], float32, zero on untrained tokens.

    Raises:
      ConfigError: `kl_in_reward` without `kl_NxT`.
      LibraError: shapes or dtypes do not match, or a reward is not finite.

    Example:
      >>> import numpy as np
      >>> from libra_jax import config
      >>> algorithm = config.AlgorithmConfig(advantage="rloo")
      >>> compute(algorithm, rewards_N=np.array([1.0, 0.0]), groups_N=np.array([0, 0]), mask_NxT=np.ones((2, 2)))
      array([[ 1.,  1.],
             [-1., -1.]], dtype=float32)
    """
    inputs = _inputs(config, rewards_N, groups_N, mask_NxT, kl_NxT, values_NxT)
    return np.asarray(find(config)(inputs))[:, : np.shape(mask_NxT)[1]]


def value_targets(
    config: config_lib.AlgorithmConfig,
    *,
    rewards_N: np.ndarray,
    mask_NxT: np.ndarray,
    values_NxT: np.ndarray,
    kl_NxT: np.ndarray | None = None,
) -> np.ndarray:
    """Computes the returns that a critic learns, by `gae` with `algorithm.advantage_arguments`. See `compute`.

    With an advantage of the user's own, the returns are those of `gae` without discount (λ = 1).
    """
    inputs = _inputs(config, rewards_N, np.arange(len(rewards_N)), mask_NxT, kl_NxT, values_NxT)
    arguments = dict(config.advantage_arguments) if config.advantage == "gae" else {}
    arguments.pop("whitened", None)
    assert inputs.values_NxT is not None
    _, returns_NxT = gae(inputs.token_rewards_NxT, inputs.values_NxT, inputs.mask_NxT, **arguments)
    return np.asarray(returns_NxT)[:, : np.shape(mask_NxT)[1]]


def _inputs(
    config: config_lib.AlgorithmConfig,
    rewards_N: np.ndarray,
    groups_N: np.ndarray,
    mask_NxT: np.ndarray,
    kl_NxT: np.ndarray | None,
    values_NxT: np.ndarray | None,
) -> AdvantageInputs:
    """Checks the arrays of a batch and lays them out for an estimator. T is rounded up to a power of two."""
    rewards_N, groups_N, mask_NxT = np.asarray(rewards_N, np.float32), np.asarray(groups_N), np.asarray(mask_NxT) != 0
    checks.rank(2, mask_NxT=mask_NxT)
    checks.same_shape(rewards_N=rewards_N, groups_N=groups_N)
    checks.same_shape(rewards_N=rewards_N, mask_N=mask_NxT[:, 0])
    checks.same_shape(mask_NxT=mask_NxT, kl_NxT=kl_NxT, values_NxT=values_NxT)
    if not np.all(np.isfinite(rewards_N)):
        index = int(np.flatnonzero(~np.isfinite(rewards_N))[0])
        raise protocols.LibraError(f"rewards_N[{index}] is {rewards_N[index]}: every reward must be finite")
    penalties_NxT = np.zeros(mask_NxT.shape, np.float32)
    if config.kl_in_reward and config.kl_coefficient > 0:
        if kl_NxT is None:
            raise protocols.ConfigError("config.algorithm.kl_in_reward: needs kl_NxT, the KL estimate of each token")
        # Selected, not multiplied: the estimates at untrained tokens may be NaN.
        penalties_NxT = np.where(mask_NxT, config.kl_coefficient * np.asarray(kl_NxT, np.float32), 0.0)
    tokens = mask_NxT.shape[1]
    # Padded columns are masked out, so they change no advantage.
    padding = ((0, 0), (0, (1 << (tokens - 1).bit_length()) - tokens))
    # Small int32 numbers: JAX has no int64 by default, and group ids may be any integers.
    group_index_N = np.unique(groups_N, return_inverse=True)[1].astype(np.int32)
    mask_NxT, penalties_NxT = np.pad(mask_NxT, padding), np.pad(penalties_NxT, padding)
    if values_NxT is not None:
        # Selected, not multiplied: values at untrained tokens may be NaN.
        values_NxT = np.pad(np.where(mask_NxT[:, :tokens], values_NxT, 0.0), padding).astype(np.float32)
    return AdvantageInputs(
        # A trajectory pays for all of its tokens at once if whole trajectories are compared.
        rewards_N=jnp.asarray(rewards_N - penalties_NxT.sum(axis=1)),
        groups_N=jnp.asarray(group_index_N),
        mask_NxT=jnp.asarray(mask_NxT),
        token_rewards_NxT=spread_rewards(rewards_N, mask_NxT, penalties_NxT),
        penalties_NxT=jnp.asarray(penalties_NxT),
        values_NxT=None if values_NxT is None else jnp.asarray(values_NxT),
    )


def _reinforce_plus_plus(inputs: AdvantageInputs) -> jax.Array:
    return reinforce_plus_plus(inputs.token_rewards_NxT, inputs.mask_NxT)


def _reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> jax.Array:
    return reinforce_plus_plus_baseline(inputs.rewards_N, inputs.groups_N, inputs.mask_NxT)


def _distillation(inputs: AdvantageInputs, *, reward_weight: float = 0.0) -> jax.Array:
    """Computes A_t = -penalty_t, and adds `reward_weight` times GRPO's advantage of the reward alone.

    The penalty is the coefficient times log π - log π_teacher of the sampled token: the reverse KL to the teacher,
    token by token and without a sum over later tokens (Lu and Thinking Machines, On-Policy Distillation, 2025).
    """
    if not reward_weight:
        return -inputs.penalties_NxT
    rewards_N = inputs.rewards_N + jnp.sum(inputs.penalties_NxT, axis=1)
    return reward_weight * grpo(rewards_N, inputs.groups_N)[:, None] - inputs.penalties_NxT


def _gae(
    inputs: AdvantageInputs,
    *,
    discount: float = 1.0,
    turn_discount: float | None = None,
    trace_decay: float = 1.0,
    whitened: bool = True,
) -> jax.Array:
    if inputs.values_NxT is None:
        raise protocols.ConfigError("config.algorithm.advantage: gae needs values_NxT, the values of a critic")
    found_NxT, _ = gae(
        inputs.token_rewards_NxT,
        inputs.values_NxT,
        inputs.mask_NxT,
        discount=discount,
        trace_decay=trace_decay,
        turn_discount=turn_discount,
    )
    return whiten(found_NxT, inputs.mask_NxT) if whitened else found_NxT


_BUILT_IN: dict[str, Callable[..., jax.Array]] = {
    "grpo": lambda inputs: grpo(inputs.rewards_N, inputs.groups_N),
    "dr_grpo": lambda inputs: dr_grpo(inputs.rewards_N, inputs.groups_N),
    "rloo": lambda inputs: rloo(inputs.rewards_N, inputs.groups_N),
    "opo": lambda inputs: opo(inputs.rewards_N, inputs.groups_N, inputs.mask_NxT),
    "reinforce_plus_plus": _reinforce_plus_plus,
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
    "distillation": _distillation,
    "gae": _gae,
}


def find(config: config_lib.AlgorithmConfig) -> Callable[[AdvantageInputs], jax.Array]:
    """Returns the config's estimator with its arguments: a built-in one, or a user's `advantage(inputs, **arguments)`.

    The result has the shape [N, T]. A user's function may return [N].

    Raises:
      ConfigError: there is no such function, or it does not take `advantage_arguments`.
    """
    return _found(config.advantage, json.dumps(dict(config.advantage_arguments), sort_keys=True, default=str))


@functools.lru_cache(maxsize=64)  # one compiled program for each estimator, not one a call
def _found(name: str, encoded: str) -> Callable[[AdvantageInputs], jax.Array]:
    arguments = json.loads(encoded)
    function = resolving.resolve(name, "algorithm.advantage") if ":" in name else _BUILT_IN[name]
    resolving.check_arguments(function, name, {"inputs": None, **arguments}, "algorithm.advantage_arguments")

    def estimate(inputs: AdvantageInputs) -> jax.Array:
        found = checks.floats(function(inputs=inputs, **arguments), "the advantages")
        count, tokens = inputs.mask_NxT.shape
        if found.shape not in ((count,), (count, tokens)):
            raise protocols.ConfigError(
                f"config.algorithm.advantage: {name} must return one advantage a trajectory, [N] = [{count}], or a "
                f"token, [N, T] = [{count}, {tokens}], not an array of shape {list(found.shape)}"
            )
        return jnp.where(inputs.mask_NxT, found if found.ndim == 2 else found[:, None], 0.0)

    return jax.jit(estimate)
