"""The sparse feed-forward layer of Qwen3-MoE: a router, and experts of which each token takes a few.

Experts are split over `fsdp` and their columns over `tensor`. Each device gathers the tokens of its `fsdp` group and
computes its own experts' part of them. The parts are summed where the tokens came from, so weights stay where they are
and no token is dropped. An all-to-all of 8 experts a token on 8 devices sends 5.3 copies of a token where this sends 7,
but needs room for the most unbalanced batch, or drops tokens.

Over `context`, tokens stay where they are. The width of the weights is split, and gathered for the layer, because the
bytes of weights do not grow with the rows.

The rows of one expert are one group of `jax.lax.ragged_dot`. A device's rows are worked off in blocks of the size of a
balanced batch, and blocks behind the last row are skipped.

Letters: B rows, T tokens, D model width, E experts, F an expert's columns, K experts of a token, N tokens, R rows of a
block; in the functions of one device, of its own shards.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from libra_jax.models import collectives, sharding

COLUMNS: sharding.Axes = ("experts", "mlp", "expert_embed")
"""Axes of a projection [E, F, D] into an expert's columns."""

ROWS: sharding.Axes = ("experts", "expert_embed", "mlp")
"""Axes of a projection [E, D, F] out of them."""


class Weights(NamedTuple):
    """Weights of all experts of a layer, in Hugging Face's layout [out, in], in the parameters' dtype."""

    gate_ExFxD: jax.Array
    up_ExFxD: jax.Array
    down_ExDxF: jax.Array


_WEIGHTS = (COLUMNS, COLUMNS, ROWS)
_WIDTH = tuple(axes.index("expert_embed") for axes in _WEIGHTS)


def choose(logits_BxTxE: jax.Array, count: int, normalize: bool) -> tuple[jax.Array, jax.Array]:
    """Returns the experts of each token, int32 [B, T, K], and their shares, float32 [B, T, K].

    Args:
      logits_BxTxE: of the router.
      count: experts of a token.
      normalize: the shares of a token sum to 1; without, they are probabilities among all experts.
    """
    probabilities = jax.nn.softmax(logits_BxTxE.astype(jnp.float32), axis=-1)
    share_BxTxK, chosen_BxTxK = jax.lax.top_k(probabilities, count)
    if normalize:
        share_BxTxK = share_BxTxK / share_BxTxK.sum(axis=-1, keepdims=True)
    return chosen_BxTxK, share_BxTxK


@jax.custom_vjp
def mix(x_BxTxD: jax.Array, share_BxTxK: jax.Array, chosen_BxTxK: jax.Array, weights: Weights) -> jax.Array:
    """Returns the sum of what each token's experts make of it, times their shares: [B, T, D] in the dtype of `x`.

    Args:
      x_BxTxD: the layer's input, split like the residual stream.
      share_BxTxK: share of each of a token's experts.
      chosen_BxTxK: int32, the experts of each token.
      weights: of all experts.
    """
    axes = (sharding.RESIDUAL, sharding.RESIDUAL, sharding.RESIDUAL, *_WEIGHTS)
    return collectives.per_device(_forward, axes, sharding.RESIDUAL)(x_BxTxD, share_BxTxK, chosen_BxTxK, *weights)


def _mix_forward(
    x_BxTxD: jax.Array, share_BxTxK: jax.Array, chosen_BxTxK: jax.Array, weights: Weights
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array, Weights]]:
    return mix(x_BxTxD, share_BxTxK, chosen_BxTxK, weights), (x_BxTxD, share_BxTxK, chosen_BxTxK, weights)


def _mix_backward(
    saved: tuple[jax.Array, jax.Array, jax.Array, Weights], grad_BxTxD: jax.Array
) -> tuple[jax.Array, jax.Array, None, Weights]:
    x_BxTxD, share_BxTxK, chosen_BxTxK, weights = saved
    tokens = [sharding.RESIDUAL] * 3
    local = collectives.per_device(
        _backward, (*tokens, *_WEIGHTS, sharding.RESIDUAL), [sharding.RESIDUAL, sharding.RESIDUAL, *_WEIGHTS]
    )
    x_grad, share_grad, *weight_grads = local(x_BxTxD, share_BxTxK, chosen_BxTxK, *weights, grad_BxTxD)
    return x_grad, share_grad, None, Weights(*weight_grads)


mix.defvjp(_mix_forward, _mix_backward)


# --------------------------------------------------------------------------------------------------------------------
# One device's program.
# --------------------------------------------------------------------------------------------------------------------


def _forward(x: jax.Array, share: jax.Array, chosen: jax.Array, *weights: jax.Array) -> jax.Array:
    whole = _whole(Weights(*weights), x.dtype)
    return _scattered(_own_experts(_gathered(x), _gathered(share), _gathered(chosen), whole))


