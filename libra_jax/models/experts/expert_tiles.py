"""One device's experts in tiles of rows, each of one expert: plain matrix products, for every platform.

A device sorts its rows by expert and works them off in tiles. A tile is three plain matrix products, so no expert
multiplies the rows of another. The loop takes as many tiles as there are rows, so a batch that falls on few experts
costs time and no memory. `jax.lax.ragged_dot` is not used: XLA for GPUs multiplies all rows with all experts of the
device, 67 times the work for Qwen3-30B-A3B on 16 devices.

Letters: D model width, E experts, F an expert's columns, K experts of a token, N tokens, R rows (a token and one of its
experts), M rows of a tile; all of one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from libra_jax.models.experts import expert_rows
from libra_jax.models.experts.expert_rows import LayerExperts

Carry = TypeVar("Carry")

MOST_ROWS = 1024
"""Rows of a tile, at most. More would fill a GPU a little better and compute more rows of no expert."""

TILES_AT_ONCE = 4
"""Tiles in an iteration of the loop, whose number of iterations a GPU's host has to wait for."""


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


def _tiles(chosen_MxK: jax.Array, weights: LayerExperts, rows: float) -> Tiles:
    """Sorts the rows of this device's experts.

    Args:
      chosen_MxK: the experts of each token.
      weights: weights of this device's experts.
      rows: expected rows of this device's experts, if all are taken equally often.
    """
    experts = weights.gate_ExFxD.shape[0]
    order_R, counts_E = expert_rows.by_expert(chosen_MxK, experts)
    size = tile_rows(rows, experts)
    order_R = jnp.pad(order_R, (0, size))  # a tile may reach over the end
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
            0, TILES_AT_ONCE, lambda number, inner_carry: one(group * TILES_AT_ONCE + number, inner_carry), carry
        )

    with jax.named_scope(expert_rows.SCOPE):
        return jax.lax.fori_loop(0, -(-tiles.ends_E[-1] // TILES_AT_ONCE), several, carry)


def mixed(
    x_MxD: jax.Array, share_MxK: jax.Array, chosen_MxK: jax.Array, weights: LayerExperts, rows: float
) -> jax.Array:
    """Returns this device's experts' part of the sum, float32 [tokens, D]."""
    share_R = share_MxK.reshape(-1)

    def add(total_MxD: jax.Array, tile: Tile) -> jax.Array:
        hidden_MxF, *_ = _hidden(x_MxD[tile.token_M], weights, tile.expert)
        out_MxD = _times(hidden_MxF, weights.down_ExDxF[tile.expert].T) * share_R[tile.row_M, None]
        return total_MxD.at[tile.token_M].add(jnp.where(tile.valid_M[:, None], out_MxD, 0.0))

    return _over_tiles(_tiles(chosen_MxK, weights, rows), add, jnp.zeros(x_MxD.shape, jnp.float32))


def mixed_gradients(
    x_NxD: jax.Array,
    share_NxK: jax.Array,
    chosen_NxK: jax.Array,
    grad_NxD: jax.Array,
    weights: LayerExperts,
    rows: float,
) -> tuple[jax.Array, jax.Array, LayerExperts]:
    """Returns the gradients of `mixed`, float32, tile by tile with the hidden values computed again."""
    share_R, dtype = share_NxK.reshape(-1), x_NxD.dtype

    def add(sums: tuple[jax.Array, jax.Array, LayerExperts], tile: Tile) -> tuple[jax.Array, jax.Array, LayerExperts]:
        x_grad_NxD, share_grad_R, weight_grads = sums
        gate_FxD, up_FxD, down_DxF = (leaf[tile.expert] for leaf in weights)
        in_MxD = x_NxD[tile.token_M]
        hidden_MxF, gate_MxF, up_MxF = _hidden(in_MxD, weights, tile.expert)
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
        new = LayerExperts(
            _times(gate_grad_MxF.T, in_MxD), _times(up_grad_MxF.T, in_MxD), _times(shared_MxD.T, hidden_MxF)
        )
        in_grad_MxD = _times(gate_grad_MxF, gate_FxD) + _times(up_grad_MxF, up_FxD)
        return (
            x_grad_NxD.at[tile.token_M].add(in_grad_MxD),
            share_grad_R.at[tile.row_M].add(share_grad_M),
            LayerExperts(*(total.at[tile.expert].add(part) for total, part in zip(weight_grads, new, strict=True))),
        )

    zeros = jnp.zeros(x_NxD.shape, jnp.float32), jnp.zeros(share_R.shape, jnp.float32)
    empty = LayerExperts(*(jnp.zeros(leaf.shape, jnp.float32) for leaf in weights))
    x_grad_NxD, share_grad_R, weight_grads = _over_tiles(_tiles(chosen_NxK, weights, rows), add, (*zeros, empty))
    return x_grad_NxD, share_grad_R.reshape(share_NxK.shape), weight_grads


def _times(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the matrix product, summed in float32; factors have the dtype of `b`."""
    return jnp.matmul(a.astype(b.dtype), b, preferred_element_type=jnp.float32)


def _hidden(in_MxD: jax.Array, weights: LayerExperts, expert: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the hidden values of a tile's rows in the compute dtype, and their two factors in float32."""
    gate_MxF, up_MxF = (_times(in_MxD, leaf[expert].T) for leaf in (weights.gate_ExFxD, weights.up_ExFxD))
    return (jax.nn.silu(gate_MxF) * up_MxF).astype(in_MxD.dtype), gate_MxF, up_MxF
