"""Where each parameter lives on the mesh.

The mesh has the axes `data` (replicas), `fsdp` (rows, and parameters split over it), `tensor` (a layer's matrices split
by heads or columns) and `context` (reserved, size 1), all of type `jax.sharding.AxisType.Auto`. Activations are pinned
inside the forward pass where that mesh has been made current with `jax.set_mesh`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from libra_jax.models import axes, transformer
from libra_jax.models import config as model_config
from libra_jax.protocols import ConfigError


def partition_specs(config: model_config.TransformerConfig) -> Any:
    """A PartitionSpec for each parameter, in the parameters' nesting."""
    names = transformer.logical_axes(config)
    return jax.tree.map(axes.spec, names, is_leaf=lambda node: isinstance(node, tuple))


def shardings(config: model_config.TransformerConfig, mesh: Mesh) -> Any:
    """A NamedSharding for each parameter, in the parameters' nesting."""
    specs = partition_specs(config)
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda node: isinstance(node, PartitionSpec)
    )


def check_divisible(config: model_config.TransformerConfig, mesh_shape: Mapping[str, int]) -> None:
    """Checks that the model splits evenly over a mesh.

    Args:
      config: the model's shape.
      mesh_shape: mesh axis to size; an axis that is missing has size 1.

    Raises:
      ConfigError: a size does not divide; the message names both.
    """
    splits = {
        "tensor": {
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "intermediate_size": config.intermediate_size,
            "vocab_size": config.vocab_size,
        },
        "fsdp": {"hidden_size": config.hidden_size},
    }
    for axis, sizes in splits.items():
        ways = mesh_shape.get(axis, 1)
        for name, size in sizes.items():
            if size % ways:
                raise ConfigError(f"config.trainer.{axis}: {ways} does not divide the model's {name} = {size}.")
