"""Assembles the case that launch/plan.py plans: machine, model and lengths, each from one source."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.cluster import resolved_run
from libra_jax.models import config as model_config
from libra_jax.models.hf import hub
from libra_jax.planning.costs import costs, hardware
from libra_jax.planning.forecast import forecast, serving
from libra_jax.planning.search import plans, search
from libra_jax.simulator import comparison, report, scripts, settings, traces, workloads

SAMPLES = 8_192
"""Maximum number of trajectories in the sample of lengths."""

MOST_ACCELERATORS = plans.MOST_DEVICES

MOST_TRAJECTORIES = 1_000_000
"""Maximum number of trajectories in a training step; each has entries in the search's tables."""

MOST_SLOTS = 256
"""Requests that an instance decodes at once if no config says how many: vLLM's default of max_num_seqs."""

PLAIN = (scripts.Script(200, (protocols.Turn(1),)),)
"""Rollouts if nothing but lengths is given: one turn after a prompt of 200 tokens."""

DEGREES = (1, 2, 4, 8)
OF_MODEL = {"model.path", "model.preset"}
"""Fields that name the model."""

SLOTS = {"simulation.slots", "rollout.slots", "rollout.slots_by_instance"}
"""Fields that set the number of requests that an instance decodes at once."""

SHARED = (
    "name",
    "algorithm.objective",
    "cluster.accelerators_per_host",
    "cluster.backend",
    "coordinator.group_size",
    "coordinator.groups_per_step",
    "coordinator.max_staleness",
    "model.logits_chunk",
    "model.lora",
    "model.remat",
    "planner.compiled",
    "planner.degrees",
    "planner.profile",
    "rollout.max_context",
    "rollout.max_tokens",
    "rollout.slots",
    "rollout.slots_by_instance",
    "rollout.tensor_parallel",
    "scheduler",
    "seed",
    "steps",
    "trainer.cores",
    "trainer.pack",
    "trainer.row_buckets",
    "trainer.row_tokens",
    "trainer.rows_per_micro_batch",
    "trainer.stream",
)
OF_SIMULATION = (*SHARED, "simulation", "workload")
"""Fields of a simulated run's config that a plan reads; the name of a group covers all of its fields."""

OF_RUN = (
    *SHARED,
    "model.path",
    "model.preset",
    "planner.hardware",
    "trainer.context",
    "trainer.data",
    "trainer.fsdp",
    "trainer.tensor",
)
"""Fields of a real run's config that a plan reads."""

COUNTS_IN_RUN = {"simulation.hardware": "planner.hardware", "simulation.model": "model.preset"}


@dataclass(frozen=True)
class PlanRequest:
    """The command line's choices of machine, model and lengths; None leaves the choice to the config.

    Attributes:
      hardware: name of a hardware sheet.
      model: name of a preset, or the Hugging Face id of its model.
      accelerators: number of accelerators to split.
      trace: file to take rollouts from.
      workload: synthetic workload to take rollouts from.
      lengths: wanted lengths of the rollouts.
      overrides: fields of the config that the command line sets.
    """

    hardware: str | None = None
    model: str | None = None
    accelerators: int | None = None
    trace: str | None = None
    workload: str | None = None
    lengths: scripts.RequestedLengths = dataclasses.field(default_factory=scripts.RequestedLengths)
    overrides: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.trace is not None and self.workload is not None:
            raise protocols.ConfigError("--workload: --trace says what rollouts are like; give one of the two")
        if self.trace is not None and self.lengths:
            raise protocols.ConfigError(
                "--trace: has lengths of its own; leave out --generated_tokens, --turns, --payload_tokens and "
                "--prompt_tokens, or the trace"
            )
        count = self.accelerators
        if count is not None and not 2 <= count <= MOST_ACCELERATORS:
            raise protocols.ConfigError(
                f"--accelerators: {count} cannot both train and roll out; give 2 or more"
                if count < 2
                else f"--accelerators: {count:,} are more than a plan is made for; give at most {MOST_ACCELERATORS:,}"
            )

    @property
    def length_flags(self) -> tuple[str, ...]:
        """Names of the flags that set the lengths."""
        names = (item.name for item in dataclasses.fields(self.lengths))
        changed = (name for name in names if getattr(self.lengths, name) is not None)
        flags = ("generated_tokens" if name == "generated" else name for name in changed)
        return (*(("workload",) if self.workload is not None else ()), *flags)


