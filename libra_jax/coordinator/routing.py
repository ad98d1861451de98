"""What routing did: moves between instances, what they cost, and whether the first decision named the right bucket.

Measured where requests are dispatched, so a simulated run and a real one report the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.scheduling import buckets


@dataclass
class Route:
    """Where a request has been.

    Attributes:
      served_by: instance that was asked for its tokens last; empty before the first.
      came_from: the one before that; empty before the second.
      asked_at: tokens generated at its first tool return; None before.
      level: bucket of the first instance decided on after that return; None before.
      moves: times that another instance went on with it.
      moving: the instance asked last is another than the one that served it before; None if it is the first.
    """

    served_by: str = ""
    came_from: str = ""
    asked_at: int | None = None
    level: int | None = None
    moves: int = 0
    moving: bool | None = None


@dataclass
class Waits:
    """Seconds from asking an instance for tokens to its first ones, in sum and in number."""

    seconds: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        """One more wait."""
        self.seconds += seconds
        self.count += 1

    @property
    def mean(self) -> float:
        """Seconds a wait; only where there were any."""
        return self.seconds / self.count


@dataclass
class RoutingCounts:
    """Routing since it was last asked about.

    Attributes:
      moves: requests that began to be served by another instance than before.
      moved_tokens: context tokens of those requests, whose keys and values the new instance did not have.
      transferred: moves whose keys and values the instance before kept for the new one, instead of a second prefill.
      judged: finished attempts whose first tool return was followed by a decision.
      right: of these, those whose decision named the bucket that their true remaining length asked for.
      moved: waits for first tokens, by instance, of requests that it had not served before: it prefills or fetches
        their context first.
      stayed: those of requests that it served last, whose context its prefix cache may hold.
    """

    moves: int = 0
    moved_tokens: int = 0
    transferred: int = 0
    judged: int = 0
    right: int = 0
    moved: dict[str, Waits] = field(default_factory=dict)
    stayed: dict[str, Waits] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """A training step's numbers; those that are means only where there was anything.

        `routing/move_wait_seconds` is the mean wait for first tokens after a move. `routing/move_seconds` is what of it
        the move cost: less the mean wait of requests that stayed, on the same instance in the same step, so that loads
        cancel out. It is measured, so it may come out below 0 where queues differ by more than a prefill takes.
        """
        values = {"routing/moves": float(self.moves), "routing/moved_tokens": float(self.moved_tokens)}
        if self.transferred:
            values["routing/transferred"] = float(self.transferred)
        if self.judged:
            values["routing/judged"] = float(self.judged)
            values["routing/one_shot_accuracy"] = self.right / self.judged
        if self.moved:
            waited = sum(waits.seconds for waits in self.moved.values())
            values["routing/move_wait_seconds"] = waited / sum(waits.count for waits in self.moved.values())
        if both := self.moved.keys() & self.stayed.keys():
            extra = sum(self.moved[name].seconds - self.moved[name].count * self.stayed[name].mean for name in both)
            values["routing/move_seconds"] = extra / sum(self.moved[name].count for name in both)
        return values


class Routing:
    """Watches decisions and streams.

    Args:
      config: the run's configuration (`scheduler.max_remaining_tokens`, `rollout.tensor_parallel`).
    """

    def __init__(self, config: configuration.RunConfig) -> None:
        # All degrees of the layout: with an instance lost or late, there are still as many buckets to be right about.
        self._levels = buckets.Levels(config.scheduler.max_remaining_tokens, config.rollout.tensor_parallel)
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
        route.moving = route.served_by != instance if route.served_by else None
        if route.moving:
            route.moves += 1
            self.counts.moves += 1
            self.counts.moved_tokens += context_tokens
        route.came_from, route.served_by = route.served_by, instance

    def answered(self, route: Route, seconds: float) -> None:
        """The stream's first tokens have come, so many seconds after they were asked for."""
        if route.moving is not None:
            waits = self.counts.moved if route.moving else self.counts.stayed
            waits.setdefault(route.served_by, Waits()).add(seconds)

    def finished(self, route: Route, generated: int) -> None:
        """The attempt has come to its own end, with so many tokens generated."""
        if route.level is not None and route.asked_at is not None:
            self.counts.judged += 1
            self.counts.right += route.level == self._levels.of_length(generated - route.asked_at)

    def take_counts(self) -> RoutingCounts:
        """Counts since the last call."""
        counts, self.counts = self.counts, RoutingCounts()
        return counts
