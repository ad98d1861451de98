"""Lookup in an embedding table that is split over `tensor` along its tokens, over `fsdp` and `context` along its width.

Each device looks up the tokens of all rows of its `fsdp` and `context` group in its own part of the table. The devices
then exchange columns for tokens and rows. So only activations travel, and the table and its gradient stay where they
are, in both passes. With the lookup left to the compiler, the whole table was gathered and its gradient summed whole.

Letters: B rows, T tokens, C parts of `context`, D model width, V vocabulary; in the functions of one device, of its own
shards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from libra_jax.models import collectives, sharding

TOKENS: sharding.Axes = ("batch", "tokens")
TABLE: sharding.Axes = ("vocab", "embed")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def lookup(table_VxD: jax.Array, tokens_BxT: jax.Array, dtype: str) -> jax.Array:
    """Returns the tokens' rows of the table, [B, T, D] in `dtype`, split like the residual stream.

    The gradient of the table is a float32 sum: an entry sums all occurrences of its token, and a bfloat16 sum loses 10%
    of a frequent one.

    Args:
      table_VxD: the table, in the parameters' dtype.
      tokens_BxT: int, token ids.
      dtype: compute dtype.

    Raises:
      ConfigError: the rows or tokens do not divide over the current mesh.
    """
    sharding.check_divides(tokens_BxT.shape, sharding.RESIDUAL[:2])
    local = functools.partial(_lookup, dtype=dtype)
    return collectives.per_device(local, (TABLE, TOKENS), sharding.RESIDUAL)(table_VxD, tokens_BxT)


def _lookup_backward(dtype: str, saved: tuple[jax.Array, ...], grad_BxTxD: jax.Array) -> tuple[jax.Array, None]:
    table_VxD, tokens_BxT = saved
    local = collectives.per_device(_scatter, (TABLE, TOKENS, sharding.RESIDUAL), TABLE)
    return local(table_VxD, tokens_BxT, grad_BxTxD), None


lookup.defvjp(
    lambda table_VxD, tokens_BxT, dtype: (lookup(table_VxD, tokens_BxT, dtype), (table_VxD, tokens_BxT)),
    _lookup_backward,
)


def _lookup(table_VxD: jax.Array, tokens_BxT: jax.Array, dtype: str) -> jax.Array:
    index_BxT = _local_index(table_VxD, tokens_BxT)
    # Cast before anything travels. At most one device of `tensor` adds anything but 0, so the sum is exact.
    x_BxTxD = table_VxD.at[index_BxT].get(mode="fill", fill_value=0).astype(dtype)
    x_BxTxD = _by_context(x_BxTxD, collectives.reduce_scatter)
    # The width is split over `fsdp` first, so the parts of `context` join before those of `fsdp`.
    x_BxTxD = collectives.all_to_all(x_BxTxD, "context", 1, 2)
    return collectives.all_to_all(x_BxTxD, "fsdp", 0, 2)


def _scatter(table_VxD: jax.Array, tokens_BxT: jax.Array, grad_BxTxD: jax.Array) -> jax.Array:
    """Returns the gradient of the table: the transpose of `_lookup`, step by step."""
    grad_BxTxD = collectives.all_to_all(grad_BxTxD, "fsdp", 2, 0)
    grad_BxTxD = collectives.all_to_all(grad_BxTxD, "context", 2, 1)
    grad_BxTxD = _by_context(grad_BxTxD, collectives.all_gather).astype(jnp.float32)
    index_BxT = _local_index(table_VxD, tokens_BxT)
    total_VxD = jnp.zeros(table_VxD.shape, jnp.float32).at[index_BxT].add(grad_BxTxD, mode="drop")
    return collectives.sum_over(total_VxD, "data").astype(table_VxD.dtype)


def _by_context(x_BxTxD: jax.Array, over: Callable[[jax.Array, str, int], jax.Array]) -> jax.Array:
    """Gathers or scatters tokens over `tensor` within each part of `context`, because `context` splits a row first."""
    parts = sharding.ways("context")
    x_BxCxTxD = x_BxTxD.reshape(x_BxTxD.shape[0], parts, -1, x_BxTxD.shape[2])
    return over(x_BxCxTxD, "tensor", 2).reshape(x_BxTxD.shape[0], -1, x_BxTxD.shape[2])


def _local_index(table_VxD: jax.Array, tokens_BxT: jax.Array) -> jax.Array:
    """Returns where the rows' tokens lie in this device's part of the table; its length for tokens of other parts."""
    tokens_BxT = collectives.all_gather(collectives.all_gather(tokens_BxT, "context", 1), "fsdp", 0)
    size = table_VxD.shape[0]
    index_BxT = tokens_BxT - collectives.first_index("tensor", size)
    # A negative index would count from the end.
    return jnp.where((index_BxT >= 0) & (index_BxT < size), index_BxT, size)
