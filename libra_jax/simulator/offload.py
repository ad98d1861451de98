"""Contexts that simulated instances keep in host memory, from where any instance of the fleet fetches them.

Every context that leaves an instance is written to the memory of its host, as LMCache and Mooncake do: beside the
steps, so that writing takes no time. When its request comes back, here or elsewhere, the instance fetches the context
if that takes less time than prefilling it. A fetch runs beside the steps, too. Fetches of one instance go one after
another, over the link of its own host memory or over the network. New weights make all kept contexts worthless.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import NamedTuple

from libra_jax.planning.costs import costs
from libra_jax.simulator import trajectory

Key = tuple[str, int]
"""Name of a segment, and the number of its life (`trajectory.Counted.key`)."""


class OffloadedContext(NamedTuple):
    """A context in host memory.

    Attributes:
      instance: name of the instance on whose host it lies.
      tokens: tokens of the context.
      policy_version: version of the weights that computed it.
    """

    instance: str
    tokens: int
    policy_version: int


@dataclass(eq=False)
class HostMemory:
    """The host memory of one instance; `contexts` holds tokens by segment, the least recently kept first."""

    degree: int
    model: costs.CostModel
    capacity: int
    tokens: int = 0
    contexts: collections.OrderedDict[Key, int] = field(default_factory=collections.OrderedDict)


class Store:
    """The kept contexts of a fleet."""

    def __init__(self) -> None:
        self._hosts: dict[str, HostMemory] = {}
        self._kept: dict[Key, OffloadedContext] = {}

    def join(self, instance: str, degree: int, model: costs.CostModel) -> None:
        """Gives an instance that begins its life an empty memory; its costs give the memory's size and speed."""
        self.drop(instance)
        self._hosts[instance] = HostMemory(degree, model, model.host_tokens(degree))

    def keep(self, instance: str, key: Key, tokens: int, policy_version: int) -> None:
        """Keeps a context, instead of an earlier one of its segment; drops the least recently kept for room."""
        before = self._kept.pop(key, None)
        if before is not None:
            self._forget(before.instance, key)
        host = self._hosts[instance]
        host.contexts[key] = tokens
        host.tokens += tokens
        self._kept[key] = OffloadedContext(instance, tokens, policy_version)
        while host.tokens > host.capacity:
            oldest, count = host.contexts.popitem(last=False)
            host.tokens -= count
            del self._kept[oldest]

    def find(self, key: Key, policy_version: int) -> OffloadedContext | None:
        """Returns the kept context of a segment; None if there is none that this version computed."""
        entry = self._kept.get(key)
        return entry if entry is not None and entry.policy_version == policy_version else None

    def longest(
        self, segment: trajectory.Counted, length: int, policy_version: int, cached_tokens: int
    ) -> tuple[str, int]:
        """Returns where the longest beginning of a segment's context is kept, and its tokens.

        Args:
          segment: the segment; the contexts of its parents serve as far as it shares them.
          length: tokens of its context.
          policy_version: version of the weights that must have computed it.
          cached_tokens: tokens that its instance holds; if nothing longer is kept, the returned name is empty.
        """
        source, tokens = "", cached_tokens
        while True:
            entry = self.find(segment.key, policy_version)
            if entry is not None and min(entry.tokens, length) > tokens:
                source, tokens = entry.instance, min(entry.tokens, length)
            if segment.parent is None:
                return source, tokens
            length, segment = min(length, segment.shared), segment.parent

    def drop(self, instance: str) -> None:
        """Forgets the contexts of an instance whose process has died."""
        host = self._hosts.pop(instance, None)
        for key in host.contexts if host is not None else ():
            del self._kept[key]

    def fetch_seconds(self, source: str, target: str, tokens: int) -> float:
        """Returns the seconds in which `target` fetches tokens of a context that lies with `source`."""
        there = self._hosts[target]
        if source == target:
            return there.model.host_seconds(there.degree, tokens)
        # Each device sends and receives its part, so the slower side sets the pace.
        return max(host.model.transfer_seconds(host.degree, tokens) for host in (there, self._hosts[source]))

    def _forget(self, instance: str, key: Key) -> None:
        host = self._hosts[instance]
        host.tokens -= host.contexts.pop(key)
