"""Gathers whole parameters if several processes share a mesh: one at a time, in step with the other processes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator

import jax


@contextlib.contextmanager
def whole(leaves: Iterable[jax.Array]) -> Iterator[Iterator[jax.Array]]:
    """Yields the arrays, each readable from end to end in this process.

    In one process the arrays pass through unchanged. With several processes, taking the next array is a collective.
    Every process must enter the block with the same arrays. Arrays not taken by the end of the block, even after an
    error, are gathered then, because the other processes wait for them. A process that needs none leaves the block.
    Devices hold one gathered array at a time, if the caller drops each array before it takes the next.
    """
    rest = iter(leaves)
    if jax.process_count() == 1:
        yield rest
        return
    try:
        yield map(_gather, rest)
    finally:
        for leaf in rest:
            _gather(leaf)


def _gather(leaf: jax.Array) -> jax.Array:
    if leaf.is_fully_replicated:
        return leaf
    # Waiting keeps one gathered array alive at a time; JAX would otherwise run ahead.
    return jax.block_until_ready(_replicate(leaf.sharding.mesh)(leaf))


@functools.lru_cache(maxsize=4)
def _replicate(mesh: jax.sharding.Mesh) -> Callable[[jax.Array], jax.Array]:
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.jit(lambda leaf: leaf, out_shardings=everywhere)
