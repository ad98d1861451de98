"""Matrix products of rows that are sorted by group, each with its group's matrix: JAX's own kernels for Hopper GPUs.

XLA for GPUs has no such product: it multiplies all rows with the matrices of all groups. JAX ships kernels for it, in
`jax.experimental.pallas.ops.gpu`. Measured on one H200 in bfloat16, 65,536 rows, 128 uneven groups, widths 2,048 and
768: 240 to 380 TFLOP/s with the blocks below, where a plain product reached 757 (docs/results/gpu.md).

Letters: R rows, G groups, A and B widths. Rows after the last group's end are 0 in results, and have no effect.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

SCOPE = "grouped_product"
"""Name of the products in compiled programs (`planning.compiled`)."""


def by_rows(x_RxA: jax.Array, weights_GxBxA: jax.Array, counts_G: jax.Array) -> jax.Array:
    """Returns each row's product with its group's transposed matrix, [R, B] in the inputs' dtype."""
    return _rows(x_RxA, weights_GxBxA, counts_G, weights_GxBxA.shape[1], transposed=True)


def by_columns(x_RxB: jax.Array, weights_GxBxA: jax.Array, counts_G: jax.Array) -> jax.Array:
    """Returns each row's product with its group's matrix, [R, A] in the inputs' dtype."""
    return _rows(x_RxB, weights_GxBxA, counts_G, weights_GxBxA.shape[2], transposed=False)


def outer(a_RxA: jax.Array, b_RxB: jax.Array, counts_G: jax.Array) -> jax.Array:
    """Returns for each group the sum of its rows' outer products, [G, A, B] in the inputs' dtype.

    Args:
      a_RxA: left factors; finite after the last group, too, because the kernel multiplies them with 0.
      b_RxB: right factors; finite, too.
      counts_G: int32, rows of each group.
    """
    # Imported here: the module needs JAX's GPU dialects, which only programs for GPUs do.
    from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu

    with jax.named_scope(SCOPE):
        product: jax.Array = transposed_ragged_dot_mgpu.transposed_ragged_dot(
            a_RxA,
            b_RxB,
            group_sizes=counts_G,
            block_m=128,
            block_n=128,
            block_k=64,
            max_concurrent_steps=4,
            grid_block_n=1,
        )
    return product


def _rows(x: jax.Array, weights: jax.Array, counts_G: jax.Array, columns: int, *, transposed: bool) -> jax.Array:
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    # Of the blocks that were measured, these two were the fastest. Few rows a block leave few rows of a group's last
    # block empty.
    block_m, block_n, planes = (64, 256, 1) if columns % 256 == 0 else (128, 128, 2)
    with jax.named_scope(SCOPE):
        product: jax.Array = ragged_dot_mgpu.ragged_dot(
            x,
            weights,
            group_sizes=counts_G,
            block_m=block_m,
            block_n=block_n,
            block_k=64,
            max_concurrent_steps=4,
            grid_block_n=planes,
            transpose_rhs=transposed,
        )
    # The kernel leaves rows of no group unwritten.
    exists_R = jnp.arange(len(product)) < jnp.sum(counts_G)
    # JAX would move a constant out of the scan over layers, and each layer would read it from memory.
    zero_R = (exists_R & False).astype(product.dtype)
    return jnp.where(exists_R[:, None], product, zero_R[:, None])
