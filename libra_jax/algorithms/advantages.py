"""Advantages: the reward of a trajectory, or of a token, relative to the expected reward.

Letters: N trajectories, T tokens.

Group estimators map one reward per trajectory and the id of its group to one advantage per trajectory. Token estimators
map rewards per token to advantages per token. `mask_NxT` is true on trained tokens. Tool and prompt tokens between them
are skipped, as if a trajectory's trained tokens were adjacent. A group of one has no comparison: its baseline is 0 and
its scale 1, so its advantage is its reward.

The trainer calls `estimators.compute`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from libra_jax import protocols
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
      truncated_N: true for trajectories that a limit cut off and `task.cut_off=bootstrap` trains; their rewards are 0.
        None: no trajectory.
      score_norms_N: norm of each trajectory's score, the gradient of the log-probability of its trained tokens. None
        unless `algorithm.baseline` is minimum_variance.
      log_weights_N: logarithm of each trajectory's importance weight π/π_b; None as for `score_norms_N`.
      relative_N: rewards less `algorithm.baseline`; None if that is the mean.
      outcomes_N: rewards without any penalty; None: `rewards_N`.
    """

    rewards_N: jax.Array
    groups_N: jax.Array
    mask_NxT: jax.Array
    token_rewards_NxT: jax.Array
    penalties_NxT: jax.Array
    values_NxT: jax.Array | None = None
    truncated_N: jax.Array | None = None
    score_norms_N: jax.Array | None = None
    log_weights_N: jax.Array | None = None
    relative_N: jax.Array | None = None
    outcomes_N: jax.Array | None = None


def centred(
    rewards_N: jax.Array, groups_N: jax.Array, weights_N: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns rewards minus their group's mean (a group of one keeps its reward), group sizes, and group numbers.

    With weights the mean is weighted; a group without any weight, or with one that is not finite, has a plain mean.

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
    centred_N, total_N = rewards_N, size_N
    if weights_N is None:
        weights_N = jnp.ones_like(rewards_N)
    else:
        total_N = _group_sum(weights_N, number_N)
        usable_N = jnp.isfinite(total_N) & (total_N > 0)
        weights_N, total_N = jnp.where(usable_N, weights_N, 1.0), jnp.where(usable_N, total_N, size_N)
    for _ in range(2):
        centred_N = centred_N - _group_sum(weights_N * centred_N, number_N) / total_N
    return jnp.where(size_N > 1, centred_N, rewards_N), size_N, number_N


def _group_sum(values_N: jax.Array, number_N: jax.Array) -> jax.Array:
    """Returns, for each trajectory, the sum over its group."""
    return jax.ops.segment_sum(values_N, number_N, num_segments=values_N.shape[0])[number_N]


def grpo(
    rewards_N: jax.Array, groups_N: jax.Array, *, eps: float = 1e-6, relative_N: jax.Array | None = None
) -> jax.Array:
    """Computes group-relative advantages: A_i = (R_i - mean(R)) / (std(R) + eps) over i's group.

    Uses the sample standard deviation (divisor n - 1), as in verl; the paper does not specify it.

    Args:
      rewards_N: one reward per trajectory.
      groups_N: integer id of each trajectory's group; any integers, in any order.
      eps: constant added to the standard deviation.
      relative_N: rewards less another baseline than the mean; None: the mean. With one, a standard deviation below
        `eps` does not divide: equal rewards need not be at that baseline.

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
    centred_N, scale_N = _standardised(rewards_N, groups_N, eps)
    if relative_N is None:
        return centred_N / scale_N
    return relative_N / jnp.where(scale_N > 2 * eps, scale_N, 1.0)


def grpo_scale(rewards_N: jax.Array, groups_N: jax.Array, *, eps: float = 1e-6) -> jax.Array:
    """Returns what `grpo` divides rewards by that are compared with another baseline, [N]; 1 for a group of one."""
    _, scale_N = _standardised(rewards_N, groups_N, eps)
    return jnp.where(scale_N > 2 * eps, scale_N, 1.0)


def _standardised(rewards_N: jax.Array, groups_N: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """Returns rewards less their group's mean, and the standard deviation plus `eps`; 1 for a group of one.

    If the rewards of a group differ by rounding alone, both are those of equal rewards: 0 and `eps`.
    """
    centred_N, size_N, number_N = centred(rewards_N, groups_N)
    # The maximum avoids 0 / 0 in a group of one, whose scale is set below.
    variance_N = _group_sum(jnp.square(centred_N), number_N) / jnp.maximum(size_N - 1, 1)
    deviation_N = jnp.sqrt(variance_N)
    # Rewards less penalties have rounding errors of the size of the rewards. Divided by `eps`, they would count.
    largest_N = jax.ops.segment_max(jnp.abs(rewards_N), number_N, num_segments=rewards_N.shape[0])[number_N]
    equal_N = (size_N > 1) & (deviation_N <= protocols.REWARD_ROUNDING * largest_N)
    centred_N, deviation_N = (jnp.where(equal_N, 0.0, values_N) for values_N in (centred_N, deviation_N))
    return centred_N, jnp.where(size_N > 1, deviation_N + eps, 1.0)


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
    return centred(rewards_N, groups_N)[0]


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
    centred_N, size_N, _ = centred(rewards_N, groups_N)
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
    return centred(rewards_N, groups_N, jnp.sum(mask_NxT != 0, axis=1, dtype=jnp.result_type(rewards_N)))[0]


def whiten(values_NxT: jax.Array, mask_NxT: jax.Array, *, eps: float = 1e-8) -> jax.Array:
    """Computes (x - mean) / sqrt(variance + eps), with mean and sample variance over all masked tokens of the batch.

    Args:
      values_NxT: per-token values.
      mask_NxT: true (non-zero) on the tokens that count.
      eps: constant added to the variance.

    Returns:
      Whitened values of shape [N, T]; zero outside the mask, and everywhere if fewer than two tokens count or the
      values differ by rounding alone.

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
    count, largest = jnp.sum(counted_NxT), jnp.max(jnp.abs(centred_NxT), initial=0.0)
    for _ in range(2):  # twice, for the reason given in `centred`
        mean = jnp.sum(centred_NxT) / jnp.maximum(count, 1)
        centred_NxT = jnp.where(counted_NxT, centred_NxT - mean, 0.0)
    # The maximum avoids 0 / 0 with a single token, whose centred value is 0.
    variance = jnp.sum(jnp.square(centred_NxT)) / jnp.maximum(count - 1, 1)
    # Large values have rounding errors that are large beside `eps`.
    differs = variance > jnp.square(protocols.REWARD_ROUNDING * largest)
    return jnp.where(differs, centred_NxT * jax.lax.rsqrt(variance + eps), 0.0)


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
    rewards_N: jax.Array,
    groups_N: jax.Array,
    mask_NxT: jax.Array,
    *,
    eps: float = 1e-8,
    relative_N: jax.Array | None = None,
) -> jax.Array:
    """Computes REINFORCE++ with baseline: R_i - mean(R) of i's group on every trained token, whitened over the batch.

    Args:
      rewards_N: one reward per trajectory.
      groups_N: integer id of each trajectory's group.
      mask_NxT: true (non-zero) on trained tokens.
      eps: constant added to the variance.
      relative_N: rewards less another baseline than the mean; None: the mean.

    Returns:
      Advantages of shape [N, T].

    Raises:
      LibraError: shapes or dtypes do not match.

    References:
      Hu et al., arXiv 2501.03262.
    """
    centred_N = centred(rewards_N, groups_N)[0] if relative_N is None else relative_N
    return whiten(jnp.broadcast_to(centred_N[:, None], mask_NxT.shape), mask_NxT, eps=eps)


