"""The global planner of a run: plans from the trajectories that the run trains on, and follows their drift.

After each training step `GlobalPlanner` sees the trained trajectories and how long the stages took. The lengths of the
last steps predict the demand of the next (`serving.Demand`). Costs start from a hardware sheet. Each stage's level is
corrected by the measured time of the last steps over the sheet's time.

`replanning.Replanner` decides when to look for a better plan, and when to take it. If the instances stay, each look
still redraws their length ranges, which costs nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.planning import replanning
from libra_jax.planning.forecast import forecast
from libra_jax.planning.search import plans

LEVELS = 8
"""Steps over which a stage's level is averaged: with max staleness above 0 long and short steps alternate, so no
single step is typical."""

LEAST_STEPS = 4
"""Steps, beyond the max staleness, before the first look: levels of fewer steps say little."""

ROUNDS, CLOSE = 3, 0.005
"""Most rounds in which a step's level of rollout is found, and the relative error at which they end."""

WAITED = 0.15
"""Share of a step that the trainer waited for its batch; above it, rollout set the length of the step."""


@dataclass(frozen=True)
class ObservedStep:
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
class _Comparison:
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
        config: config_lib.PlannerConfig,
        setting: forecast.PlanConditions,
        plan: protocols.Plan,
        *,
        masks: Callable[[str | None], bool],
    ) -> None:
        self._config = config
        self._setting = setting
        self._masks = masks
        self._recent_requests: collections.deque[list[tuple[int, list[protocols.Turn], bool]]] = collections.deque(
            maxlen=config.window
        )
        self._comparisons: collections.deque[_Comparison] = collections.deque(maxlen=LEVELS)
        profile = setting.profile
        self.levels = (
            forecast.CorrectionLevels()
            if profile is None
            else forecast.CorrectionLevels(sync=profile.sync, between=profile.between)
        )
        self._measured: set[str] = set() if profile is None else {"train", "rollout"}
        self._steps = 0
        self._work: forecast.StepWork  # of the latest steps; `after` sets it before the first look
        self._expected: forecast.Prediction | None = None
        self._before: protocols.Plan | None = None
        rules = replanning.Rules(
            **{item.name: getattr(config, item.name) for item in dataclasses.fields(replanning.Rules)}
        )
        if not setting.staleness:  # stages that take turns need not take equally long
            rules = dataclasses.replace(rules, imbalance=math.inf)
        self._replanner: replanning.Replanner[protocols.Plan] = replanning.Replanner(
            rules,
            plan,
            best=lambda: self._work.best(self.levels),
            seconds=lambda plan: self._work.predict(plan, self.levels).step,
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
        measured: ObservedStep,
        trained: Sequence[protocols.Trajectory],
        *,
        may_move: bool = True,
    ) -> tuple[replanning.Decision[protocols.Plan] | None, dict[str, float]]:
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
            signs = replanning.Signs(
                now.train, now.rollout, waiting=measured.waiting, slots=measured.slots, lost=measured.lost
            )
            before = self.plan
            decision = self._replanner.after(step, signs)
            if self.plan != before:
                self._before = before
        if decision is not None and not self._config.shadow:
            # The same devices and instances, with the length ranges that suit the instances best.
            self._replanner.present = dataclasses.replace(self.plan, rollout=work.search.ranges(self.plan.rollout))
        self._expected = work.predict(self.plan, self.levels)
        return decision, metrics

    def _learn(self, measured: ObservedStep, trained: Sequence[protocols.Trajectory]) -> forecast.StepWork:
        """Returns the work of the latest steps, and updates the levels: measured seconds over the sheet's."""
        # Each segment of a rollout is a request, and a sequence of the trainer.
        requests = [
            (segment.shared + segment.prompt_tokens, list(segment.turns), not self._masks(item.finish))
            for item in trained
            for segment in item.segments
            if segment.turns
        ]
        self._recent_requests.append(requests)
        prompts, turns, is_trained = zip(
            *(one for step_requests in self._recent_requests for one in step_requests), strict=True
        )
        work = forecast.StepWork(self._setting, prompts, turns, is_trained)
        expected = work.predict(self.plan, self.levels)
        # A step that trained on nothing says nothing about training.
        if (
            not any(is_trained for _, _, is_trained in requests)
            or measured.disturbed
            or not math.isfinite(expected.step)
        ):
            return work
        self._comparisons.append(
            _Comparison(
                measured.step,
                measured.wait,
                measured.train,
                measured.sync,
                self._bare_rollout(measured, work, expected),
                expected.train / self.levels.train,
            )
        )
        # Ratios of sums, not means of ratios: a short step says less about a level than a long one.
        sums = map(sum, zip(*map(dataclasses.astuple, self._comparisons), strict=True))
        step, wait, train, sync, bare_rollout, bare_train = sums
        self.levels = dataclasses.replace(self.levels, sync=sync / len(self._comparisons))
        if train > 0:
            self.levels = dataclasses.replace(self.levels, train=train / bare_train)
            self._measured.add("train")
        if wait > WAITED * step:  # otherwise training hid rollout, and its time is not known
            rollout = step if self._setting.overlaps else wait
            self.levels = dataclasses.replace(self.levels, rollout=rollout / bare_rollout)
            self._measured.add("rollout")
        return work

    def _bare_rollout(self, measured: ObservedStep, work: forecast.StepWork, expected: forecast.Prediction) -> float:
        """Returns the seconds that rollout takes by the sheet, on the scale of what is measured of it: with overlap the
        whole step, in turn the wait of the trainer."""
        levels = self.levels
        if not self._setting.overlaps:
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
            "taken": [dataclasses.astuple(comparison) for comparison in self._comparisons],
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Replaces the planner's state by a snapshot's."""
        self._replanner.restore(plans.of_values(snapshot["plan"]), snapshot)
        before = snapshot.get("before")
        self._before = None if before is None else plans.of_values(before)
        self.levels, self._measured = forecast.CorrectionLevels(**snapshot["levels"]), set(snapshot["measured"])
        self._comparisons.clear()
        self._comparisons.extend(_Comparison(*comparison) for comparison in snapshot["taken"])

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
