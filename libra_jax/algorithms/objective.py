"""The trainer's one entry point to this room: turns log-probabilities into the sums of a training step.

Letters: B rows, T tokens.

    objective = Σ [ w · policy loss + kl_coefficient · KL(π ‖ π_ref) - entropy_coefficient · H(π)
                    + balance_coefficient · balance + router_z_coefficient · z ]

One aggregation mode applies to all parts, so all share one count. `loss_sum / count` over the global batch is the loss.
A gradient step differentiates `loss_sum` of its micro-batch, and the apply step divides by the global count.

Three policies may differ. The *behaviour* policy π_b sampled the tokens, the *proximal* policy π_p is the policy when
the batch arrived, and the *current* policy π is being updated.

- `objective="behaviour"`: the ratio of the policy loss is π/π_b. This ratio already is the importance weight, so a
  correction truncates the ratio or drops tokens with too large a ratio. It is not a second factor.
- `objective="decoupled"`: the ratio is π/π_p, clipped around the proximal policy. The correction weighs each token by
  π_p/π_b, truncated or masked (AReaL, arXiv 2505.24298, section 5.2). For exact weights, use "truncated" with a cap
  out of reach; "none" leaves the weight out.

With `loss="gspo"`, both ratios are length-normalised over the trajectory, so its tokens share one weight.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.algorithms import aggregation, checks, corrections, kl, losses

Metrics = dict[str, tuple[jax.Array, jax.Array]]

WEIGHT, WEIGHT_SQUARED = "ess/weight", "ess/weight_squared"
"""Sums that `effective_share` turns into the metric `ess`."""


class ObjectiveSums(NamedTuple):
    """Contribution of one piece of the batch. The sums of any split add up; maxima combine by comparison.

    Attributes:
      loss_sum: scalar to differentiate.
      count: scalar; the sum of all `loss_sum` is divided by the sum of all `count`.
      metrics: (sum, count) by name. A metric is sum / count after all parts are added; it has no value if count is 0.
      maxima: largest of positive values by name; 0 if there are none.
    """

    loss_sum: jax.Array
    count: jax.Array
    metrics: Metrics
    maxima: dict[str, jax.Array]


class _Tokens(NamedTuple):
    """The inputs in one float dtype, set to zero at all untrained tokens."""

    log_probs: jax.Array
    behaviour: jax.Array
    advantages: jax.Array
    trained: jax.Array
    segments: jax.Array
    entropy: jax.Array | None
    proximal: jax.Array | None
    reference: jax.Array | None
    balance: jax.Array | None
    router_z: jax.Array | None
    rollout_tokens: jax.Array | None


def policy_objective(
    config: config_lib.AlgorithmConfig,
    *,
    log_probs_BxT: jax.Array,
    behaviour_log_probs_BxT: jax.Array,
    advantages_BxT: jax.Array,
    mask_BxT: jax.Array,
    segments_BxT: jax.Array,
    max_segments: int,
    entropy_BxT: jax.Array | None = None,
    proximal_log_probs_BxT: jax.Array | None = None,
    reference_log_probs_BxT: jax.Array | None = None,
    same_version_BxT: jax.Array | None = None,
    arrived_log_probs_BxT: jax.Array | None = None,
    statistics: Mapping[str, jax.Array] = MappingProxyType({}),
    balance_BxT: jax.Array | None = None,
    router_z_BxT: jax.Array | None = None,
    rollout_tokens_BxT: jax.Array | None = None,
) -> ObjectiveSums:
    """Computes the objective of packed rows, as sums.

    Only `log_probs_BxT`, `entropy_BxT` and the losses of routers are differentiated. Log-probs belong to the sampled
    token at its own position t, in nats, at the sampling temperature. Values at untrained tokens are ignored, even NaN.

    Args:
      config: settings of the algorithm (static).
      log_probs_BxT: log-probs under the current policy.
      behaviour_log_probs_BxT: log-probs under the policy that sampled the token.
      advantages_BxT: advantages per token.
      mask_BxT: true (non-zero) on trained tokens.
      segments_BxT: trajectory number inside the row, 1..S; 0 is padding.
      max_segments: S (static).
      entropy_BxT: entropy of the next-token distribution that the token was sampled from. Required with an entropy
        coefficient, else only reported.
      proximal_log_probs_BxT: log-probs under the policy at the step's start; required by `objective="decoupled"`. In a
        batch's first update these are `log_probs_BxT` itself: no gradient flows through this argument.
      reference_log_probs_BxT: log-probs under the frozen reference. Required with a KL coefficient in the loss, else
        only reported.
      same_version_BxT: true for tokens sampled by the policy version that scores them. Adds `mismatch/kl` and
        `mismatch/ratio_max`, the disagreement of engine and trainer about the same weights.
      arrived_log_probs_BxT: log-probs under the weights of that version; default: `log_probs_BxT`.
      statistics: statistics of the whole update that the loss takes (`batch_statistics`), [B, T] each.
      balance_BxT: load-balance loss of routers (`models.experts.router`); reported, and part of the loss with a
        coefficient.
      router_z_BxT: z-loss of the routers; as the load-balance loss.
      rollout_tokens_BxT: trained tokens of each token's trajectory, in rows that hold parts of trajectories
        (`aggregation.token_weights`). Everything else takes a part for a trajectory.

    Returns:
      ObjectiveSums. Metrics over the loss's count: `loss/policy`, `loss/kl` and `loss/entropy` (parts of the loss,
      coefficients included). Metrics over trained tokens: `entropy`, `kl/reference`, `kl/behaviour` (k3 estimate of
      KL(π_b ‖ π)), `clip/low_fraction`, `clip/high_fraction`, `clip/dual_fraction`, `correction/*` (see
      `corrections.diagnostics`), `mismatch/kl`. Maxima: `ratio/max` (of the policy loss), `mismatch/ratio_max`.

    Raises:
      ConfigError: the config needs log-probs or an entropy that are not given.
      LibraError: shapes or dtypes do not match.

    Example:
      >>> import jax.numpy as jnp
      >>> from libra_jax import config as config_lib
      >>> sums = policy_objective(
      ...     config_lib.AlgorithmConfig(),
      ...     log_probs_BxT=jnp.array([[-1.0, -2.0, 0.0]]),
      ...     behaviour_log_probs_BxT=jnp.array([[-1.0, -2.0, 0.0]]),
      ...     advantages_BxT=jnp.array([[1.0, 0.5, 0.0]]),
      ...     mask_BxT=jnp.array([[True, True, False]]),
      ...     segments_BxT=jnp.array([[1, 1, 0]]),
      ...     max_segments=1,
      ... )
      >>> print(sums.loss_sum / sums.count)
      -0.75
    """
    checks.rank(2, log_probs_BxT=log_probs_BxT)
    checks.same_shape(
        log_probs_BxT=log_probs_BxT,
        behaviour_log_probs_BxT=behaviour_log_probs_BxT,
        advantages_BxT=advantages_BxT,
        mask_BxT=mask_BxT,
        segments_BxT=segments_BxT,
        entropy_BxT=entropy_BxT,
        proximal_log_probs_BxT=proximal_log_probs_BxT,
        reference_log_probs_BxT=reference_log_probs_BxT,
        same_version_BxT=same_version_BxT,
        arrived_log_probs_BxT=arrived_log_probs_BxT,
        balance_BxT=balance_BxT,
        router_z_BxT=router_z_BxT,
        rollout_tokens_BxT=rollout_tokens_BxT,
    )
    _check_given(config, entropy_BxT, proximal_log_probs_BxT, reference_log_probs_BxT)
    # Padding is never trained, even if the mask is set there.
    trained_BxT = (mask_BxT != 0) & (segments_BxT > 0)

    def clean(array: jax.Array, name: str) -> jax.Array:
        # A where, not a product: 0 * NaN is NaN, in the value and in the gradient.
        return jnp.where(trained_BxT, checks.floats(array, name), 0.0)

    def fixed(array: jax.Array | None, name: str) -> jax.Array | None:
        return None if array is None else jax.lax.stop_gradient(clean(array, name))

    tokens = _Tokens(
        log_probs=clean(log_probs_BxT, "log_probs_BxT"),
        behaviour=jax.lax.stop_gradient(clean(behaviour_log_probs_BxT, "behaviour_log_probs_BxT")),
        advantages=jax.lax.stop_gradient(clean(advantages_BxT, "advantages_BxT")),
        trained=trained_BxT,
        segments=segments_BxT,
        entropy=None if entropy_BxT is None else clean(entropy_BxT, "entropy_BxT"),
        proximal=fixed(proximal_log_probs_BxT, "proximal_log_probs_BxT"),
        reference=fixed(reference_log_probs_BxT, "reference_log_probs_BxT"),
        balance=None if balance_BxT is None else clean(balance_BxT, "balance_BxT"),
        router_z=None if router_z_BxT is None else clean(router_z_BxT, "router_z_BxT"),
        rollout_tokens=fixed(rollout_tokens_BxT, "rollout_tokens_BxT"),
    )
    sums = _sums(config, tokens, max_segments, statistics)
    if same_version_BxT is not None:
        arrived_BxT = fixed(arrived_log_probs_BxT, "arrived_log_probs_BxT")
        scored_BxT = jax.lax.stop_gradient(tokens.log_probs) if arrived_BxT is None else arrived_BxT
        same_BxT = trained_BxT & (same_version_BxT != 0)
        kl_BxT = jnp.where(same_BxT, kl.k3(tokens.behaviour, scored_BxT), 0.0)
        ratio_BxT = corrections.bounded_ratio(scored_BxT - tokens.behaviour)
        sums.metrics["mismatch/kl"] = (jnp.sum(kl_BxT), jnp.sum(same_BxT, dtype=kl_BxT.dtype))
        sums.maxima["mismatch/ratio_max"] = _largest(ratio_BxT, same_BxT)
    return sums


def _check_given(
    config: config_lib.AlgorithmConfig,
    entropy_BxT: jax.Array | None,
    proximal_BxT: jax.Array | None,
    reference_BxT: jax.Array | None,
) -> None:
    """Raises ConfigError if the config needs an input that the caller left out."""
    if config.objective == "decoupled" and proximal_BxT is None:
        raise protocols.ConfigError('config.algorithm.objective: "decoupled" needs proximal_log_probs_BxT')
    if config.kl_coefficient > 0 and not config.kl_in_reward and reference_BxT is None:
        raise protocols.ConfigError("config.algorithm.kl_coefficient: above 0 it needs reference_log_probs_BxT")
    if config.entropy_coefficient != 0 and entropy_BxT is None:
        raise protocols.ConfigError("config.algorithm.entropy_coefficient: unless 0 it needs entropy_BxT")


def _sums(
    config: config_lib.AlgorithmConfig, tokens: _Tokens, max_segments: int, statistics: Mapping[str, jax.Array]
) -> ObjectiveSums:
    weights_BxT, count = aggregation.token_weights(
        tokens.trained,
        tokens.segments,
        config.aggregation,
        max_segments=max_segments,
        constant=config.sequence_length_constant,
        dtype=tokens.log_probs.dtype,
        rollout_tokens_BxT=tokens.rollout_tokens,
    )
    token_count = jnp.sum(tokens.trained, dtype=tokens.log_probs.dtype)

    def token_mean(values_BxT: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Without the stop, the backward pass would also carry the metrics.
        return jax.lax.stop_gradient(jnp.sum(jnp.where(tokens.trained, values_BxT, 0.0))), token_count

    # Each part is a sum with the same weights, so the parts add up and share one count.
    token_loss, metrics = _policy_loss(config, tokens, max_segments, statistics)
    loss_sum = aggregation.weighted_sum(token_loss.loss_BxT, weights_BxT)
    metrics["loss/policy"] = (jax.lax.stop_gradient(loss_sum), count)
    if tokens.reference is not None:
        kl_BxT = kl.estimate(tokens.log_probs, tokens.reference, config.kl_estimator)
        metrics["kl/reference"] = token_mean(kl_BxT)
        if config.kl_coefficient > 0 and not config.kl_in_reward:
            kl_sum = config.kl_coefficient * aggregation.weighted_sum(kl_BxT, weights_BxT)
            metrics["loss/kl"] = (jax.lax.stop_gradient(kl_sum), count)
            loss_sum += kl_sum
    if tokens.entropy is not None:
        # Reported over tokens, while its part of the loss is aggregated as the loss is.
        metrics["entropy"] = token_mean(tokens.entropy)
        if config.entropy_coefficient != 0:
            entropy_sum = -config.entropy_coefficient * aggregation.weighted_sum(tokens.entropy, weights_BxT)
            metrics["loss/entropy"] = (jax.lax.stop_gradient(entropy_sum), count)
            loss_sum += entropy_sum
    for name, values_BxT, coefficient in (
        ("router/balance", tokens.balance, config.balance_coefficient),
        ("router/z", tokens.router_z, config.router_z_coefficient),
    ):
        if values_BxT is not None:
            metrics[name] = token_mean(values_BxT)
            if coefficient:
                loss_sum += coefficient * aggregation.weighted_sum(values_BxT, weights_BxT)
    # KL(π_b ‖ π): the behaviour policy sampled the tokens, so it is the first argument.
    metrics["kl/behaviour"] = token_mean(kl.k3(tokens.behaviour, tokens.log_probs))
    # One weight for each trajectory, the product of its tokens' ratios: the effective sample size of the update.
    metrics |= _sequence_weights(tokens, max_segments)
    metrics["clip/low_fraction"] = token_mean(token_loss.low_BxT)
    metrics["clip/high_fraction"] = token_mean(token_loss.high_BxT)
    if config.dual_clip:
        metrics["clip/dual_fraction"] = token_mean(token_loss.dual_BxT)
    maxima = {"ratio/max": _largest(token_loss.ratio_BxT, tokens.trained)}
    return ObjectiveSums(loss_sum, count, metrics, maxima)


def _sequence_weights(tokens: _Tokens, max_segments: int) -> Metrics:
    """Returns the first two moments of the trajectories' importance weights π/π_b."""
    log_ratio_BxT = jax.lax.stop_gradient(tokens.log_probs) - tokens.behaviour
    log_weight_BxS, trained_BxS = (
        aggregation.segment_sums(values_BxT, tokens.segments, max_segments=max_segments)
        for values_BxT in (log_ratio_BxT, tokens.trained.astype(log_ratio_BxT.dtype))
    )
    weight_BxS = jnp.where(trained_BxS > 0, corrections.bounded_ratio(log_weight_BxS), 0.0)
    count = jnp.sum(trained_BxS > 0, dtype=weight_BxS.dtype)
    return {WEIGHT: (jnp.sum(weight_BxS), count), WEIGHT_SQUARED: (jnp.sum(jnp.square(weight_BxS)), count)}


