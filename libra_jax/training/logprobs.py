"""Log-probabilities and entropies of tokens, without the [tokens, vocabulary] matrix of logits.

The hidden states are projected onto the vocabulary one chunk of tokens at a time. The backward pass projects each chunk
again, so the logits of at most `chunk` tokens exist at once on a device, in both directions. The idea comes from Liger
Kernel's fused linear cross entropy (arXiv 2410.10989, section 3.2).

On a mesh, each device loops over its own tokens, with its own part of the vocabulary. Everything that travels does so
outside the loop, once a pass: the output projection over `fsdp` and `context` in the compute dtype, the hidden states
and three numbers a token over `tensor`, and the projection's gradient, a float32 sum. Left to the compiler, the
projection and its gradient travelled in every iteration.

Letters: B rows, T tokens of a row, C tokens of a chunk, D model width, V vocabulary; in the
functions of one device, of its own shards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from libra_jax.models import collectives, sharding

Carry = TypeVar("Carry")
Outputs = TypeVar("Outputs")

HEAD: sharding.Axes = ("embed", "vocab")
PER_TOKEN: sharding.Axes = ("batch", "tokens")
STATE_AXES = ("fsdp", "context")
"""Mesh axes over which the rows of the output projection are split, the outermost first."""


Saved = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]
"""Arrays that the backward pass needs: hidden states, output projection, targets, entropies and normalizers.

