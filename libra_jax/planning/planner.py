"""The global planner of a run: plans from the trajectories that it trains on, and follows them as they drift.

After each training step it is shown what was trained and how long the stages took. Lengths of the last steps say what
the next will ask for (`demand`); costs start from a hardware sheet, and each stage's level is corrected by what the
last steps took over what the sheet says of them. `replanning` says when to look and whether to move; where the
instances stay, their ranges of lengths are drawn anew at each look, which costs nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.models import config as model_config
from libra_jax.models import feasibility
from libra_jax.planning import costs, demand, meshes, plans, profiles, replanning, search, serving

LEVELS = 8
"""Steps over which a stage's level is taken: at eta > 0 long steps and short ones take turns, so none tells alone."""


LEAST_STEPS = 4
"""Steps, beyond the staleness, before the first look: levels of fewer say little."""


@dataclass(frozen=True)
class Setting:
    """What a plan is made for, apart from lengths.

    Attributes:
      model: what things cost.
      trainer: of the training steps.
      degrees: tensor-parallel degrees that instances may have.
      slots: of an instance of each degree.
      devices: to split.
      requests: trajectories of a training step.
      staleness: eta.
      mesh: (data, fsdp, tensor) where the trainer cannot change; None leaves it to the plan.
      reach: devices, at most, of a mesh that a trainer which runs can change to; None: any mesh.
      profile: what runs have measured here, if they have.
    """

    model: costs.CostModel
    trainer: meshes.Trainer
    degrees: tuple[int, ...]
    slots: tuple[int, ...]
    devices: int
    requests: int
    staleness: int
    mesh: tuple[int, int, int] | None = None
    reach: int | None = None
    profile: profiles.Profile | None = None

    @classmethod
    def of_run(
        cls,
        run: configuration.RunConfig,
        model: costs.CostModel,
        devices: int,
        *,
        slots: Sequence[int] = (),
        mesh: tuple[int, int, int] | None = None,
        reach: int | None = None,
    ) -> Setting:
        """The setting of a run.

        Args:
          run: its configuration.
          model: what things cost there, by the sheet; with `planner.profile`, what was measured takes its place.
          devices: that train and roll out.
          slots: of its instances, in the order of `rollout.tensor_parallel`; empty: as `rollout` says.
          mesh: the trainer's, if it has to stay.
          reach: devices of the largest mesh that the trainer can change to, if it runs.

        Raises:
          ConfigError: no instance that plans may use holds a whole context, or the profile is not of this model and
            hardware.
          DataError: the profile cannot be read.
        """
        profile = profiles.read(Path(run.planner.profile)) if run.planner.profile else None
        if profile is not None:
            model = profile.cost_model(model)
        most, context = model.sheet.devices_per_node, run.rollout.max_context
        possible = [
            degree for degree in sorted(set(run.planner.degrees)) if degree <= most and _divides(model.shape, degree)
        ]
        degrees = tuple(degree for degree in possible if model.kv_tokens(degree) >= context)
        if not degrees:
            room = max((model.kv_tokens(degree) for degree in possible), default=0)
            raise protocols.ConfigError(
                f"config.rollout.max_context: beside the weights, no instance on {model.sheet.name} of the "
                f"tensor-parallel degrees {possible} (planner.degrees) holds {context} tokens; the most is "
                f"{max(0, room)}: lower it, or plan for other hardware or wider instances"
            )
        if profile is not None:
            degrees = profile.measured(degrees)
        given = configuration.slots_by_degree(run.rollout.tensor_parallel, slots or run.rollout.instance_slots)
        return cls(
            model,
            meshes.Trainer.of_run(run, model.sheet),
            degrees,
            tuple(given.get(degree, run.rollout.slots) for degree in degrees),
            devices,
            run.coordinator.groups_per_step * run.coordinator.group_size,
            run.coordinator.staleness,
            mesh,
            reach,
            profile,
        )


def _divides(shape: model_config.TransformerConfig, degree: int) -> bool:
    try:
        feasibility.check_tensor_parallel(shape, degree)
    except protocols.ConfigError:
        return False
    return True


@dataclass(frozen=True)
class Prediction:
    """Times of a training step under a plan, in seconds (`uncertainty` gives shares of them in the same form).

    Attributes:
      train: of the trainer's step, the publication left out.
      rollout: of the step's requests.
      step: of the whole.
    """

    train: float
    rollout: float
    step: float


