"""Aggregates per-token values into one number: sums and counts over packed rows.

Letters: B rows, T tokens, S segments (trajectories) of a row.

A packed row holds several trajectories one after another. `segments_BxT` numbers them 1..S inside their row and is 0
on padding; `mask_BxT` is true on trained tokens. A trajectory never crosses rows. A value per sequence is therefore a
reduction by segment inside a row, with the same result as on unpacked trajectories.

Every mode is a weighted sum over tokens. The weights depend only on the mask, never on the parameters, so the backward
pass needs no segment reduction.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from libra_jax import config as config_lib
from libra_jax.algorithms import checks


def segment_sums(values_BxT: jax.Array, segments_BxT: jax.Array, *, max_segments: int) -> jax.Array:
    """Sums the tokens of each trajectory.

    Args:
      values_BxT: per-token values; zero for tokens that must not count.
      segments_BxT: trajectory number inside the row, 1..S; 0 is padding and is left out.
      max_segments: S, the largest trajectory number (static).

    Returns:
      Sums of shape [B, S]. Column s belongs to segment s + 1 and is zero if the row has no such segment.
    """

    def row(values_T: jax.Array, segments_T: jax.Array) -> jax.Array:
        # Number 0 collects the padding and is dropped.
        return jax.ops.segment_sum(values_T, segments_T, num_segments=max_segments + 1)[1:]

    return jax.vmap(row)(values_BxT, segments_BxT)


def spread(values_BxS: jax.Array, segments_BxT: jax.Array) -> jax.Array:
    """Gives each token the value of its trajectory; zero on padding. Inverse direction of `segment_sums`.

    Args:
      values_BxS: one value per trajectory.
      segments_BxT: trajectory number inside the row, 1..S; 0 is padding.

    Returns:
      Values of shape [B, T].
    """
    # Segment number 0, the padding, reads the added zero column.
    padded_BxP = jnp.pad(values_BxS, ((0, 0), (1, 0)))
    return jnp.take_along_axis(padded_BxP, segments_BxT, axis=1)


def token_weights(
    mask_BxT: jax.Array,
    segments_BxT: jax.Array,
    mode: str,
    *,
    max_segments: int,
    constant: float = 1.0,
    dtype: jnp.dtype = jnp.float32,
    rollout_tokens_BxT: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the weight of each token in the aggregated sum, and the count that finally divides the sum.

    With |i| the trained tokens of trajectory i:

    - `token_mean`: weight 1, count Σ_i |i|. Every token has the same weight (DAPO, arXiv 2503.14476 eq. 12).
    - `sequence_mean`: weight 1/|i|, count = number of trajectories. Every trajectory has the same weight (GRPO, arXiv
      2402.03300 eq. 3).
    - `sequence_sum`: weight 1/constant, count = number of trajectories. No division by a length, hence no length bias
      (Dr. GRPO, arXiv 2503.20783).

    Trajectories without a trained token have no weight and are not counted. A part of a trajectory that was split has
    the weights of the whole one, and counts as its share of the trained tokens.

    Args:
      mask_BxT: true (non-zero) on trained tokens.
      segments_BxT: trajectory number inside the row, 1..S; 0 is padding.
      mode: one of `config.AGGREGATIONS`.
      max_segments: S (static).
      constant: divisor of `sequence_sum`.
      dtype: dtype of the results.
      rollout_tokens_BxT: trained tokens of the trajectory that a trained token belongs to, in rows that hold parts of
        trajectories; None: all trajectories are whole.

    Returns:
      Weights of shape [B, T], zero on untrained tokens, and the scalar count.

    Raises:
      ConfigError: the mode is unknown.
      LibraError: shapes or dtypes do not match.
    """
    config_lib.check_choice(mode, config_lib.AGGREGATIONS, "algorithm.aggregation")
    checks.rank(2, mask_BxT=mask_BxT)
    checks.same_shape(mask_BxT=mask_BxT, segments_BxT=segments_BxT)
    checks.integer(segments_BxT=segments_BxT)
    # Padding has no trajectory to count for, even if the mask is set there.
    trained_BxT = ((mask_BxT != 0) & (segments_BxT > 0)).astype(dtype)
    if mode == "token_mean":
        return trained_BxT, jnp.sum(trained_BxT)
    lengths_BxS = segment_sums(trained_BxT, segments_BxT, max_segments=max_segments)
    # S is the largest number that any row can have; most rows have fewer trajectories.
    sequences = jnp.sum(lengths_BxS > 0, dtype=dtype)
    if rollout_tokens_BxT is not None:
        wholes_BxT = jnp.where(trained_BxT > 0, rollout_tokens_BxT, 0.0)
        # All trained tokens of a part have the same number: their mean.
        wholes_BxS = segment_sums(wholes_BxT, segments_BxT, max_segments=max_segments) / jnp.maximum(lengths_BxS, 1.0)
        sequences = jnp.sum(lengths_BxS / jnp.maximum(wholes_BxS, 1.0))
        lengths_BxS = wholes_BxS
    if mode == "sequence_sum":
        return trained_BxT / constant, sequences
    # The maximum avoids 0 times infinity for a segment without a trained token.
    return trained_BxT * spread(1.0 / jnp.maximum(lengths_BxS, 1.0), segments_BxT), sequences


def aggregate(
    values_BxT: jax.Array,
    mask_BxT: jax.Array,
    segments_BxT: jax.Array,
    mode: str,
    *,
    max_segments: int,
    constant: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Aggregates per-token values into a sum and a count; `sum / count` over the whole batch is the result.

    Sums and counts of any split of the batch add up. Values at untrained tokens are ignored, not multiplied by zero, so
    they may be NaN.

    Args:
      values_BxT: per-token values.
      mask_BxT: true (non-zero) on trained tokens.
      segments_BxT: trajectory number inside the row, 1..S; 0 is padding.
      mode: one of `config.AGGREGATIONS`; see `token_weights`.
      max_segments: S (static).
      constant: divisor of `sequence_sum`.

    Returns:
      Two scalars: the sum and the count, both zero if nothing is trained.

    Raises:
      ConfigError: the mode is unknown.
      LibraError: shapes or dtypes do not match.

    Example:
      >>> import jax.numpy as jnp
      >>> values = jnp.array([[1.0, 3.0, 5.0, 9.0]])
      >>> segments = jnp.array([[1, 1, 2, 0]])
      >>> total, count = aggregate(values, segments > 0, segments, "sequence_mean", max_segments=2)
      >>> print(total, count)  # (1 + 3) / 2 + 5, over two trajectories
      7.0 2.0
    """
    values_BxT = checks.floats(values_BxT, "values_BxT")
    checks.same_shape(values_BxT=values_BxT, mask_BxT=mask_BxT, segments_BxT=segments_BxT)
    weights_BxT, count = token_weights(
        mask_BxT, segments_BxT, mode, max_segments=max_segments, constant=constant, dtype=values_BxT.dtype
    )
    return weighted_sum(values_BxT, weights_BxT), count


def weighted_sum(values_BxT: jax.Array, weights_BxT: jax.Array) -> jax.Array:
    """Returns the scalar Σ weight·value over tokens with non-zero weight; other values are ignored, even NaN."""
    # A where before the product: 0 * NaN is NaN, in the value and in the gradient.
    return jnp.sum(jnp.where(weights_BxT != 0, values_BxT, 0.0) * weights_BxT)