A token's normalizer is the logarithm of the sum of its exponentiated logits.
"""


class LogProbSettings(NamedTuple):
    """Settings of `token_log_probs` that are part of the program."""

    temperature: float
    chunk: int
    entropy_gradient: bool


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
      hidden_BxTxD: final hidden states, split like the residual stream.
      head_DxV: output projection in the parameters' dtype. It is cast to the dtype of the hidden states before it
        travels; its gradient sums in float32.
      targets_BxT: int32, the token that each hidden state predicts.
      temperature: sampling temperature, above 0 (the log-prob contract: score as sampled).
      chunk: number of tokens whose logits may exist at once on a device.
      entropy_gradient: gradients flow through the entropy. This costs time, so set it only if the loss has an entropy
        term.
    """
    return _log_probs(LogProbSettings(temperature, chunk, entropy_gradient), hidden_BxTxD, head_DxV, targets_BxT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _log_probs(
    settings: LogProbSettings, hidden_BxTxD: jax.Array, head_DxV: jax.Array, targets_BxT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _forward(settings, hidden_BxTxD, head_DxV, targets_BxT)[0]


def _forward(
    settings: LogProbSettings, hidden_BxTxD: jax.Array, head_DxV: jax.Array, targets_BxT: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], Saved]:
    local = collectives.per_device(
        functools.partial(_local_scores, settings), (sharding.RESIDUAL, HEAD, PER_TOKEN), [PER_TOKEN] * 3
    )
    log_probs_BxT, entropy_BxT, normalizer_BxT = local(hidden_BxTxD, head_DxV, targets_BxT)
    return (log_probs_BxT, entropy_BxT), (hidden_BxTxD, head_DxV, targets_BxT, entropy_BxT, normalizer_BxT)


def _backward(
    settings: LogProbSettings, saved: Saved, grads_BxT: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, None]:
    local = collectives.per_device(
        functools.partial(_local_gradients, settings),
        (sharding.RESIDUAL, HEAD, *[PER_TOKEN] * 5),
        [sharding.RESIDUAL, HEAD],
    )
    hidden_grad_BxTxD, head_grad_DxV = local(*saved, *grads_BxT)
    return hidden_grad_BxTxD, head_grad_DxV, None


_log_probs.defvjp(_forward, _backward)


# --------------------------------------------------------------------------------------------------------------------
# One device's program.
# --------------------------------------------------------------------------------------------------------------------


def _local_scores(
    settings: LogProbSettings, hidden_BxTxD: jax.Array, head_DxV: jax.Array, targets_BxT: jax.Array
) -> tuple[jax.Array, ...]:
    hidden_BxTxD = collectives.all_gather(hidden_BxTxD, "tensor", 1)
    head_DxV = collectives.all_gather(head_DxV.astype(hidden_BxTxD.dtype), STATE_AXES, 0)

    def score(_: None, inputs: tuple[jax.Array, ...]) -> tuple[None, tuple[jax.Array, ...]]:
        hidden_CxD, targets_C = inputs
        logits_CxV, chosen_CxV, here_C = _logits(settings, hidden_CxD, head_DxV, targets_C)
        # A compiler reads the logits twice: for their maximum, and for the three sums, which all start from it.
        top_C = jnp.max(logits_CxV, axis=-1)
        below_CxV = logits_CxV - top_C[:, None]
        odds_CxV = jnp.exp(below_CxV)
        total_C = jnp.sum(odds_CxV, axis=-1)
        mean_C = jnp.sum(odds_CxV * below_CxV, axis=-1) / total_C - jnp.log(total_C)
        chosen_C = jnp.sum(jnp.where(chosen_CxV, below_CxV, 0.0), axis=-1) + jnp.where(here_C, top_C, 0.0)
        return None, (chosen_C, top_C + jnp.log(total_C), mean_C)

    _, (chosen_BxT, part_BxT, mean_BxT) = _scan(settings.chunk, score, None, (hidden_BxTxD, targets_BxT))
    # The parts of the vocabulary meet here, after the loop. A part holds exp(its normalizer - the normalizer of all) of
    # the probability, and `mean` is its own mean of log p.
    top_BxT = collectives.max_over(part_BxT, "tensor")
    normalizer_BxT = top_BxT + jnp.log(collectives.sum_over(jnp.exp(part_BxT - top_BxT), "tensor"))
    share_BxT = part_BxT - normalizer_BxT
    entropy_BxT = -collectives.sum_over(jnp.exp(share_BxT) * (mean_BxT + share_BxT), "tensor")
    return collectives.sum_over(chosen_BxT, "tensor") - normalizer_BxT, entropy_BxT, normalizer_BxT


def _local_gradients(
    settings: LogProbSettings,
    hidden_BxTxD: jax.Array,
    head_DxV: jax.Array,
    targets_BxT: jax.Array,
    entropy_BxT: jax.Array,
    normalizer_BxT: jax.Array,
    log_probs_grad_BxT: jax.Array,
    entropy_grad_BxT: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    dtype, head_dtype = hidden_BxTxD.dtype, head_DxV.dtype
    hidden_BxTxD = collectives.all_gather(hidden_BxTxD, "tensor", 1)
    head_DxV = collectives.all_gather(head_DxV.astype(dtype), STATE_AXES, 0)

    def add(head_grad_DxV: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        hidden_CxD, targets_C, entropy_C, normalizer_C, log_prob_grad_C, entropy_grad_C = inputs
        logits_CxV, chosen_CxV, _ = _logits(settings, hidden_CxD, head_DxV, targets_C)
        log_p_CxV = logits_CxV - normalizer_C[:, None]
        p_CxV = jnp.exp(log_p_CxV)
        grad_CxV = log_prob_grad_C[:, None] * (chosen_CxV - p_CxV)
        if settings.entropy_gradient:
            grad_CxV -= entropy_grad_C[:, None] * p_CxV * (log_p_CxV + entropy_C[:, None])
        # In the compute dtype, so that the products run on matrix units; both sum in float32.
        grad_CxV = (grad_CxV / settings.temperature).astype(dtype)
        hidden_grad_CxD = jnp.einsum("cv,dv->cd", grad_CxV, head_DxV, preferred_element_type=jnp.float32)
        head_grad_DxV += jnp.einsum("cd,cv->dv", hidden_CxD, grad_CxV, preferred_element_type=jnp.float32)
        return head_grad_DxV, hidden_grad_CxD.astype(dtype)

    inputs = hidden_BxTxD, targets_BxT, entropy_BxT, normalizer_BxT, log_probs_grad_BxT, entropy_grad_BxT
    zeros_DxV = jnp.zeros(head_DxV.shape, jnp.float32)
    head_grad_DxV, hidden_grad_BxTxD = _scan(settings.chunk, add, zeros_DxV, inputs)
    hidden_grad_BxTxD = collectives.reduce_scatter(hidden_grad_BxTxD, "tensor", 1)
    head_grad_DxV = collectives.reduce_scatter(head_grad_DxV, STATE_AXES, 0)
    return hidden_grad_BxTxD, collectives.sum_over(head_grad_DxV, "data").astype(head_dtype)


def _scan(
    chunk: int,
    body: Callable[[Carry, tuple[jax.Array, ...]], tuple[Carry, Outputs]],
    carry: Carry,
    inputs: tuple[jax.Array, ...],
) -> tuple[Carry, Outputs]:
    """Runs `body` over chunks of at most `chunk` tokens.

    Inputs and outputs are [B, T, ...] here, and [C, ...] in `body`.
    """
    rows, columns = inputs[0].shape[:2]
    tokens = rows * columns
    count = -(-tokens // chunk)
    # A scan needs equal chunks: made as even as possible, so that little is padded.
    width = -(-tokens // count)

    def split(x: jax.Array) -> jax.Array:
        flat = x.reshape(tokens, *x.shape[2:])
        padding = [(0, count * width - tokens), *[(0, 0)] * (flat.ndim - 1)]
        return jnp.pad(flat, padding).reshape(count, width, *flat.shape[1:])

    def join(x: jax.Array) -> jax.Array:
        return x.reshape(count * width, *x.shape[2:])[:tokens].reshape(rows, columns, *x.shape[2:])

    carry, outputs = jax.lax.scan(body, carry, jax.tree.map(split, inputs))
    return carry, jax.tree.map(join, outputs)


def _logits(
    settings: LogProbSettings, hidden_CxD: jax.Array, head_DxV: jax.Array, targets_C: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the float32 logits and which of them is the target's, both [C, V], and whether there is one, [C]."""
    logits_CxV = jnp.einsum("cd,dv->cv", hidden_CxD, head_DxV, preferred_element_type=jnp.float32)
    # Compared, not indexed: a device holds only a part of the vocabulary.
    size = head_DxV.shape[1]
    vocabulary_V = jax.lax.broadcasted_iota(targets_C.dtype, (1, size), 1)
    target_C = targets_C - collectives.first_index("tensor", size)
    here_C = (target_C >= 0) & (target_C < size)
    return logits_CxV / settings.temperature, vocabulary_V == target_C[:, None], here_C
