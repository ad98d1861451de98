"""Low-rank adapters (LoRA, arXiv 2106.09685) as trees of arrays: y = x W^T + (alpha / rank) (x A^T) B^T.

A policy with an adapter is one nested dict (`transformer.Params`): the frozen weights, and beside each adapted weight
the leaves `lora_a` and `lora_b`. Axis 0 of these leaves is the adapted layer, which may be fewer than all layers.

Letters: K adapted layers, R rank, I inputs and O outputs of a projection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from libra_jax.models import config as model_config

Tree = Mapping[str, Any]

Saveable = Callable[..., bool]
"""A policy of `jax.checkpoint`: whether the result of a primitive is kept for the backward pass."""

LEAVES = ("lora_a", "lora_b")
"""Names of the trained leaves."""


def is_leaf(path: tuple[Any, ...]) -> bool:
    """Tells whether a path of `jax.tree_util`, in a tree of the policy, leads to a leaf of the adapter."""
    return any(getattr(part, "key", None) in LEAVES for part in path)


def split(tree: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the adapter and the rest of a tree, each in the tree's nesting without empty dicts."""
    adapter: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            for part, target in zip(split(value), (adapter, rest), strict=True):
                if part:
                    target[key] = part
        else:
            (adapter if key in LEAVES else rest)[key] = value
    return adapter, rest


def join(base: Tree, adapter: Tree | None) -> Tree:
    """Returns the policy of frozen weights and adapter: the inverse of `split`. Copies no array."""
    if adapter is None:
        return base
    joined = dict(base)
    for key, value in adapter.items():
        joined[key] = join(joined.get(key, {}), value) if isinstance(value, Mapping) else value
    return joined


def spread(tree: Tree, config: model_config.TransformerConfig) -> Tree:
    """Returns the tree with adapter leaves of all layers. Layers without an adapter get zeros.

    The zeros exist inside a program only: a scan over the layers needs leaves of one length.
    """
    adapter = config.adapter
    if adapter is None or len(adapter.layers) == config.num_layers:
        return tree
    layers, (leaves, base) = np.array(adapter.layers), split(tree)

    spread_leaves = jax.tree.map(
        lambda leaf: jnp.zeros((config.num_layers, *leaf.shape[1:]), leaf.dtype).at[layers].set(leaf), leaves
    )
    return join(base, spread_leaves)


def saveable(adapter: model_config.AdapterConfig | None, products: Saveable) -> Saveable:
    """Returns a rematerialisation policy that keeps what `products` keeps, but no product with B.

    Such a product is as large as that of the weight, to which it is added: to keep it, too, would double what is kept
    of a projection. It is cheap to compute again, with rank multiplications an element.
    """
    if adapter is None:
        return products

    def keep(primitive: Any, *arrays: Any, **parameters: Any) -> bool:
        is_product = bool(products(primitive, *arrays, **parameters))
        if not is_product or "dimension_numbers" not in parameters:
            return is_product
        (axes, _), _ = parameters["dimension_numbers"]
        return [arrays[0].shape[axis] for axis in axes] != [adapter.rank]

    return keep


def init(shapes: Tree, key: jax.Array) -> Tree:
    """Draws a fresh adapter as PEFT does: A uniform in +-1 / sqrt(I), and B zero, so that the product is zero.

    Args:
      shapes: `jax.ShapeDtypeStruct` leaves of the adapter.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(shapes)

    def draw(number: int, path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if path[-1].key == "lora_b":
            return jnp.zeros(leaf.shape, leaf.dtype)
        # kaiming_uniform with a = sqrt(5), whose bound this is.
        bound = leaf.shape[-1] ** -0.5
        return jax.random.uniform(jax.random.fold_in(key, number), leaf.shape, leaf.dtype, -bound, bound)

    return jax.tree.unflatten(structure, [draw(number, *item) for number, item in enumerate(leaves)])


def merged(base: Tree, adapter: Tree, config: model_config.TransformerConfig, dtype: str) -> Tree:
    """Returns all weights with the adapter added, W + (alpha / rank) B A.

    The sum is taken in float32 and rounded once. The result is a second copy of the weights.

    Args:
      base: the frozen weights.
      config: shape of the model, with its adapter.
      dtype: dtype of matrices and biases in the result. Weights of norms stay as they are.
    """
    assert config.adapter is not None
    scale, layers = config.adapter.scale, np.array(config.adapter.layers)

    def add(base: Tree, adapter: Tree) -> Tree:
        result: dict[str, Any] = {}
        for key, value in base.items():
            if isinstance(value, Mapping):
                result[key] = value if key.endswith("norm") else add(value, adapter.get(key, {}))
            elif key == "weight" and LEAVES[0] in adapter:
                a, b = (adapter[name].astype(jnp.float32) for name in LEAVES)
                product = jnp.einsum("kor,kri->koi", b, a, precision="highest")
                result[key] = value.astype(jnp.float32).at[layers].add(scale * product).astype(dtype)
            else:
                result[key] = value.astype(dtype)
        return result

    return add(base, adapter)
