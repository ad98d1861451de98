"""The global planner of a run: plans from the trajectories that the run trains on, and follows their drift.

After each training step `GlobalPlanner` sees the trained trajectories and how long the stages took. The lengths of the
last steps predict the demand of the next (`serving.Demand`). Costs start from a hardware sheet. Each stage's level is
corrected by the measured time of the last steps over the sheet's time.

`Replanner` decides when to look for a better plan, and when to take it: a move has to pay for itself before the next
one. It looks every `period` steps. It looks early if more requests wait than `queue_pressure` allows, if one stage has
become much slower than the other, or if an instance is lost. A found plan is taken under three conditions. It saves
more over the next `horizon` steps than the move costs. It shortens a step by at least `least_gain`, because a smaller
gain is within the error of the predictions. And the last move is at least `cooldown` steps ago. Every look leaves a
line in the log. If the instances stay, each look still redraws their length ranges, which costs nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.planning import forecast, plans

LEVELS = 8
"""Steps over which a stage's level is averaged: with max staleness above 0 long and short steps alternate, so no
single step is typical."""

LEAST_STEPS = 4
"""Steps, beyond the max staleness, before the first look: levels of fewer steps say little."""

ROUNDS, CLOSE = 3, 0.005
"""Most rounds in which a step's level of rollout is found, and the relative error at which they end."""

Plan = TypeVar("Plan", bound=Hashable)

WAITED = 0.15
"""Share of a step that the trainer waited for its batch; above it, rollout set the length of the step."""


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
class Measured:
    """Times of a training step, as the coordinator saw them.

    Attributes:
      step: seconds from the end of the step before, without an evaluation.
      train: seconds of the training step within `step`.
      wait: seconds within `step` in which the trainer waited for its batch.
      sync: seconds of the weight sync within `step`.
      waiting: requests that waited for a slot, mean over the step.
      slots: slots of all instances.
      lost: instances lost since the step before.
      disturbed: a move or a loss affected the step, so that it does not predict later steps.
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
      present: the plan in force.
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
        self._looked_at, self._slower = step, slower
        best = self._best()
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


@dataclass(frozen=True)
class _Taken:
    """Measured seconds of a step, and the sheet's seconds of the same stages."""

    step: float
    wait: float
    train: float
    sync: float
    bare_rollout: float
    bare_train: float


