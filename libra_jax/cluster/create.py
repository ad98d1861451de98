"""Makes the cluster that the config requests. Imports Ray only if the config requests Ray."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from libra_jax.cluster import granted, hosts, inprocess
from libra_jax.config import ClusterConfig
from libra_jax.protocols import Cluster, ConfigError

RESOURCES = {"cuda": "GPU", "tpu": "TPU"}
"""Ray's names for accelerators, by `trainer.platform`. For other platforms, CPU cores stand for them."""


def create(
    config: ClusterConfig,
    *,
    start_seconds: float = 60.0,
    shutdown_seconds: float = 60.0,
    layout: hosts.HostLayout | None = None,
    platform: str = "cpu",
    on_hosts: Callable[[granted.Granted], None] | None = None,
) -> Cluster:
    """Makes the cluster. The first `spawn` starts or joins Ray itself.

    Args:
      config: the backend and, for Ray, the address of the cluster to join.
      start_seconds: seconds for reaching or starting Ray, and for Ray to place an actor.
      shutdown_seconds: seconds for an actor to stop.
      layout: layout of the run over hosts; None: Ray places each actor on any node with room.
      platform: platform of the hosts' accelerators, as in `trainer.platform`.
      on_hosts: called with the granted hosts, and again whenever a host is replaced.

    Raises:
      ConfigError: the config requests Ray, and it is not installed.
    """
    if config.backend == "inprocess":
        return inprocess.InProcessCluster(shutdown_seconds=shutdown_seconds)
    if importlib.util.find_spec("ray") is None:
        raise ConfigError('config.cluster.backend: "ray" needs the ray package; install it with `pip install ray`')
    from libra_jax.cluster import ray_cluster, ray_placement

    placement = None
    if layout is not None:
        resource = RESOURCES.get(platform, "CPU")
        placement = ray_placement.RayPlacement(layout, resource=resource, seconds=start_seconds, on_hosts=on_hosts)
    return ray_cluster.RayCluster(
        config.address, start_seconds=start_seconds, shutdown_seconds=shutdown_seconds, placement=placement
    )
