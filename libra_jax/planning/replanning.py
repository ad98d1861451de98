"""When to look for a better plan, and when to take it: a move has to pay for itself before the next one.

A plan is looked for every `period` steps, or early, when something says that the present one no longer fits: requests
wait for more slots than there are, one stage has come to take much longer than the other, an instance is lost. What is
found is taken if, over the next `horizon` steps, it saves more than the move costs, if a step gets shorter by
`least_gain` at least (less is within the error of the predictions), and if the last move is `cooldown` steps ago. Every
look leaves a line in the log, whichever way it went.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Plan = TypeVar("Plan", bound=Hashable)

WAITED = 0.15
"""Share of its time that the trainer waited for batches, above which steps were as long as rollout makes them."""


@dataclass(frozen=True)
class Rules:
    """When to look and when to move.

    Attributes:
      period: training steps between two looks; 0: none but early ones.
      horizon: steps over which a move has to pay.
      cooldown: steps after a move before the next, and after any look before an early one.
      least_gain: relative gain of a step below which nothing moves.
      queue_pressure: requests waiting for a slot, over all slots, above which it looks early.
      imbalance: how many times as long as the other a stage may take before it looks early.
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
    """What a training step showed.

    Attributes:
      train_seconds: of the step.
      rollout_seconds: of the step's requests.
      waiting: requests that waited for a slot, mean over the step.
      slots: of all instances.
      lost: instances lost since the step before.
    """

    train_seconds: float
    rollout_seconds: float
    waiting: float = 0.0
    slots: int = 1
    lost: int = 0


@dataclass(frozen=True)
class Measured:
    """What a training step took, as the coordinator saw it.

    Attributes:
      step: seconds, from the end of the step before, without an evaluation.
      train: of them, the training step.
      sync: of them, the publication of its weights.
      wait: of them, the trainer waited for its batch.
      waiting: requests that waited for a slot, mean over the step.
      slots: of all instances.
      lost: instances lost since the step before.
      disturbed: a move or a loss touched the step, so that it says nothing of those to come.
    """

    step: float
    train: float
    wait: float
    sync: float = 0.0
    waiting: float = 0.0
    slots: int = 1
    lost: int = 0
    disturbed: bool = False


@dataclass(frozen=True)
class Decision(Generic[Plan]):
    """One look.

    Attributes:
      step: training step.
      why: what made it look.
      plan: the best that was found.
      present_seconds: of a step under the present plan, as predicted.
      best_seconds: likewise under the best.
      move_seconds: that going from one to the other costs.
      moved: whether it was taken.
      reason: why, or why not.
    """

    step: int
    why: str
    plan: Plan
    present_seconds: float
    best_seconds: float
    move_seconds: float
    moved: bool
    reason: str

    @property
    def gain(self) -> float:
        """Relative gain of a step."""
        return 1.0 - self.best_seconds / self.present_seconds

    def record(self) -> dict[str, Any]:
        """For `plans.jsonl`."""
        return {**dataclasses.asdict(self), "gain": self.gain}

    def line(self) -> str:
        """For the log."""
        verdict = "moves" if self.moved else "stays"
        return (
            f"step {self.step} ({self.why}): {verdict}: {self.present_seconds:.1f} s a step now, "
            f"{self.best_seconds:.1f} s at best, {self.move_seconds:.1f} s to get there: {self.reason}"
        )


class Replanner(Generic[Plan]):
    """Decides step by step.

    Args:
      rules: when.
      present: the plan that is in force.
      best: () to the best plan for what is to be done now.
      seconds: of a step under a plan, for what is to be done now.
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
        self._slower = ""  # the stage that took much longer when it looked last

    def after(self, step: int, signs: Signs) -> Decision[Plan] | None:
        """The decision after a training step; None if nothing makes it look.

        Args:
          step: its number, from 1.
          signs: what it showed.
        """
        why = self._why(step, signs)
        if why is None:
            return None
        self._looked_at, self._slower = step, self._much_slower(signs)
        best = self._best()
        now, then = self._seconds(self.present), self._seconds(best)
        cost = self._move(self.present, best) if best != self.present else 0.0
        reason = self._against(step, best, now, then, cost, lost=signs.lost > 0)
        moved = reason is None and not self.rules.shadow
        saved = (now - then) * self.rules.horizon - cost
        taken = f"saves {saved:.1f} s over the next {self.rules.horizon} steps"
        shadow = f"would move, as it {taken}, and only watches" if reason is None else reason
        decision = Decision(step, why, best, now, then, cost, moved, taken if moved else shadow)
        if moved:
            self.present, self._moved_at = best, step
        return decision

    def _why(self, step: int, signs: Signs) -> str | None:
        rules = self.rules
        if signs.lost:
            return f"{signs.lost} instances lost"
        if rules.period and step - self._looked_at >= rules.period:
            return f"every {rules.period} steps"
        if self._cooling(step) or step - self._looked_at < rules.cooldown:  # it has just seen the same
            return None
        if signs.waiting > rules.queue_pressure * signs.slots:
            return f"{signs.waiting:.0f} requests wait for {signs.slots} slots"
        stage = self._much_slower(signs)
        if stage and stage != self._slower:  # else it was so at the last look, which could not mend it
            seconds = sorted((signs.rollout_seconds, signs.train_seconds))
            return f"{stage} takes {seconds[1] / max(seconds[0], 1e-9):.1f} times as long as the other stage"
        return None

    def _much_slower(self, signs: Signs) -> str:
        """The stage that takes much longer than the other, if one does."""
        if signs.rollout_seconds > self.rules.imbalance * signs.train_seconds:
            return "rollout"
        return "training" if signs.train_seconds > self.rules.imbalance * signs.rollout_seconds else ""

    def snapshot(self) -> dict[str, Any]:
        """JSON-able: when it looked and moved last, without the plan."""
        return {"moved_at": self._moved_at, "looked_at": self._looked_at, "slower": self._slower}

    def restore(self, present: Plan, snapshot: Mapping[str, Any]) -> None:
        """Goes on with the plan in force and what `snapshot` returned; what an older one lacks is as at the start."""
        self.present = present
        self._moved_at = snapshot.get("moved_at")
        self._looked_at, self._slower = snapshot.get("looked_at", 0), snapshot.get("slower", "")

    def _against(self, step: int, best: Plan, now: float, then: float, cost: float, *, lost: bool) -> str | None:
        """What speaks against the move, None if nothing does."""
        rules = self.rules
        if best == self.present:
            return "the present plan is the best"
        if self._cooling(step) and not lost:
            return f"the last move was {step - (self._moved_at or 0)} steps ago, of {rules.cooldown} to wait"
        if then >= now * (1.0 - rules.least_gain):
            return f"a gain of {100 * (1.0 - then / now):.1f}% is less than {100 * rules.least_gain:g}%"
        if (now - then) * rules.horizon <= cost:
            return f"{rules.horizon} steps would not pay for the move"
        return None

    def _cooling(self, step: int) -> bool:
        return self._moved_at is not None and step - self._moved_at < self.rules.cooldown
