"""Functions that run on each device's own shards, and the collectives that they call.

The compiler places the collectives of the layers. For the vocabulary's matrices it places them badly: whole matrices
move in every iteration of a loop. There each device's program is written out instead.

A collective over one device is left out, because compilers do not remove all of them.

Thread-safety: all functions are pure; the current mesh is a property of the thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax

from libra_jax.models import sharding

Local = TypeVar("Local", bound=Callable[..., Any])


def per_device(function: Local, inputs: tuple[sharding.Axes, ...], outputs: Any) -> Local:
    """Returns a function of whole arrays that runs `function` on each device's shards of the current mesh.

    Without a current mesh, returns `function` itself. The collectives below then change nothing.

    Args:
      function: takes and returns arrays. It is not differentiated: wrap the result in `jax.custom_vjp`.
      inputs: logical axes of each argument.
      outputs: logical axes of the result, or a list of them if there are several results. Along a mesh axis that the
        result does not name, every device must return the same value.

    Raises:
      ConfigError: see `sharding.current_mesh`.
    """
    mesh = sharding.current_mesh()
    if mesh is None:
        return function
    results = tuple(map(sharding.spec, outputs)) if isinstance(outputs, list) else sharding.spec(outputs)
    split = jax.shard_map(
        function, mesh=mesh, in_specs=tuple(map(sharding.spec, inputs)), out_specs=results, check_vma=False
    )
    return cast(Local, split)


def all_gather(x: jax.Array, names: str | tuple[str, ...], axis: int) -> jax.Array:
    """Joins the devices' shards along `axis`; of several mesh axes, the first is the outermost."""
    split = _split(names)
    return jax.lax.all_gather(x, split, axis=axis, tiled=True) if split else x


def reduce_scatter(x: jax.Array, names: str | tuple[str, ...], axis: int) -> jax.Array:
    """Sums over the devices; each keeps its own shard of the sum along `axis`. The inverse of `all_gather`."""
    split = _split(names)
    return jax.lax.psum_scatter(x, split, scatter_dimension=axis, tiled=True) if split else x


def all_to_all(x: jax.Array, name: str, split: int, join: int) -> jax.Array:
    """Sends one part of axis `split` to each device, and joins the received parts along axis `join`."""
    return x if sharding.ways(name) == 1 else jax.lax.all_to_all(x, name, split, join, tiled=True)


def permute(x: jax.Array, name: str, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """Sends each device's array to one other device: `pairs` are the positions of sender and receiver."""
    return x if sharding.ways(name) == 1 else jax.lax.ppermute(x, name, pairs)


def sum_over(x: jax.Array, *names: str) -> jax.Array:
    """Sums over the devices of these mesh axes."""
    split = _split(names)
    return jax.lax.psum(x, split) if split else x


def max_over(x: jax.Array, name: str) -> jax.Array:
    """Returns the maximum over the devices."""
    return x if sharding.ways(name) == 1 else jax.lax.pmax(x, name)


def first_index(name: str, size: int) -> jax.Array | int:
    """Returns the position of this device's first entry in an axis split over `name` into shards of `size`."""
    return 0 if sharding.ways(name) == 1 else jax.lax.axis_index(name) * size


def _split(names: str | tuple[str, ...]) -> tuple[str, ...]:
    """Returns those of the mesh axes that have more than one device."""
    return tuple(name for name in ((names,) if isinstance(names, str) else names) if sharding.ways(name) > 1)
