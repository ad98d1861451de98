"""Attention over rows whose tokens are split over the `context` axis of the mesh.

Outside of attention, each device holds its own tokens and all heads of its `tensor` shard. Attention needs whole rows:

- By heads (`over_heads`): the devices exchange tokens for heads, attend over whole rows, and exchange back (Ulysses,
  arXiv 2309.14509). Every kernel works, and every device computes the same amount.
- By queries (`over_queries`), where the devices do not divide the heads: keys and values are gathered, and each device
  keeps its queries. Causal attention gives late queries more work. So each device takes one early and one late part of
  the row. In a row of one sequence, all devices then compute the same amount. Of a packed row, a device computes more
  if its parts hold longer sequences.

All functions run on one device's shards inside `jax.shard_map`.

Letters: B rows, T tokens of a row, S tokens of this device, H query heads, N key and value heads, K head width.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from libra_jax.models import collectives, feasibility, sharding

LocalAttention = Callable[..., jax.Array]
"""Attention on one device: [B, T, H, K] from queries, keys, values, segment ids [B, T], and the kernel's own arrays,
whose first axis is B."""

PartAttention = Callable[..., jax.Array]
"""Attention of some queries: [B, S, H, K] from queries, keys [B, T, N, K], values, the first column of each half of the
queries, segment ids [B, T], and the kernel's own arrays."""


def over_heads(local: LocalAttention) -> LocalAttention:
    """Returns attention of a device's own tokens that exchanges tokens for heads around `local`.

    Fewer key and value heads than devices are copied before the exchange. Each device is sent only the heads that its
    queries attend to. Gathering all of them would send more: N heads to each device instead of the one that it needs.
    """

    def attend(q_BxSxHxK: jax.Array, k_BxSxNxK: jax.Array, v_BxSxNxK: jax.Array, *shared: jax.Array) -> jax.Array:
        ways = sharding.ways("context")
        sent = feasibility.context_heads(q_BxSxHxK.shape[2], k_BxSxNxK.shape[2], ways)
        q_BxTxHxK = collectives.all_to_all(q_BxSxHxK, "context", 2, 1)

        def exchange(x_BxSxNxK: jax.Array) -> jax.Array:
            if sent.copies != tuple(range(x_BxSxNxK.shape[2])):
                x_BxSxNxK = jnp.take(x_BxSxNxK, jnp.array(sent.copies), axis=2)
            x_BxTxNxK = collectives.all_to_all(x_BxSxNxK, "context", 2, 1)
            if sent.of_query is None:
                return x_BxTxNxK
            of_query_H = jnp.array(sent.of_query)[collectives.first_index("context", 1)]
            return jnp.take(x_BxTxNxK, of_query_H, axis=2)

        out_BxTxHxK = local(q_BxTxHxK, exchange(k_BxSxNxK), exchange(v_BxSxNxK), *shared)
        return collectives.all_to_all(out_BxTxHxK, "context", 1, 2)

    return attend


def over_queries(local: PartAttention) -> LocalAttention:
    """Returns attention of a device's own tokens that gathers keys and values, and balances the queries."""

    def attend(q_BxSxHxK: jax.Array, k_BxSxNxK: jax.Array, v_BxSxNxK: jax.Array, *shared: jax.Array) -> jax.Array:
        place, ways, half = jax.lax.axis_index("context"), sharding.ways("context"), q_BxSxHxK.shape[1] // 2
        # Of 2 x `ways` parts of the row, device i attends with part i and with part 2 x `ways` - 1 - i.
        firsts = jnp.stack([place * half, (2 * ways - 1 - place) * half])
        out_BxSxHxK = local(
            _balanced(q_BxSxHxK),
            collectives.all_gather(k_BxSxNxK, "context", 1),
            collectives.all_gather(v_BxSxNxK, "context", 1),
            firsts,
            *shared,
        )
        return _in_order(out_BxSxHxK)

    return attend


def _owners(ways: int, parity: int) -> list[tuple[int, int]]:
    """Returns (sender, receiver) of the even (0) or odd (1) parts: device i holds parts 2 i and 2 i + 1."""
    parts = range(parity, 2 * ways, 2)
    return [(part // 2, min(part, 2 * ways - 1 - part)) for part in parts]


def _balanced(x_BxSxHxK: jax.Array) -> jax.Array:
    """Sends each device the early and the late part that it attends with, early part first."""
    ways = sharding.ways("context")
    even, odd = (
        collectives.permute(part, "context", _owners(ways, parity))
        for parity, part in enumerate(jnp.split(x_BxSxHxK, 2, axis=1))
    )
    # The early part of device i is part i.
    early_is_even = jax.lax.axis_index("context") % 2 == 0
    parts = jnp.where(early_is_even, even, odd), jnp.where(early_is_even, odd, even)
    return jnp.concatenate(parts, axis=1)


def _in_order(x_BxSxHxK: jax.Array) -> jax.Array:
    """Sends the parts back to the devices that hold their tokens: the inverse of `_balanced`."""
    ways = sharding.ways("context")
    early, late = jnp.split(x_BxSxHxK, 2, axis=1)
    early_is_even = jax.lax.axis_index("context") % 2 == 0
    halves = jnp.where(early_is_even, early, late), jnp.where(early_is_even, late, early)
    returned = (
        collectives.permute(part, "context", [(receiver, sender) for sender, receiver in _owners(ways, parity)])
        for parity, part in enumerate(halves)
    )
    return jnp.concatenate(list(returned), axis=1)