@dataclass(frozen=True)
class SampledWork:
    """A training step's trajectories, from a sample of a workload.

    Attributes:
      source: printed description of the sample's source.
      prompts: number of prompt tokens of each trajectory.
      turns: turns of each trajectory.
      count: number of trajectories in a training step.
      cut: share of the sample that ends because its context is full.
    """

    source: str
    prompts: list[int]
    turns: list[tuple[protocols.Turn, ...]]
    count: int
    cut: float = 0.0

    @classmethod
    def of(cls, run: config_lib.RunConfig, source: str, rollouts: Sequence[scripts.Script]) -> SampledWork:
        """Returns the work of a run's step, from a sample of its rollouts, which end where their context is full."""
        count, longest = run.coordinator.groups_per_step * run.coordinator.group_size, run.rollout.max_context
        fitting = [scripts.cut(script, longest) for script in rollouts]
        share = sum(one is not script for one, script in zip(fitting, rollouts, strict=True)) / max(1, len(rollouts))
        prompts, turns = [script.prompt_tokens for script in fitting], [script.turns for script in fitting]
        return cls(source, prompts, turns, count, share)

    @property
    def scripts(self) -> list[scripts.Script]:
        """The sample as scripts."""
        return [scripts.Script(*one) for one in zip(self.prompts, self.turns, strict=True)]

    def scaled(self, factor: float) -> SampledWork:
        """Returns a copy with `factor` times as many generated tokens."""
        longer = [
            tuple(
                dataclasses.replace(turn, generated_tokens=max(1, round(factor * turn.generated_tokens)))
                for turn in turns
            )
            for turns in self.turns
        ]
        return dataclasses.replace(self, turns=longer)


class CaseRecord(TypedDict):
    """What a plan is for, in the plan's file. `slots` are by degree."""

    model: str
    hardware: str
    accelerators: int
    trajectories: int
    staleness: int
    slots: Mapping[str, int]
    lengths: Mapping[str, object]


@dataclass(frozen=True)
class PlanInputs:
    """The input of a plan.

    Attributes:
      run: batches, rows, limits.
      name: name of the model.
      model: cost model.
      slots: number of slots of each of the config's instances.
      work: trajectories of a training step.
      devices: number of devices to split.
      length_flags: names of the flags that set the lengths.
    """

    run: config_lib.RunConfig
    name: str
    model: costs.CostModel
    slots: tuple[int, ...]
    work: SampledWork
    devices: int
    length_flags: tuple[str, ...] = ()

    def searched(self) -> search.PlanSearch:
        """Builds the search over the case's plans, with the seconds of a step that belong to no stage.

        Raises:
          ConfigError: a rollout fits no row or no instance, or the model fits no mesh.
        """
        trainer, longest = self.run.trainer, max(script.context_tokens for script in self.work.scripts)
        columns = max((trainer.row_tokens, *trainer.row_buckets))
        if self.length_flags and longest > columns + 1:
            raise protocols.ConfigError(
                f"--{', --'.join(self.length_flags)}: rollouts of up to {longest:,} tokens do not fit the config's "
                f"rows of {columns:,}; raise --config.trainer.row_tokens and --config.rollout.max_context, or give "
                "smaller lengths"
            )
        return self.predictions.searched(self.levels)

    @functools.cached_property
    def predictions(self) -> forecast.StepWork:
        """The predictions of the case's plans."""
        return forecast.StepWork(self.setting, self.work.prompts, self.work.turns)

    @property
    def levels(self) -> forecast.CorrectionLevels:
        """Levels of the predictions: the profile's, if there is one."""
        profile = self.setting.profile
        return (
            forecast.CorrectionLevels()
            if profile is None
            else forecast.CorrectionLevels(sync=profile.sync, between=profile.between)
        )

    def besides(self, split: search.DeviceSplit) -> float:
        """Returns the seconds of a split's step beside training in which the trainer takes part."""
        return self.predictions.besides(split.train.devices, self.levels)

    @functools.cached_property
    def setting(self) -> forecast.PlanConditions:
        """The setting of the case's plans."""
        try:
            setting = forecast.PlanConditions.from_config(
                self.run, self.model, self.devices, slots=self.slots, whole_hosts=True
            )
        except protocols.ConfigError as error:
            field, rest = "config.rollout.max_context: ", str(error)
            if not self.length_flags or not rest.startswith(field):
                raise
            # The flags made the context as long as it is.
            rest = rest.removeprefix(field).replace("lower it", "give smaller lengths", 1)
            raise protocols.ConfigError(f"--{', --'.join(self.length_flags)}: {rest}") from error
        return dataclasses.replace(setting, requests=self.work.count)

    @functools.cached_property
    def lengths(self) -> workloads.Summary:
        """Summary of the sample's lengths."""
        return workloads.summary_of(self.work.scripts)

    def subject(self) -> str:
        """Returns a clause that names the model and the machine."""
        billions = self.model.parameters / 1e9
        return f"{self.name} ({billions:.3g} billion parameters) on {self.devices:,} {self.model.sheet.name}"

    def as_json(self) -> CaseRecord:
        """Returns the case as the plan's file has it."""
        setting = self.setting
        return {
            "model": self.name,
            "hardware": self.model.sheet.name,
            "accelerators": self.devices,
            "trajectories": self.work.count,
            "staleness": setting.staleness,
            "slots": {str(degree): slots for degree, slots in zip(setting.degrees, setting.slots, strict=True)},
            "lengths": {
                "source": self.work.source,
                **dataclasses.asdict(self.lengths),
            },
        }


