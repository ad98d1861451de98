"""Where each parameter lives on the mesh.

The mesh has the axes `data` (replicas), `fsdp` (rows, and parameters split over it), `tensor` (a layer's matrices split
by heads or columns) and `context` (reserved, size 1), all of type `jax.sharding.AxisType.Auto`. Activations are pinned
inside the forward pass where that mesh has been made current with `jax.set_mesh`.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from libra_jax.models import axes, transformer
from libra_jax.models import config as model_config


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
