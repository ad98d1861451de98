"""The sparse feed-forward layer of Qwen3-MoE: a router, and experts of which each token takes a few.

Experts are split over `fsdp` and their columns over `tensor`. Weights stay where they are. Each device sends a token to
the devices that hold one of its experts, once to each (all-to-all). Their parts of the sum come back the same way.

An all-to-all has a fixed number of places, some more than a batch needs whose experts are taken equally often. If a
device has more tokens for another one, the devices of the group gather all tokens instead. So no token is dropped.

Over `context`, tokens stay where they are. The width of the weights is split, and gathered for the layer, because the
bytes of weights do not grow with the rows.

A device then computes its own experts' part of the sum: on Hopper GPUs by grouped products (`expert_groups`), elsewhere
in tiles (`expert_tiles`).

Letters: B rows, T tokens, D model width, E experts, F an expert's columns, K experts of a token, N tokens, M tokens
that came to a device; in the functions of one device, of its own shards.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from libra_jax.models import collectives, communication_bounds, sharding
from libra_jax.models.experts import expert_groups, expert_tiles
from libra_jax.models.experts.expert_rows import LayerExperts

Computed = TypeVar("Computed")

COLUMNS: sharding.Axes = ("experts", "mlp", "expert_embed")
"""Axes of a projection [E, F, D] into an expert's columns."""

ROWS: sharding.Axes = ("experts", "expert_embed", "mlp")
"""Axes of a projection [E, D, F] out of them."""


_WEIGHTS = (COLUMNS, COLUMNS, ROWS)
_WIDTH = tuple(axes.index("expert_embed") for axes in _WEIGHTS)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def mix(
    kernel: str, x_BxTxD: jax.Array, share_BxTxK: jax.Array, chosen_BxTxK: jax.Array, weights: LayerExperts
) -> jax.Array:
    """Returns for each token the sum of its experts' outputs, times their shares: [B, T, D] in the dtype of `x`.

    Args:
      kernel: "groups" or "tiles" (`feasibility.choose_experts`).
      x_BxTxD: the layer's input, split like the residual stream.
      share_BxTxK: share of each of a token's experts.
      chosen_BxTxK: int32, the experts of each token; -1 for none, as for padding, whose sum is 0.
      weights: weights of all experts.
    """
    axes = (sharding.RESIDUAL, sharding.RESIDUAL, sharding.RESIDUAL, *_WEIGHTS)
    local = collectives.per_device(functools.partial(_forward, kernel), axes, sharding.RESIDUAL)
    mixed_BxTxD: jax.Array = local(x_BxTxD, share_BxTxK, chosen_BxTxK, *weights)
    return mixed_BxTxD


def _mix_forward(
    kernel: str, x_BxTxD: jax.Array, share_BxTxK: jax.Array, chosen_BxTxK: jax.Array, weights: LayerExperts
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array, LayerExperts]]:
    return mix(kernel, x_BxTxD, share_BxTxK, chosen_BxTxK, weights), (x_BxTxD, share_BxTxK, chosen_BxTxK, weights)


def _mix_backward(
    kernel: str, saved: tuple[jax.Array, jax.Array, jax.Array, LayerExperts], grad_BxTxD: jax.Array
) -> tuple[jax.Array, jax.Array, None, LayerExperts]:
    x_BxTxD, share_BxTxK, chosen_BxTxK, weights = saved
    tokens = [sharding.RESIDUAL] * 3
    local = collectives.per_device(
        functools.partial(_backward, kernel),
        (*tokens, *_WEIGHTS, sharding.RESIDUAL),
        [sharding.RESIDUAL, sharding.RESIDUAL, *_WEIGHTS],
    )
    x_grad, share_grad, *weight_grads = local(x_BxTxD, share_BxTxK, chosen_BxTxK, *weights, grad_BxTxD)
    return x_grad, share_grad, None, LayerExperts(*weight_grads)


mix.defvjp(_mix_forward, _mix_backward)


# --------------------------------------------------------------------------------------------------------------------
# One device's program.
# --------------------------------------------------------------------------------------------------------------------


def _forward(kernel: str, x: jax.Array, share: jax.Array, chosen: jax.Array, *weights: jax.Array) -> jax.Array:
    local_weights, tokens = _whole(weights, x.dtype), (_flat(x), _flat(share), _flat(chosen))
    mixed = expert_groups.mixed if kernel == "groups" else expert_tiles.mixed

    def compute(exchange: TokenExchange) -> jax.Array:
        x_MxD, share_MxK = exchange.bring(tokens[0]), exchange.bring(tokens[1])
        part_MxD = mixed(x_MxD, share_MxK, exchange.bring_experts(tokens[2]), local_weights, exchange.rows)
        return exchange.take_back(part_MxD.astype(x.dtype))

    return _exchanged(tokens[2], local_weights.gate_ExFxD.shape[0], compute).reshape(x.shape)


