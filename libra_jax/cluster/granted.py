"""What a cluster gave a run: the nodes that are its hosts and what they have installed, or why it gave none.

Pure decisions and sentences over what `cluster.ray_placement` has found out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from libra_jax.cluster import hosts
from libra_jax.protocols import LibraError

NAMED = 8
"""Of a long list, so many are named in a sentence; a run's `hosts.json` has them all."""

ROLE_LABEL = "libra-role"
"""Of a node (`ray start --labels libra-role=rollout`): "training" or "rollout" is all that it may do, where a cluster
has machines of two kinds."""

SOURCES = "libra_jax"
"""Of `Node.versions`, what must be there on every host; other packages only some of them need."""


@dataclass(frozen=True)
class Node:
    """A node of the cluster.

    Attributes:
      node_id: Ray's.
      name: that it was started with; its address if it was given none.
      address: under which the others reach it.
      resources: that it has in all, taken or not, by Ray's names for them.
      accelerators: ids of those that the run has of it, as its own programs are to be told of them; empty on CPU.
      versions: of what matters to a run and is installed there, by the package's name.
      role: that it is labelled to have (`ROLE_LABEL`); empty: any.
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
    """A run's hosts, and the node that each is.

    Attributes:
      layout: how the run lies on them.
      nodes: one each, in the order of the hosts' numbers.
      resource: Ray's name for what its accelerators are: "GPU", "TPU"; "CPU" where cores stand for them.
    """

    layout: hosts.Layout
    nodes: tuple[Node, ...]
    resource: str

    def sentence(self) -> str:
        """What was granted, on one line."""
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
        """The same for a program, all of it; JSON-able."""
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
    """The first of them, and how many more there are."""
    known = list(names)
    more = len(known) - NAMED
    return ", ".join(known) if more <= 0 else f"{', '.join(known[:NAMED])} and {more} more"


def label(role: hosts.Role) -> str:
    """Of a node that is for one role, as `ray start --labels` takes it."""
    return f"{ROLE_LABEL}={role}"


def natural(name: str) -> list[tuple[bool, int, str]]:
    """Sorts names as people do: node-2 before node-10."""
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", name)]


def by_name(shapes: Sequence[Mapping[str, float]], nodes: Sequence[Node]) -> tuple[int, ...]:
    """Which bundle each host gets: of bundles of one shape, the hosts of lower numbers get the nodes named first.

    Where nodes are labelled with roles, so among those of one label.

    Neighbours in name are neighbours in most machine rooms, so that the trainer's mesh is contiguous over their links.

    Args:
      shapes: of each host, and of the bundle that was asked for it: resource to quantity.
      nodes: that each bundle was placed on.
    """
    alike: dict[tuple[frozenset[tuple[str, float]], str], list[int]] = {}
    for number, (shape, node) in enumerate(zip(shapes, nodes, strict=True)):
        alike.setdefault((frozenset(shape.items()), node.role), []).append(number)
    found: dict[int, int] = {}
    for numbers in alike.values():
        found |= zip(numbers, sorted(numbers, key=lambda bundle: natural(nodes[bundle].name)), strict=True)
    return tuple(found[number] for number in range(len(shapes)))


def why_not(layout: hosts.Layout, resource: str, nodes: Sequence[Node]) -> str:
    """Why the nodes can never hold the run, whatever else they are busy with; empty if they can.

    Args:
      layout: of the run over its hosts, each of which takes as many CPUs as accelerators.
      resource: Ray's name for its accelerators.
      nodes: that there are.
    """
    for role, purpose in (("", ""), ("training", " to train"), ("rollout", " to roll out")):
        needs = [host.accelerators for host in layout.hosts if role in ("", host.role)]
        able = [node for node in nodes if not role or node.role in ("", role)]
        if reason := refusal(needs, resource, able, purpose) or _too_few_cpus(needs, resource, able, purpose):
            return reason
    return ""


def short(layout: hosts.Layout, resource: str, free: Mapping[str, float]) -> str:
    """What the run takes in all, and of which other programs leave too little; the accelerators where it is neither."""
    taken = sum(host.accelerators for host in layout.hosts)
    kind = "CPU" if free.get(resource, 0) >= taken > free.get("CPU", 0) else resource
    return f"it takes {taken} {kind}s, and other programs leave {free.get(kind, 0):g}"


def _too_few_cpus(needs: Sequence[int], resource: str, nodes: Sequence[Node], purpose: str) -> str:
    """Why hosts that have the accelerators are short of CPUs; empty if they are not."""
    both = [min(node.resources.get(resource, 0), node.resources.get("CPU", 0)) for node in nodes]
    if all(need <= have for need, have in zip(sorted(needs)[::-1], sorted(both)[::-1], strict=False)):
        return ""
    counts = listed(f"{node.name} has {node.resources.get('CPU', 0):g}" for node in nodes)
    return (
        f"config.cluster.accelerators_per_host: the run takes as many CPUs of its {len(needs)} hosts{purpose} as "
        f"{resource}s ({_sizes(needs, 'CPU')}), and of the Ray cluster's {len(nodes)}, {counts}; start Ray with more "
        "there (`ray start --num-cpus`)"
    )


def refusal(needs: Sequence[int], resource: str, nodes: Sequence[Node], purpose: str = "") -> str:
    """Why the nodes cannot hold hosts that need so many accelerators each; empty if they can.

    Args:
      needs: accelerators of each host.
      resource: Ray's name for them.
      nodes: that there are; with a purpose, those that are for it.
      purpose: of the hosts, as " to train"; empty: all of the run.
    """
    have = [(node.name, int(node.resources.get(resource, 0))) for node in nodes]
    asked = f"the run takes {len(needs)} hosts{purpose} ({_sizes(needs, resource)})"
    where = "config.cluster.accelerators_per_host"
    mend = "start more with `ray start`, or ask for less (config.trainer, config.rollout.tensor_parallel)"
    if len(have) < len(needs):
        there = f"{len(have)} ({listed(name for name, _ in have)})" if have else "none"
        meant = f" that may do that ({ROLE_LABEL})" if purpose else ""
        return f"{where}: {asked}, and the Ray cluster has {there}{meant}; {mend}"
    pairs = zip(sorted(needs, reverse=True), sorted((count for _, count in have), reverse=True), strict=False)
    if all(need <= count for need, count in pairs):
        return ""
    counts = listed(f"{name} has {count}" for name, count in have)
    return f"{where}: {asked}, {sum(needs)} in all, and of the Ray cluster's {len(have)}, {counts}; {mend}"


def differences(here: Mapping[str, str], nodes: Sequence[Node]) -> str:
    """What the hosts have installed otherwise than this one, in one sentence; empty if nothing.

    What a host has not, or this one has not, is for whatever needs it to say: a host that trains serves nothing. Builds
    of one version (0.32.0+cpu) are alike.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        for package, mine in here.items():
            theirs = node.versions.get(package, "missing" if package == SOURCES else mine)
            if theirs.partition("+")[0] != mine.partition("+")[0]:
                found.setdefault((package, theirs), []).append(node.name)
    said = [
        f"{package} is {theirs} on {listed(names)} ({here[package]} here)"
        for (package, theirs), names in sorted(found.items())
    ]
    if not said:
        return ""
    return f"the run's hosts differ from the one it was started on: {'; '.join(said)}; install the same on all of them"


def own(node: Node, local: str) -> str:
    """Ids of a host's accelerators as its programs are to be told, for those that a layout numbers ("0,1").

    Raises:
      LibraError: the host has fewer.
    """
    numbers = [int(number) for number in local.split(",")]
    if max(numbers) >= len(node.accelerators):
        raise LibraError(
            f"host {node.name} has {len(node.accelerators)} accelerators for the run, and one of its workers is to "
            f"have number {max(numbers)}; a plan may not put more on a host than it had at the run's start"
        )
    return ",".join(node.accelerators[number] for number in numbers)


def _sizes(counts: Sequence[int], resource: str) -> str:
    """`8 GPUs each`, or how many each has."""
    if len(set(counts)) == 1:
        return f"{counts[0]} {resource}{'s' * (counts[0] != 1)} each"
    return f"{listed(map(str, counts))} {resource}s"
