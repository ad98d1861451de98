"""A run with what follows from its config alone: the policy's shape, the hosts, and the partition of the devices."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.cluster import hosts
from libra_jax.models import config as model_config
from libra_jax.models.adapters import adapters
from libra_jax.utils import checksums


@dataclass(frozen=True)
class DevicePartition:
    """The devices that train and the devices that roll out. On CPU, all workers share the machine's cores.

    Attributes:
      trainer: device ordinals of the trainer's mesh.
      instances: device ordinals of each rollout instance, in the order of `rollout.tensor_parallel`.
    """

    trainer: tuple[int, ...]
    instances: tuple[tuple[int, ...], ...]

    @property
    def total(self) -> int:
        return len(self.trainer) + sum(len(devices) for devices in self.instances)


@dataclass(frozen=True)
class ResolvedRun:
    """A run's config, and what every room would otherwise compute of it again.

    Attributes:
      config: configuration of the run.
      shape: the policy's shape with its adapter; None if this machine cannot know it.
    """

    config: config_lib.RunConfig
    shape: model_config.TransformerConfig | None

    @property
    def policy(self) -> model_config.TransformerConfig:
        """The policy's shape. Raises DataError if this machine cannot know it."""
        if self.shape is None:
            raise protocols.DataError(f"config.model.path: {self.config.model.path}: no such model directory")
        return self.shape

    @functools.cached_property
    def layout(self) -> hosts.HostLayout | None:
        """The layout over hosts; None: the run has one host."""
        return hosts.layout(self.config)

    @functools.cached_property
    def partition(self) -> DevicePartition:
        """The devices of the trainer, which come first, and of the instances, in order."""
        edge = self.config.trainer.devices
        instances = []
        for degree in self.config.rollout.tensor_parallel:
            instances.append(tuple(range(edge, edge + degree)))
            edge += degree
        return DevicePartition(tuple(range(self.config.trainer.devices)), tuple(instances))

    def place(self, devices: Sequence[int]) -> tuple[int | None, tuple[int, ...]]:
        """Returns the host of a worker on these devices, and that host's numbers for them. None: there is one host.

        Raises:
          LibraError: the devices are on several hosts.
        """
        if self.layout is None:
            return None, tuple(devices)
        location = self.layout.place(devices)
        return location.host, location.devices


def resolve(config: config_lib.RunConfig, *, need_weights: bool) -> ResolvedRun:
    """Resolves a config. The policy's shape is that of `model.path` if it is set and exists, else of `model.preset`.

    Args:
      need_weights: `model.path` has to exist here, if it is set. Without, a path that is elsewhere leaves the shape
        unknown, unless the config chose a preset.

    Raises:
      ConfigError: the model cannot have the adapter of `model.lora`.
      DataError: the directory cannot be used, or is damaged.
    """
    path, preset = config.model.path, config.model.preset
    here = path and (need_weights or Path(path).exists())
    if path and not here and preset == config_lib.ModelConfig().preset:
        return ResolvedRun(config, None)
    if here:
        checksums.check_sealed(Path(path), weights=False)
    shape = model_config.read_directory(path) if here else model_config.load_preset(preset)
    return ResolvedRun(config, adapters.adapted(shape, config.model.lora))
