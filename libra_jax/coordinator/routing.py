"""Requests in progress, and what routing did with them: moves, their cost, and whether the first bucket was right.

The counts are taken where requests are dispatched, so a simulated run and a real run report the same numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.coordinator import instances
from libra_jax.scheduling import levels


@dataclass
class Route:
    """The instances that served a request.

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
    """Waits from asking an instance for tokens to its first token: total seconds, and their number."""

    seconds: float = 0.0
    count: int = 0


@dataclass
class RoutingCounts:
    """Counts of routing since they were last taken.

    Attributes:
      moves: requests that moved to another instance.
      moved_tokens: context tokens of moved requests, whose keys and values the new instance lacked.
      transferred: moves whose keys and values came from the previous instance, instead of a second prefill.
      judged: finished rollouts with a decision after their first tool return.
      right: judged rollouts whose decision named the bucket of their true remaining length.
      moved: waits for first tokens after a move: the new instance first prefills or fetches the context.
      stayed: waits for first tokens without a move: the prefix cache may hold the context.
    """

    moves: int = 0
    moved_tokens: int = 0
    transferred: int = 0
    judged: int = 0
    right: int = 0
    moved: Waits = field(default_factory=Waits)
    stayed: Waits = field(default_factory=Waits)

    def metrics(self) -> dict[str, float]:
        """Returns a training step's numbers. A mean appears only if it has a value.

        `routing/move_seconds` is the mean time from asking the new instance for tokens to its first token. This time
        holds the prefill of the whole context and the instance's other work, so it is an upper bound of a move's cost.
        `routing/stay_seconds` is the same time without a move, for comparison. Requests move to instances with room, so
        moved requests may wait for less than requests that stay in a crowd.
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
    """Counts the scheduler's decisions and their streams.

    Args:
      config: the run's configuration (`scheduler.max_remaining_tokens`, `rollout.kinds`).
    """

    def __init__(self, config: configuration.RunConfig) -> None:
        # All kinds of the layout: if an instance is lost or late, the number of possible buckets stays the same.
        self._levels = levels.Levels(config.scheduler.max_remaining_tokens, config.rollout.kinds)
        self._kinds: dict[str, protocols.Kind] = {}
        self._plans = 0
        self.counts = RoutingCounts()

    def instances(self, serving: Sequence[protocols.Instance]) -> None:
        """Takes the instances on which requests may be placed now."""
        self._levels.learn(serving)
        self._kinds.update((instance.name, instance.kind) for instance in serving)

    def replan(self, rollout: Sequence[protocols.PlannedBucket]) -> None:
        """Judges later decisions by a plan's buckets. Earlier decisions are not judged."""
        self._levels = levels.Levels.planned(rollout)
        self._plans += 1

    def returned(self, route: Route, generated: int) -> None:
        """Notes the length at the first tool return; a decision follows."""
        if route.asked_at is None:
            route.asked_at = generated

    def decided(self, route: Route, placement: protocols.Placement) -> None:
        """Takes in that the scheduler has placed the request."""
        if route.asked_at is not None and route.level is None:
            route.level, route.plan = self._levels.of_kind(self._kinds[placement.instance]), self._plans
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
            waits = self.counts.stayed if route.move is None else self.counts.moved
            waits.seconds += seconds
            waits.count += 1

    def finished(self, route: Route, generated: int) -> None:
        """Judges the decision of a completed rollout, by the tokens it generated in total."""
        # Buckets of another plan have other bounds, so decisions under it are not judged.
        if route.level is not None and route.asked_at is not None and route.plan == self._plans:
            self.counts.judged += 1
            self.counts.right += route.level == self._levels.of_length(generated - route.asked_at)

    def take_counts(self) -> RoutingCounts:
        """Returns the counts since the last call, and starts new ones."""
        counts, self.counts = self.counts, RoutingCounts()
        return counts


@dataclass
class Stream:
    """One engine's answer to one request, while the answer streams.

    `broken` ends the stream. It resolves after the pump has ended, or early: with the stream's error, or with None if
    the request was moved or displaced.
    """

    engine: instances.Engine
    life: int
    broken: asyncio.Future[BaseException | None]
    begin: float
    last_delta: float
    answered: bool = False
    closed: bool = False
    finish: protocols.FinishReason | None = None

    def end(self, error: BaseException | None = None) -> None:
        """Ends the stream, if it has not ended."""
        if not self.broken.done():
            self.broken.set_result(error)


@dataclass
class Request:
    """A segment between its first and its last token."""

    segment: protocols.Segment
    group_id: int
    generated: int
    # Empty while the request waits or its tool runs.
    instance: str = ""
    # True while the request asks for tokens and has no instance.
    waits: bool = False
    # Start of the wait that is not in the counts yet.
    waits_since: float = 0.0
    # Start of a wait during which some slot was always free: past its deadline the scheduler is at fault.
    passed_over_since: float | None = None
    placed: asyncio.Event = field(default_factory=asyncio.Event)
    stream: Stream | None = None
    # Called at new tokens.
    heard: Callable[[], None] | None = None
    route: Route = field(default_factory=Route)
    failures: int = 0
    away_since: float = 0.0

    @property
    def name(self) -> str:
        """Name of the request: the segment's."""
        return self.segment.name

    def displace(self) -> None:
        """Takes the request off its instance: its stream ends, and the next one waits for a placement."""
        self.instance = ""
        # Cleared before the stream ends: `sample` looks at it next.
        self.placed.clear()
        if self.stream is not None:
            self.stream.end()
