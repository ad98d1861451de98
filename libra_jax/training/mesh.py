"""The device mesh that a trainer runs on."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from libra_jax import config as config_lib
from libra_jax import protocols

AXES = ("data", "fsdp", "tensor", "context")
BATCH = PartitionSpec(("data", "fsdp"), None)
"""How a [rows, tokens] array lies on the mesh: rows over data and fsdp."""


def make(config: config_lib.TrainerConfig, devices: Sequence[jax.Device]) -> Mesh:
    """The mesh of `config` over the first of `devices`; its axes are `AXES`, propagated by the compiler (Auto).

    Raises:
      ConfigError: there are fewer devices than the mesh needs, or they are not of `config.platform`: without a GPU,
        JAX passes over the "cuda" of JAX_PLATFORMS=cuda,cpu and says nothing.
    """
    shape = (config.data, config.fsdp, config.tensor, config.context)
    wanted = {"cuda": "gpu"}.get(config.platform, config.platform)
    if devices and wanted not in ("auto", devices[0].platform):
        raise protocols.ConfigError(
            f"config.trainer.platform: JAX finds no {config.platform} device here, only {devices[0].platform}; install "
            f"JAX for {config.platform}, or use auto"
        )
    if len(devices) < config.devices:
        sizes = " x ".join(f"{name} {size}" for name, size in zip(AXES, shape, strict=True) if size > 1)
        raise protocols.ConfigError(
            f"config.trainer: the mesh ({sizes or 'one device'}) needs {config.devices} devices and there are "
            f"{len(devices)}; lower data, fsdp or tensor, or start with more devices"
        )
    grid = np.asarray(devices[: config.devices], dtype=object).reshape(shape)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of a [rows, tokens] array."""
    return NamedSharding(mesh, BATCH)


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding of what every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def sizes(mesh: Mesh) -> dict[str, int]:
    """Axis name to size."""
    return {name: int(size) for name, size in mesh.shape.items()}