@dataclass(frozen=True)
class Levels:
    """What measuring adds to the sheet.

    Attributes:
      train: how many times as long as the sheet says a training step takes here.
      rollout: likewise of a step's requests.
      sync: seconds of a publication.
      between: seconds of a step that belong to no stage.
    """

    train: float = 1.0
    rollout: float = 1.0
    sync: float = 0.0
    between: float = 0.0

    @property
    def besides(self) -> float:
        """Seconds of a step, beside training, that the trainer takes part in."""
        return self.sync + self.between


class Work:
    """The work of training steps like these trajectories, and what plans make of it.

    Args:
      setting: of the plans.
      prompts: tokens of each trajectory's prompt.
      turns: of each trajectory.

    Raises:
      DataError: there are no trajectories.
      ConfigError: nothing holds the model or a context; the message says what is short.
    """

    def __init__(self, setting: Setting, prompts: Sequence[int], turns: Sequence[Sequence[protocols.Turn]]) -> None:
        self._setting = setting
        wanted = demand.of_trajectories(prompts, turns, requests=setting.requests)
        contexts = demand.contexts(prompts, turns)
        lengths = [contexts[index * len(contexts) // setting.requests] for index in range(setting.requests)]
        self.training = meshes.Training(setting.model, lengths, setting.trainer)
        engines = setting.model if setting.profile is None else setting.profile.rollout(setting.model)
        rollout = serving.Serving(engines, wanted, setting.degrees, setting.slots, staleness=setting.staleness)
        self.search = search.Search(
            rollout,
            self.training,
            setting.devices,
            staleness=setting.staleness,
            mesh=setting.mesh,
            reach=setting.reach,
        )

    def best(self, levels: Levels) -> protocols.Plan:
        """The plan with the shortest step, the stages at these levels."""
        weighed = self.search.weighed(levels.train / levels.rollout, levels.besides / levels.rollout)
        return weighed.best(self._setting.devices).plan

    def predict(self, plan: protocols.Plan, levels: Levels) -> Prediction:
        """Times of the stages, each at its level, and of the step; infinite where a context fits no instance."""
        train = levels.train * self.training.seconds(plan.data, plan.fsdp, plan.tensor)
        rollout = levels.rollout * self.search.rollout_seconds(plan.rollout)
        cycle = train + levels.besides
        return Prediction(train, rollout, max(cycle, rollout) if self._setting.staleness else cycle + rollout)

    def drawn_anew(self, plan: protocols.Plan) -> protocols.Plan:
        """The same devices, their instances with the ranges of lengths that suit them best."""
        return dataclasses.replace(plan, rollout=self.search.ranges(plan.rollout))


@dataclass(frozen=True)
class _Taken:
    """Seconds of a step as it was, and of the stages of steps like it by the sheet."""

    step: float
    wait: float
    train: float
    sync: float
    bare_rollout: float
    bare_train: float


class GlobalPlanner:
    """See the module.

    Args:
      config: when to look, and what moves cost.
      setting: what plans are made for.
      plan: the one in force at first.
    """

    def __init__(self, config: configuration.PlannerConfig, setting: Setting, plan: protocols.Plan) -> None:
        self._config = config
        self._setting = setting
        self._seen: collections.deque[list[tuple[int, list[protocols.Turn]]]] = collections.deque(maxlen=config.window)
        self._taken: collections.deque[_Taken] = collections.deque(maxlen=LEVELS)
        profile = setting.profile
        self._levels = Levels() if profile is None else Levels(sync=profile.sync, between=profile.between)
        self._measured: set[str] = set() if profile is None else {"train", "rollout"}
        self._steps = 0
        self._work: Work | None = None
        self._expected: Prediction | None = None
        self._before: protocols.Plan | None = None
        rules = replanning.Rules(
            **{item.name: getattr(config, item.name) for item in dataclasses.fields(replanning.Rules)}
        )
        if not setting.staleness:  # stages that take turns need not take as long as each other
            rules = dataclasses.replace(rules, imbalance=math.inf)
        self._replanner: replanning.Replanner[protocols.Plan] = replanning.Replanner(
            rules, plan, best=self._best, seconds=self._seconds, move=self._move_seconds
        )

    @property
    def plan(self) -> protocols.Plan:
        """The plan in force."""
        return self._replanner.present

    @property
    def levels(self) -> Levels:
        """What has been measured so far."""
        return self._levels

    @property
    def calibrated(self) -> bool:
        """Both stages have been measured, by this run or by those of its profile."""
        return {"train", "rollout"} <= self._measured

    def after(
        self,
        step: int,
        measured: replanning.Measured,
        trained: Sequence[protocols.Trajectory],
        *,
        may_move: bool = True,
    ) -> tuple[replanning.Decision[protocols.Plan] | None, dict[str, float]]:
        """What to do after a training step, and its metrics.

        Args:
          step: its number, from 1.
          measured: what it took.
          trained: what was trained on.
          may_move: nothing is decided otherwise.

        Returns:
          The decision, if there was a look; `plan` has been updated. The metrics compare what was predicted for this
          step, before it, with what it took, and what it would have taken under the plan before the last move.
        """
        metrics = self._metrics(measured)
        self._steps += 1
        if self._steps <= self._setting.staleness + 1:  # what finishes first is short, and engines were filling up
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
        """Takes in what was trained and what it took."""
        self._seen.append([(item.prompt_tokens, list(item.turns)) for item in trained if item.turns])
        shown = [one for step_seen in self._seen for one in step_seen]
        self._work = Work(self._setting, [prompt for prompt, _ in shown], [turns for _, turns in shown])
        self._learn_levels(measured)

    def refuse(self, plan: protocols.Plan) -> None:
        """The last decision could not be carried out: `plan` is in force. The cooldown holds all the same."""
        self._replanner.present, self._before = plan, None

    def snapshot(self) -> dict[str, Any]:
        """JSON-able: the plan in force, when it looked and moved, and the levels; lengths are seen again."""
        return {
            "plan": dataclasses.asdict(self.plan),
            "before": None if self._before is None else dataclasses.asdict(self._before),
            **self._replanner.snapshot(),
            "levels": dataclasses.asdict(self._levels),
            "measured": sorted(self._measured),
            "taken": [dataclasses.astuple(taken) for taken in self._taken],
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Takes a snapshot's state in place of its own."""
        self._replanner.restore(plans.of_values(snapshot["plan"]), snapshot)
        before = snapshot.get("before")
        self._before = None if before is None else plans.of_values(before)
        self._levels, self._measured = Levels(**snapshot["levels"]), set(snapshot["measured"])
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
        """What steps took, against what the sheet says of the trajectories seen last."""
        assert self._work is not None
        bare = self._work.predict(self.plan, Levels())
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
        if wait > replanning.WAITED * step:  # else training hid rollout, and nothing is known of it
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
        """What a move takes from the steps: training stands still while its mesh changes, and new instances start."""
        config = self._config
        resized = (present.data, present.fsdp, present.tensor) != (best.data, best.fsdp, best.tensor)
        before = {bucket.tensor_parallel: bucket.count for bucket in present.rollout}
        new = sum(
            bucket.tensor_parallel * max(0, bucket.count - before.get(bucket.tensor_parallel, 0))
            for bucket in best.rollout
        )
        return config.resize_seconds * resized + config.start_seconds * new / best.rollout_devices


def check_layout(run: configuration.RunConfig, setting: Setting) -> None:
    """Refuses a layout with instances that no plan may have: what it takes could not be predicted.

    Raises:
      ConfigError: the message names the degree, and what speaks against it.
    """
    for degree in run.rollout.tensor_parallel:
        if degree in setting.degrees:
            continue
        model = setting.model
        profile = setting.profile
        if profile is not None and degree not in profile.engines:
            known = ", ".join(map(str, sorted(profile.engines)))
            reason = f"config.planner.profile has measured {known}; record a run with it (launch/calibrate.py)"
        elif degree not in run.planner.degrees:
            reason = f"config.planner.degrees: {run.planner.degrees} leave it out; add it"
        elif degree > model.sheet.devices_per_node:
            reason = f"a node of {model.sheet.name} has {model.sheet.devices_per_node} devices; take narrower instances"
        else:
            room = max(0, model.kv_tokens(degree))
            reason = (
                f"by the sheet of {model.sheet.name} it holds {room} tokens beside the weights, of "
                f"config.rollout.max_context = {run.rollout.max_context}; is planner.hardware right?"
            )
        raise protocols.ConfigError(f"config.rollout.tensor_parallel: plans cannot use degree {degree}: {reason}")
