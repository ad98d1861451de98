"""The sparse feed-forward layer of Qwen3-MoE: a router, and experts of which each token takes a few.

Experts are split over `fsdp` and their columns over `tensor`. Weights stay where they are. Each device sends a token to
the devices that hold one of its experts, once to each (all-to-all). Their parts of the sum come back the same way.

An all-to-all has a fixed number of places, some more than a batch needs whose experts are taken equally often. If a
device has more tokens for another one, the devices of the group gather all tokens instead. So no token is dropped.

Over `context`, tokens stay where they are. The width of the weights is split, and gathered for the layer, because the
bytes of weights do not grow with the rows.

A device sorts its rows by expert and works them off in tiles, each of rows of one expert. A tile is three plain matrix
products, so no expert multiplies the rows of another. The loop takes as many tiles as there are rows, so a batch that
falls on few experts costs time and no memory. `jax.lax.ragged_dot` is not used: XLA for GPUs multiplies all rows with
all experts of the device, 67 times the work for Qwen3-30B-A3B on 16 devices.

Letters: B rows, T tokens, D model width, E experts, F an expert's columns, K experts of a token, N tokens, M rows of a
tile; in the functions of one device, of its own shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from libra_jax.models import collectives, sharding
from libra_jax.planning import least

Carry = TypeVar("Carry")

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


@jax.custom_vjp
def mix(x_BxTxD: jax.Array, share_BxTxK: jax.Array, chosen_BxTxK: jax.Array, weights: Weights) -> jax.Array:
    """Returns for each token the sum of its experts' outputs, times their shares: [B, T, D] in the dtype of `x`.

    Args:
      x_BxTxD: the layer's input, split like the residual stream.
      share_BxTxK: share of each of a token's experts.
      chosen_BxTxK: int32, the experts of each token; -1 for none, as for padding, whose sum is 0.
      weights: weights of all experts.
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
    own, tokens = _whole(weights, x.dtype), (_flat(x), _flat(share), _flat(chosen))

    def compute(exchange: Exchange) -> jax.Array:
        x_MxD, share_MxK = exchange.bring(tokens[0]), exchange.bring(tokens[1])
        part_MxD = _mixed(x_MxD, share_MxK, exchange.bring_experts(tokens[2]), own, exchange.rows)
        return exchange.take_back(part_MxD.astype(x.dtype))

    return _exchanged(tokens[2], own.gate_ExFxD.shape[0], compute).reshape(x.shape)


