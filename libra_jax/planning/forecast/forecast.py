"""Predicts what a training step takes under a plan, by the hardware sheet and at measured levels."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.models import feasibility
from libra_jax.planning.costs import costs, profiles
from libra_jax.planning.forecast import confusion, meshes, pipeline, serving
from libra_jax.planning.search import search

MOVE = 0.3
"""Relative change of a cost coefficient, of which `uncertainty` computes the effect."""

SAMPLES = 512
"""Most trajectories from which `uncertainty` computes times."""

BATCHES = 8
"""Most batches over which the time of a training step is averaged."""

SIMPLER = 0.02
"""Share of a step that each further degree of a plan has to save: predictions are no better than that."""

FOLLOWED, ROUGHLY = 2_048, 128
"""Most requests of a training step that `pipeline` follows, and most in a rough prediction."""


@dataclass(frozen=True)
class PlanConditions:
    """Conditions that a plan is made for, apart from lengths.

    Attributes:
      trainer: trainer of the training steps.
      degrees: tensor-parallel degrees that instances may have.
      slots: slots of an instance of each degree.
      devices: devices to split.
      requests: trajectories of a training step.
      staleness: max staleness, in training steps.
      mesh: (data, fsdp, tensor) if the trainer cannot change; None leaves it to the plan.
      reach: most devices of a mesh that a running trainer can change to; None: any mesh.
      profile: measurements of earlier runs here, if there are any.
      group_size: trajectories of a group, which start together.
      policy: scheduling policy, by which requests find their instances.
      cache_share: share of a cache that the policy fills; 0: any number of contexts.
      ageing: seconds after which a waiting request takes any free slot, whether or not the cache has room.
      part_tokens: fewest tokens of finished groups on which a step begins (`trainer.stream`); None: steps take whole
        batches.
      host_devices: devices of a host if no host may both train and roll out; 1: any device may do either.
    """

    model: costs.CostModel
    trainer: meshes.TrainerProperties
    degrees: tuple[int, ...]
    slots: tuple[int, ...]
    devices: int
    requests: int
    staleness: int
    mesh: tuple[int, int, int] | None = None
    reach: int | None = None
    profile: profiles.Profile | None = None
    group_size: int = 1
    policy: str = "cmlfq"
    cache_share: float = 0.9
    ageing: float = math.inf
    part_tokens: int | None = None
    host_devices: int = 1

    @property
    def overlaps(self) -> bool:
        """Whether training overlaps with rollout."""
        return self.staleness > 0 or self.part_tokens is not None

    @classmethod
    def from_config(
        cls,
        run: config_lib.RunConfig,
        model: costs.CostModel,
        devices: int,
        *,
        slots: Sequence[int] = (),
        mesh: tuple[int, int, int] | None = None,
        reach: int | None = None,
        together: int | None = None,
        whole_hosts: bool = False,
    ) -> PlanConditions:
        """Returns the setting of a run.

        Args:
          model: cost model by the sheet; measurements replace it if `planner.profile` is set.
          devices: devices that train and roll out.
          slots: slots of its instances, in the order of `rollout.tensor_parallel`; empty takes the slots of `rollout`.
          mesh: the trainer's mesh, if it has to stay.
          reach: devices of the largest mesh that the trainer can change to, if it runs.
          together: most devices that the run has on one host, if it runs: a host may have granted fewer than it has.
          whole_hosts: whether plans give each host one role, as a run begins (`cluster.hosts`).

        Raises:
          ConfigError: no instance that plans may use holds a whole context, or the profile is not of this model and
            hardware.
          DataError: the profile cannot be read.
        """
        profile = profiles.read(Path(run.planner.profile)) if run.planner.profile else None
        if profile is not None:
            model = profile.cost_model(model)
        max_degree, context = _max_degree(run, model), run.rollout.max_context
        max_degree = max_degree if together is None else min(max_degree, together)
        host, candidates = run.cluster.accelerators_per_host if whole_hosts else 0, []
        for degree in sorted(set(run.planner.degrees)):
            with contextlib.suppress(protocols.ConfigError):  # the degree does not divide the model
                feasibility.check_tensor_parallel(model.shape, degree)
                candidates += [degree] if degree <= max_degree and not host % degree else []
        degrees = tuple(degree for degree in candidates if model.kv_tokens(degree) >= context)
        if not degrees:
            room = max((model.kv_tokens(degree) for degree in candidates), default=0)
            raise protocols.ConfigError(
                f"config.rollout.max_context: beside the weights, no instance on {model.sheet.name} of the "
                f"tensor-parallel degrees {candidates} (planner.degrees) holds {context} tokens; the most is "
                f"{max(0, room)}: lower it, or plan for other hardware or wider instances"
            )
        if profile is not None:
            degrees = profile.measured(degrees)
        slots_by_degree = config_lib.slots_by_degree(run.rollout.tensor_parallel, slots or run.rollout.instance_slots)
        micro_batch = run.trainer.micro_batch_rows * run.trainer.row_tokens
        return cls(
            model,
            meshes.TrainerProperties.from_config(run, model.sheet),
            degrees,
            tuple(slots_by_degree.get(degree, run.rollout.slots) for degree in degrees),
            devices,
            run.coordinator.groups_per_step * run.coordinator.group_size,
            run.coordinator.max_staleness,
            mesh,
            reach,
            profile,
            run.coordinator.group_size,
            run.scheduler.policy,
            confusion.cache_share(run.scheduler),
            run.scheduler.ageing_seconds,
            {"off": None, "group": 0, "micro_batch": micro_batch}[run.trainer.stream],
            max(1, host),
        )


def _max_degree(run: config_lib.RunConfig, model: costs.CostModel) -> int:
    """Returns the most devices that an instance may have: those of a node, or of one of the run's hosts."""
    return min(model.sheet.devices_per_node, run.cluster.accelerators_per_host or model.sheet.devices_per_node)