class GlobalPlanner:
    """The global planner; see the module's docstring.

    Args:
      config: when to look, and what moves cost.
      setting: conditions of the plans.
      plan: the plan in force at first.
      masks: tells whether a rollout with this finish is left out of training (`TaskConfig.masks`).

    Attributes:
      levels: levels measured so far.
    """

    def __init__(
        self,
        config: configuration.PlannerConfig,
        setting: forecast.Setting,
        plan: protocols.Plan,
        *,
        masks: Callable[[str | None], bool],
    ) -> None:
        self._config = config
        self._setting = setting
        self._masks = masks
        self._seen: collections.deque[list[tuple[int, list[protocols.Turn], bool]]] = collections.deque(
            maxlen=config.window
        )
        self._taken: collections.deque[_Taken] = collections.deque(maxlen=LEVELS)
        profile = setting.profile
        self.levels = (
            forecast.Levels() if profile is None else forecast.Levels(sync=profile.sync, between=profile.between)
        )
        self._measured: set[str] = set() if profile is None else {"train", "rollout"}
        self._steps = 0
        self._work: forecast.Work  # of the latest steps; `after` sets it before the first look
        self._expected: forecast.Prediction | None = None
        self._before: protocols.Plan | None = None
        rules = Rules(**{item.name: getattr(config, item.name) for item in dataclasses.fields(Rules)})
        if not setting.staleness:  # stages that take turns need not take equally long
            rules = dataclasses.replace(rules, imbalance=math.inf)
        self._replanner: Replanner[protocols.Plan] = Replanner(
            rules,
            plan,
            best=lambda: self._work.best(self.levels),
            seconds=lambda present: self._work.predict(present, self.levels).step,
            move=self._move_seconds,
        )

    @property
    def plan(self) -> protocols.Plan:
        """The plan in force."""
        return self._replanner.present

    @property
    def calibrated(self) -> bool:
        """True if both stages have been measured, by this run or by those of its profile."""
        return {"train", "rollout"} <= self._measured

    def after(
        self,
        step: int,
        measured: Measured,
        trained: Sequence[protocols.Trajectory],
        *,
        may_move: bool = True,
    ) -> tuple[Decision[protocols.Plan] | None, dict[str, float]]:
        """Decides what to do after a training step, and returns the step's metrics.

        Args:
          step: number of the step, from 1.
          measured: measured times of the step.
          trained: the step's rollouts; masked ones take no training time.
          may_move: allows a decision; without it there is no look.

        Returns:
          The decision, if there was a look; `plan` has been updated. The metrics compare the prediction for this
          step, made before it, with its measured time, and with its time under the plan before the last move.
        """
        metrics: dict[str, float] = {}
        if (expected := self._expected) is not None:
            metrics = {"plan/step_seconds": expected.step, "plan/train_seconds": expected.train}
            metrics["plan/rollout_seconds"] = expected.rollout
            metrics["plan/step_error"] = abs(expected.step / measured.step - 1.0) if measured.step > 0 else math.nan
        self._steps += 1
        if self._steps <= self._setting.staleness + 1:  # short rollouts finish first, and engines were filling up
            return None, {}
        work = self._work = self._learn(measured, trained)
        if self._before is not None:
            metrics["plan/saved_seconds"] = work.predict(self._before, self.levels).step - measured.step
        decision = None
        if may_move and self._steps > self._setting.staleness + LEAST_STEPS:
            now = work.predict(self.plan, self.levels)
            signs = Signs(now.train, now.rollout, waiting=measured.waiting, slots=measured.slots, lost=measured.lost)
            before, decision = self.plan, self._replanner.after(step, signs)
            if self.plan != before:
                self._before = before
        if decision is not None and not self._config.shadow:
            # The same devices and instances, with the length ranges that suit the instances best.
            self._replanner.present = dataclasses.replace(self.plan, rollout=work.search.ranges(self.plan.rollout))
        self._expected = work.predict(self.plan, self.levels)
        return decision, metrics

    def _learn(self, measured: Measured, trained: Sequence[protocols.Trajectory]) -> forecast.Work:
        """Returns the work of the latest steps, and updates the levels: measured seconds over the sheet's."""
        # Each segment of a rollout is a request, and a sequence of the trainer.
        seen = [
            (segment.shared + segment.prompt_tokens, list(segment.turns), not self._masks(item.finish))
            for item in trained
            for segment in item.segments
            if segment.turns
        ]
        self._seen.append(seen)
        prompts, turns, kept = zip(*(one for step_seen in self._seen for one in step_seen), strict=True)
        work = forecast.Work(self._setting, prompts, turns, kept)
        expected = work.predict(self.plan, self.levels)
        # A step that trained on nothing says nothing about training.
        if not any(kept for _, _, kept in seen) or measured.disturbed or not math.isfinite(expected.step):
            return work
        self._taken.append(
            _Taken(
                measured.step,
                measured.wait,
                measured.train,
                measured.sync,
                self._bare_rollout(measured, work, expected),
                expected.train / self.levels.train,
            )
        )
        # Ratios of sums, not means of ratios: a short step says less about a level than a long one.
        sums = map(sum, zip(*map(dataclasses.astuple, self._taken), strict=True))
        step, wait, train, sync, bare_rollout, bare_train = sums
        self.levels = dataclasses.replace(self.levels, sync=sync / len(self._taken))
        if train > 0:
            self.levels = dataclasses.replace(self.levels, train=train / bare_train)
            self._measured.add("train")
        if wait > WAITED * step:  # otherwise training hid rollout, and its time is not known
            rollout = step if self._setting.staleness else wait
            self.levels = dataclasses.replace(self.levels, rollout=rollout / bare_rollout)
            self._measured.add("rollout")
        return work

    def _bare_rollout(self, measured: Measured, work: forecast.Work, expected: forecast.Prediction) -> float:
        """Returns the seconds that rollout takes by the sheet, on the scale of what is measured of it: with overlap the
        whole step, in turn the wait of the trainer."""
        levels = self.levels
        if not self._setting.staleness:
            return expected.rollout / levels.rollout
        if measured.wait <= WAITED * measured.step:
            return expected.step / levels.rollout
        # Training is a part of the step, so the level at which the prediction is right is found step by step.
        for _ in range(ROUNDS):
            right = measured.step / expected.step
            if abs(right - 1.0) < CLOSE:
                break
            levels = dataclasses.replace(levels, rollout=levels.rollout * right)
            expected = work.predict(self.plan, levels)
        return expected.step / levels.rollout

    def refuse(self, plan: protocols.Plan) -> None:
        """Sets the plan in force after a decision could not be carried out. The cooldown holds all the same."""
        self._replanner.present, self._before = plan, None

    def snapshot(self) -> dict[str, Any]:
        """Returns JSON-able state: the plan in force, when it looked and moved, and the levels. Lengths are
        collected again."""
        return {
            "plan": dataclasses.asdict(self.plan),
            "before": None if self._before is None else dataclasses.asdict(self._before),
            **self._replanner.snapshot(),
            "levels": dataclasses.asdict(self.levels),
            "measured": sorted(self._measured),
            "taken": [dataclasses.astuple(taken) for taken in self._taken],
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Replaces the planner's state by a snapshot's."""
        self._replanner.restore(plans.of_values(snapshot["plan"]), snapshot)
        before = snapshot.get("before")
        self._before = None if before is None else plans.of_values(before)
        self.levels, self._measured = forecast.Levels(**snapshot["levels"]), set(snapshot["measured"])
        self._taken.clear()
        self._taken.extend(_Taken(*taken) for taken in snapshot["taken"])

    def _move_seconds(self, present: protocols.Plan, best: protocols.Plan) -> float:
        """Returns the seconds that a move costs: training stands still while its mesh changes, and new instances
        start."""
        config = self._config
        mesh = operator.attrgetter("data", "fsdp", "tensor", "context")
        resized = mesh(present) != mesh(best)
        before = {bucket.tensor_parallel: bucket.count for bucket in present.rollout}
        new = sum(
            bucket.tensor_parallel * max(0, bucket.count - before.get(bucket.tensor_parallel, 0))
            for bucket in best.rollout
        )
        # New instances delay only their share of the rollout devices.
        return config.resize_seconds * resized + config.start_seconds * new / best.rollout_devices
