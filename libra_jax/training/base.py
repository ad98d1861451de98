"""The model's weights before the first step: read, drawn, and recognised by a digest.

An adapter's frozen weights never change. A checkpoint therefore holds their digest, and not their bytes, if they can be
read or drawn again. The digest shows whether the source still holds the same weights.
"""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp

from libra_jax import config as config_lib
from libra_jax.models import config as model_config
from libra_jax.models.hf import hf
from libra_jax.training import state as state_lib


def load(config: config_lib.RunConfig, model: model_config.TransformerConfig, where: state_lib.StateLayout) -> Any:
    """Returns the model's weights as `where.weights` places them: from `model.path`, or drawn from the seed.

    Raises:
      DataError: the model directory cannot be used.
    """
    if not config.model.path:
        return state_lib.random_params(model, where, config.seed)
    return hf.load(config.model.path, model, where.weights, state_lib.shardings_of(where.weights))


def digest(weights: Any) -> str:
    """Returns 16 hex digits that tell weights apart by any bit. They are the same on every mesh.

    Each element is mixed with its place and summed in uint32. Such sums have one result in any order, so each device
    sums its own shards. With several processes, the call is a collective.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(weights)
    sums = jax.device_get(_sums([leaf for _, leaf in leaves]))
    hasher = hashlib.sha256()
    for (path, leaf), pair in zip(leaves, sums, strict=True):
        hasher.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape} {pair[0]} {pair[1]};".encode())
    return hasher.hexdigest()[:16]


@jax.jit
def _sums(leaves: list[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
    return [(_mixed_sum(leaf, 0x9E3779B9), _mixed_sum(leaf, 0x85EBCA77)) for leaf in leaves]


def _mixed_sum(leaf: jax.Array, seed: int) -> jax.Array:
    """Returns the wrapping sum of an array's elements, each hashed with its place (MurmurHash3's finalizer)."""
    kind = {2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(leaf, kind).astype(jnp.uint32)
    place, stride = jnp.zeros(leaf.shape, jnp.uint32), 1
    for axis in reversed(range(leaf.ndim)):
        place += jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= leaf.shape[axis]
    mixed = (place + jnp.uint32(1)) * jnp.uint32(seed) ^ bits
    for multiplier in (0x85EBCA6B, 0xC2B2AE35):
        mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(multiplier)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)
