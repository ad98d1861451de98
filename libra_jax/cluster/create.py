"""The cluster that the config asks for. Reaches for Ray only where the config does."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from libra_jax.cluster import granted, hosts, inprocess
from libra_jax.config import ClusterConfig
from libra_jax.protocols import Cluster, ConfigError

RESOURCES = {"cuda": "GPU", "tpu": "TPU"}
"""Ray's names for accelerators, by `trainer.platform`. Elsewhere CPU cores stand for them."""


def create(
    config: ClusterConfig,
    *,
    start_seconds: float = 60.0,
    shutdown_seconds: float = 60.0,
    layout: hosts.Layout | None = None,
    platform: str = "cpu",
    told: Callable[[granted.Granted], None] | None = None,
) -> Cluster:
    """Makes the cluster; Ray itself is started or joined at the first `spawn`.

    Args:
      config: the backend and, for Ray, the address of the cluster to join.
      start_seconds: deadline for reaching or starting Ray, and for it to place an actor.
      shutdown_seconds: deadline for an actor to stop.
      layout: of the run over hosts; None: Ray places each actor wherever there is room.
      platform: what the hosts' accelerators are, as `trainer.platform` has it.
      told: is given what the cluster granted of the layout, and again whenever a host is replaced.

    Raises:
      ConfigError: Ray is asked for and not installed.
    """
    if config.backend == "inprocess":
        return inprocess.InProcessCluster(shutdown_seconds=shutdown_seconds)
    if importlib.util.find_spec("ray") is None:
        raise ConfigError('config.cluster.backend: "ray" needs the ray package; install it with `pip install ray`')
    from libra_jax.cluster import ray_cluster, ray_placement

    placement = None
    if layout is not None:
        resource = RESOURCES.get(platform, "CPU")
        placement = ray_placement.Placement(layout, resource=resource, seconds=start_seconds, told=told)
    return ray_cluster.RayCluster(
        config.address, start_seconds=start_seconds, shutdown_seconds=shutdown_seconds, placement=placement
    )