def _backward(
    kernel: str, x: jax.Array, share: jax.Array, chosen: jax.Array, *rest: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns the gradients of `x`, the shares and the weights."""
    *weights, grad = rest
    local_weights, tokens = _whole(weights, x.dtype), (_flat(x), _flat(share), _flat(chosen), _flat(grad))
    gradients = expert_groups.mixed_gradients if kernel == "groups" else expert_tiles.mixed_gradients

    def compute(exchange: TokenExchange) -> tuple[jax.Array, jax.Array, LayerExperts]:
        x_MxD, share_MxK, grad_MxD = (exchange.bring(tokens[place]) for place in (0, 1, 3))
        brought = exchange.bring_experts(tokens[2])
        x_grad_MxD, share_grad_MxK, grads = gradients(x_MxD, share_MxK, brought, grad_MxD, local_weights, exchange.rows)
        return (
            exchange.take_back(x_grad_MxD.astype(x.dtype)),
            exchange.take_back(share_grad_MxK.astype(share.dtype)),
            grads,
        )

    x_grad_NxD, share_grad_NxK, grads = _exchanged(tokens[2], local_weights.gate_ExFxD.shape[0], compute)
    scattered = map(collectives.reduce_scatter, grads, ("context",) * 3, _WIDTH)
    return (
        x_grad_NxD.reshape(x.shape),
        share_grad_NxK.reshape(share.shape),
        *(
            collectives.sum_over(total, "data").astype(leaf.dtype)
            for total, leaf in zip(scattered, weights, strict=True)
        ),
    )


def _flat(x_BxTxD: jax.Array) -> jax.Array:
    return x_BxTxD.reshape(-1, x_BxTxD.shape[-1])


def _whole(weights: Sequence[jax.Array], dtype: jnp.dtype) -> LayerExperts:
    """Returns this device's experts in the compute dtype, with their width gathered over `context`."""
    # Cast first, so that fewer bytes travel.
    return LayerExperts(
        *(
            collectives.all_gather(leaf.astype(dtype), "context", axis)
            for leaf, axis in zip(weights, _WIDTH, strict=True)
        )
    )


# --------------------------------------------------------------------------------------------------------------------
# Exchanges.
# --------------------------------------------------------------------------------------------------------------------

OVERFLOW = "expert_overflow"
"""Name of the branch that gathers all tokens in compiled programs (`planning.compiled`)."""


class TokenExchange(NamedTuple):
    """Brings tokens to the devices of their experts, and results back.

    Attributes:
      tokens: N, number of this device's tokens.
      rows: expected rows of this device's experts (tokens x experts of a token), if all are taken equally often.
      slot_WxC: token that each place takes, for each of the W devices of the group; N for none. None: every device
        gathers all tokens.
    """

    tokens: int
    rows: float
    slot_WxC: jax.Array | None

    def bring(self, x_NxD: jax.Array, empty: int = 0) -> jax.Array:
        """Returns the tokens that came to this device, [M, D], with `empty` in places without one."""
        if self.slot_WxC is None:
            x_MxD = collectives.all_gather(x_NxD, "fsdp", 0)
        else:
            padded = jnp.pad(x_NxD, ((0, 1), (0, 0)), constant_values=empty)
            x_MxD = _flat(collectives.all_to_all(padded[self.slot_WxC], "fsdp", 0, 0))
        # Over `tensor` last: its devices are neighbours, and each has its own tokens to bring from the others' nodes.
        return collectives.all_gather(x_MxD, "tensor", 0)

    def bring_experts(self, chosen_NxK: jax.Array) -> jax.Array:
        """Returns the experts of the tokens that came, [M, K]; -1 in places without one."""
        return self.bring(chosen_NxK, -1)

    def take_back(self, part_MxD: jax.Array) -> jax.Array:
        """Returns the sum of all devices' parts at each of this device's tokens, [N, D]."""
        part_MxD = collectives.reduce_scatter(part_MxD, "tensor", 0)
        if self.slot_WxC is None:
            return collectives.reduce_scatter(part_MxD, "fsdp", 0)
        part_WxCxD = part_MxD.reshape(*self.slot_WxC.shape, -1)
        home_MxD = _flat(collectives.all_to_all(part_WxCxD, "fsdp", 0, 0))
        total_NxD = jnp.zeros((self.tokens + 1, home_MxD.shape[-1]), jnp.float32)
        return total_NxD.at[self.slot_WxC.reshape(-1)].add(home_MxD)[:-1].astype(part_MxD.dtype)


def _exchanged(chosen_NxK: jax.Array, experts: int, compute: Callable[[TokenExchange], Computed]) -> Computed:
    """Computes over an all-to-all if every token finds a place in it, else over all tokens.

    Args:
      chosen_NxK: the experts of this device's tokens.
      experts: number of a device's experts.
      compute: the devices of the group call it with the same kind of exchange.
    """
    (tokens, of_token), ways = chosen_NxK.shape, sharding.ways("fsdp")
    rows = tokens * of_token * sharding.ways("tensor")
    places = math.ceil(tokens * communication_bounds.places_for_experts(ways, of_token))
    everything = TokenExchange(tokens, rows, None)
    if places >= tokens:
        return compute(everything)
    needs_NxW = (chosen_NxK[..., None] // experts == jnp.arange(ways)).any(axis=1)
    place_NxW = jnp.where(needs_NxW, jnp.cumsum(needs_NxW, axis=0) - 1, places)
    missing = jnp.sum(needs_NxW & (place_NxW >= places), dtype=jnp.int32)
    # What finds no place falls into one more, which is cut off.
    slot_WxC = jnp.full((ways, places + 1), tokens, jnp.int32)
    slot_WxC = slot_WxC.at[jnp.arange(ways), jnp.minimum(place_NxW, places)].set(jnp.arange(tokens)[:, None])[:, :-1]

    def overflow() -> Computed:
        with jax.named_scope(OVERFLOW):
            return compute(everything)

    fits = collectives.sum_over(missing, "fsdp", "tensor") == 0
    return jax.lax.cond(fits, lambda: compute(TokenExchange(tokens, rows, slot_WxC)), overflow)