def check_layout(run: config_lib.RunConfig, setting: PlanConditions) -> None:
    """Refuses a layout with instances that no plan may have, because their time could not be predicted.

    Raises:
      ConfigError: the message names the degree and the reason.
    """
    for degree in run.rollout.tensor_parallel:
        if degree in setting.degrees:
            continue
        model = setting.model
        profile = setting.profile
        if profile is not None and degree not in profile.engines:
            measured_degrees = ", ".join(map(str, sorted(profile.engines)))
            reason = (
                f"config.planner.profile has measured {measured_degrees}; record a run with it (launch/calibrate.py)"
            )
        elif degree not in run.planner.degrees:
            reason = f"config.planner.degrees: {run.planner.degrees} leave it out; add it"
        elif degree > (max_degree := _max_degree(run, model)):
            reason = f"a node of {model.sheet.name} has {max_degree} devices; take narrower instances"
        else:
            room = max(0, model.kv_tokens(degree))
            reason = (
                f"by the sheet of {model.sheet.name} it holds {room} tokens beside the weights, of "
                f"config.rollout.max_context = {run.rollout.max_context}; is planner.hardware right?"
            )
        raise protocols.ConfigError(f"config.rollout.tensor_parallel: plans cannot use degree {degree}: {reason}")


@dataclass(frozen=True)
class Prediction:
    """Times of a training step under a plan, in seconds (`uncertainty` gives shares of them in the same form).

    Attributes:
      train: time of the trainer's step, without the weight sync.
      rollout: time of the step's requests: if no training overlaps with it, that in which no step trains, else an
        estimate by the instances' throughput and the longest path, at most the step.
      step: time of the whole step.
    """

    train: float
    rollout: float
    step: float


@dataclass(frozen=True)
class CorrectionLevels:
    """Measured corrections of the sheet.

    Attributes:
      train: factor on the sheet's time of a training step.
      rollout: factor on the sheet's time of a step's requests.
      sync: seconds of a weight sync; None: those of the sheet.
      between: seconds of a step that belong to no stage.
    """

    train: float = 1.0
    rollout: float = 1.0
    sync: float | None = None
    between: float = 0.0


