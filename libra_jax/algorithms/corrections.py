"""Importance-sampling corrections: what a sampled token's loss weighs when another policy drew it.

Letters: B rows, T tokens.

A token drawn by the behaviour policy and trained on by another one π carries the importance ratio
r = π(token) / π_behaviour(token). Exact weighting by r is unbiased and of unbounded variance, so r goes through one of

- truncated: min(r, C) (truncated importance sampling; E. Ionides 2008; IMPALA, arXiv 1802.01561 section 4.1);
- masked: r where r <= C, else 0 (the token is dropped; it stays in the denominator of the loss).

Weights never carry a gradient: they change the measure, not the objective.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from libra_jax import config
from libra_jax.algorithms import checks, kl


def bounded_ratio(log_ratio_BxT: jax.Array) -> jax.Array:
    """exp of the log-ratio cut to ±20, so that no ratio overflows and no product with zero turns into NaN."""
    return jnp.exp(jnp.clip(log_ratio_BxT, -kl.LOG_RATIO_BOUND, kl.LOG_RATIO_BOUND))


def truncated(log_ratio_BxT: jax.Array, *, cap: float) -> jax.Array:
    """min(r, cap) per token, without a gradient; shape [B, T].

    Example:
      >>> import jax.numpy as jnp
      >>> print(truncated(jnp.log(jnp.array([[0.5, 4.0]])), cap=2.0))
      [[0.5 2. ]]
    """
    return jax.lax.stop_gradient(jnp.minimum(bounded_ratio(log_ratio_BxT), cap))


def masked(log_ratio_BxT: jax.Array, *, cap: float) -> jax.Array:
    """r where r <= cap, else 0, per token, without a gradient; shape [B, T].

    Example:
      >>> import jax.numpy as jnp
      >>> print(masked(jnp.log(jnp.array([[0.5, 4.0]])), cap=2.0))
      [[0.5 0. ]]
    """
    ratio_BxT = bounded_ratio(log_ratio_BxT)
    return jax.lax.stop_gradient(jnp.where(ratio_BxT <= cap, ratio_BxT, 0.0))


def weights(log_ratio_BxT: jax.Array, correction: str, *, cap: float) -> jax.Array:
    """Importance weights by the correction's name in the config; all ones for "none".

    Args:
      log_ratio_BxT: log π - log π_behaviour of the sampled tokens.
      correction: one of `config.CORRECTIONS`.
      cap: C above.

    Returns:
      Weights of shape [B, T], without a gradient.

    Raises:
      ConfigError: the correction is unknown.
    """
    config.check_choice(correction, config.CORRECTIONS, "algorithm.correction")
    log_ratio_BxT = checks.floats(log_ratio_BxT, "log_ratio_BxT")
    if correction == "truncated":
        return truncated(log_ratio_BxT, cap=cap)
    if correction == "masked":
        return masked(log_ratio_BxT, cap=cap)
    return jnp.ones_like(log_ratio_BxT)


def cap_log_ratio(log_ratio_BxT: jax.Array, *, cap: float) -> jax.Array:
    """log min(r, cap) whose gradient is still that of log r: a ratio truncated as an importance weight.

    Where the ratio of a policy loss itself goes back to the behaviour policy, it already is the importance weight.
    A second factor min(r, C) would count it twice; truncating the ratio is the correction there. Unlike a plain
    minimum, a truncated token still learns, with weight `cap`.

    Args:
      log_ratio_BxT: log π - log π_behaviour, differentiable in π.
      cap: largest ratio.

    Returns:
      Log-ratios of shape [B, T].
    """
    return kl.straight_through(jnp.minimum(log_ratio_BxT, jnp.log(cap)), log_ratio_BxT)


def diagnostics(
    log_ratio_BxT: jax.Array, weights_BxT: jax.Array, mask_BxT: jax.Array, *, cap: float
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """How far the correction reaches, as (sum, count) pairs over the trained tokens.

    `correction/weight` and `correction/weight_squared` are the first two moments of the weights; from their sums over
    the whole batch follows the effective sample size, as a fraction of the samples weight² / weight_squared (Kish).

    Args:
      log_ratio_BxT: log π - log π_behaviour.
      weights_BxT: what `weights` made of it.
      mask_BxT: true (non-zero) on trained tokens.
      cap: the cap of the weights.

    Returns:
      `correction/weight`, `correction/weight_squared` and `correction/capped_fraction` (ratios above the cap, which
      were cut or dropped).
    """
    trained_BxT = mask_BxT != 0
    count = jnp.sum(trained_BxT, dtype=weights_BxT.dtype)
    kept_BxT = jnp.where(trained_BxT, weights_BxT, 0.0)
    capped_BxT = trained_BxT & (bounded_ratio(log_ratio_BxT) > cap)
    return {
        "correction/weight": (jnp.sum(kept_BxT), count),
        "correction/weight_squared": (jnp.sum(jnp.square(kept_BxT)), count),
        "correction/capped_fraction": (jnp.sum(capped_BxT, dtype=weights_BxT.dtype), count),
    }
