"""One device's experts by grouped products: a few large kernels, for Hopper GPUs.

Rows are sorted by expert, and a product multiplies each row with its own expert's matrix (`grouped_products`). A device
whose experts may be given more rows than others' works them off in parts of a fixed number of rows, as many as there
are. Other platforms take tiles (`expert_tiles`), which leave a GPU idle between thousands of small kernels: on an H200,
the gradient of six layers of Qwen3-30B-A3B over 8,192 tokens took 2.1 s (docs/results/gpu.md).

Letters: D model width, E experts, F an expert's columns, K experts of a token, N tokens, R = N x K rows, S rows of a
part; all of one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from libra_jax.models import feasibility
from libra_jax.models.experts import expert_rows, grouped_products
from libra_jax.models.experts.expert_rows import LayerExperts

Sums = TypeVar("Sums")

MOST_ROWS = 131_072
"""Rows of a part, at most, because the values of a part are in memory together."""

PARTS = 4
"""Parts of the rows that a device expects of other devices' tokens. Smaller ones compute fewer rows that do not exist;
larger ones add up fewer gradients of weights."""


class RowSpan(NamedTuple):
    """Some of the sorted rows, one after the other.

    Attributes:
      row_S: the rows; arbitrary after the last one.
      token_S: the rows' tokens.
      exists_S: False after the last row.
      counts_E: int32, rows of each expert among them.
      place_NxK: where each row of the tokens stands in the part.
      inside_NxK: whether it does.
    """

    row_S: jax.Array
    token_S: jax.Array
    exists_S: jax.Array
    counts_E: jax.Array
    place_NxK: jax.Array
    inside_NxK: jax.Array


def part_rows(rows: float, alone: bool) -> int:
    """Returns the number of rows of a part.

    Args:
      rows: expected rows of a device's experts, if all are taken equally often.
      alone: the device has all experts, so it has no other number of rows.
    """
    part_size = rows if alone else rows / PARTS
    return feasibility.GROUPED_STEP * math.ceil(min(part_size, MOST_ROWS) / feasibility.GROUPED_STEP)


def mixed(
    x_NxD: jax.Array, share_NxK: jax.Array, chosen_NxK: jax.Array, weights: LayerExperts, rows: float
) -> jax.Array:
    """Returns this device's experts' part of the sum, float32 [N, D]. See `expert_tiles.mixed`."""

    def compute(part: RowSpan) -> jax.Array:
        hidden_SxF, *_ = _hidden(x_NxD[part.token_S], weights, part.counts_E)
        out_SxD = grouped_products.by_rows(hidden_SxF, weights.down_ExDxF, part.counts_E)
        return _summed(out_SxD, part, share_NxK)

    return _over_parts(chosen_NxK, len(weights.gate_ExFxD), rows, compute)


def mixed_gradients(
    x_NxD: jax.Array,
    share_NxK: jax.Array,
    chosen_NxK: jax.Array,
    grad_NxD: jax.Array,
    weights: LayerExperts,
    rows: float,
) -> tuple[jax.Array, jax.Array, LayerExperts]:
    """Returns the gradients of `mixed`, float32, with the hidden values computed again."""
    share_R, dtype = share_NxK.reshape(-1), x_NxD.dtype

    def compute(part: RowSpan) -> tuple[jax.Array, jax.Array, LayerExperts]:
        counts_E = part.counts_E
        in_SxD = x_NxD[part.token_S]
        # Rows of no expert may be padding, whose gradient may be anything, and `outer` takes finite numbers alone.
        grad_SxD = jnp.where(part.exists_S[:, None], grad_NxD[part.token_S], 0.0).astype(dtype)
        hidden_SxF, gate_SxF, up_SxF = _hidden(in_SxD, weights, counts_E)
        # Before the share, so that its own gradient needs no other product.
        back_SxF = grouped_products.by_columns(grad_SxD, weights.down_ExDxF, counts_E).astype(jnp.float32)
        share_S = share_R[part.row_S, None]
        share_grad_S = jnp.sum(back_SxF * hidden_SxF, axis=-1)
        activated_SxF, slope = jax.vjp(jax.nn.silu, gate_SxF)
        (gate_grad_SxF,) = slope(back_SxF * share_S * up_SxF)
        gate_grad_SxF = gate_grad_SxF.astype(dtype)
        up_grad_SxF = (back_SxF * share_S * activated_SxF).astype(dtype)
        weight_grads = LayerExperts(
            grouped_products.outer(gate_grad_SxF, in_SxD, counts_E),
            grouped_products.outer(up_grad_SxF, in_SxD, counts_E),
            grouped_products.outer((grad_SxD * share_S).astype(dtype), hidden_SxF, counts_E),
        )
        in_grad_SxD = grouped_products.by_columns(gate_grad_SxF, weights.gate_ExFxD, counts_E)
        in_grad_SxD += grouped_products.by_columns(up_grad_SxF, weights.up_ExFxD, counts_E)
        share_grad_NxK = jnp.where(part.inside_NxK, share_grad_S[part.place_NxK], 0.0)
        return _summed(in_grad_SxD, part), share_grad_NxK, _floats(weight_grads)

    return _over_parts(chosen_NxK, len(weights.gate_ExFxD), rows, compute)


def _hidden(in_SxD: jax.Array, weights: LayerExperts, counts_E: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the hidden values of a part's rows in the compute dtype, and their two factors in float32."""
    gate_SxF, up_SxF = (
        grouped_products.by_rows(in_SxD, leaf, counts_E).astype(jnp.float32)
        for leaf in (weights.gate_ExFxD, weights.up_ExFxD)
    )
    return (jax.nn.silu(gate_SxF) * up_SxF).astype(in_SxD.dtype), gate_SxF, up_SxF


