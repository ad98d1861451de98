"""Judges the scheduler: was the first decision after a request's first tool return right?

The decisions are taken in where requests are dispatched, so a simulated run and a real run report the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.scheduling import levels


@dataclass
class JudgedRequest:
    """The decision on a request that is judged.

    Attributes:
      asked_at: tokens generated at the request's first tool return; None before.
      level: bucket of the first instance decided on after that return; None before.
      plan: number of the plan that had the bucket.
    """

    asked_at: int | None = None
    level: int | None = None
    plan: int = 0


@dataclass
class RoutingCounts:
    """Counts of routing since they were last taken.

    Attributes:
      judged: finished rollouts with a decision after their first tool return.
      right: judged rollouts whose decision named the bucket of their true remaining length.
    """

    judged: int = 0
    right: int = 0


def metrics(judged: RoutingCounts, streams: protocols.StreamCounts) -> dict[str, float]:
    """Returns a training step's numbers. A mean appears only if it has a value.

    `routing/move_seconds` is the mean time from asking the new instance for tokens to its first token. This time
    holds the prefill of the whole context and the instance's other work, so it is an upper bound of a move's cost.
    `routing/stay_seconds` is the same time without a move, for comparison. Requests move to instances with room, so
    moved requests may wait for less than requests that stay in a crowd.
    """
    values = {"routing/moves": float(streams.moves), "routing/moved_tokens": float(streams.moved_tokens)}
    if judged.judged:
        values["routing/judged"] = float(judged.judged)
        values["routing/one_shot_accuracy"] = judged.right / judged.judged
    for name, waits in (("move", streams.moved), ("stay", streams.stayed)):
        if waits.count:
            values[f"routing/{name}_seconds"] = waits.seconds / waits.count
    return values


class Routing:
    """Judges the scheduler's decisions.

    Args:
      config: the run's configuration (`scheduler.max_remaining_tokens`, `rollout.kinds`).
    """

    def __init__(self, config: config_lib.RunConfig) -> None:
        # All kinds of the layout: if an instance is lost or late, the number of possible buckets stays the same.
        self._levels = levels.LevelMap(config.scheduler.max_remaining_tokens, config.rollout.kinds)
        self._kinds: dict[str, protocols.Kind] = {}
        self._plans = 0
        self.counts = RoutingCounts()

    def instances(self, serving: Sequence[protocols.Instance]) -> None:
        """Takes the instances on which requests may be placed now."""
        self._levels.learn(serving)
        self._kinds.update((instance.name, instance.kind) for instance in serving)

    def replan(self, rollout: Sequence[protocols.PlannedBucket]) -> None:
        """Judges later decisions by a plan's buckets. Earlier decisions are not judged."""
        self._levels = levels.LevelMap.planned(rollout)
        self._plans += 1

    def returned(self, decision: JudgedRequest, generated: int) -> None:
        """Notes the length at the first tool return; a decision follows."""
        if decision.asked_at is None:
            decision.asked_at = generated

    def decided(self, decision: JudgedRequest, instance: str) -> None:
        """Takes in that the scheduler has placed the request."""
        if decision.asked_at is not None and decision.level is None:
            decision.level, decision.plan = self._levels.of_kind(self._kinds[instance]), self._plans

    def finished(self, decision: JudgedRequest, generated: int) -> None:
        """Judges the decision on a request of a completed rollout, by the tokens that it generated in total."""
        # Buckets of another plan have other bounds, so decisions under it are not judged.
        if decision.level is not None and decision.asked_at is not None and decision.plan == self._plans:
            self.counts.judged += 1
            self.counts.right += decision.level == self._levels.of_length(generated - decision.asked_at)

    def take_counts(self) -> RoutingCounts:
        """Returns the counts since the last call, and starts new ones."""
        counts, self.counts = self.counts, RoutingCounts()
        return counts
