"""The device mesh of a trainer."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from libra_jax import config as config_lib
from libra_jax import protocols

AXES = ("data", "fsdp", "tensor", "context")
BATCH = PartitionSpec(("data", "fsdp"), None)
"""Sharding of a [rows, tokens] array: rows over data and fsdp."""


def make(config: config_lib.TrainerConfig, devices: Sequence[jax.Device]) -> Mesh:
    """Builds the mesh of `config` over the first of `devices`. Its axes are `AXES`, of type Auto (the compiler shards).

    Raises:
      ConfigError: the mesh needs more devices, or the devices are not of `config.platform`. Without a GPU, JAX silently
        ignores the "cuda" in JAX_PLATFORMS=cuda,cpu.
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
    """Returns the sharding of a [rows, tokens] array."""
    return NamedSharding(mesh, BATCH)


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def sizes(mesh: Mesh) -> dict[str, int]:
    """Returns the size of each mesh axis by name."""
    return {name: int(size) for name, size in mesh.shape.items()}
