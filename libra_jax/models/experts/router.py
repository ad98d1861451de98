"""The router of a layer of experts: the experts of each token, their shares, and how evenly tokens spread.

Letters: B rows, T tokens, E experts, K experts of a token, S sequences of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Losses(NamedTuple):
    """Losses that keep a layer's router in order, or their means over the layers.

    Attributes:
      balance_BxT: how unevenly the token's sequence spreads over the experts; 1 if evenly, at most E / K.
      z_BxT: square of the logarithm of the sum of the token's exponentiated logits.
    """

    balance_BxT: jax.Array
    z_BxT: jax.Array


class GivenExperts(NamedTuple):
    """Experts chosen elsewhere (routing replay, arXiv 2510.11370).

    Attributes:
      experts: unsigned, experts of each token: [B, T, K] for one layer, [B, T, L, K] for all L layers.
      known_BxT: bool, tokens that take the given experts; other tokens take the router's own choice.
    """

    experts: jax.Array
    known_BxT: jax.Array


def choose(
    logits_BxTxE: jax.Array, count: int, normalize: bool, routing: GivenExperts | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns the experts of each token, int32 [B, T, K], and their shares, float32 [B, T, K].

    Gradients flow through the shares to the router, for given experts, too.

    Args:
      count: K.
      normalize: True if the shares of a token sum to 1. If False, they are probabilities among all experts.
      routing: experts of this layer to take instead of the router's own.
    """
    logits_BxTxE = logits_BxTxE.astype(jnp.float32)
    _, chosen_BxTxK = jax.lax.top_k(logits_BxTxE, count)
    if routing is not None:
        theirs_BxTxK = routing.experts.astype(chosen_BxTxK.dtype)
        chosen_BxTxK = jnp.where(routing.known_BxT[..., None], theirs_BxTxK, chosen_BxTxK)
    logits_BxTxK = jnp.take_along_axis(logits_BxTxE, chosen_BxTxK, axis=-1)
    if normalize:
        # Not the probabilities over their sum: for improbable experts, both underflow to 0.
        return chosen_BxTxK, jax.nn.softmax(logits_BxTxK, axis=-1)
    return chosen_BxTxK, jnp.exp(logits_BxTxK - jax.nn.logsumexp(logits_BxTxE, axis=-1, keepdims=True))


def losses(logits_BxTxE: jax.Array, chosen_BxTxK: jax.Array, segments_BxT: jax.Array, max_segments: int) -> Losses:
    """Returns the losses of one layer's router, float32.

    The balance is that of each sequence (DeepSeek-V3, arXiv 2412.19437, equations 17 to 20), so that any split of a
    batch into micro-batches gives the same. The z-loss is of ST-MoE (arXiv 2202.08906, equation 5).

    Args:
      segments_BxT: sequence of the row that a token belongs to, from 1; 0 is padding, whose balance is 0.
      max_segments: S, the most sequences of a row.
    """
    logits_BxTxE = logits_BxTxE.astype(jnp.float32)
    count, of_token = logits_BxTxE.shape[-1], chosen_BxTxK.shape[-1]
    of_BxTxS = (segments_BxT[..., None] == jnp.arange(1, max_segments + 1)).astype(jnp.float32)
    tokens_BxS = jnp.maximum(of_BxTxS.sum(axis=1), 1.0)
    taken_BxTxE = (chosen_BxTxK[..., None] == jnp.arange(count)).any(axis=2).astype(jnp.float32)

    def mean(values_BxTxE: jax.Array) -> jax.Array:
        return jnp.einsum("bts,bte->bse", of_BxTxS, values_BxTxE) / tokens_BxS[..., None]

    # Which experts are taken has no gradient; how probable they are has.
    balance_BxS = count / of_token * jnp.sum(mean(taken_BxTxE) * mean(jax.nn.softmax(logits_BxTxE)), axis=-1)
    return Losses(
        balance_BxT=jnp.einsum("bts,bs->bt", of_BxTxS, balance_BxS),
        z_BxT=jax.nn.logsumexp(logits_BxTxE, axis=-1) ** 2,
    )
