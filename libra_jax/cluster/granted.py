"""The cluster's answer to a run: the nodes that are its hosts and their packages, or the reason for a refusal.

Pure decisions and sentences about the findings of `cluster.ray_placement`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from libra_jax.cluster import hosts
from libra_jax.protocols import LibraError

NAMED = 8
"""Maximum number of names that a sentence lists; a run's `hosts.json` lists all."""

ROLE_LABEL = "libra-role"
"""Label of a node (`ray start --labels libra-role=rollout`). It limits the node to "training" or "rollout", if a
cluster has two kinds of machines."""

SOURCES = "libra_jax"
"""Entry of `GrantedNode.versions` that every host must have; not all hosts need the other packages."""


@dataclass(frozen=True)
class GrantedNode:
    """A node of the cluster.

    Attributes:
      node_id: Ray's id of the node.
      name: name that the node was started with; its address if it has no name.
      address: address by which other nodes reach it.
      resources: total resources of the node, taken or free, by Ray's names.
      accelerators: ids of the accelerators that the run has there, for the run's programs; empty on CPU.
      versions: versions of the packages that matter to a run, by package name.
      role: role of the node's label (`ROLE_LABEL`); empty: any role.
    """

    node_id: str
    name: str
    address: str
    resources: Mapping[str, float] = field(default_factory=dict)
    accelerators: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    role: str = ""


@dataclass(frozen=True)
class Granted:
    """The hosts of a run, and the node of each host.

    Attributes:
      nodes: one node per host, in the order of the hosts' numbers.
      resource: Ray's name for the accelerators: "GPU" or "TPU"; "CPU" if cores stand for them.
    """

    layout: hosts.HostLayout
    nodes: tuple[GrantedNode, ...]
    resource: str

    def sentence(self) -> str:
        """Describes the granted hosts on one line."""
        parts = []
        for role, verb in (("training", "to train"), ("rollout", "to roll out")):
            mine = [host for host in self.layout.hosts if host.role == role]
            if mine:
                names = listed(self.nodes[host.number].name for host in mine)
                sizes = _sizes([host.accelerators for host in mine], self.resource)
                parts.append(f"{names} {verb} ({sizes})")
        versions = ", ".join(f"{package} {version}" for package, version in sorted(self.nodes[0].versions.items()))
        return f"Ray placed the run on {len(self.nodes)} hosts: {'; '.join(parts)}. {versions}."

    def record(self) -> list[dict[str, Any]]:
        """Returns all granted hosts as JSON-able values."""
        return [
            {
                "host": host.number,
                "role": host.role,
                "processes": list(host.processes),
                "instances": list(host.instances),
                "node": node.name,
                "address": node.address,
                self.resource: host.accelerators,
                "accelerators": list(node.accelerators),
                "versions": dict(node.versions),
            }
            for host, node in zip(self.layout.hosts, self.nodes, strict=True)
        ]


def listed(names: Iterable[str]) -> str:
    """Joins the first names, and counts the rest."""
    items = list(names)
    more = len(items) - NAMED
    return ", ".join(items) if more <= 0 else f"{', '.join(items[:NAMED])} and {more} more"


def natural(name: str) -> list[tuple[bool, int, str]]:
    """Returns a sort key that sorts names as people do: node-2 before node-10."""
    # The flag comes first, because a number and a word cannot be compared.
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", name)]


def by_name(shapes: Sequence[Mapping[str, float]], nodes: Sequence[GrantedNode]) -> tuple[int, ...]:
    """Assigns a bundle to each host: among bundles of one shape, lower host numbers get nodes that sort first by name.

    If nodes have role labels, this holds among the nodes of one label. Neighbours in name are neighbours in most
    machine rooms, so the trainer's mesh is contiguous over their links.

    Args:
      shapes: resources of each host, and of the bundle requested for it: resource to quantity.
      nodes: node that each bundle was placed on.
    """
    alike: dict[tuple[frozenset[tuple[str, float]], str], list[int]] = {}
    for number, (shape, node) in enumerate(zip(shapes, nodes, strict=True)):
        alike.setdefault((frozenset(shape.items()), node.role), []).append(number)
    bundles: dict[int, int] = {}
    for numbers in alike.values():
        bundles |= zip(numbers, sorted(numbers, key=lambda bundle: natural(nodes[bundle].name)), strict=True)
    return tuple(bundles[number] for number in range(len(shapes)))