def _backward(x: jax.Array, share: jax.Array, chosen: jax.Array, *rest: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the gradients of `x`, the shares and the weights."""
    *weights, grad = rest
    own, tokens = _whole(weights, x.dtype), (_flat(x), _flat(share), _flat(chosen), _flat(grad))

    def compute(exchange: Exchange) -> tuple[jax.Array, jax.Array, Weights]:
        x_MxD, share_MxK, grad_MxD = (exchange.bring(tokens[place]) for place in (0, 1, 3))
        brought = exchange.bring_experts(tokens[2])
        x_grad_MxD, share_grad_MxK, grads = _mixed_gradients(x_MxD, share_MxK, brought, grad_MxD, own, exchange.rows)
        return (
            exchange.take_back(x_grad_MxD.astype(x.dtype)),
            exchange.take_back(share_grad_MxK.astype(share.dtype)),
            grads,
        )

    x_grad_NxD, share_grad_NxK, grads = _exchanged(tokens[2], own.gate_ExFxD.shape[0], compute)
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


def _mixed(x_MxD: jax.Array, share_MxK: jax.Array, chosen_MxK: jax.Array, own: Weights, rows: float) -> jax.Array:
    """Returns this device's experts' part of the sum, float32 [tokens, D]."""
    share_R = share_MxK.reshape(-1)

    def add(total_MxD: jax.Array, tile: Tile) -> jax.Array:
        hidden_MxF, *_ = _hidden(x_MxD[tile.token_M], own, tile.expert)
        out_MxD = _times(hidden_MxF, own.down_ExDxF[tile.expert].T) * share_R[tile.row_M, None]
        return total_MxD.at[tile.token_M].add(jnp.where(tile.valid_M[:, None], out_MxD, 0.0))

    return _over_tiles(_tiles(chosen_MxK, own, rows), add, jnp.zeros(x_MxD.shape, jnp.float32))


def _mixed_gradients(
    x_NxD: jax.Array, share_NxK: jax.Array, chosen_NxK: jax.Array, grad_NxD: jax.Array, own: Weights, rows: float
) -> tuple[jax.Array, jax.Array, Weights]:
    """Returns the gradients of `_mixed`, float32, tile by tile with the hidden values computed again."""
    share_R, dtype = share_NxK.reshape(-1), x_NxD.dtype

    def add(sums: tuple[jax.Array, jax.Array, Weights], tile: Tile) -> tuple[jax.Array, jax.Array, Weights]:
        x_grad_NxD, share_grad_R, weight_grads = sums
        gate_FxD, up_FxD, down_DxF = (leaf[tile.expert] for leaf in own)
        in_MxD = x_NxD[tile.token_M]
        hidden_MxF, gate_MxF, up_MxF = _hidden(in_MxD, own, tile.expert)
        # Rows of no expert have no gradient, and with it none of what follows.
        grad_MxD = jnp.where(tile.valid_M[:, None], grad_NxD[tile.token_M], 0.0)
        # Before the share, so that its own gradient needs no other product.
        back_MxF = _times(grad_MxD, down_DxF)
        share_M = share_R[tile.row_M, None]
        share_grad_M = jnp.sum(back_MxF * hidden_MxF, axis=-1)
        activated_MxF, slope = jax.vjp(jax.nn.silu, gate_MxF)
        (gate_grad_MxF,) = slope(back_MxF * share_M * up_MxF)
        gate_grad_MxF = gate_grad_MxF.astype(dtype)
        up_grad_MxF = (back_MxF * share_M * activated_MxF).astype(dtype)
        shared_MxD = (grad_MxD * share_M).astype(dtype)
        new = Weights(_times(gate_grad_MxF.T, in_MxD), _times(up_grad_MxF.T, in_MxD), _times(shared_MxD.T, hidden_MxF))
        in_grad_MxD = _times(gate_grad_MxF, gate_FxD) + _times(up_grad_MxF, up_FxD)
        return (
            x_grad_NxD.at[tile.token_M].add(in_grad_MxD),
            share_grad_R.at[tile.row_M].add(share_grad_M),
            Weights(*(total.at[tile.expert].add(part) for total, part in zip(weight_grads, new, strict=True))),
        )

    zeros = jnp.zeros(x_NxD.shape, jnp.float32), jnp.zeros(share_R.shape, jnp.float32)
    empty = Weights(*(jnp.zeros(leaf.shape, jnp.float32) for leaf in own))
    x_grad_NxD, share_grad_R, weight_grads = _over_tiles(_tiles(chosen_NxK, own, rows), add, (*zeros, empty))
    return x_grad_NxD, share_grad_R.reshape(share_NxK.shape), weight_grads


def _whole(weights: Sequence[jax.Array], dtype: jnp.dtype) -> Weights:
    """Returns this device's experts in the compute dtype, with their width gathered over `context`."""
    # Cast first, so that fewer bytes travel.
    return Weights(
        *(
            collectives.all_gather(leaf.astype(dtype), "context", axis)
            for leaf, axis in zip(weights, _WIDTH, strict=True)
        )
    )


def _times(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the matrix product, summed in float32; factors have the dtype of `b`."""
    return jnp.matmul(a.astype(b.dtype), b, preferred_element_type=jnp.float32)


def _hidden(in_MxD: jax.Array, own: Weights, expert: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the hidden values of a tile's rows in the compute dtype, and their two factors in float32."""
    gate_MxF, up_MxF = (_times(in_MxD, leaf[expert].T) for leaf in (own.gate_ExFxD, own.up_ExFxD))
    return (jax.nn.silu(gate_MxF) * up_MxF).astype(in_MxD.dtype), gate_MxF, up_MxF


# --------------------------------------------------------------------------------------------------------------------
# Exchanges.
# --------------------------------------------------------------------------------------------------------------------

OVERFLOW = "expert_overflow"
"""Name of the branch that gathers all tokens in compiled programs (`planning.compiled`)."""


class Exchange(NamedTuple):
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


def _exchanged(chosen_NxK: jax.Array, experts: int, compute: Callable[[Exchange], Carry]) -> Carry:
    """Computes over an all-to-all if every token finds a place in it, else over all tokens.

    Args:
      chosen_NxK: the experts of this device's tokens.
      experts: number of a device's experts.
      compute: the devices of the group call it with the same kind of exchange.
    """
    (tokens, of_token), ways = chosen_NxK.shape, sharding.ways("fsdp")
    rows = tokens * of_token * sharding.ways("tensor")
    places = math.ceil(tokens * least.places_for_experts(ways, of_token))
    everything = Exchange(tokens, rows, None)
    if places >= tokens:
        return compute(everything)
    needs_NxW = (chosen_NxK[..., None] // experts == jnp.arange(ways)).any(axis=1)
    place_NxW = jnp.where(needs_NxW, jnp.cumsum(needs_NxW, axis=0) - 1, places)
    missing = jnp.sum(needs_NxW & (place_NxW >= places), dtype=jnp.int32)
    # What finds no place falls into one more, which is cut off.
    slot_WxC = jnp.full((ways, places + 1), tokens, jnp.int32)
    slot_WxC = slot_WxC.at[jnp.arange(ways), jnp.minimum(place_NxW, places)].set(jnp.arange(tokens)[:, None])[:, :-1]

    def overflow() -> Carry:
        with jax.named_scope(OVERFLOW):
            return compute(everything)

    fits = collectives.sum_over(missing, "fsdp", "tensor") == 0
    return jax.lax.cond(fits, lambda: compute(Exchange(tokens, rows, slot_WxC)), overflow)


# --------------------------------------------------------------------------------------------------------------------
# Tiles.
# --------------------------------------------------------------------------------------------------------------------

MOST_ROWS = 1024
"""Rows of a tile, at most. More would fill a GPU a little better and compute more rows of no expert."""

TILES_AT_ONCE = 4
"""Tiles in an iteration of the loop, whose number of iterations a GPU's host has to wait for."""

SCOPE = "expert_tiles"
"""Name of the loop over tiles in compiled programs (`planning.compiled`)."""


class Tile(NamedTuple):
    """Rows of one expert.

    Attributes:
      expert: number of the expert among this device's.
      row_M: rows, each a token and one of its experts: token x K + the expert's position.
      token_M: the rows' tokens.
      valid_M: False for rows that the expert does not have.
    """

    expert: jax.Array
    row_M: jax.Array
    token_M: jax.Array
    valid_M: jax.Array


class Tiles(NamedTuple):
    """The rows of this device's experts, cut into tiles.

    Attributes:
      order_R: rows, sorted by expert; those of other devices' experts last.
      starts_E: position of each expert's first row in `order_R`.
      counts_E: rows of each expert.
      ends_E: number of tiles up to and with each expert's.
      rows: M, rows of a tile.
      of_token: K, experts of a token.
    """

    order_R: jax.Array
    starts_E: jax.Array
    counts_E: jax.Array
    ends_E: jax.Array
    rows: int
    of_token: int


def tile_rows(rows: float, experts: int) -> int:
    """Returns the number of rows of a tile: about an eighth of an expert's rows, a power of two.

    Args:
      rows: expected rows of a device's experts, if all are taken equally often.
      experts: number of the device's experts.
    """
    return 1 << max(3, min(MOST_ROWS, int(rows / experts / 8)).bit_length() - 1)


def balanced_iterations(rows: float, experts: int) -> float:
    """Returns the expected iterations of the loop over tiles.

    Args:
      rows: expected rows of a device's experts, if all are taken equally often.
      experts: number of the device's experts. Each leaves half a tile empty.
    """
    return math.ceil((rows / tile_rows(rows, experts) + experts / 2) / TILES_AT_ONCE)


def _tiles(chosen_MxK: jax.Array, own: Weights, rows: float) -> Tiles:
    """Sorts the rows of this device's experts.

    Args:
      chosen_MxK: the experts of each token.
      own: weights of this device's experts.
      rows: expected rows of this device's experts, if all are taken equally often.
    """
    experts = own.gate_ExFxD.shape[0]
    own_R = chosen_MxK.reshape(-1) - collectives.first_index("fsdp", experts)
    own_R = jnp.where((own_R >= 0) & (own_R < experts), own_R, experts)  # behind all of its own
    size = tile_rows(rows, experts)
    counts_E = jnp.bincount(own_R, length=experts)
    # A tile may reach over the end.
    order_R = jnp.pad(jnp.argsort(own_R, stable=True), (0, size))
    ends_E = jnp.cumsum(-(-counts_E // size))
    return Tiles(order_R, jnp.cumsum(counts_E) - counts_E, counts_E, ends_E, size, chosen_MxK.shape[-1])


def _over_tiles(tiles: Tiles, add: Callable[[Carry, Tile], Carry], carry: Carry) -> Carry:
    """Calls `add` with every tile, and a few times at the end with tiles without valid rows."""

    def one(number: jax.Array, carry: Carry) -> Carry:
        expert = jnp.minimum(jnp.searchsorted(tiles.ends_E, number, side="right"), len(tiles.ends_E) - 1)
        first = number - jnp.concatenate([jnp.zeros(1, tiles.ends_E.dtype), tiles.ends_E])[expert]
        first *= tiles.rows
        row_M = jax.lax.dynamic_slice_in_dim(tiles.order_R, tiles.starts_E[expert] + first, tiles.rows)
        valid_M = first + jnp.arange(tiles.rows) < tiles.counts_E[expert]
        return add(carry, Tile(expert, row_M, row_M // tiles.of_token, valid_M))

    def several(group: jax.Array, carry: Carry) -> Carry:
        return jax.lax.fori_loop(
            0, TILES_AT_ONCE, lambda number, held: one(group * TILES_AT_ONCE + number, held), carry
        )

    with jax.named_scope(SCOPE):
        return jax.lax.fori_loop(0, -(-tiles.ends_E[-1] // TILES_AT_ONCE), several, carry)
