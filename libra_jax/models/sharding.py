"""The sharding of each parameter on the mesh.

The mesh has four axes: `data` (copies), `fsdp` (rows, and parameters split over it), `tensor` (matrices of a layer,
split by heads or columns) and `context` (reserved, size 1). All are of type `jax.sharding.AxisType.Auto`. If
`jax.set_mesh` has made that mesh current, the forward pass also pins its activations.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from libra_jax.models import axes, transformer
from libra_jax.models import config as model_config


def partition_specs(config: model_config.TransformerConfig) -> Any:
    """Returns a PartitionSpec for each parameter, in the parameters' nesting."""
    names = transformer.logical_axes(config)
    return jax.tree.map(axes.spec, names, is_leaf=lambda node: isinstance(node, tuple))


def shardings(config: model_config.TransformerConfig, mesh: Mesh) -> Any:
    """Returns a NamedSharding for each parameter, in the parameters' nesting."""
    specs = partition_specs(config)
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda node: isinstance(node, PartitionSpec)
    )
