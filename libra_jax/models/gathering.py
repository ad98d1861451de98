"""Whole parameters where several processes share a mesh: one at a time, in step with the other processes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator

import jax


@contextlib.contextmanager
def whole(leaves: Iterable[jax.Array]) -> Iterator[Iterator[jax.Array]]:
    """The arrays, each readable in this process from end to end.

    In one process they are what they are. Among several, taking the next one is a collective: every process has to
    enter the block with the same arrays, and those that are not taken by its end, for an error too, are gathered then,
    because the others wait for them. A process that wants none just leaves the block. Devices hold one gathered array
    at a time, provided that the caller lets go of each before it takes the next.
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
    return jax.block_until_ready(_replicate(leaf.sharding.mesh)(leaf))


@functools.lru_cache(maxsize=4)
def _replicate(mesh: jax.sharding.Mesh) -> Callable[[jax.Array], jax.Array]:
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.jit(lambda leaf: leaf, out_shardings=everywhere)