def case(values: Mapping[str, Any], request: PlanRequest) -> PlanInputs:
    """Builds the case to plan.

    Args:
      values: values of the config file, simulated or real, with the command line's overrides.
      request: the other flags.

    Raises:
      ConfigError: values contradict each other, or one is given twice; the message names it.
      DataError: the trace or the model directory cannot be used.
    """
    if request.model is not None:
        request = dataclasses.replace(request, model=model_config.preset_of(request.model))
    if values["cluster"]["accelerators_per_host"]:  # a run over hosts has Ray, and the job launchers set it
        values = {**values, "cluster": {**values["cluster"], "backend": "ray"}}
    simulated, batch = "simulation" in values, values["coordinator"]
    if batch["groups_per_step"] * batch["group_size"] > MOST_TRAJECTORIES:
        field = max(("groups_per_step", "group_size"), key=lambda name: int(batch[name]))
        raise protocols.ConfigError(
            f"config.coordinator.{field}: {batch[field]:,} makes more trajectories a step than a plan is made for; "
            f"groups_per_step x group_size is at most {MOST_TRAJECTORIES:,}"
        )
    fields = {"hardware": "planner.hardware", "model": "model.preset"}
    if simulated:
        fields = {"hardware": "simulation.hardware", "model": "simulation.model"}
    named = {flag: field for flag, field in fields.items() if getattr(request, flag) is not None}
    for flag, field in named.items():
        if field in request.overrides:
            raise protocols.ConfigError(f"--{flag}: --config.{field} says the same; give one of the two")
    try:
        result = _of_simulation(values, request) if simulated else _of_run(values, request)
    except protocols.ConfigError as error:
        sentence = str(error)
        # The flag that set the field is what the user has written.
        for flag, field in named.items():
            sentence = re.sub(rf"^config\.{re.escape(field)}: ", f"--{flag}: ", sentence)
        raise protocols.ConfigError(sentence) from error
    config_lib.check(
        not result.run.rollout.accelerators,
        "rollout.accelerators",
        "this plan is for one kind of accelerator; assign several with --inventory, or leave it empty",
    )
    if request.accelerators is not None:
        result = dataclasses.replace(result, devices=request.accelerators)
    if not 2 <= result.devices <= MOST_ACCELERATORS:
        raise protocols.ConfigError(
            f"--accelerators: the config has {result.devices:,}; give 2 to {MOST_ACCELERATORS:,} with this flag"
        )
    return result


