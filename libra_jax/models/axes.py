"""Logical axis names, the mesh axes they are split over, and the constraint that pins an activation to its place."""

from __future__ import annotations

import math
from collections.abc import Mapping

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

"residual" is the tokens of the residual stream: between a layer's matrix products nothing mixes tokens, so what a layer
keeps for the backward pass is split over `tensor` too (sequence parallelism, Korthikanti et al., arXiv 2205.05198)."""


def spec(axes: tuple[str | None, ...]) -> PartitionSpec:
    """The PartitionSpec of an array with these logical axes."""
    return PartitionSpec(*(RULES[axis] for axis in axes))


def current_mesh() -> jax.sharding.AbstractMesh | None:
    """The mesh made current with `jax.set_mesh`, or None.

    Raises:
      ConfigError: an axis of it is not of type Auto (`jax.make_mesh` makes Explicit ones unless told otherwise).
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None
    if any(kind == AxisType.Explicit for kind in mesh.axis_types):
        raise ConfigError("the current mesh has axes of type Explicit; make it with axis_types=(AxisType.Auto,) * 4.")
    return mesh


def constrain(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """Pins an activation to its place on the current mesh; without one, returns it as it is.

    Raises:
      ConfigError: a size does not divide over the mesh; the message names the axis.
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
