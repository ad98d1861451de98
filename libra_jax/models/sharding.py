"""How arrays lie on the mesh: logical axis names, their mesh axes, the pinning of activations, and gathering.

The mesh has four axes: `data` (copies), `fsdp` (rows), `tensor` (matrices of a layer, split by heads or columns) and
`context` (the tokens of a row). The state is split over `fsdp` and `context` together, because both hold the same
parameters otherwise. All axes are of type `jax.sharding.AxisType.Auto`. If `jax.set_mesh` has made that mesh current,
the forward pass also pins its activations.

Tensor parallelism is Megatron's with sequence parallelism (Korthikanti et al., arXiv 2205.05198, section 4.2.2): tokens
of the residual stream are split over `tensor`, gathered before a projection that splits its columns, and summed and
split again after a projection that splits its rows.

Letters: B rows, T tokens, D model width.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import jax
from jax.sharding import AxisType, PartitionSpec

from libra_jax.protocols import ConfigError

Axes = tuple[str | None, ...]
"""Logical axis of each dimension of an array."""

RULES: Mapping[str | None, str | tuple[str, ...] | None] = {
    "layers": None,
    "vocab": "tensor",
    "embed": ("fsdp", "context"),
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "experts": "fsdp",
    "expert_embed": "context",
    "router": None,
    "rank": None,
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


def spec(axes: Axes) -> PartitionSpec:
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


def ways(name: str) -> int:
    """Returns the number of devices along an axis of the current mesh; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.shape[name]


def constrain(x: jax.Array, axes: Axes) -> jax.Array:
    """Pins an activation to its sharding on the current mesh; without a mesh, returns the activation unchanged.

    Raises:
      ConfigError: a size is not divisible over the mesh; the message names the axis.
    """
    if current_mesh() is None:
        return x
    check_divides(x.shape, axes)
    return jax.lax.with_sharding_constraint(x, spec(axes))


def check_divides(shape: tuple[int, ...], axes: Axes) -> None:
    """Checks that an array of this shape splits evenly over the current mesh; without a mesh, every array does.

    Raises:
      ConfigError: a size is not divisible; the message names the axis.
    """
    if (mesh := current_mesh()) is None:
        return
    for axis, size in zip(axes, shape, strict=True):
        names = RULES[axis] or ()
        ways = math.prod(mesh.shape[name] for name in ((names,) if isinstance(names, str) else names))
        if size % ways:
            raise ConfigError(f"the batch's {axis} axis of size {size} does not divide over {ways} shards of the mesh.")


RESIDUAL: Axes = ("batch", "residual", None)
"""Axes of the residual stream [B, T, D]."""

WHOLE_TOKENS: Axes = ("batch", "tokens", None)
"""Axes of an array [B, T, D] of which every device of `tensor` holds the same tokens."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def reshard(x: jax.Array, axes: Axes, gradient_axes: Axes) -> jax.Array:
    """Pins an array to one sharding and its gradient to another.

    `constrain` pins both alike. A gradient that is a sum over devices would then be summed whole on every device: an
    all-reduce, of twice the bytes of the reduce-scatter that suffices.
    """
    return constrain(x, axes)


reshard.defvjp(
    lambda x, axes, gradient_axes: (constrain(x, axes), None),
    lambda axes, gradient_axes, _, grad: (constrain(grad, gradient_axes),),
)


def gather_tokens(x_BxTxD: jax.Array) -> jax.Array:
    """Gathers the tokens of the residual stream over `tensor`, once for all projections of one input."""
    return reshard(x_BxTxD, WHOLE_TOKENS, RESIDUAL)


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
