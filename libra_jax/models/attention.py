"""Causal attention within segments.

Letters: B rows, T queries, S keys, H query heads, N key and value heads, G = H / N query heads a key head, K head
width.
"""

from __future__ import annotations

import functools
from typing import Protocol

import jax
import jax.numpy as jnp

SAVED_NAMES = ("attention_output", "attention_normalizer")
"""`checkpoint_name`s of what the backward pass needs from a forward pass of attention."""

_MASKED = -1e30
_FLOOR = -1e20  # a row without a key has maximum _FLOOR, so that all its weights underflow to exactly 0


class Attend(Protocol):
    """Attention over one set of segments."""

    def __call__(self, q_BxTxHxK: jax.Array, k_BxTxNxK: jax.Array, v_BxTxNxK: jax.Array) -> jax.Array: ...


def prepare(kernel: str, chunk: int, segments_BxT: jax.Array) -> Attend:
    """Attention over these segments with the named kernel."""
    return functools.partial(dense, segments_BxT=segments_BxT)


def dense(q_BxTxHxK: jax.Array, k_BxTxNxK: jax.Array, v_BxTxNxK: jax.Array, segments_BxT: jax.Array) -> jax.Array:
    """Attention with the whole [T, T] matrix at once; softmax in float32, padding queries give 0."""
    rows, tokens, _, head_dim = q_BxTxHxK.shape
    q_BxTxNxGxK = q_BxTxHxK.reshape(rows, tokens, k_BxTxNxK.shape[2], -1, head_dim) * head_dim**-0.5
    scores = jnp.einsum("btngk,bsnk->bngts", q_BxTxNxGxK, k_BxTxNxK, preferred_element_type=jnp.float32)
    same = (segments_BxT[:, :, None] == segments_BxT[:, None, :]) & (segments_BxT[:, :, None] != 0)
    mask_BxTxS = same & jnp.tril(jnp.ones((tokens, tokens), bool))
    scores = jnp.where(mask_BxTxS[:, None, None], scores, _MASKED)
    top = jax.lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), _FLOOR))
    weights = jnp.exp(scores - top)
    total = weights.sum(-1)
    out = jnp.einsum(
        "bngts,bsnk->btngk", weights.astype(v_BxTxNxK.dtype), v_BxTxNxK, preferred_element_type=jnp.float32
    )
    total_BxTxNxG = jnp.where(total == 0, 1.0, total).transpose(0, 3, 1, 2)
    return (out / total_BxTxNxG[..., None]).astype(q_BxTxHxK.dtype).reshape(q_BxTxHxK.shape)
