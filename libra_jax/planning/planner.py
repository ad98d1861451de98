"""The global planner of a run: plans from the trajectories that the run trains on, and follows their drift.

After each training step the planner sees the trained trajectories and how long the stages took. The lengths of the
last steps predict the demand of the next (`demand`). Costs start from a hardware sheet. Each stage's level is
corrected by the measured time of the last steps over the sheet's time. `replanning` decides when to look and whether
to move. If the instances stay, each look still redraws their length ranges, which costs nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.planning import forecast, plans, replanning

LEVELS = 8
"""Steps over which a stage's level is averaged: with max staleness above 0 long and short steps alternate, so no
single step is typical."""


LEAST_STEPS = 4
"""Steps, beyond the max staleness, before the first look: levels of fewer steps say little."""


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
        self._levels = (
            forecast.Levels() if profile is None else forecast.Levels(sync=profile.sync, between=profile.between)
        )
        self._measured: set[str] = set() if profile is None else {"train", "rollout"}
        self._steps = 0
        self._work: forecast.Work | None = None
        self._expected: forecast.Prediction | None = None
        self._before: protocols.Plan | None = None
        rules = replanning.Rules(
            **{item.name: getattr(config, item.name) for item in dataclasses.fields(replanning.Rules)}
        )
        if not setting.staleness:  # stages that take turns need not take equally long
            rules = dataclasses.replace(rules, imbalance=math.inf)
        self._replanner: replanning.Replanner[protocols.Plan] = replanning.Replanner(
            rules, plan, best=self._best, seconds=self._seconds, move=self._move_seconds
        )

    @property
    def plan(self) -> protocols.Plan:
        """The plan in force."""
        return self._replanner.present

    @property
    def levels(self) -> forecast.Levels:
        """Levels measured so far."""
        return self._levels

    @property
    def calibrated(self) -> bool:
        """True if both stages have been measured, by this run or by those of its profile."""
        return {"train", "rollout"} <= self._measured

    def after(
        self,
        step: int,
        measured: replanning.Measured,
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
        metrics = self._metrics(measured)
        self._steps += 1
        if self._steps <= self._setting.staleness + 1:  # short rollouts finish first, and engines were filling up
            return None, {}
        self._see(measured, trained)
        assert self._work is not None
        if self._before is not None:
            metrics["plan/saved_seconds"] = self._work.predict(self._before, self.levels).step - measured.step
        decision = None
        if may_move and self._steps > self._setting.staleness + LEAST_STEPS:
            now = self._work.predict(self.plan, self.levels)
            signs = replanning.Signs(
                now.train, now.rollout, waiting=measured.waiting, slots=measured.slots, lost=measured.lost
            )
            before, decision = self.plan, self._replanner.after(step, signs)
            if self.plan != before:
                self._before = before
        if decision is not None and not self._config.shadow:
            self._replanner.present = self._work.drawn_anew(self.plan)
        self._expected = self._work.predict(self.plan, self.levels)
        return decision, metrics

    def _see(self, measured: replanning.Measured, trained: Sequence[protocols.Trajectory]) -> None:
        """Adds a step's trajectories and measured times."""
        seen = [(item.prompt_tokens, list(item.turns), not self._masks(item.finish)) for item in trained if item.turns]
        self._seen.append(seen)
        prompts, turns, kept = zip(*(one for step_seen in self._seen for one in step_seen), strict=True)
        self._work = forecast.Work(self._setting, prompts, turns, kept)
        if any(kept for _, _, kept in seen):  # a step that trained on nothing says nothing about training
            self._learn_levels(measured)

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
            "levels": dataclasses.asdict(self._levels),
            "measured": sorted(self._measured),
            "taken": [dataclasses.astuple(taken) for taken in self._taken],
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Replaces the planner's state by a snapshot's."""
        self._replanner.restore(plans.of_values(snapshot["plan"]), snapshot)
        before = snapshot.get("before")
        self._before = None if before is None else plans.of_values(before)
        self._levels, self._measured = forecast.Levels(**snapshot["levels"]), set(snapshot["measured"])
        self._taken.clear()
        self._taken.extend(_Taken(*taken) for taken in snapshot["taken"])

    def _metrics(self, measured: replanning.Measured) -> dict[str, float]:
        expected = self._expected
        if expected is None:
            return {}
        metrics = {"plan/step_seconds": expected.step, "plan/train_seconds": expected.train}
        metrics["plan/rollout_seconds"] = expected.rollout
        metrics["plan/step_error"] = abs(expected.step / measured.step - 1.0) if measured.step > 0 else math.nan
        return metrics

    def _learn_levels(self, measured: replanning.Measured) -> None:
        """Updates the levels: measured seconds over the sheet's seconds of the latest trajectories."""
        assert self._work is not None
        bare = self._work.predict(self.plan, forecast.Levels())
        if measured.disturbed or not math.isfinite(bare.rollout):
            return
        self._taken.append(
            _Taken(measured.step, measured.wait, measured.train, measured.sync, bare.rollout, bare.train)
        )
        sums = map(sum, zip(*map(dataclasses.astuple, self._taken), strict=True))
        step, wait, train, sync, bare_rollout, bare_train = sums
        self._levels = dataclasses.replace(self._levels, sync=sync / len(self._taken))
        if train > 0:
            self._levels = dataclasses.replace(self._levels, train=train / bare_train)
            self._measured.add("train")
        if wait > replanning.WAITED * step:  # otherwise training hid rollout, and its time is not known
            # With overlap, the whole step lasted as long as rollout; in turn, the trainer waited for exactly the
            # rollout.
            rollout = step if self._setting.staleness else wait
            self._levels = dataclasses.replace(self._levels, rollout=rollout / bare_rollout)
            self._measured.add("rollout")

    def _best(self) -> protocols.Plan:
        assert self._work is not None
        return self._work.best(self.levels)

    def _seconds(self, plan: protocols.Plan) -> float:
        assert self._work is not None
        return self._work.predict(plan, self.levels).step

    def _move_seconds(self, present: protocols.Plan, best: protocols.Plan) -> float:
        """Returns the seconds that a move costs: training stands still while its mesh changes, and new instances
        start."""
        config = self._config
        resized = (present.data, present.fsdp, present.tensor) != (best.data, best.fsdp, best.tensor)
        before = {bucket.tensor_parallel: bucket.count for bucket in present.rollout}
        new = sum(
            bucket.tensor_parallel * max(0, bucket.count - before.get(bucket.tensor_parallel, 0))
            for bucket in best.rollout
        )
        # New instances delay only their share of the rollout devices.
        return config.resize_seconds * resized + config.start_seconds * new / best.rollout_devices