def why_not(layout: hosts.HostLayout, resource: str, nodes: Sequence[GrantedNode]) -> str:
    """Explains why the nodes can never hold the run, even if idle; empty if they can.

    Args:
      layout: layout of the run over its hosts. Each host takes one CPU per accelerator.
      resource: Ray's name for the accelerators.
      nodes: nodes of the cluster.
    """
    # The whole run first: if nodes lack in all, the reason names no role.
    for role, purpose in (("", ""), ("training", " to train"), ("rollout", " to roll out")):
        needs = [host.accelerators for host in layout.hosts if role in ("", host.role)]
        able = [node for node in nodes if not role or node.role in ("", role)]
        if reason := refusal(needs, resource, able, purpose):
            return reason
        # Largest need against largest node, sorted: if this pairing fails, every other assignment fails too.
        both = [min(node.resources.get(resource, 0), node.resources.get("CPU", 0)) for node in able]
        if any(need > have for need, have in zip(sorted(needs)[::-1], sorted(both)[::-1], strict=False)):
            counts = listed(f"{node.name} has {node.resources.get('CPU', 0):g}" for node in able)
            return (
                f"config.cluster.accelerators_per_host: the run takes as many CPUs of its {len(needs)} hosts{purpose} "
                f"as {resource}s ({_sizes(needs, 'CPU')}), and of the Ray cluster's {len(able)}, {counts}; start Ray "
                "with more there (`ray start --num-cpus`)"
            )
    return ""


def short(layout: hosts.HostLayout, resource: str, free: Mapping[str, float]) -> str:
    """Compares the run's total with what other programs leave free: of accelerators, or of CPUs if only they lack."""
    total = sum(host.accelerators for host in layout.hosts)
    # Bundles take one CPU for each accelerator, so CPUs may be what lacks.
    kind = "CPU" if free.get(resource, 0) >= total > free.get("CPU", 0) else resource
    return f"it takes {total} {kind}s, and other programs leave {free.get(kind, 0):g}"


def refusal(needs: Sequence[int], resource: str, nodes: Sequence[GrantedNode], purpose: str = "") -> str:
    """Explains why the nodes cannot hold hosts of these sizes; empty if they can.

    Args:
      needs: number of accelerators of each host.
      resource: Ray's name for the accelerators.
      nodes: nodes of the cluster; with a purpose, only nodes that allow it.
      purpose: purpose of the hosts, as " to train"; empty: the whole run.
    """
    have = [(node.name, int(node.resources.get(resource, 0))) for node in nodes]
    demand = f"the run takes {len(needs)} hosts{purpose} ({_sizes(needs, resource)})"
    where = "config.cluster.accelerators_per_host"
    mend = "start more with `ray start`, or ask for less (config.trainer, config.rollout.tensor_parallel)"
    if len(have) < len(needs):
        there = f"{len(have)} ({listed(name for name, _ in have)})" if have else "none"
        meant = f" that may do that ({ROLE_LABEL})" if purpose else ""
        return f"{where}: {demand}, and the Ray cluster has {there}{meant}; {mend}"
    # Largest need against largest node: if this pairing fails, every other assignment fails too.
    pairs = zip(sorted(needs, reverse=True), sorted((count for _, count in have), reverse=True), strict=False)
    if all(need <= count for need, count in pairs):
        return ""
    counts = listed(f"{name} has {count}" for name, count in have)
    return f"{where}: {demand}, {sum(needs)} in all, and of the Ray cluster's {len(have)}, {counts}; {mend}"


def differences(here: Mapping[str, str], nodes: Sequence[GrantedNode]) -> str:
    """Lists in one sentence the packages in which the hosts differ from this one; empty if none differs.

    Except for `SOURCES`, a missing package is no difference: its user reports it, because not every host needs every
    package. Builds of one version (0.32.0+cpu) count as equal.
    """
    hosts_by_version: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        for package, mine in here.items():
            theirs = node.versions.get(package, "missing" if package == SOURCES else mine)
            if theirs.partition("+")[0] != mine.partition("+")[0]:
                hosts_by_version.setdefault((package, theirs), []).append(node.name)
    clauses = [
        f"{package} is {theirs} on {listed(names)} ({here[package]} here)"
        for (package, theirs), names in sorted(hosts_by_version.items())
    ]
    if not clauses:
        return ""
    return (
        f"the run's hosts differ from the one it was started on: {'; '.join(clauses)}; install the same on all of them"
    )


def accelerator_ids(node: GrantedNode, local: str) -> str:
    """Translates a layout's accelerator numbers ("0,1") into the host's ids for its programs.

    Raises:
      LibraError: the host has fewer accelerators.
    """
    numbers = [int(number) for number in local.split(",")]
    if max(numbers) >= len(node.accelerators):
        raise LibraError(
            f"host {node.name} has {len(node.accelerators)} accelerators for the run, and one of its workers is to "
            f"have number {max(numbers)}; a plan may not put more on a host than it had at the run's start"
        )
    return ",".join(node.accelerators[number] for number in numbers)


def _sizes(counts: Sequence[int], resource: str) -> str:
    """Returns `8 GPUs each`, or the count of each host if they differ."""
    if len(set(counts)) == 1:
        return f"{counts[0]} {resource}{'s' * (counts[0] != 1)} each"
    return f"{listed(map(str, counts))} {resource}s"
