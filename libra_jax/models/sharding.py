"""How arrays lie on the mesh: logical axis names, their mesh axes, the pinning of activations, and gathering.

The mesh has four axes: `data` (copies), `fsdp` (rows, and parameters split over it), `tensor` (matrices of a layer,
split by heads or columns) and `context` (reserved, size 1). All are of type `jax.sharding.AxisType.Auto`. If
`jax.set_mesh` has made that mesh current, the forward pass also pins its activations.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import jax
from jax.sharding import AxisType, PartitionSpec

from libra_jax.protocols import ConfigError

RULES: Mapping[str | None, str | tuple[str, ...] | None] = {
    "layers": None,
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "norm": None,
    "batch": ("data", "fsdp"),
    "tokens": "context",
    "residual": ("context", "tensor"),
    None: None,
}
"""Logical axis -> mesh axes, for parameters and activations.

"residual" is the token axis of the residual stream. Between a layer's matrix products nothing mixes tokens, so the
arrays kept for the backward pass are split over `tensor` too (sequence parallelism, Korthikanti et al., arXiv
2205.05198)."""


def spec(axes: tuple[str | None, ...]) -> PartitionSpec:
    """Returns the PartitionSpec of an array with these logical axes."""
    return PartitionSpec(*(RULES[axis] for axis in axes))


def current_mesh() -> jax.sharding.AbstractMesh | None:
    """Returns the mesh made current with `jax.set_mesh`, or None.

    Raises:
      ConfigError: one of its axes is of type Explicit (the default of `jax.make_mesh`), not Auto.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None
    if any(kind == AxisType.Explicit for kind in mesh.axis_types):
        raise ConfigError("the current mesh has axes of type Explicit; make it with axis_types=(AxisType.Auto,) * 4.")
    return mesh


def constrain(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """Pins an activation to its sharding on the current mesh; without a mesh, returns the activation unchanged.

    Raises:
      ConfigError: a size is not divisible over the mesh; the message names the axis.
    """
    mesh = current_mesh()
    if mesh is None:
        return x
    for axis, size in zip(axes, x.shape, strict=True):
        names = RULES[axis] or ()
        ways = math.prod(mesh.shape[name] for name in ((names,) if isinstance(names, str) else names))
        if size % ways:
            raise ConfigError(f"the batch's {axis} axis of size {size} does not divide over {ways} shards of the mesh.")
    return jax.lax.with_sharding_constraint(x, spec(axes))


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
    everywhere = jax.sharding.NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda leaf: leaf, out_shardings=everywhere)