def _of_simulation(values: Mapping[str, Any], request: PlanRequest) -> PlanInputs:
    """Builds the case of a simulated run, with a sample of its workload."""
    names = (("hardware", request.hardware), ("model", request.model))
    named = {name: text for name, text in names if text is not None}
    shape = {}
    if request.trace is not None:
        shape = {"shape": "trace", "trace": request.trace}
    elif request.workload is not None:
        shape = {"shape": request.workload, "trace": ""}
    rollout = dict(values["rollout"])
    overrides = request.overrides
    if request.length_flags and "rollout.max_context" in overrides and "rollout.max_tokens" not in overrides:
        # The file's limit of an output is for the file's own context.
        rollout["max_tokens"] = min(rollout["max_tokens"], max(1, rollout["max_context"] - 1))
    run = config_lib.parse(
        settings.SimulatedRun,
        {
            **values,
            "rollout": rollout,
            "simulation": {**values["simulation"], **named},
            "workload": {**values["workload"], **shape},
        },
    )
    devices = run.simulation.train_devices + sum(run.rollout.tensor_parallel)
    if not (named or request.length_flags):
        run = comparison.prepare(run, [run.scheduler.policy])
    # A mistyped name is refused before the workload is sampled, which takes seconds.
    model, slots = run.simulation.cost_model(run.model.lora), run.simulation.instance_slots(run.rollout)
    workload, groups = comparison.workload(run), run.steps * run.coordinator.groups_per_step
    size = run.coordinator.group_size
    # Every n-th task, so that the sample spans the whole workload and stays near SAMPLES.
    every, samples = max(1, -(-groups * size // SAMPLES)), range(min(size, SAMPLES))
    rollouts = [workload.script(task, sample) for task in range(0, groups, every) for sample in samples]
    rollouts = scripts.reshaped(rollouts, request.lengths)
    source = Path(run.workload.trace).name if run.workload.trace else run.workload.shape
    if request.length_flags:
        run = _limited(run, max(script.context_tokens for script in rollouts), request)
    if (named or request.length_flags) and not SLOTS & request.overrides:
        run, slots = _with_slots(run, model, rollouts)
    work = SampledWork.of(run, _source(source, request), rollouts)
    return PlanInputs(run, run.simulation.model, model, slots, work, devices, request.length_flags)


def _of_run(values: Mapping[str, Any], request: PlanRequest) -> PlanInputs:
    """Builds the case of a real run, with the trajectories of a trace or of the flags."""
    named: dict[str, object] = {}
    if request.model is not None:
        named["model"] = {**values["model"], "preset": request.model, "path": ""}
    if request.hardware is not None:
        named["planner"] = {**values["planner"], "hardware": request.hardware}
    run = config_lib.parse(config_lib.RunConfig, {**values, **named})
    path, chosen = run.model.path, run.model.preset != config_lib.ModelConfig().preset
    # A config may name a preset of its model's shape, for machines without the model.
    if path and chosen and not Path(path).exists() and request.overrides & OF_MODEL != {"model.path"}:
        run, path = dataclasses.replace(run, model=dataclasses.replace(run.model, path="")), ""
    if path and not Path(path).exists() and (shipped := model_config.preset_of(path)) != path:
        # The hub need not be asked for a shape that ships.
        run, path = dataclasses.replace(run, model=dataclasses.replace(run.model, preset=shipped, path="")), ""
    if path and "model.preset" in request.overrides:
        raise protocols.ConfigError(
            f"--config.model.preset: model.path={path} counts; leave out one of the two, or name a preset with --model"
        )
    try:  # a plan needs only the config.json; a plan for another model would be useless
        shape = resolved_run.resolve(hub.with_model(run), need_weights=bool(path)).policy
    except protocols.DataError as error:
        sentence = str(error).removeprefix("config.model.path: ").rstrip(".")
        raise protocols.DataError(
            f"config.model.path: {sentence}; to plan without the model, name a preset of its shape with --model"
        ) from error
    if request.trace is not None:
        read = traces.read(Path(request.trace))
        rollouts, source = [script for _, script in read[-SAMPLES:]], Path(request.trace).name
    elif request.workload is not None:
        groups, size = run.steps * run.coordinator.groups_per_step, run.coordinator.group_size
        of = workloads.WorkloadConfig(shape=request.workload)
        workload = workloads.create(of, seed=run.seed, tasks=groups, max_context=run.rollout.max_context)
        every, samples = max(1, -(-groups * size // SAMPLES)), range(min(size, SAMPLES))
        rollouts = [workload.script(task, sample) for task in range(0, groups, every) for sample in samples]
        rollouts, source = scripts.reshaped(rollouts, request.lengths), request.workload
    elif isinstance(request.lengths.generated, scripts.LogNormal):
        rollouts, source = scripts.reshaped(list(PLAIN) * SAMPLES, request.lengths), "one length distribution"
    elif request.lengths.generated is not None:
        raise protocols.ConfigError(
            "--generated_tokens: a mean alone scales the lengths of a workload, and there is none; give mean,P90, "
            "or --workload"
        )
    else:
        raise protocols.ConfigError(
            "--trace: the config of a real run has no workload to take lengths from; give a trace, such as the "
            "trace.jsonl of a run's folder, or --workload, or --generated_tokens=mean,P90"
        )
    config_lib.check(
        run.planner.hardware != hardware.THIS_MACHINE or run.trainer.platform not in ("cuda", "tpu"),
        "planner.hardware",
        f"{run.planner.hardware!r} is not what trainer.platform={run.trainer.platform} runs on; name the accelerator, "
        "such as --hardware=h100",
    )
    model = costs.of_hardware(run.planner.hardware, shape, "planner.hardware")
    devices = run.trainer.devices + sum(run.rollout.tensor_parallel)
    name = Path(path).name if path else run.model.preset
    return PlanInputs(
        run, name, model, (), SampledWork.of(run, _source(source, request), rollouts), devices, request.length_flags
    )


def _source(name: str, request: PlanRequest) -> str:
    """Returns the workload's name, and the flags that changed its lengths."""
    if not request.lengths:
        return name
    flags = [flag for flag in request.length_flags if flag != "workload"]
    return f"{name}, with --{', --'.join(flags)}"


def _limited(run: settings.SimulatedRun, longest: int, request: PlanRequest) -> settings.SimulatedRun:
    """Fits the run's context and rows to the longest rollout, because the config's are for another workload."""
    # The longest rollout and one more token, rounded up to a multiple of 1,024.
    context = max(1_024, -(-(longest + 1) // 1_024) * 1_024)
    rollout, trainer, overrides = run.rollout, run.trainer, request.overrides
    if "rollout.max_context" not in overrides:
        max_tokens = min(rollout.max_tokens, context - 1)
        rollout = dataclasses.replace(rollout, max_context=context, max_tokens=max_tokens)
    if not {"trainer.row_tokens", "trainer.row_buckets"} & overrides:
        trainer = dataclasses.replace(trainer, row_tokens=rollout.max_context, row_buckets=())
    return dataclasses.replace(run, rollout=rollout, trainer=trainer)


def _with_slots(
    run: settings.SimulatedRun, model: costs.CostModel, rollouts: Sequence[scripts.Script]
) -> tuple[settings.SimulatedRun, tuple[int, ...]]:
    """Gives the run one instance of each degree, with slots for as many live contexts as its cache holds."""
    asks = serving.Demand.of_trajectories(
        [script.prompt_tokens for script in rollouts], [script.turns for script in rollouts]
    )
    live = float(asks.context.sum() / asks.tokens.sum())  # mean context length over all decoded tokens
    slots = tuple(max(1, min(MOST_SLOTS, int(model.kv_tokens(degree) // live))) for degree in DEGREES)
    elastic = dataclasses.replace(run.elastic, hybrid=0, cores=())
    rollout = dataclasses.replace(run.rollout, tensor_parallel=DEGREES, slots_by_instance=())
    scheduler = dataclasses.replace(run.scheduler, max_remaining_tokens=())
    simulation = dataclasses.replace(run.simulation, slots=slots)
    changed = dataclasses.replace(run, elastic=elastic, rollout=rollout, scheduler=scheduler, simulation=simulation)
    return changed, slots


def draw(path: Path, best: search.DeviceSplit, splits: Sequence[search.DeviceSplit], case: PlanInputs) -> None:
    """Draws both stages' times against the number of training devices; a single split gets a bar for each stage."""
    stages = [
        ("training and weight sync", "#54a24b", best.train.seconds, [item.train.seconds for item in splits]),
        ("rollout", "#4c78a8", best.rollout_seconds, [item.rollout_seconds for item in splits]),
    ]
    sentence = f"Plan: {best.train.devices} train, {best.step_seconds:.0f} s a step"
    degrees = ", ".join(f"{bucket.count} of degree {bucket.tensor_parallel}" for bucket in best.rollout)
    title = [sentence, f"{case.subject()}; instances {degrees}", f"{case.work.source}: {case.lengths}"]
    with report.picture_axes(path, 2.6 if len(splits) > 1 else 1.6, title) as axes:
        if len(splits) == 1:  # a line needs two points
            times = [seconds for _, _, seconds, _ in stages]
            report.bars(axes, [name for name, *_ in stages], times, [0.0, 0.0], "{:.0f}")
            axes.set_xlabel("seconds a step; no other split fits")
            return
        devices = [item.train.devices for item in splits]
        for name, colour, _, times in stages:
            axes.plot(devices, times, "o-", color=colour, markersize=4, label=name)
        axes.axvline(best.train.devices, color="#c44e52", linewidth=1.2, label="the plan")
        axes.set_ylim(bottom=0.0)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("accelerators that train; the others roll out")
        axes.set_ylabel("seconds a step")
