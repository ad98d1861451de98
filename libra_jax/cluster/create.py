"""The cluster that the config asks for. Reaches for Ray only where the config does."""

from __future__ import annotations

import importlib.util

from libra_jax.cluster import inprocess
from libra_jax.config import ClusterConfig
from libra_jax.protocols import Cluster, ConfigError


def create(config: ClusterConfig, *, start_seconds: float = 60.0, shutdown_seconds: float = 60.0) -> Cluster:
    """Makes the cluster; Ray itself is started or joined at the first `spawn`.

    Args:
      config: the backend and, for Ray, the address of the cluster to join.
      start_seconds: deadline for reaching or starting Ray, and for it to place an actor.
      shutdown_seconds: deadline for an actor to stop.

    Raises:
      ConfigError: Ray is asked for and not installed.
    """
    if config.backend == "inprocess":
        return inprocess.InProcessCluster(shutdown_seconds=shutdown_seconds)
    if importlib.util.find_spec("ray") is None:
        raise ConfigError('config.cluster.backend: "ray" needs the ray package; install it with `pip install ray`')
    from libra_jax.cluster import ray_cluster

    return ray_cluster.RayCluster(config.address, start_seconds=start_seconds, shutdown_seconds=shutdown_seconds)