def gae(
    token_rewards_NxT: jax.Array,
    values_NxT: jax.Array,
    mask_NxT: jax.Array,
    *,
    discount: float = 1.0,
    trace_decay: float | jax.Array = 1.0,
    turn_discount: float | None = None,
    truncated_N: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes generalised advantage estimation over the trained tokens, not whitened.

    δ_t = r_t + γ V_{t+1} - V_t;  A_t = δ_t + γ λ A_{t+1};  return_t = A_t + V_t. Here t + 1 is the next trained token,
    and V and A are 0 after the last. From the last token of a turn to the first of the next, γ is `turn_discount`. If a
    trajectory is truncated, V after its last trained token is V of that token.

    Args:
      token_rewards_NxT: rewards per token; rewards at untrained tokens are ignored.
      values_NxT: V, the critic's estimates.
      mask_NxT: true (non-zero) on trained tokens.
      discount: γ.
      trace_decay: λ, one number or one per trajectory, [N].
      turn_discount: γ between two turns, which untrained tokens separate; None: the same.
      truncated_N: true for trajectories that a limit cut off; None: no trajectory.

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
    # True until the first trained token from the end, for truncated trajectories alone.
    open_N = jnp.zeros(zeros_N.shape, bool) if truncated_N is None else truncated_N != 0
    between_turns = discount if turn_discount is None else turn_discount
    Carry = tuple[jax.Array, jax.Array, jax.Array, jax.Array]

    def step(following: Carry, token: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Carry, jax.Array]:
        next_value_N, next_advantage_N, apart_N, open_N = following
        reward_N, value_N, trained_N = token
        # Nothing is known beyond the end of a truncated trajectory, so its last value stands for what follows.
        next_value_N = jnp.where(open_N & trained_N, value_N, next_value_N)
        discount_N = jnp.where(apart_N & ~open_N, between_turns, discount)
        delta_N = reward_N + discount_N * next_value_N - value_N
        advantage_N = delta_N + discount_N * trace_decay * next_advantage_N
        # An untrained token passes the later values on unchanged, as if the trained tokens were adjacent.
        carry = jnp.where(trained_N, value_N, next_value_N), jnp.where(trained_N, advantage_N, next_advantage_N)
        return (*carry, ~trained_N, open_N & ~trained_N), jnp.where(trained_N, advantage_N, 0.0)

    trained_NxT = mask_NxT != 0
    xs = (rewards_NxT.T, values_NxT.T, trained_NxT.T)
    start = (zeros_N, zeros_N, jnp.zeros_like(trained_NxT[:, 0]), open_N)
    _, advantages_TxN = jax.lax.scan(step, start, xs, reverse=True)
    return advantages_TxN.T, jnp.where(trained_NxT, advantages_TxN.T + values_NxT, 0.0)