def _backward(x: jax.Array, share: jax.Array, chosen: jax.Array, *rest: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the gradients of `x`, the shares and the weights: the transpose of `_forward`, with its blocks again."""
    *weights, grad = rest
    chosen = _gathered(chosen)
    _, transposed = jax.vjp(
        lambda x, share, weights: _own_experts(x, share, chosen, weights),
        _gathered(x),
        _gathered(share),
        _whole(Weights(*weights), x.dtype),
    )
    x_grad, share_grad, weight_grads = transposed(_gathered(grad))
    scattered = map(collectives.reduce_scatter, weight_grads, ("context",) * 3, _WIDTH)
    return (
        _scattered(x_grad),
        _scattered(share_grad),
        *(collectives.sum_over(leaf, "data") for leaf in scattered),
    )


def _whole(weights: Weights, dtype: jnp.dtype) -> Weights:
    """Gathers the width of this device's experts over `context`."""
    if sharding.ways("context") == 1:
        return weights
    # They travel in the compute dtype. Their gradients sum over blocks in the parameters' dtype, hence the cast back.
    gathered = (
        collectives.all_gather(leaf.astype(dtype), "context", axis).astype(leaf.dtype)
        for leaf, axis in zip(weights, _WIDTH, strict=True)
    )
    return Weights(*gathered)


def _gathered(x_BxTxD: jax.Array) -> jax.Array:
    return collectives.all_gather(collectives.all_gather(x_BxTxD, "tensor", 1), "fsdp", 0)


def _scattered(x_BxTxD: jax.Array) -> jax.Array:
    return collectives.reduce_scatter(collectives.reduce_scatter(x_BxTxD, "fsdp", 0), "tensor", 1)


def _own_experts(x_BxTxD: jax.Array, share_BxTxK: jax.Array, chosen_BxTxK: jax.Array, weights: Weights) -> jax.Array:
    """Returns this device's experts' part of the sum, [B, T, D]."""
    experts, width, of_token = weights.gate_ExFxD.shape[0], x_BxTxD.shape[-1], share_BxTxK.shape[-1]
    x_NxD, share_R = x_BxTxD.reshape(-1, width), share_BxTxK.reshape(-1)
    own_R = chosen_BxTxK.reshape(-1) - collectives.first_index("fsdp", experts)
    own_R = jnp.where((own_R >= 0) & (own_R < experts), own_R, experts)  # behind all of its own
    order_R = jnp.argsort(own_R, stable=True)
    ends_E = jnp.cumsum(jnp.bincount(own_R, length=experts))
    blocks = sharding.ways("fsdp")
    size = -(-len(order_R) // blocks)
    # Of rows that fill the last block, no expert takes any.
    order_R = jnp.pad(order_R, (0, blocks * size - len(order_R)))

    @jax.checkpoint
    def block(first: jax.Array | int) -> jax.Array:
        row_R = jax.lax.dynamic_slice_in_dim(order_R, first, size)
        groups_E = jnp.diff(jnp.clip(ends_E - first, 0, size), prepend=0).astype(jnp.int32)
        in_RxD = x_NxD[row_R // of_token]

        def project(in_RxI: jax.Array, weight_ExOxI: jax.Array) -> jax.Array:
            return jax.lax.ragged_dot(in_RxI, jnp.swapaxes(weight_ExOxI.astype(in_RxI.dtype), 1, 2), groups_E)

        hidden_RxF = jax.nn.silu(project(in_RxD, weights.gate_ExFxD)) * project(in_RxD, weights.up_ExFxD)
        out_RxD = project(hidden_RxF, weights.down_ExDxF).astype(jnp.float32)
        taken_R = first + jnp.arange(size) < ends_E[-1]
        # What a kernel leaves in rows of no group is not said to be finite.
        out_RxD = jnp.where(taken_R[:, None], out_RxD * share_R[row_R, None], 0.0)
        return jnp.zeros((x_NxD.shape[0], width), jnp.float32).at[row_R // of_token].add(out_RxD)

    if blocks == 1:
        return block(0).astype(x_BxTxD.dtype).reshape(x_BxTxD.shape)

    def add(total_NxD: jax.Array, first: jax.Array) -> tuple[jax.Array, None]:
        return jax.lax.cond(first < ends_E[-1], lambda: total_NxD + block(first), lambda: total_NxD), None

    total_NxD, _ = jax.lax.scan(add, jnp.zeros(x_NxD.shape, jnp.float32), jnp.arange(blocks) * size)
    return total_NxD.astype(x_BxTxD.dtype).reshape(x_BxTxD.shape)
