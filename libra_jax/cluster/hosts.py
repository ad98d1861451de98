"""The hosts of a run: which of its accelerators are on which host (Slurm, Kubernetes, a TPU pod, or this machine).

The accelerators of a run have running numbers: first the trainer's mesh, then each rollout instance in the order of
`rollout.tensor_parallel`. Hosts have numbers too. Hosts that train come first, next to each other, so that the mesh is
contiguous over their links; hosts that roll out follow. No host does both, so the two kinds may be different machines.
This module makes pure decisions over the config; `cluster.ray_placement` finds the real nodes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from libra_jax import config as config_lib
from libra_jax.protocols import ConfigError, LibraError

Role = Literal["training", "rollout"]


@dataclass(frozen=True)
class WorkerPlace:
    """The place of a worker.

    Attributes:
      host: number of its host.
      devices: accelerators of the worker, as that host numbers them.
    """

    host: int
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Host:
    """One host of a run.

    Attributes:
      number: number among the run's hosts.
      role: role of its accelerators.
      accelerators: number of accelerators that the run uses on this host.
      processes: trainer processes on this host.
      instances: rollout instances on this host.
    """

    number: int
    role: Role
    accelerators: int
    processes: tuple[int, ...] = ()
    instances: tuple[int, ...] = ()


@dataclass(frozen=True)
class HostLayout:
    """The layout of a run over its hosts.

    Attributes:
      hosts: hosts in the order of their numbers.
      processes: place of each trainer process.
      instances: place of each rollout instance.
    """

    hosts: tuple[Host, ...]
    processes: tuple[WorkerPlace, ...]
    instances: tuple[WorkerPlace, ...]

    def of_role(self, role: Role) -> tuple[Host, ...]:
        """Returns the hosts that train, or the hosts that roll out."""
        return tuple(host for host in self.hosts if host.role == role)

    def place(self, devices: Sequence[int]) -> WorkerPlace:
        """Returns the place of a worker on these accelerators of the run.

        Raises:
          LibraError: the accelerators are on several hosts.
        """
        locations = [self._numbered[device] for device in devices]
        if len({host for host, _ in locations}) != 1:
            named = ", ".join(map(str, devices))
            raise LibraError(f"accelerators {named} of the run are not on one host, as a worker's have to be")
        return WorkerPlace(locations[0][0], tuple(local for _, local in locations))

    def on_one_host(self, free: Sequence[int], degree: int) -> list[int]:
        """Returns those of the free accelerators on the last host that has `degree` of them; empty if no host has."""
        by_host: dict[int, list[int]] = {}
        for device in free:
            by_host.setdefault(self._numbered[device][0], []).append(device)
        # The last host first: hosts that roll out follow those that train.
        return next((devices for _, devices in sorted(by_host.items(), reverse=True) if len(devices) >= degree), [])

    @functools.cached_property
    def _numbered(self) -> tuple[tuple[int, int], ...]:
        """Host, and number on that host, of each accelerator of the run."""
        places = (*self.processes, *self.instances)
        return tuple((place.host, local) for place in places for local in place.devices)


def layout(config: config_lib.RunConfig) -> HostLayout | None:
    """Lays a run's workers out over hosts of `cluster.accelerators_per_host` each; None if the run has one host.

    A trainer process or an instance never spans hosts, so tensor-parallel groups never cross a link between hosts.
    Instances are packed, the largest first, into the first host with room.

    Raises:
      ConfigError: a process, a tensor group of the mesh or an instance is larger than a host.
    """
    per_host = config.cluster.accelerators_per_host
    if not per_host:
        return None
    processes = _training(config.trainer, per_host)
    # No host does both: hosts that roll out follow those that train.
    training = processes[-1].host + 1
    instances = _rollout(config.rollout.tensor_parallel, per_host, training)
    count = max((place.host for place in instances), default=training - 1) + 1
    hosts = [
        Host(
            number,
            "training" if number < training else "rollout",
            sum(len(place.devices) for place in (*processes, *instances) if place.host == number),
            tuple(one for one, place in enumerate(processes) if place.host == number),
            tuple(one for one, place in enumerate(instances) if place.host == number),
        )
        for number in range(count)
    ]
    return HostLayout(tuple(hosts), processes, instances)


def _training(trainer: config_lib.TrainerConfig, per_host: int) -> tuple[WorkerPlace, ...]:
    devices = trainer.devices // trainer.processes
    if devices > per_host:
        raise ConfigError(
            f"config.trainer.processes: each of {trainer.processes} would have {devices} devices of the mesh, and a "
            f"host has {per_host} (config.cluster.accelerators_per_host); "
            f"{math.ceil(trainer.devices / per_host)} or more are needed"
        )
    together = min(per_host // devices, trainer.processes)
    inside = trainer.tensor * trainer.context
    if trainer.processes > together and together * devices % inside:
        raise ConfigError(
            f"config.trainer.{'tensor' if trainer.tensor > 1 else 'context'}: the {inside} devices that split a layer "
            f"or a row (tensor x context) must be on one host, and a host has {together * devices} of the mesh "
            "(config.cluster.accelerators_per_host, config.trainer.processes)"
        )
    # Neighbours in the mesh share a host, so that the mesh is contiguous over the hosts' links.
    firsts = [process % together * devices for process in range(trainer.processes)]
    return tuple(
        WorkerPlace(process // together, tuple(range(first, first + devices))) for process, first in enumerate(firsts)
    )


def _rollout(degrees: Sequence[int], per_host: int, first: int) -> tuple[WorkerPlace, ...]:
    # Accelerators in use by host. The largest instance first, because it is the one that may find no room later.
    used_by_host: list[int] = []
    places: dict[int, WorkerPlace] = {}
    for number in sorted(range(len(degrees)), key=lambda number: -degrees[number]):
        degree = degrees[number]
        if degree > per_host:
            raise ConfigError(
                f"config.rollout.tensor_parallel: instance {number} has {degree} accelerators, which must be on one "
                f"host, and a host has {per_host} (config.cluster.accelerators_per_host)"
            )
        host = next((host for host, used in enumerate(used_by_host) if used + degree <= per_host), len(used_by_host))
        # If no host has room, the instance opens a new host.
        if host == len(used_by_host):
            used_by_host.append(0)
        places[number] = WorkerPlace(first + host, tuple(range(used_by_host[host], used_by_host[host] + degree)))
        used_by_host[host] += degree
    return tuple(places[number] for number in range(len(degrees)))
