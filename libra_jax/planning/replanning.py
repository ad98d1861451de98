"""Decides when a run looks for a better plan, and when it takes the plan: a move has to pay off before the next one.

`Replanner` looks every `period` steps. It looks early if more requests wait than `queue_pressure` allows, if one stage
has become much slower than the other, or if an instance is lost. A found plan is taken under three conditions. It saves
more over the next `horizon` steps than the move costs. It shortens a step by at least `least_gain`, because a smaller
gain is within the error of the predictions. And the last move is at least `cooldown` steps ago. Every look leaves a
line in the log.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Plan = TypeVar("Plan", bound=Hashable)


@dataclass(frozen=True)
class Rules:
    """Rules for looks and moves.

    Attributes:
      period: training steps between two looks; 0: only early looks.
      horizon: steps over which a move has to pay.
      cooldown: steps after a move before the next move, and after any look before an early look.
      least_gain: relative gain of a step below which nothing moves.
      queue_pressure: requests waiting for a slot, over all slots, above which it looks early.
      imbalance: ratio of the longer stage to the shorter above which it looks early.
      shadow: decides and logs, and never moves.
    """

    period: int = 10
    horizon: int = 20
    cooldown: int = 5
    least_gain: float = 0.05
    queue_pressure: float = 1.0
    imbalance: float = 2.0
    shadow: bool = False


@dataclass(frozen=True)
class Signs:
    """Signs that a training step showed.

    Attributes:
      train_seconds: seconds of the training step.
      rollout_seconds: seconds of the step's requests.
      waiting: requests that waited for a slot, mean over the step.
      slots: slots of all instances.
      lost: instances lost since the step before.
    """

    train_seconds: float
    rollout_seconds: float
    waiting: float = 0.0
    slots: int = 1
    lost: int = 0


@dataclass(frozen=True)
class Decision(Generic[Plan]):
    """One look.

    Attributes:
      step: training step of the look.
      why: reason for the look.
      plan: the best plan that was found.
      present_seconds: predicted seconds of a step under the present plan.
      best_seconds: predicted seconds of a step under the best plan.
      move_seconds: seconds that the move between them costs.
      moved: the plan was taken.
      reason: reason for or against the move.
    """

    step: int
    why: str
    plan: Plan
    present_seconds: float
    best_seconds: float
    move_seconds: float
    moved: bool
    reason: str

    def record(self) -> dict[str, Any]:
        """Returns the line of `plans.jsonl`, as a dict; `gain` is the relative gain of a step."""
        return {**dataclasses.asdict(self), "gain": 1.0 - self.best_seconds / self.present_seconds}

    def line(self) -> str:
        """Returns the line of the log."""
        verdict = "moves" if self.moved else "stays"
        return (
            f"step {self.step} ({self.why}): {verdict}: {self.present_seconds:.1f} s a step now, "
            f"{self.best_seconds:.1f} s at best, {self.move_seconds:.1f} s to get there: {self.reason}"
        )


class Replanner(Generic[Plan]):
    """Decides step by step.

    Args:
      rules: rules for looks and moves.
      best: returns the best plan for the present work.
      seconds: plan to the seconds of a step, for the present work.
      move: (from, to) to the seconds that a move costs.
    """

    def __init__(
        self,
        rules: Rules,
        present: Plan,
        *,
        best: Callable[[], Plan],
        seconds: Callable[[Plan], float],
        move: Callable[[Plan, Plan], float],
    ) -> None:
        self.rules = rules
        self.present = present
        self._best = best
        self._seconds = seconds
        self._move = move
        self._moved_at: int | None = None
        self._looked_at = 0
        self._slower = ""  # the stage that took much longer at the last look

    def after(self, step: int, signs: Signs) -> Decision[Plan] | None:
        """Returns the decision after a training step; None if nothing calls for a look.

        Args:
          step: number of the step, from 1.
          signs: signs that the step showed.
        """
        rules = self.rules
        slower = ""
        if signs.rollout_seconds > rules.imbalance * signs.train_seconds:
            slower = "rollout"
        elif signs.train_seconds > rules.imbalance * signs.rollout_seconds:
            slower = "training"
        why = self._why(step, signs, slower)
        if why is None:
            return None
        best = self._best()
        self._looked_at, self._slower = step, slower
        # The lengths have changed since the plan in force was found, so its time is predicted again, too.
        now, then = self._seconds(self.present), self._seconds(best)
        cost = self._move(self.present, best) if best != self.present else 0.0
        against = self._against(step, best, now, then, cost, lost=signs.lost > 0)
        moved = against is None and not rules.shadow
        reason = f"saves {(now - then) * rules.horizon - cost:.1f} s over the next {rules.horizon} steps"
        if not moved:
            reason = against or f"would move, as it {reason}, and only watches"
        decision = Decision(step, why, best, now, then, cost, moved, reason)
        if moved:
            self.present, self._moved_at = best, step
        return decision

    def _why(self, step: int, signs: Signs, slower: str) -> str | None:
        """Returns the reason to look after this step; None if there is none."""
        rules = self.rules
        if signs.lost:
            return f"{signs.lost} instances lost"
        if rules.period and step - self._looked_at >= rules.period:
            return f"every {rules.period} steps"
        # An early look soon after a look or a move would judge the same state again.
        if step - max(self._looked_at, self._moved_at or 0) < rules.cooldown:
            return None
        if signs.waiting > rules.queue_pressure * signs.slots:
            return f"{signs.waiting:.0f} requests wait for {signs.slots} slots"
        if slower and slower != self._slower:  # otherwise the last look saw this too and could not mend it
            seconds = sorted((signs.rollout_seconds, signs.train_seconds))
            return f"{slower} takes {seconds[1] / max(seconds[0], 1e-9):.1f} times as long as the other stage"
        return None

    def _against(self, step: int, best: Plan, now: float, then: float, cost: float, *, lost: bool) -> str | None:
        """Returns the reason against the move; None if there is none."""
        rules = self.rules
        if best == self.present:
            return "the present plan is the best"
        # A lost instance makes the present plan impossible, so the cooldown does not hold.
        if self._moved_at is not None and step - self._moved_at < rules.cooldown and not lost:
            return f"the last move was {step - self._moved_at} steps ago, of {rules.cooldown} to wait"
        if not math.isfinite(then):
            return "no step can be predicted under the plan"
        if then >= now * (1.0 - rules.least_gain):
            return f"a gain of {100 * (1.0 - then / now):.1f}% is less than {100 * rules.least_gain:g}%"
        if (now - then) * rules.horizon <= cost:
            return f"{rules.horizon} steps would not pay for the move"
        return None

    def snapshot(self) -> dict[str, Any]:
        """Returns JSON-able state: when it last looked and moved, without the plan."""
        return {"moved_at": self._moved_at, "looked_at": self._looked_at, "slower": self._slower}

    def restore(self, present: Plan, snapshot: Mapping[str, Any]) -> None:
        """Restores the plan in force and a snapshot; a value that an older snapshot lacks starts fresh."""
        self.present = present
        self._moved_at = snapshot.get("moved_at")
        self._looked_at, self._slower = snapshot.get("looked_at", 0), snapshot.get("slower", "")