def effective_share(metrics: Mapping[str, tuple[float, float]]) -> float | None:
    """Returns the effective sample size of summed metrics as a share of the trajectories (Kish); None without any.

    (Σ w)² / (N Σ w²), where w is the product of a trajectory's token ratios, with its logarithm cut to ±20.
    """
    total, count = metrics.get(WEIGHT, (0.0, 0.0))
    squares, _ = metrics.get(WEIGHT_SQUARED, (0.0, 0.0))
    return float(total) ** 2 / (float(count) * float(squares)) if count and squares else None


def _policy_loss(
    config: config_lib.AlgorithmConfig, tokens: _Tokens, max_segments: int, statistics: Mapping[str, jax.Array]
) -> tuple[losses.TokenLoss, Metrics]:
    """Returns the corrected policy loss per token, and the correction's diagnostics."""
    decoupled = config.objective == "decoupled"
    anchor_BxT = tokens.proximal if decoupled and tokens.proximal is not None else tokens.behaviour
    log_ratio_BxT = tokens.log_probs - anchor_BxT
    # Decoupled: π_p/π_b is a separate weight. Else the ratio π/π_b is itself the importance weight.
    importance_BxT = anchor_BxT - tokens.behaviour if decoupled else log_ratio_BxT
    if config.loss == "gspo":
        normalise = functools.partial(
            losses.sequence_log_ratio, mask_BxT=tokens.trained, segments_BxT=tokens.segments, max_segments=max_segments
        )
        log_ratio_BxT, importance_BxT = normalise(log_ratio_BxT), normalise(importance_BxT)
    # Weights change the measure, not the objective, so no gradient flows through them.
    importance_BxT = corrections.of_level(
        jax.lax.stop_gradient(importance_BxT),
        tokens.trained,
        tokens.segments,
        config.correction_level,
        max_segments=max_segments,
    )
    limits = {"cap": config.correction_cap, "floor": config.correction_floor}
    weights_BxT = corrections.weights(importance_BxT, config.correction, **limits)
    factor_BxT = weights_BxT
    if not decoupled:
        log_ratio_BxT, factor_BxT = _correct_ratio(config, log_ratio_BxT, weights_BxT)
    inputs = losses.LossInputs(
        log_probs_BxT=tokens.log_probs,
        log_ratio_BxT=log_ratio_BxT,
        advantages_BxT=tokens.advantages,
        mask_BxT=tokens.trained,
        segments_BxT=tokens.segments,
        max_segments=max_segments,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
        statistics=statistics,
    )
    token_loss = losses.find(config)(inputs)
    metrics: Metrics = {}
    if config.correction != "none":
        token_loss = token_loss._replace(loss_BxT=token_loss.loss_BxT * factor_BxT)
        metrics = corrections.diagnostics(importance_BxT, weights_BxT, tokens.trained, **limits)
    return token_loss, metrics


def _correct_ratio(
    config: config_lib.AlgorithmConfig, log_ratio_BxT: jax.Array, weights_BxT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Corrects a ratio that is itself the importance weight: returns the log-ratio, and a factor that drops tokens."""
    if config.correction == "truncated":
        log_ratio_BxT = corrections.cap_log_ratio(log_ratio_BxT, cap=config.correction_cap)
        return log_ratio_BxT, jnp.ones_like(weights_BxT)
    # Masked: the factor only drops tokens; a weight of r would count the ratio twice.
    return log_ratio_BxT, (weights_BxT > 0).astype(weights_BxT.dtype)


def _largest(values_BxT: jax.Array, keep_BxT: jax.Array) -> jax.Array:
    """Returns the largest of the kept (positive) values; 0 if none is kept."""
    return jax.lax.stop_gradient(jnp.max(jnp.where(keep_BxT, values_BxT, 0.0), initial=0.0))
