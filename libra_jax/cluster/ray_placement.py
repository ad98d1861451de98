"""The run's hosts on the nodes of a Ray cluster: one placement group, a bundle for each host.

Each bundle is on a node of its own and holds the accelerators that the run takes of that host. Actors with a host start
in its bundle and ask Ray for nothing more, because the bundle has reserved it for all of them; which GPUs a worker has
is what the layout says, by the ids that Ray gave the bundle. Actors without a host go to nodes without a bundle, if
there are any.

Which nodes a larger cluster gives is Ray's choice; among those, hosts of one shape are numbered by name
(`granted.by_name`).

When a node dies, Ray moves its bundle to a node that has room; an actor that is made anew there follows it.
Run on CPU, over emulated hosts; no GPU, TPU or second machine has been tried (not run).
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import ray
import ray.exceptions
from ray.util import scheduling_strategies as strategies

from libra_jax.cluster import actors, granted, hosts, ray_probe
from libra_jax.protocols import ActorSpec, ConfigError, DeadlineMissed, LibraError, WorkerLost

SETTLE_SECONDS = 10.0
"""Nodes of a cluster that has just been started join one after the other: while the last one is younger than this, it
is too early to say that there are too few. A quarter of the deadline, if that is longer."""

_LOOK_SECONDS = 0.5
_LITTLE_MEMORY = 1 << 20  # Ray 2.60 puts an actor that asks for nothing at all anywhere, whatever its strategy
_NODE_LABEL = "ray.io/node-id"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_look = ray.remote(num_cpus=0)(ray_probe.make())

Told = Callable[[granted.Granted], None]


class Placement:
    """Where a run's actors go. Made inside the event loop that it serves.

    Args:
      layout: of the run over its hosts.
      resource: Ray's name for its accelerators: "GPU", "TPU"; "CPU" where cores stand for them.
      seconds: deadline for the cluster to have room for the run, for a host to answer, and for one that is gone to be
        replaced (`config.deadlines.cluster_start`).
      told: is given what was granted, and again whenever a host is replaced.
    """

    def __init__(self, layout: hosts.Layout, *, resource: str, seconds: float, told: Told | None = None) -> None:
        self._layout = layout
        self._resource = resource
        self._seconds = seconds
        self._told = told
        # Ray's calls that ask the head block, for long if that is gone: not on the event loop's own threads, which it
        # would wait for at its end.
        self._thread = actors.ActorThread("placement")
        self._group: Any = None
        self._placing: asyncio.Task[None] | None = None
        self._bundles: tuple[int, ...] = ()
        self._granted: granted.Granted | None = None
        self._doubted: set[int] = set()
        self._locks: collections.defaultdict[int, asyncio.Lock] = collections.defaultdict(asyncio.Lock)

    async def place(self, spec: ActorSpec) -> tuple[ActorSpec, dict[str, Any]]:
        """How to make an actor: its spec with the ids of its GPUs, and Ray's options. The first call places the run.

        Raises:
          ConfigError: the cluster has too few nodes or accelerators, or its hosts differ in what they have installed.
          DeadlineMissed: other programs hold them; or the actor's host is gone, and nothing has taken its place.
          LibraError: the run has no such host.
        """
        if self._placing is None:
            self._placing = asyncio.get_running_loop().create_task(self._place())
        await asyncio.shield(self._placing)
        if spec.host is None:
            return spec, await self._elsewhere(spec)
        if not 0 <= spec.host < len(self._bundles):
            raise LibraError(f"actor {spec.name!r} is for host {spec.host}, and the run has {len(self._bundles)} hosts")
        node = await self._node(spec.host)
        environment = dict(spec.environment)
        if node.accelerators and environment.get(_VISIBLE):
            environment[_VISIBLE] = granted.own(node, environment[_VISIBLE])
        options = {"num_cpus": 0.0, "num_gpus": 0.0, "scheduling_strategy": self._within(self._bundles[spec.host])}
        return dataclasses.replace(spec, environment=environment), options

    def doubt(self, host: int | None) -> None:
        """An actor there has ended unasked: before another is made, the host has to answer."""
        if host is not None:
            self._doubted.add(host)

    async def end(self) -> None:
        """Removes the group, and what still runs in it. Idempotent."""
        if self._placing is not None:
            self._placing.cancel()
            await asyncio.wait({self._placing})
        group, self._group = self._group, None
        if group is not None and ray.is_initialized():
            removing = self._thread.submit("remove", lambda: ray.util.remove_placement_group(group))
            await asyncio.wait({removing}, timeout=self._seconds)  # without us, it goes with our connection
        self._thread.close()

    def _shape(self, host: hosts.Host) -> dict[str, float]:
        return {"CPU": float(host.accelerators), self._resource: float(host.accelerators)}

    async def _place(self) -> None:
        shapes = [self._shape(host) for host in self._layout.hosts]
        not_meant = {"training": "!rollout", "rollout": "!training"}  # which a node without the label is not either
        self._group = ray.util.placement_group(
            shapes,
            strategy="STRICT_SPREAD",
            bundle_label_selector=[{granted.ROLE_LABEL: not_meant[host.role]} for host in self._layout.hosts],
        )
        await self._room()
        table = await self._thread.submit("table", lambda: ray.util.placement_group_table(self._group))
        alive = {node.node_id: node for node in await self._nodes()}
        placed = [table["bundles_to_node_id"][bundle] for bundle in range(len(shapes))]
        # One that has died meanwhile will not answer below.
        self._bundles = granted.by_name(shapes, [alive.get(node, granted.Node(node, "", "")) for node in placed])
        nodes = await asyncio.gather(*(self._ask(host.number) for host in self._layout.hosts))
        if found := granted.differences(await self._here(), nodes):
            raise ConfigError(f"config.cluster.address: {found}")
        self._tell(nodes)

    async def _room(self) -> None:
        """Returns when the group is placed."""
        loop = asyncio.get_running_loop()
        begun = changed = loop.time()
        count = len(self._layout.hosts)
        settle = min(max(SETTLE_SECONDS, self._seconds / 4), self._seconds)
        ready, known = asyncio.ensure_future(self._group.ready()), -1
        try:
            while not (await asyncio.wait({ready}, timeout=_LOOK_SECONDS))[0]:
                now, nodes = loop.time(), await self._nodes()
                if len(nodes) != known:
                    changed, known = now, len(nodes)
                reason = granted.why_not(self._layout, self._resource, nodes)
                if reason and now - changed >= settle:
                    raise ConfigError(reason)
                if now - begun >= self._seconds:
                    free = await self._thread.submit("free", ray.available_resources)
                    raise DeadlineMissed(
                        f"The Ray cluster's {len(nodes)} nodes had no room for the run's {count} hosts within "
                        f"{self._seconds:g} s: {granted.short(self._layout, self._resource, free)}; wait for them to "
                        "end, ask for less, or raise config.deadlines.cluster_start"
                    )
            ready.result()
        finally:
            ready.cancel()

    async def _node(self, host: int) -> granted.Node:
        """The host's node. One that is doubted has to answer first, and may be another then."""
        assert self._granted is not None
        async with self._locks[host]:
            before = self._granted.nodes[host]
            if host not in self._doubted:
                return before
            node = await self._ask(host)
            if node.node_id != before.node_id:
                if found := granted.differences(await self._here(), [node]):
                    raise WorkerLost(f"{node.name} has taken the place of the run's host {before.name}, but {found}")
                nodes = list(self._granted.nodes)
                nodes[host] = node
                self._tell(nodes)
            self._doubted.discard(host)
            return self._granted.nodes[host]

    async def _ask(self, host: int) -> granted.Node:
        """Lets the host say what it is. If it is gone, whichever node gets its bundle answers.

        Its accelerators are all free for that: actors have theirs through the bundle, not from Ray.
        """
        count = self._layout.hosts[host].accelerators
        options: dict[str, Any] = {"scheduling_strategy": self._within(self._bundles[host])}
        if self._resource == "GPU":
            options["num_gpus"] = count
        elif self._resource != "CPU":
            options["resources"] = {self._resource: count}
        asked = _look.options(**options).remote(_import_path(), self._resource)
        try:
            said = await asyncio.wait_for(asyncio.ensure_future(asked), self._seconds)
            node = next(node for node in await self._nodes() if node.node_id == said["node_id"])
        except ray.exceptions.RayTaskError as error:
            raise LibraError(f"host {host} of the run cannot tell what it is ({actors.summary(error)})") from error
        except (TimeoutError, StopIteration, ray.exceptions.RayError):
            ray.cancel(asked, force=True)
            raise DeadlineMissed(self._silence(host, count)) from None
        return dataclasses.replace(
            node, accelerators=tuple(sorted(said["accelerators"], key=granted.natural)), versions=said["versions"]
        )

    def _silence(self, host: int, count: int) -> str:
        name = f" ({self._granted.nodes[host].name})" if self._granted is not None else ""
        return (
            f"host {host} of the run{name} did not answer within {self._seconds:g} s, and no other node has taken its "
            f"place: that takes {count} {self._resource}{'s' * (count != 1)} that nothing uses; start one with `ray "
            "start`"
        )

    async def _elsewhere(self, spec: ActorSpec) -> dict[str, Any]:
        """Options of an actor without a host: on a node without a bundle, if there is one that has what it asks for.

        Elsewhere, and where cores stand for accelerators, it takes no core from Ray's count: there it shares those of
        the hosts, or would keep a spare host from taking the place of one that is gone.
        """
        assert self._granted is not None
        taken = {node.node_id for node in self._granted.nodes}
        wanted = {"CPU": spec.cpus, "GPU": spec.gpus}
        others = [
            node
            for node in await self._nodes()
            if node.node_id not in taken and all(node.resources.get(name, 0) >= wanted[name] for name in wanted)
        ]
        options = {} if others and self._resource != "CPU" else {"num_cpus": 0.0, "memory": _LITTLE_MEMORY}
        if not others:
            return {**options, "scheduling_strategy": "SPREAD"}
        apart = {_NODE_LABEL: strategies.NotIn(*sorted(taken))}
        return {**options, "scheduling_strategy": strategies.NodeLabelSchedulingStrategy(hard={}, soft=apart)}

    async def _here(self) -> Mapping[str, str]:
        """What is installed here, now: sources that have changed since the run began have changed for all its hosts."""
        said = await self._thread.submit("versions", lambda: ray_probe.make()((), self._resource))
        return dict(said["versions"])

    async def _nodes(self) -> list[granted.Node]:
        """The cluster's nodes that are alive."""
        found: list[granted.Node] = await self._thread.submit("nodes", _nodes)
        return found

    def _within(self, bundle: int) -> Any:
        return strategies.PlacementGroupSchedulingStrategy(self._group, bundle)

    def _tell(self, nodes: Any) -> None:
        self._granted = granted.Granted(self._layout, tuple(nodes), self._resource)
        if self._told is not None:
            self._told(self._granted)


def _import_path() -> list[str]:
    return [os.path.abspath(path) for path in sys.path]


def _nodes() -> list[granted.Node]:
    return [_node_of(node) for node in ray.nodes() if node["Alive"]]


def _node_of(node: Mapping[str, Any]) -> granted.Node:
    address = node["NodeManagerAddress"]
    role = node.get("Labels", {}).get(granted.ROLE_LABEL, "")
    return granted.Node(node["NodeID"], node["NodeName"] or address, address, node["Resources"], role=role)
