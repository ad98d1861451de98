"""Hosts that Ray emulates on this machine: a node each, whose processes take each other's memory for another host's.

Actors are put on the node of their `ActorSpec.host`; those without one are where there is room.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

from libra_jax import protocols
from libra_jax.interop import memfd

PORTION = 0.001
"""Of its host, that an actor takes: so that any number fits."""


def resource(host: int) -> str:
    return f"host-{host}"


@contextlib.contextmanager
def hosts(count: int, cpus: int = 8) -> Iterator[str]:
    """The address of a cluster of so many nodes; host 0 is the head, where the driver has to be."""
    from ray import cluster_utils

    def node(host: int) -> dict[str, Any]:
        return {
            "num_cpus": cpus,
            "resources": {resource(host): 1.0},
            "env_vars": {memfd.HOST_VARIABLE: resource(host)},
        }

    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:  # sockets have short names
        nodes = cluster_utils.Cluster(initialize_head=True, head_node_args={**node(0), "temp_dir": folder})
        try:
            for host in range(1, count):
                nodes.add_node(**node(host))
            yield nodes.address
        finally:
            nodes.shutdown()


class _Placed:
    """Ray's class of actors, each on the node of its host."""

    def __init__(self, actors: Any, options: dict[str, Any] | None = None) -> None:
        self._actors, self._options = actors, options or {}

    def options(self, **options: Any) -> _Placed:
        return _Placed(self._actors, options)

    def remote(self, spec: protocols.ActorSpec, *arguments: Any) -> Any:
        options = dict(self._options)
        if spec.host is not None and "scheduling_strategy" not in options:  # else it has its place already
            options["resources"] = {resource(spec.host): PORTION}
        return self._actors.options(**options).remote(spec, *arguments)


def place() -> None:
    """From now on actors of this process's Ray clusters are put on their hosts."""
    from libra_jax.cluster import ray_cluster

    ray_cluster._Host = _Placed(ray_cluster._Host)
