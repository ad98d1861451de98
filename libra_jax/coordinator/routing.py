"""What routing did: moves between instances, their cost, and whether the first decision named the right bucket.

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
      streams: instances asked for its tokens so far, one after the other.
      asked_at: tokens generated at its first tool return; None before.
      level: bucket of the first instance decided on after that return; None before.
      plan: number of the plan that had the bucket.
      decided: move that the scheduler has decided on since the last stream began; None if the request stays.
      move: move with which the last stream began; None if that was the first, or the request stayed.
      moves: each move so far, with the number of the turn that went on after it.
    """

    streams: int = 0
    asked_at: int | None = None
    level: int | None = None
    plan: int = 0
    decided: protocols.Move | None = None
    move: protocols.Move | None = None
    moves: list[tuple[int, protocols.Move]] = field(default_factory=list)


@dataclass
class Waits:
    """Seconds from asking an instance for tokens to its first ones, in sum and in number."""

    seconds: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        """One more wait."""
        self.seconds += seconds
        self.count += 1


@dataclass
class RoutingCounts:
    """Routing since it was last asked about.

    Attributes:
      moves: requests that began to be served by another instance than before.
      moved_tokens: context tokens of those requests, whose keys and values the new instance did not have.
      transferred: moves whose keys and values the instance before kept for the new one, instead of a second prefill.
      judged: finished attempts whose first tool return was followed by a decision.
      right: of these, those whose decision named the bucket that their true remaining length asked for.
      moved: waits for first tokens of requests that moved: the new instance prefills or fetches their context first.
      stayed: those of requests that went on where they were, whose context the prefix cache may hold.
    """

    moves: int = 0
    moved_tokens: int = 0
    transferred: int = 0
    judged: int = 0
    right: int = 0
    moved: Waits = field(default_factory=Waits)
    stayed: Waits = field(default_factory=Waits)

    def metrics(self) -> dict[str, float]:
        """A training step's numbers; those that are means only where there was anything.

        `routing/move_seconds` is the mean time from asking the new instance for tokens to its first ones: the prefill
        of the whole context, and what the instance does besides. So it bounds what a move costs from above.
        `routing/stay_seconds` is the same without a move, for comparison: requests move to where there is room, so
        they may well wait for less than those that stay in a crowd.
        """
        values = {"routing/moves": float(self.moves), "routing/moved_tokens": float(self.moved_tokens)}
        if self.transferred:
            values["routing/transferred"] = float(self.transferred)
        if self.judged:
            values["routing/judged"] = float(self.judged)
            values["routing/one_shot_accuracy"] = self.right / self.judged
        for name, waits in (("move", self.moved), ("stay", self.stayed)):
            if waits.count:
                values[f"routing/{name}_seconds"] = waits.seconds / waits.count
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
        self._plans = 0
        self.counts = RoutingCounts()

    def instances(self, serving: Sequence[protocols.Instance]) -> None:
        """The instances that requests may be placed on now."""
        self._levels.learn(serving)
        self._degrees.update((instance.name, instance.tensor_parallel) for instance in serving)

    def replan(self, rollout: Sequence[protocols.PlannedBucket]) -> None:
        """What is right goes by these buckets from now on; decisions made before are judged by no bucket."""
        self._levels = buckets.Levels.planned(rollout)
        self._plans += 1

    def returned(self, route: Route, generated: int) -> None:
        """A tool has returned; its decision follows."""
        if route.asked_at is None:
            route.asked_at = generated

    def decided(self, route: Route, placement: protocols.Placement) -> None:
        """Takes in that the scheduler has placed the request."""
        if route.asked_at is not None and route.level is None:
            route.level, route.plan = self._levels.of_degree(self._degrees[placement.instance]), self._plans
        move = placement.move
        if move is not None:
            # Of several moves before a stream begins, only the way from the first source to the last target is gone.
            source = move.source if route.decided is None else route.decided.source
            route.decided = move._replace(source=source) if source != move.target else None

    def served(self, route: Route, turn: int, context_tokens: int) -> None:
        """Takes in that a stream begins, for the turn of this number, with these tokens of context."""
        route.move = route.decided if route.streams else None
        route.decided = None
        route.streams += 1
        if route.move is not None:
            route.moves.append((turn, route.move))
            self.counts.moves += 1
            self.counts.moved_tokens += context_tokens

    def answered(self, route: Route, seconds: float) -> None:
        """Takes in that the stream's first tokens came this many seconds after they were asked for."""
        if route.streams > 1:
            (self.counts.stayed if route.move is None else self.counts.moved).add(seconds)

    def finished(self, route: Route, generated: int) -> None:
        """The attempt has come to its own end, with so many tokens generated."""
        if route.level is not None and route.asked_at is not None and route.plan == self._plans:
            self.counts.judged += 1
            self.counts.right += route.level == self._levels.of_length(generated - route.asked_at)

    def take_counts(self) -> RoutingCounts:
        """Counts since the last call."""
        counts, self.counts = self.counts, RoutingCounts()
        return counts
