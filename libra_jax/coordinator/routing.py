"""What routing did: moves between instances, and whether the first routed tool return named the right bucket.

Measured where requests are dispatched, so a simulated run and a real one report the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.scheduling import buckets


@dataclass
class Route:
    """Where a request has been.

    Attributes:
      served_by: instance that sent it tokens last; empty before the first.
      asked_at: tokens generated at its first tool return; None before.
      level: bucket of the first instance decided on after that return; None before.
    """

    served_by: str = ""
    asked_at: int | None = None
    level: int | None = None


@dataclass
class RoutingCounts:
    """Routing since it was last asked about.

    Attributes:
      moves: requests that began to be served by another instance than before.
      moved_tokens: context tokens of those requests, whose keys and values the new instance did not have.
      judged: finished attempts whose first tool return was followed by a decision.
      right: of these, those whose decision named the bucket that their true remaining length asked for.
    """

    moves: int = 0
    moved_tokens: int = 0
    judged: int = 0
    right: int = 0

    def metrics(self) -> dict[str, float]:
        """A training step's numbers; accuracy only where anything was judged."""
        values = {"routing/moves": float(self.moves), "routing/moved_tokens": float(self.moved_tokens)}
        if self.judged:
            values["routing/judged"] = float(self.judged)
            values["routing/one_shot_accuracy"] = self.right / self.judged
        return values


class Routing:
    """Watches decisions and streams.

    Args:
      config: the run's configuration (`scheduler.max_remaining_tokens`).
    """

    def __init__(self, config: configuration.RunConfig) -> None:
        self._levels = buckets.Levels(config.scheduler.max_remaining_tokens)
        self._degrees: dict[str, int] = {}
        self.counts = RoutingCounts()

    def instances(self, serving: Sequence[protocols.Instance]) -> None:
        """The instances that requests may be placed on now."""
        self._levels.learn(serving)
        self._degrees.update((instance.name, instance.tensor_parallel) for instance in serving)

    def returned(self, route: Route, generated: int) -> None:
        """A tool has returned; its decision follows."""
        if route.asked_at is None:
            route.asked_at = generated

    def decided(self, route: Route, instance: str) -> None:
        """The scheduler has placed the request."""
        if route.asked_at is not None and route.level is None:
            route.level = self._levels.of_degree(self._degrees[instance])

    def served(self, route: Route, instance: str, context_tokens: int) -> None:
        """A stream begins."""
        if route.served_by not in ("", instance):
            self.counts.moves += 1
            self.counts.moved_tokens += context_tokens
        route.served_by = instance

    def finished(self, route: Route, generated: int) -> None:
        """The attempt has come to its own end, with so many tokens generated."""
        if route.level is not None and route.asked_at is not None:
            self.counts.judged += 1
            self.counts.right += route.level == self._levels.of_length(generated - route.asked_at)

    def take_counts(self) -> RoutingCounts:
        """Counts since the last call."""
        counts, self.counts = self.counts, RoutingCounts()
        return counts