class StepWork:
    """The work of training steps of such trajectories, and the plans for it.

    Attributes:
      prompts: tokens of each trajectory's prompt.

    Args:
      setting: conditions of the plans.
      prompts: tokens of each trajectory's prompt.
      trained: tells for each trajectory whether it is trained; None: all are. Rollout makes the others, too. If none is
        trained, all count, because nothing else says what training takes.

    Raises:
      DataError: there are no trajectories.
      ConfigError: no device or instance can hold the model or a context; the message says what is short.
    """

    def __init__(
        self,
        setting: PlanConditions,
        prompts: Sequence[int],
        turns: Sequence[Sequence[protocols.Turn]],
        trained: Sequence[bool] | None = None,
    ) -> None:
        self._setting = setting
        self.prompts, self.turns = prompts, turns
        self._sample = serving.Demand.in_order(prompts, turns)
        if trained is None or not any(trained):
            trained = [True] * len(turns)
        trained_indices = [index for index, one in enumerate(trained) if one]
        # Tokens of each whole context at its end; its last tool return is never shown.
        contexts = [
            prompts[index]
            + sum(max(1, turn.generated_tokens) + turn.payload_tokens for turn in turns[index])
            - turns[index][-1].payload_tokens
            for index in trained_indices
            if turns[index]
        ]
        count = max(1, round(setting.requests * len(trained_indices) / len(trained)))
        batches = max(1, min(BATCHES, len(contexts) // count))
        # Spread evenly over the trained trajectories, so that the sample has their lengths.
        lengths = [contexts[index * len(contexts) // (count * batches)] for index in range(count * batches)]
        streams, size = setting.part_tokens is not None, min(setting.group_size, setting.requests)
        parts = setting.requests // size if streams else 0
        self.training = meshes.Training(setting.model, lengths, setting.trainer, batches, parts)
        self._tools = any(turn.tool is not None for one in turns for turn in one)
        self._engines = setting.model if setting.profile is None else setting.profile.rollout(setting.model)
        slots = dict(zip(setting.degrees, setting.slots, strict=True))
        pauses = {degree: setting.model.load_seconds(degree) for degree in setting.degrees}
        self._pools = serving.Pools(self._engines, self._sample, slots, room=setting.cache_share, pauses=pauses)
        self._steps: dict[tuple[object, ...], pipeline.Steps] = {}
        # A rollout's longest context is what is trained of it.
        self._tokens = self._sample.peak.tolist() if streams else []
        self._min_part_share = (setting.part_tokens or 0) / (setting.requests * float(self._sample.peak.mean()))
        self._sequences: dict[int, tuple[pipeline.Integers, list[int], float]] = {}  # by groups of a step
        host = setting.host_devices
        front = search.front_of(
            self.training, setting.devices, mesh=setting.mesh, reach=setting.reach, host_devices=host
        )
        fastest = front[-1]
        rollout = serving.Serving(
            self._engines,
            self._sample.of_step(setting.requests),
            setting.degrees,
            setting.slots,
            staleness=setting.staleness,
            after=fastest.seconds - fastest.early + self.besides(fastest.devices, CorrectionLevels()),
        )
        self.search = search.PlanSearch(
            rollout,
            front,
            setting.devices,
            staleness=setting.staleness,
            step=self._step,
            simpler=SIMPLER,
            host_devices=host,
        )

    def besides(self, devices: int, levels: CorrectionLevels) -> float:
        """Returns the trainer's seconds of a step beside training: the weight sync, and time of no stage."""
        if levels.sync is not None:
            return levels.sync + levels.between
        model, degrees = self._setting.model, self._setting.degrees
        # The last engine to have new weights ends the sync.
        return model.gather_seconds(devices) + max(map(model.load_seconds, degrees)) + levels.between

    def confusion(self, bands: int) -> confusion.Confusion:
        """Returns the confusion of predicted and true lengths that plans with this number of bands assume."""
        return confusion.calibrated(self._setting.policy, bands, tools=self._tools)

    def searched(self, levels: CorrectionLevels) -> search.PlanSearch:
        """Returns the search at these levels; its seconds are those of rollout by the sheet."""
        return self.search.weighed(
            levels.train / levels.rollout,
            lambda devices: self.besides(devices, levels) / levels.rollout,
            functools.partial(self._step, level=levels.rollout),
        )

    def best(self, levels: CorrectionLevels) -> protocols.Plan:
        """Returns the plan with the shortest step at these levels."""
        return self.searched(levels).best(self._setting.devices).plan

    def predict(self, plan: protocols.Plan, levels: CorrectionLevels) -> Prediction:
        """Predicts the seconds of both stages, each at its level, and of the step; infinite if a context fits no
        instance."""
        mesh = self.training.mesh(plan.data, plan.fsdp, plan.tensor)
        train = levels.train * mesh.seconds
        rollout = levels.rollout * self.search.rollout_seconds(plan.rollout)
        if not math.isfinite(rollout):
            return Prediction(train, rollout, math.inf)
        # Only the ratio of the stages matters, so rollout keeps the sheet's scale.
        besides, ratio = self.besides(plan.train_devices, levels), levels.train / levels.rollout
        cycle = train + besides
        scaled = dataclasses.replace(
            mesh, seconds=cycle / levels.rollout, early=ratio * mesh.early, part=ratio * mesh.part
        )
        steps = self._follow(plan.rollout, scaled, level=levels.rollout)
        step = levels.rollout * steps.seconds
        if mesh.early:  # parts take longer than the whole
            train = levels.rollout * steps.train - besides
        # Stages that take turns add up.
        return Prediction(train, min(rollout, step) if self._setting.overlaps else step - cycle, step)

    def _step(
        self, buckets: Sequence[protocols.PlannedBucket], train: meshes.Mesh, *, rough: bool, level: float = 1.0
    ) -> float:
        """Returns the seconds of a step; see `_follow`."""
        return self._follow(buckets, train, rough=rough, level=level).seconds

    def _follow(
        self, buckets: Sequence[protocols.PlannedBucket], train: meshes.Mesh, *, rough: bool = False, level: float
    ) -> pipeline.Steps:
        """Returns the times of steps with these instances and this mesh, whose seconds are those of training and weight
        sync, both on the sheet's scale of rollout, whose measured level is `level`."""
        setting = self._setting
        key = (tuple(buckets), train.seconds, train.early, train.part, rough, level)
        if key not in self._steps:
            # A large cluster is followed at a smaller scale.
            size = min(setting.group_size, setting.requests)
            groups_per_step = max(1, setting.requests // size)
            groups = min(groups_per_step, max(1, (ROUGHLY if rough else FOLLOWED) // size))
            rules = pipeline.Cycle(
                groups,
                size,
                setting.staleness,
                train.seconds,
                setting.ageing / level,
                train.early if groups > 1 else 0.0,
                train.part,
                self._min_part_share,
            )
            if groups not in self._sequences:
                sequence = self._sequence(rules, setting.requests)
                # Requests that are followed may be longer than all are on average: they get as much more to run on.
                length_ratio = float(self._sample.tokens[sequence].mean() / self._sample.tokens.mean())
                self._sequences[groups] = sequence, sequence.tolist(), length_ratio
            sequence, sampled_requests, length_ratio = self._sequences[groups]
            pools = [
                self._pools.pool(one.tensor_parallel, one.count * length_ratio * groups / groups_per_step)
                for one in buckets
            ]
            predicted_pools = [-1] * len(sampled_requests)
            if bounds := [bucket.max_remaining_tokens for bucket in buckets[:-1]]:
                bands = np.searchsorted(bounds, self._sample.tokens[sequence])
                predicted_pools = self.confusion(len(buckets)).predict_bands(bands).tolist()
            self._steps[key] = pipeline.follow(pools, sampled_requests, predicted_pools, rules, self._tokens)
        return self._steps[key]

    def _sequence(self, rules: pipeline.Cycle, requests: int) -> pipeline.Integers:
        """Returns the sampled request of each dispatched one: groups of neighbours, spread evenly over the sample."""
        tokens, size = self._sample.tokens, rules.size
        sampled = len(tokens)
        numbers = np.arange(rules.requests)
        batch = rules.groups * size
        smaller = batch < requests
        groups = np.arange(max(1, sampled // size))
        if smaller and len(groups) > 1:
            # Few groups follow each other here, so that chance would make all of them long. Each batch gets some of all
            # lengths.
            groups = tokens[: len(groups) * size].reshape(-1, size).sum(1).argsort(kind="stable")
        first = groups[(numbers // size * confusion.GOLDEN % 1.0 * len(groups)).astype(np.int64)] * size
        sequence = (first + numbers % size) % sampled
        if smaller:
            # A step waits for its longest request, and a smaller batch has the longest of fewer.
            longest = np.argsort(-tokens, kind="stable")[: max(1, round(sampled / requests))]
            batches = sequence.reshape(-1, batch)
            steps = np.arange(len(batches))
            batches[steps, tokens[batches].argmax(1)] = longest[steps % len(longest)]
        return sequence


def uncertainty(
    setting: PlanConditions, prompts: Sequence[int], turns: Sequence[Sequence[protocols.Turn]], plan: protocols.Plan
) -> Prediction:
    """Returns the uncertainty of each time of a plan, as a share of the time.

    Moves each cost coefficient by `MOVE` both ways, one at a time. The effects are taken as independent, so the larger
    effect of each coefficient adds up in squares. This holds for times computed from a hardware sheet alone; levels
    correct measured times (`planner`).

    Args:
      setting: conditions of the plan.
      prompts: tokens of each trajectory's prompt.
    """
    # Every n-th trajectory keeps the distribution of lengths.
    every = -(-len(prompts) // SAMPLES)
    prompts, turns = prompts[::every], turns[::every]

    def seconds(model: costs.CostModel) -> tuple[float, ...] | None:
        try:
            work = StepWork(dataclasses.replace(setting, model=model), prompts, turns)
        except protocols.ConfigError:
            return None
        times = dataclasses.astuple(work.predict(plan, CorrectionLevels()))
        return times if all(map(math.isfinite, times)) else None

    base = seconds(setting.model)
    assert base is not None
    effects: dict[str, list[float]] = {}
    for name, value in costs.moved(setting.model.coefficients, MOVE):
        coefficients = dataclasses.replace(setting.model.coefficients, **{name: value})  # type: ignore[arg-type]
        moved_times = seconds(dataclasses.replace(setting.model, coefficients=coefficients))
        if moved_times is None:  # the plan no longer fits into the memory, so there is no time to compare
            continue
        changes = [abs(after / before - 1.0) for before, after in zip(base, moved_times, strict=True)]
        # The larger effect of the move down and the move up.
        effects[name] = [max(pair) for pair in zip(changes, effects.get(name, changes), strict=True)]
    return Prediction(*(math.hypot(*one) for one in zip(*effects.values(), strict=True)))
