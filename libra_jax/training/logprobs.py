"""Computes log-probabilities and entropies of tokens without the [tokens, vocabulary] matrix of logits.

The hidden states are projected onto the vocabulary one chunk of tokens at a time. The backward pass projects each chunk
again, so the logits of at most `chunk` tokens exist at once in both directions. The idea comes from Liger Kernel's
fused linear cross entropy (arXiv 2410.10989, section 3.2). Here it is a scan that XLA partitions, so the vocabulary may
be sharded over the mesh.

Letters: B rows, T tokens of a row, C tokens of a row in one chunk, N chunks, D model width, V vocabulary.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


def token_log_probs(
    hidden_BxTxD: jax.Array,
    head_DxV: jax.Array,
    targets_BxT: jax.Array,
    *,
    temperature: float,
    chunk: int,
    entropy_gradient: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns log p(target) and the entropy of p = softmax(hidden @ head / temperature), both float32 [B, T].

    Args:
      hidden_BxTxD: final hidden states.
      head_DxV: output projection in the parameters' dtype. Each chunk casts it to the dtype of the hidden states.
      targets_BxT: int32, the token that each hidden state predicts.
      temperature: sampling temperature, above 0 (the log-prob contract: score as sampled).
      chunk: number of tokens, over all rows, whose logits may exist at once; at least one per row.
      entropy_gradient: gradients flow through the entropy. This costs time, so set it only if the loss has an entropy
        term.
    """
    rows, columns = targets_BxT.shape
    width = min(columns, max(1, chunk // rows))
    score = functools.partial(_chunk_log_probs, temperature=temperature, entropy_gradient=entropy_gradient)
    if width == columns:
        return score(hidden_BxTxD, head_DxV, targets_BxT)
    # A scan needs equal chunks, so the last chunk is padded and `_join` cuts the padding off.
    count = -(-columns // width)
    padding = count * width - columns
    hidden_NxBxCxD = _split(jnp.pad(hidden_BxTxD, ((0, 0), (0, padding), (0, 0))), count)
    targets_NxBxC = _split(jnp.pad(targets_BxT, ((0, 0), (0, padding))), count)
    # XLA never merges the two passes of a scan, so prevent_cse is not needed; and the head is cast only once.
    checkpointed = jax.checkpoint(score, prevent_cse=False)

    def body(_: None, inputs: tuple[jax.Array, jax.Array]) -> tuple[None, tuple[jax.Array, jax.Array]]:
        hidden_BxCxD, targets_BxC = inputs
        return None, checkpointed(hidden_BxCxD, head_DxV, targets_BxC)

    _, (log_probs_NxBxC, entropy_NxBxC) = jax.lax.scan(body, None, (hidden_NxBxCxD, targets_NxBxC))
    return _join(log_probs_NxBxC, columns), _join(entropy_NxBxC, columns)


def _chunk_log_probs(
    hidden_BxCxD: jax.Array, head_DxV: jax.Array, targets_BxC: jax.Array, *, temperature: float, entropy_gradient: bool
) -> tuple[jax.Array, jax.Array]:
    # Cast here, not before the chunks: the chunks' gradients then add up in the head's own dtype.
    head_DxV = head_DxV.astype(hidden_BxCxD.dtype)
    logits_BxCxV = jnp.einsum("bcd,dv->bcv", hidden_BxCxD, head_DxV, preferred_element_type=jnp.float32) / temperature
    normaliser_BxC = jax.nn.logsumexp(logits_BxCxV, axis=-1)
    # Compare and sum, not gather: each device of a sharded vocabulary then looks only at its own part.
    vocabulary_V = jax.lax.broadcasted_iota(targets_BxC.dtype, (1, 1, logits_BxCxV.shape[-1]), 2)
    chosen_BxC = jnp.sum(jnp.where(vocabulary_V == targets_BxC[..., None], logits_BxCxV, 0.0), axis=-1)
    # Without the stop, the backward pass would also differentiate the entropy: one more [tokens, vocabulary] product.
    held = (logits_BxCxV, normaliser_BxC)
    z_BxCxV, lse_BxC = held if entropy_gradient else jax.lax.stop_gradient(held)
    entropy_BxC = lse_BxC - jnp.sum(jnp.exp(z_BxCxV - lse_BxC[..., None]) * z_BxCxV, axis=-1)
    return chosen_BxC - normaliser_BxC, entropy_BxC


def _split(x_BxTx: jax.Array, count: int) -> jax.Array:
    """Splits [B, N * C, ...] into [N, B, C, ...]."""
    rows, columns = x_BxTx.shape[:2]
    return jnp.moveaxis(x_BxTx.reshape(rows, count, columns // count, *x_BxTx.shape[2:]), 1, 0)


def _join(x_NxBxC: jax.Array, columns: int) -> jax.Array:
    """Joins [N, B, C] to [B, T] and drops the padding."""
    count, rows, width = x_NxBxC.shape
    return jnp.moveaxis(x_NxBxC, 0, 1).reshape(rows, count * width)[:, :columns]
