"""Policy losses per token: clipped, dual clip, GSPO, CISPO, SAPO, GMPO, BAPO, Clip-Cov, KL-Cov, and a user's own.

Letters: B rows, T tokens.

r is the ratio of the current policy to the policy that it is compared with (its *anchor*: behaviour or proximal
policy). A is the advantage. All losses are minimised. They take log-ratios, differentiable in the current policy;
`aggregation` turns their tokens into sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.algorithms import aggregation, batch_statistics, checks, corrections
from libra_jax.utils import resolving


class LossInputs(NamedTuple):
    """The argument of a policy loss. Every array has the shape [B, T] and is 0 at untrained tokens.

    Rows hold whole trajectories one after the other (`segments_BxT`). A loss may compare tokens of one trajectory. It
    must not compare trajectories, because a batch is split into micro-batches, and over devices.

    Attributes:
      log_probs_BxT: log π of the current policy; gradients flow through it.
      log_ratio_BxT: log r, the log-ratio to the anchor after the correction; gradients flow through it.
      advantages_BxT: A.
      mask_BxT: true on trained tokens.
      segments_BxT: trajectory number inside the row, 1..S; 0 is padding.
      max_segments: S, a Python number.
      clip_low: `algorithm.clip_low`.
      clip_high: `algorithm.clip_high`.
      dual_clip: `algorithm.dual_clip`.
      statistics: statistics of the whole update by name (`batch_statistics`), spread over the tokens, [B, T].
    """

    log_probs_BxT: jax.Array
    log_ratio_BxT: jax.Array
    advantages_BxT: jax.Array
    mask_BxT: jax.Array
    segments_BxT: jax.Array
    max_segments: int
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    statistics: Mapping[str, jax.Array] = MappingProxyType({})


class TokenLoss(NamedTuple):
    """A policy loss before aggregation; every array has the shape [B, T].

    Attributes:
      loss_BxT: loss per token, to aggregate and minimise.
      ratio_BxT: the importance ratio that was clipped.
      low_BxT: true if the lower clip decides, so that the token does not push its ratio further down.
      high_BxT: true if the upper clip decides.
      dual_BxT: true if the dual clip decides.
    """

    loss_BxT: jax.Array
    ratio_BxT: jax.Array
    low_BxT: jax.Array
    high_BxT: jax.Array
    dual_BxT: jax.Array


def clipped(
    log_ratio_BxT: jax.Array,
    advantages_BxT: jax.Array,
    *,
    clip_low: float | jax.Array,
    clip_high: float | jax.Array,
    dual_clip: float = 0.0,
) -> TokenLoss:
    """Computes the clipped surrogate with separate bounds and an optional dual clip.

    loss = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A). If A < 0 and `dual_clip` = c > 1, the loss is at most -c
    A, so that one very likely bad token cannot dominate the batch.

    Args:
      log_ratio_BxT: log r, differentiable.
      advantages_BxT: A.
      clip_low: the lower bound is 1 - clip_low; 1 means no lower bound.
      clip_high: the upper bound is 1 + clip_high.
      dual_clip: c above 1, or 0 for no dual clip.

    Returns:
      A TokenLoss.

    Raises:
      LibraError: shapes or dtypes do not match.

    Example:
      >>> import jax.numpy as jnp
      >>> log_ratio = jnp.log(jnp.array([[1.5, 0.5, 5.0]]))
      >>> advantages = jnp.array([[1.0, -1.0, -1.0]])
      >>> print(clipped(log_ratio, advantages, clip_low=0.2, clip_high=0.25, dual_clip=3.0).loss_BxT)
      [[-1.25  0.8   3.  ]]

    References:
      Schulman et al., arXiv 1707.06347, eq. 7; separate bounds: DAPO, arXiv 2503.14476, section 3.1; dual clip: Ye
      et al., arXiv 1912.09729.
    """
    checks.same_shape(log_ratio_BxT=log_ratio_BxT, advantages_BxT=advantages_BxT)
    ratio_BxT = corrections.bounded_ratio(checks.floats(log_ratio_BxT, "log_ratio_BxT"))
    advantages_BxT = checks.floats(advantages_BxT, "advantages_BxT")
    free_BxT = -advantages_BxT * ratio_BxT
    bounded_BxT = -advantages_BxT * jnp.clip(ratio_BxT, 1.0 - clip_low, 1.0 + clip_high)
    # The paper maximises the smaller surrogate; the loss is its negative, so the larger one counts.
    loss_BxT = jnp.maximum(free_BxT, bounded_BxT)
    decides_BxT = bounded_BxT > free_BxT
    if dual_clip:
        # Only for A < 0: there the loss grows with the ratio without a bound, because the clip does not decide.
        ceiling_BxT = -advantages_BxT * dual_clip
        dual_BxT = (advantages_BxT < 0) & (loss_BxT > ceiling_BxT)
        loss_BxT = jnp.where(dual_BxT, ceiling_BxT, loss_BxT)
    else:
        dual_BxT = jnp.zeros_like(decides_BxT)
    # The bounds lie on either side of 1, so the ratio tells which bound decided.
    low_BxT = decides_BxT & (ratio_BxT < 1.0)
    high_BxT = decides_BxT & (ratio_BxT > 1.0)
    return TokenLoss(loss_BxT, ratio_BxT, low_BxT, high_BxT, dual_BxT)


def sequence_log_ratio(
    log_ratio_BxT: jax.Array, mask_BxT: jax.Array, segments_BxT: jax.Array, *, max_segments: int
) -> jax.Array:
    """Returns GSPO's length-normalised log-ratio of a whole trajectory at each of its tokens.

    log s_i = (1/|y_i|) Σ_t log r_{i,t} over the trained tokens. The result is the token form
    log s_{i,t} = sg[log s_i] + log r_{i,t} - sg[log r_{i,t}] (sg: no gradient). Its value is log s_i at every token. If
    A is one number per trajectory, any aggregation of the tokens has the gradient of the same aggregation of s_i. The
    form also holds for advantages that differ between tokens. No gradient crosses tokens.

    Args:
      log_ratio_BxT: log r per token, differentiable.
      mask_BxT: true (non-zero) on trained tokens.
      segments_BxT: trajectory number inside the row, 1..S; 0 is padding.
      max_segments: S (static).

    Returns:
      log s_{i,t}, of shape [B, T]; zero on untrained tokens.

    References:
      Zheng et al., arXiv 2507.18071, eq. 7 and section 4.3 (GSPO-token).
    """
    log_ratio_BxT = checks.floats(log_ratio_BxT, "log_ratio_BxT")
    weights_BxT, _ = aggregation.token_weights(
        mask_BxT, segments_BxT, "sequence_mean", max_segments=max_segments, dtype=log_ratio_BxT.dtype
    )
    trained_BxT = weights_BxT > 0
    log_ratio_BxT = jnp.where(trained_BxT, log_ratio_BxT, 0.0)
    fixed_BxT = jax.lax.stop_gradient(log_ratio_BxT)
    means_BxS = aggregation.segment_sums(fixed_BxT * weights_BxT, segments_BxT, max_segments=max_segments)
    # Added and subtracted, the token's log-ratio gives the gradient and leaves the mean as the value.
    return jnp.where(trained_BxT, aggregation.spread(means_BxS, segments_BxT) + log_ratio_BxT - fixed_BxT, 0.0)


def gspo(
    log_ratio_BxT: jax.Array,
    advantages_BxT: jax.Array,
    mask_BxT: jax.Array,
    segments_BxT: jax.Array,
    *,
    max_segments: int,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> TokenLoss:
    """Computes group sequence policy optimisation: the clipped surrogate of the length-normalised sequence ratio.

    Args:
      log_ratio_BxT: log r per token, differentiable.
      advantages_BxT: A, usually one number per trajectory.
      mask_BxT: true (non-zero) on trained tokens.
      segments_BxT: trajectory number inside the row, 1..S; 0 is padding.
      max_segments: S (static).
      clip_low: the lower bound is 1 - clip_low; sequence ratios stay near 1, the paper uses 3e-4.
      clip_high: the upper bound is 1 + clip_high; the paper uses 4e-4.
      dual_clip: same meaning as in `clipped`.

    Returns:
      A TokenLoss; the paper's objective aggregates it by `sequence_mean`.

    References:
      Zheng et al., arXiv 2507.18071, eq. 5.
    """
    log_ratio_BxT = sequence_log_ratio(log_ratio_BxT, mask_BxT, segments_BxT, max_segments=max_segments)
    return clipped(log_ratio_BxT, advantages_BxT, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def cispo(
    log_probs_BxT: jax.Array,
    log_ratio_BxT: jax.Array,
    advantages_BxT: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """Computes clipped importance-sampling-weight policy optimisation: tokens keep their gradient, weights are clipped.

    loss = -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log π.

    Args:
      log_probs_BxT: log π of the current policy, differentiable.
      log_ratio_BxT: log r; no gradient flows through it.
      advantages_BxT: A.
      clip_low: the lower bound is 1 - clip_low; the paper has none (1).
      clip_high: the upper bound is 1 + clip_high.

    Returns:
      A TokenLoss; `low_BxT` and `high_BxT` mark the clipped weights.

    Raises:
      LibraError: shapes or dtypes do not match.

    Example:
      >>> import jax.numpy as jnp
      >>> log_ratio = jnp.log(jnp.array([[3.0]]))
      >>> print(cispo(jnp.array([[-2.0]]), log_ratio, jnp.array([[1.0]]), clip_low=1.0, clip_high=0.5).loss_BxT)
      [[3.]]

    References:
      MiniMax-M1, arXiv 2506.13585, eq. 4 and 5.
    """
    checks.same_shape(log_probs_BxT=log_probs_BxT, log_ratio_BxT=log_ratio_BxT, advantages_BxT=advantages_BxT)
    log_probs_BxT = checks.floats(log_probs_BxT, "log_probs_BxT")
    # The ratio is only a weight here; the gradient flows through log π alone.
    ratio_BxT = jax.lax.stop_gradient(corrections.bounded_ratio(checks.floats(log_ratio_BxT, "log_ratio_BxT")))
    weight_BxT = jnp.clip(ratio_BxT, 1.0 - clip_low, 1.0 + clip_high)
    loss_BxT = -weight_BxT * checks.floats(advantages_BxT, "advantages_BxT") * log_probs_BxT
    low_BxT = ratio_BxT < weight_BxT
    high_BxT = ratio_BxT > weight_BxT
    return TokenLoss(loss_BxT, ratio_BxT, low_BxT, high_BxT, jnp.zeros_like(low_BxT))


def sapo(inputs: LossInputs, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> TokenLoss:
    """Computes soft adaptive policy optimisation: a smooth gate of the ratio instead of the clip.

    loss = -A · (4 / τ) · sigmoid(τ (r - 1)), with τ = `tau_positive` for A > 0, else `tau_negative`. At r = 1 the
    gradient is that of -A log π; it fades on both sides.

    Args:
      inputs: arrays of the micro-batch.
      tau_positive: sharpness of the gate for positive advantages.
      tau_negative: sharpness for the other tokens; larger than `tau_positive` in the paper.

    Returns:
      A TokenLoss; the paper's objective aggregates it by `sequence_mean`.

    References:
      Gao et al., arXiv 2511.20347, eq. 5 and 6.
    """
    ratio_BxT = corrections.bounded_ratio(inputs.log_ratio_BxT)
    tau_BxT = jnp.where(inputs.advantages_BxT > 0, tau_positive, tau_negative)
    gate_BxT = jax.nn.sigmoid(tau_BxT * (ratio_BxT - 1.0)) * (4.0 / tau_BxT)
    return _unclipped(-inputs.advantages_BxT * gate_BxT, ratio_BxT)


def gmpo(inputs: LossInputs) -> TokenLoss:
    """Computes geometric-mean policy optimisation: the geometric mean of token ratios, each clipped in log space.

    With s = sign(A): log c_t = s · min(s log r_t, s clip(log r_t, -clip_low, clip_high)); loss of each token of a
    trajectory = -A · exp(mean_t log c_t), so `sequence_mean` gives the paper's objective.

    Args:
      inputs: arrays of the micro-batch. `clip_low` and `clip_high` bound the log-ratio; the paper uses 0.4.

    Returns:
      A TokenLoss.

    References:
      Zhao et al., arXiv 2507.20673, eq. 4.
    """
    bounded_BxT = jnp.clip(inputs.log_ratio_BxT, -inputs.clip_low, inputs.clip_high)
    sign_BxT = jnp.sign(inputs.advantages_BxT)
    clipped_BxT = sign_BxT * jnp.minimum(sign_BxT * inputs.log_ratio_BxT, sign_BxT * bounded_BxT)
    weights_BxT, _ = aggregation.token_weights(
        inputs.mask_BxT, inputs.segments_BxT, "sequence_mean", max_segments=inputs.max_segments, dtype=clipped_BxT.dtype
    )
    means_BxS = aggregation.segment_sums(
        clipped_BxT * weights_BxT, inputs.segments_BxT, max_segments=inputs.max_segments
    )
    ratio_BxT = corrections.bounded_ratio(aggregation.spread(means_BxS, inputs.segments_BxT))
    decides_BxT = clipped_BxT != inputs.log_ratio_BxT
    return TokenLoss(
        -inputs.advantages_BxT * ratio_BxT,
        ratio_BxT,
        decides_BxT & (inputs.advantages_BxT < 0),
        decides_BxT & (inputs.advantages_BxT > 0),
        jnp.zeros_like(decides_BxT),
    )


def bapo(inputs: LossInputs) -> TokenLoss:
    """Computes balanced policy optimisation: the clipped surrogate with the bounds that `batch_statistics.bapo` found.

    Args:
      inputs: arrays of the micro-batch, with the statistics `low` and `high`.

    Returns:
      A TokenLoss.

    References:
      Xi et al., arXiv 2510.18927, eq. 7; the dual clip of the authors' code is `algorithm.dual_clip=3`.
    """
    return clipped(
        inputs.log_ratio_BxT,
        inputs.advantages_BxT,
        clip_low=1.0 - inputs.statistics["low"],
        clip_high=inputs.statistics["high"] - 1.0,
        dual_clip=inputs.dual_clip,
    )


def clip_cov(inputs: LossInputs) -> TokenLoss:
    """Computes Clip-Cov: the clipped surrogate without the tokens that `batch_statistics.clip_cov` drops.

    A dropped token has no loss and no gradient, and stays in the denominator.

    Args:
      inputs: arrays of the micro-batch, with the statistic `dropped`.

    Returns:
      A TokenLoss; `high_BxT` marks dropped tokens, too.

    References:
      Cui et al., arXiv 2505.22617, eq. 12.
    """
    token_loss, dropped_BxT = _clipped(inputs), inputs.statistics["dropped"] > 0
    loss_BxT = jnp.where(dropped_BxT, 0.0, token_loss.loss_BxT)
    return token_loss._replace(loss_BxT=loss_BxT, high_BxT=token_loss.high_BxT | dropped_BxT)


def kl_cov(inputs: LossInputs, *, coefficient: float = 1.0) -> TokenLoss:
    """Computes KL-Cov: -r A, plus a penalty of |log r| on the tokens that `batch_statistics.kl_cov` chooses.

    Args:
      inputs: arrays of the micro-batch, with the statistic `chosen`.
      coefficient: weight of the penalty.

    Returns:
      A TokenLoss, which has no clip.

    References:
      Cui et al., arXiv 2505.22617, eq. 14.
    """
    ratio_BxT = corrections.bounded_ratio(inputs.log_ratio_BxT)
    penalty_BxT = coefficient * jnp.abs(inputs.log_ratio_BxT) * inputs.statistics["chosen"]
    return _unclipped(penalty_BxT - inputs.advantages_BxT * ratio_BxT, ratio_BxT)


def _unclipped(loss_BxT: jax.Array, ratio_BxT: jax.Array) -> TokenLoss:
    nowhere_BxT = jnp.zeros(loss_BxT.shape, bool)
    return TokenLoss(loss_BxT, jax.lax.stop_gradient(ratio_BxT), nowhere_BxT, nowhere_BxT, nowhere_BxT)


def _clipped(inputs: LossInputs) -> TokenLoss:
    # GSPO's too: its log-ratio is already that of the whole trajectory.
    return clipped(
        inputs.log_ratio_BxT,
        inputs.advantages_BxT,
        clip_low=inputs.clip_low,
        clip_high=inputs.clip_high,
        dual_clip=inputs.dual_clip,
    )


_BUILT_IN: dict[str, Callable[..., TokenLoss]] = {
    "clipped": _clipped,
    "gspo": _clipped,
    "cispo": lambda inputs: cispo(
        inputs.log_probs_BxT,
        inputs.log_ratio_BxT,
        inputs.advantages_BxT,
        clip_low=inputs.clip_low,
        clip_high=inputs.clip_high,
    ),
    "sapo": sapo,
    "gmpo": gmpo,
    "bapo": bapo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}


def find(config: config_lib.AlgorithmConfig) -> Callable[[LossInputs], TokenLoss]:
    """Returns the config's loss with its arguments: a built-in one, or a user's function `loss(inputs, **arguments)`.

    A user's function returns the loss of each token, float [B, T], or a `TokenLoss`.

    Raises:
      ConfigError: there is no such function, or it does not take `loss_arguments`.
    """
    is_custom, field = ":" in config.loss, "algorithm.loss_arguments"
    function = resolving.resolve(config.loss, "algorithm.loss") if is_custom else _BUILT_IN[config.loss]
    arguments = dict(config.loss_arguments)
    if batch_statistics.find(config) is not None:
        # All other arguments are those of the statistics, which `find` has checked.
        allowed_names = batch_statistics.OF_THE_LOSS.get(config.loss, ())
        arguments = {name: value for name, value in arguments.items() if name in allowed_names}
    resolving.check_arguments(function, config.loss, {"inputs": None, **arguments}, field)

    def loss(inputs: LossInputs) -> TokenLoss:
        result = function(inputs=inputs, **arguments)
        if isinstance(result, TokenLoss):
            return result
        if jnp.shape(result) != inputs.mask_BxT.shape:
            raise protocols.ConfigError(
                f"config.algorithm.loss: {config.loss} must return the loss of each token, [B, T] = "
                f"{inputs.mask_BxT.shape}, not an array of shape {jnp.shape(result)}"
            )
        loss_BxT = checks.floats(result, "the loss of each token")
        return _unclipped(loss_BxT, corrections.bounded_ratio(inputs.log_ratio_BxT))

    return loss
