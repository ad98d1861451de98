"""Estimators of KL(π ‖ π_ref) from the log-probabilities of sampled tokens.

Letters: B rows, T tokens. The functions work per token and take any shape; [B, T] stands for it here.

With x ~ π and d = log π_ref(x) - log π(x) (J. Schulman, "Approximating KL divergence", joschu.net/blog/kl-approx.html):

- k1 = -d: unbiased, large variance, may be negative.
- k2 = d²/2: biased, small variance.
- k3 = exp(d) - 1 - d: unbiased, small variance, never negative.

The choice matters for the gradient. On samples of π, the gradient of k1 has expectation zero. The gradient of k3
estimates the gradient of KL(π_ref ‖ π), and the gradient of k2 estimates the gradient of KL(π ‖ π_ref). The
straight-through forms `k1+` and `k3+` keep the value of k1 or k3 and take the gradient of k2.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from libra_jax import config as config_lib
from libra_jax.algorithms import checks

LOG_RATIO_BOUND = 20.0
"""Limit of log-ratios before they are exponentiated, in nats (±20): exp(20) = 4.9e8 is far from overflow."""


def k1(log_probs_BxT: jax.Array, reference_log_probs_BxT: jax.Array) -> jax.Array:
    """Returns log π - log π_ref per token; shape [B, T]."""
    return log_probs_BxT - reference_log_probs_BxT


def k2(log_probs_BxT: jax.Array, reference_log_probs_BxT: jax.Array) -> jax.Array:
    """Returns (log π - log π_ref)² / 2 per token; shape [B, T]."""
    return 0.5 * jnp.square(log_probs_BxT - reference_log_probs_BxT)


def k3(log_probs_BxT: jax.Array, reference_log_probs_BxT: jax.Array) -> jax.Array:
    """Returns exp(d) - 1 - d per token with d = log π_ref - log π cut to ±20; shape [B, T].

    Uses expm1, because near d = 0, the usual case, `exp(d) - 1 - d` loses every digit in float32 and
    turns negative.

    Example:
      >>> import jax.numpy as jnp
      >>> print(k3(jnp.array([[-1.0]]), jnp.array([[-1.0]])))
      [[0.]]
    """
    log_ratio_BxT = jnp.clip(reference_log_probs_BxT - log_probs_BxT, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return jnp.expm1(log_ratio_BxT) - log_ratio_BxT


def straight_through(value_BxT: jax.Array, gradient_of_BxT: jax.Array) -> jax.Array:
    """Returns the value of the first argument with the gradient of the second."""
    # In the value, the second argument cancels; only the last term has a gradient.
    return jax.lax.stop_gradient(value_BxT - gradient_of_BxT) + gradient_of_BxT


def estimate(log_probs_BxT: jax.Array, reference_log_probs_BxT: jax.Array, estimator: str) -> jax.Array:
    """Estimates KL(π ‖ π_ref) per token with the estimator that the config names.

    Args:
      log_probs_BxT: log π of the sampled tokens.
      reference_log_probs_BxT: log π_ref of the same tokens.
      estimator: one of `config.KL_ESTIMATORS`.

    Returns:
      Estimates in nats, of shape [B, T].

    Raises:
      ConfigError: the estimator is unknown.
      LibraError: shapes or dtypes do not match.

    Example:
      >>> import jax.numpy as jnp
      >>> print(estimate(jnp.array([[-1.0]]), jnp.array([[-3.0]]), "k2"))
      [[2.]]
    """
    config_lib.check_choice(estimator, config_lib.KL_ESTIMATORS, "algorithm.kl_estimator")
    checks.same_shape(log_probs_BxT=log_probs_BxT, reference_log_probs_BxT=reference_log_probs_BxT)
    log_probs_BxT = checks.floats(log_probs_BxT, "log_probs_BxT")
    reference_BxT = checks.floats(reference_log_probs_BxT, "reference_log_probs_BxT")
    # "k3+" has the value of k3.
    value_BxT = {"k1": k1, "k2": k2, "k3": k3}[estimator.rstrip("+")](log_probs_BxT, reference_BxT)
    if estimator.endswith("+"):
        return straight_through(value_BxT, k2(log_probs_BxT, reference_BxT))
    return value_BxT