def _summed(values_SxD: jax.Array, part: RowSpan, share_NxK: jax.Array | None = None) -> jax.Array:
    """Returns at each token the sum of its rows in the part, times their shares; float32 [N, D]."""
    share_NxK = jnp.ones((), jnp.float32) if share_NxK is None else share_NxK
    weight_NxK = jnp.where(part.inside_NxK, share_NxK, 0.0)
    # A token gathers its own rows: adding rows to tokens takes atomic operations, which are slower. Rows of no expert
    # are 0, so a product is as good as a choice.
    return jnp.sum(values_SxD[part.place_NxK].astype(jnp.float32) * weight_NxK[..., None], axis=1)


def _floats(tree: Sums) -> Sums:
    floats: Sums = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
    return floats


def _over_parts(chosen_NxK: jax.Array, experts: int, rows: float, compute: Callable[[RowSpan], Sums]) -> Sums:
    """Returns the sum of what `compute` returns for each part.

    Args:
      chosen_NxK: the experts of each token, among those of all devices; -1 for none.
      experts: number of this device's experts.
      rows: expected rows of this device's experts, if all are taken equally often.
      compute: its results are float32.
    """
    order_R, counts_E = expert_rows.by_expert(chosen_NxK, experts)
    count = len(order_R)
    size = part_rows(rows, rows >= count)
    place_R = jnp.zeros_like(order_R).at[order_R].set(jnp.arange(count), unique_indices=True)
    total, ends_E = jnp.sum(counts_E), jnp.cumsum(counts_E)
    padded_R = jnp.pad(order_R, (0, size))  # the last part may reach over the end

    def part(number: jax.Array | int) -> RowSpan:
        first = number * size
        row_S = jax.lax.dynamic_slice_in_dim(padded_R, first, size)
        until_E = jnp.clip(ends_E - first, 0, size)
        place_NxK = place_R.reshape(chosen_NxK.shape)
        inside_NxK = (place_NxK >= first) & (place_NxK < jnp.minimum(first + size, total))
        return RowSpan(
            row_S,
            row_S // chosen_NxK.shape[1],
            first + jnp.arange(size) < total,
            jnp.diff(until_E, prepend=0).astype(jnp.int32),
            jnp.clip(place_NxK - first, 0, size - 1),
            inside_NxK,
        )

    if size >= count:
        return compute(part(0))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(lambda: compute(part(0))))
    with jax.named_scope(expert_rows.SCOPE):
        return jax.lax.fori_loop(
            0, -(-total // size), lambda number, sums: jax.tree.map(jnp.add, sums, compute(part(number))), zeros
        )


def balanced_iterations(rows: float, alone: bool) -> float:
    """Returns the expected iterations of the loop over parts; see `part_rows`."""
    return math.ceil(rows / part_rows(rows, alone))
