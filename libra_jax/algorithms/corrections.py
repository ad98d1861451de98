"""Importance-sampling corrections: weights for tokens that another policy sampled.

Letters: B rows, T tokens.

A token sampled by the behaviour policy and trained under another policy π has the importance ratio r = π(token) /
π_behaviour(token). Exact weighting by r is unbiased but has unbounded variance, so r is bounded by one of

- truncated: min(r, C) (truncated importance sampling; E. Ionides 2008; IMPALA, arXiv 1802.01561 section 4.1);
- masked: r if F <= r <= C, else 0 (the token is dropped but stays in the denominator of the loss). With a floor F above
  0 this is IcePop's two-sided mask (arXiv 2510.18855).

r is that of a token, or one number for all tokens of a trajectory: the product of its tokens' ratios (`sequence`) or
their geometric mean (`geometric`).

Weights never carry a gradient: they change the measure, not the objective.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from libra_jax import config as config_lib
from libra_jax.algorithms import aggregation, checks, kl


def bounded_ratio(log_ratio_BxT: jax.Array) -> jax.Array:
    """Returns exp of the log-ratio cut to ±20, so that no ratio overflows and no product with zero becomes NaN."""
    return jnp.exp(jnp.clip(log_ratio_BxT, -kl.LOG_RATIO_BOUND, kl.LOG_RATIO_BOUND))


def truncated(log_ratio_BxT: jax.Array, *, cap: float) -> jax.Array:
    """Returns min(r, cap) per token, without a gradient; shape [B, T].

    Example:
      >>> import jax.numpy as jnp
      >>> print(truncated(jnp.log(jnp.array([[0.5, 4.0]])), cap=2.0))
      [[0.5 2. ]]
    """
    return jax.lax.stop_gradient(jnp.minimum(bounded_ratio(log_ratio_BxT), cap))


def masked(log_ratio_BxT: jax.Array, *, cap: float, floor: float = 0.0) -> jax.Array:
    """Returns r if floor <= r <= cap, else 0, per token, without a gradient; shape [B, T].

    Example:
      >>> import jax.numpy as jnp
      >>> print(masked(jnp.log(jnp.array([[0.5, 4.0]])), cap=2.0))
      [[0.5 0. ]]
    """
    ratio_BxT = bounded_ratio(log_ratio_BxT)
    # A kept ratio is never 0 (its log is cut at -20), so a weight of 0 marks a dropped token.
    return jax.lax.stop_gradient(jnp.where((ratio_BxT >= floor) & (ratio_BxT <= cap), ratio_BxT, 0.0))


def of_level(
    log_ratio_BxT: jax.Array, mask_BxT: jax.Array, segments_BxT: jax.Array, level: str, *, max_segments: int
) -> jax.Array:
    """Returns the log-ratio that the correction of each token looks at.

    Args:
      log_ratio_BxT: log π - log π_behaviour, 0 at untrained tokens.
      mask_BxT: true (non-zero) on trained tokens.
      segments_BxT: trajectory number inside the row, 1..S; 0 is padding.
      level: `token` (its own), `sequence` (the sum over its trajectory) or `geometric` (the mean over its trajectory).
      max_segments: S (static).

    Returns:
      Log-ratios of shape [B, T], zero at untrained tokens.
    """
    if level == "token":
        return log_ratio_BxT
    mode = "sequence_mean" if level == "geometric" else "token_mean"
    weights_BxT, _ = aggregation.token_weights(
        mask_BxT, segments_BxT, mode, max_segments=max_segments, dtype=log_ratio_BxT.dtype
    )
    sums_BxS = aggregation.segment_sums(log_ratio_BxT * weights_BxT, segments_BxT, max_segments=max_segments)
    return jnp.where(weights_BxT > 0, aggregation.spread(sums_BxS, segments_BxT), 0.0)


def weights(log_ratio_BxT: jax.Array, correction: str, *, cap: float, floor: float = 0.0) -> jax.Array:
    """Returns importance weights for the correction that the config names; all ones for "none".

    Args:
      log_ratio_BxT: log π - log π_behaviour of the sampled tokens.
      correction: one of `config.CORRECTIONS`.
      cap: C, the bound of the ratio.
      floor: F, below which "masked" drops a token.

    Returns:
      Weights of shape [B, T], without a gradient.

    Raises:
      ConfigError: the correction is unknown.
    """
    config_lib.check_choice(correction, config_lib.CORRECTIONS, "algorithm.correction")
    log_ratio_BxT = checks.floats(log_ratio_BxT, "log_ratio_BxT")
    if correction == "truncated":
        return truncated(log_ratio_BxT, cap=cap)
    if correction == "masked":
        return masked(log_ratio_BxT, cap=cap, floor=floor)
    return jnp.ones_like(log_ratio_BxT)


def cap_log_ratio(log_ratio_BxT: jax.Array, *, cap: float) -> jax.Array:
    """Returns log min(r, cap) with the gradient of log r: a ratio truncated as an importance weight.

    If the ratio of a policy loss already refers to the behaviour policy, the ratio is the importance weight. A second
    factor min(r, C) would count it twice, so the correction truncates the ratio itself. Unlike with a plain minimum, a
    truncated token still learns, with weight `cap`.

    Args:
      log_ratio_BxT: log π - log π_behaviour, differentiable in π.
      cap: largest ratio.

    Returns:
      Log-ratios of shape [B, T].
    """
    return kl.straight_through(jnp.minimum(log_ratio_BxT, jnp.log(cap)), log_ratio_BxT)


def interpolated_proximal(
    log_probs_BxT: jax.Array, behaviour_log_probs_BxT: jax.Array, staleness_BxT: jax.Array
) -> jax.Array:
    """Approximates a proximal policy between the behaviour and the current policy, without a forward pass of its own.

    log π_p = log π_b + d / (d + 1) · (log π - log π_b), with d the token's staleness: π is one update ahead of the
    policy that the batch came to, which is d updates ahead of the behaviour policy.

    Args:
      log_probs_BxT: log-probs under the current policy π.
      behaviour_log_probs_BxT: log-probs under the policy π_b that sampled the token.
      staleness_BxT: d, policy versions between the sampling of the token and its training step.

    Returns:
      Log-probs of shape [B, T], without a gradient.

    References:
      A-3PO, arXiv 2512.06547, section 3; AReaL's `prox_logp_method="loglinear"`.
    """
    # Below 0 only in padding, whose value never counts.
    share_BxT = staleness_BxT / (jnp.maximum(staleness_BxT, 0.0) + 1.0)
    return jax.lax.stop_gradient(behaviour_log_probs_BxT + share_BxT * (log_probs_BxT - behaviour_log_probs_BxT))


def diagnostics(
    log_ratio_BxT: jax.Array, weights_BxT: jax.Array, mask_BxT: jax.Array, *, cap: float, floor: float = 0.0
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Measures the effect of the correction, as (sum, count) pairs over the trained tokens.

    `correction/weight` and `correction/weight_squared` are the first two moments of the weights. Their sums over the
    whole batch give the effective sample size as a fraction of the samples: weight² / weight_squared (Kish).

    Args:
      log_ratio_BxT: log π - log π_behaviour.
      weights_BxT: result of `weights`.
      mask_BxT: true (non-zero) on trained tokens.
      cap: the cap of the weights.
      floor: the floor of the weights.

    Returns:
      `correction/weight`, `correction/weight_squared` and `correction/capped_fraction` (fraction of ratios above the
      cap or below the floor, which were cut or dropped).
    """
    trained_BxT = mask_BxT != 0
    count = jnp.sum(trained_BxT, dtype=weights_BxT.dtype)
    kept_BxT = jnp.where(trained_BxT, weights_BxT, 0.0)
    # From the ratio, not the weight: a truncated weight equals the cap, and a masked weight is 0.
    ratio_BxT = bounded_ratio(log_ratio_BxT)
    capped_BxT = trained_BxT & ((ratio_BxT > cap) | (ratio_BxT < floor))
    return {
        "correction/weight": (jnp.sum(kept_BxT), count),
        "correction/weight_squared": (jnp.sum(jnp.square(kept_BxT)), count),
        "correction/capped_fraction": (jnp.sum(capped_BxT, dtype=weights_BxT.dtype), count),
    }
