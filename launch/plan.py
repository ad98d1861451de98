"""Plans a cluster: how many accelerators train, on which mesh, and which instances roll out what lengths.

  python launch/plan.py --config=configs/simulate.py --output=runs/plan.json
  python launch/plan.py --config=configs/simulate.py --trace=runs/mine/trace.jsonl --accelerators=64
  python launch/plan.py --config=configs/simulate.py --sweep=accelerators
  python launch/plan.py --config=configs/planned_cpu.py --trace=runs/mine/trace.jsonl   # a real run's

What steps cost is computed from a hardware sheet and the model's shape. Without --trace, lengths are those of the
config's workload; a real run's config has none. launch/train.py and launch/simulate.py take the file by --plan.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags
from rich import console, table

import cli
from libra_jax import config as libra_config
from libra_jax import protocols
from libra_jax.models import config as model_config
from libra_jax.planning import costs, forecast, hardware, search, uncertainty
from libra_jax.simulator import comparison, scripts, settings, traces

SAMPLES = 8_192
"""Trajectories that lengths are taken from, at most."""

OBJECTIVES = ("step_time", "per_accelerator", "cheapest")
SWEEPS = ("accelerators", "hardware", "lengths")
ACCELERATORS = (16, 32, 48, 64, 96, 128, 256, 512, 1_024, 2_048, 4_096, 10_240)
FACTORS = (0.25, 0.5, 1.0, 2.0)

_CONFIG = config_flags.DEFINE_config_file("config", None, "A run's config file, simulated or real.", lock_config=True)
_TRACE = flags.DEFINE_string("trace", None, "Trace (JSON lines) whose lengths to plan for.")
_ACCELERATORS = flags.DEFINE_integer("accelerators", None, "How many there are; default: as many as the config has.")
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write; the picture lies beside it, as .svg.")
_OBJECTIVE = flags.DEFINE_enum(
    "objective",
    "step_time",
    OBJECTIVES,
    "step_time: the shortest step; per_accelerator: the most tokens a second for each accelerator in use, of which "
    "there may be fewer; cheapest: the fewest accelerators whose step takes at most --within seconds.",
)
_WITHIN = flags.DEFINE_float("within", None, "Seconds that a step may take, for --objective=cheapest.")
_SWEEP = flags.DEFINE_enum("sweep", None, SWEEPS, "Plan again and again: for other numbers, hardware or lengths.")


@dataclasses.dataclass(frozen=True)
class Work:
    """A training step's trajectories, from a sample of a workload."""

    prompts: list[int]
    turns: list[tuple[protocols.Turn, ...]]
    count: int

    def scaled(self, factor: float) -> Work:
        """The same with so many times as many generated tokens."""
        longer = [
            tuple(
                dataclasses.replace(turn, generated_tokens=max(1, round(factor * turn.generated_tokens)))
                for turn in turns
            )
            for turns in self.turns
        ]
        return dataclasses.replace(self, turns=longer)

    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(scripts.Script(*one).context_tokens for one in zip(self.prompts, self.turns, strict=True))


@dataclasses.dataclass(frozen=True)
class Case:
    """What to plan for.

    Attributes:
      run: batches, rows, limits.
      model: what things cost.
      slots: of the config's instances.
      work: of a training step.
      devices: to split.
    """

    run: libra_config.RunConfig
    model: costs.CostModel
    slots: tuple[int, ...]
    work: Work
    devices: int

    def searched(self) -> search.Search:
        """The search for its plans."""
        return forecast.Work(self._setting(), self.work.prompts, self.work.turns).search.weighed(1.0, self.besides)

    @property
    def calibrated(self) -> bool:
        """Times come from what runs measured (`planner.profile`)."""
        return bool(self.run.planner.profile)

    @property
    def besides(self) -> float:
        """Seconds of a step, beside training, that the trainer takes part in; 0 where nothing was measured."""
        profile = self._setting().profile
        return 0.0 if profile is None else profile.besides

    def uncertainty(self, plan: protocols.Plan) -> forecast.Prediction:
        """Of a plan's times, relative: a profile's errors on held-out steps, or else by the coefficients."""
        profile = self._setting().profile
        if profile is not None:
            return forecast.Prediction(*(profile.errors[name] for name in ("train", "rollout", "total")))
        return uncertainty.relative(self._setting(), self.work.prompts, self.work.turns, plan)

    def _setting(self) -> forecast.Setting:
        setting = forecast.Setting.of_run(self.run, self.model, self.devices, slots=self.slots)
        return dataclasses.replace(setting, requests=self.work.count)


def main() -> None:
    values = _CONFIG.value.to_dict()
    case = _of_simulation(values) if "simulation" in values else _of_run(values)
    if _ACCELERATORS.value is not None:
        case = dataclasses.replace(case, devices=_ACCELERATORS.value)
    if case.devices < 2:
        raise protocols.ConfigError(f"--accelerators: {case.devices} cannot both train and roll out; give 2 or more")
    if (_OBJECTIVE.value == "cheapest") != (_WITHIN.value is not None):
        raise protocols.ConfigError(
            "--within: give the seconds of a step with --objective=cheapest, and only with that"
        )
    if _WITHIN.value is not None and not 0.0 < _WITHIN.value < math.inf:
        raise protocols.ConfigError(
            f"--within: {_WITHIN.value:g} is no time that a step may take; give seconds above 0"
        )
    if _SWEEP.value and _OUTPUT.value is not None:
        raise protocols.ConfigError("--output: a sweep writes no file; leave --output or --sweep out")
    output = None if _OUTPUT.value is None else Path(_OUTPUT.value)
    if output is not None:
        cli.check_output(output)
    if _SWEEP.value:
        _print_sweep(case)
        return
    searched = case.searched()
    best, seconds = _timed(searched, case.devices)
    splits = list(searched.splits(case.devices, near=best if _OBJECTIVE.value == "step_time" else None))
    unsure = case.uncertainty(best.plan)
    _print(best, case, unsure)
    if _OBJECTIVE.value == "step_time":
        print(f"Runner-up: {search.compared(best, splits)}.")
    else:
        print(f"The shortest step that {case.devices} accelerators allow takes {_shortest(splits):.1f} s.")
    if output is not None:
        _write(output, as_json(best, case, unsure, seconds), best, splits, case.run.name)


def _timed(searched: search.Search, devices: int) -> tuple[search.Split, float]:
    """The best by --objective, and the seconds that finding it took."""
    began = time.perf_counter()
    if _OBJECTIVE.value == "cheapest":
        found = searched.cheapest(_WITHIN.value, devices)
    elif _OBJECTIVE.value == "per_accelerator":
        found = searched.thriftiest(devices)
    else:
        found = searched.best(devices)
    return found, time.perf_counter() - began


def _of_simulation(values: dict[str, Any]) -> Case:
    """A simulated run, and a sample of its workload."""
    if _TRACE.value is not None:
        values["workload"] |= {"shape": "trace", "trace": _TRACE.value}
    run = comparison.prepare(libra_config.parse(settings.SimulatedRun, values), [values["scheduler"]["policy"]])
    workload, groups = comparison.workload(run), run.steps * run.coordinator.groups_per_step
    size = run.coordinator.group_size
    every = max(1, -(-groups * size // SAMPLES))
    drawn = [workload.script(task, sample) for task in range(0, groups, every) for sample in range(size)]
    devices = run.simulation.train_devices + sum(run.rollout.tensor_parallel)
    work = _work(run, drawn)
    return Case(run, run.simulation.cost_model(), run.simulation.slots, work, devices)


def _of_run(values: dict[str, Any]) -> Case:
    """A real run, and the trajectories of a trace."""
    run = libra_config.parse(libra_config.RunConfig, values)
    if _TRACE.value is None:
        raise protocols.ConfigError(
            "--trace: the config of a real run has no workload to take lengths from; give a trace, such as the "
            "trace.jsonl of a run's folder"
        )
    path = run.model.path
    shape = model_config.read_directory(path) if path else model_config.load_preset(run.model.preset)
    model = costs.of_hardware(run.planner.hardware, shape, "planner.hardware")
    devices = run.trainer.devices + sum(run.rollout.tensor_parallel)
    return Case(run, model, (), _work(run, traces.read(Path(_TRACE.value))[-SAMPLES:]), devices)


def _work(run: libra_config.RunConfig, drawn: Sequence[scripts.Script]) -> Work:
    count = run.coordinator.groups_per_step * run.coordinator.group_size
    return Work([script.prompt_tokens for script in drawn], [script.turns for script in drawn], count)


def _shortest(splits: Sequence[search.Split]) -> float:
    return min(split.step_seconds for split in splits)


def _print(best: search.Split, case: Case, unsure: forecast.Prediction) -> None:
    mesh, rows = best.train, table.Table("stage", "accelerators", "as", "serves", "seconds a step")
    shape = f"data {mesh.data} x fsdp {mesh.fsdp} x tensor {mesh.tensor}, {mesh.memory_bytes / 1e9:.0f} GB each"
    rows.add_row("train", str(mesh.devices), shape, "", f"{best.train_seconds - case.besides:.1f}")
    for index, bucket in enumerate(best.rollout):
        last = index == len(best.rollout) - 1
        rows.add_row(
            "rollout",
            str(bucket.count * bucket.tensor_parallel),
            f"{bucket.count} of degree {bucket.tensor_parallel}",
            "whatever is longer" if last else f"up to {bucket.max_remaining_tokens:,} tokens",
            f"{best.rollout_seconds:.1f}" if index == 0 else "",
        )
    console.Console().print(rows)
    unused = case.devices - best.devices
    idle = f"; {unused} of {case.devices} accelerators have no use" if unused else ""
    lengths = [sum(turn.generated_tokens for turn in turns) for turns in case.work.turns]
    print(
        f"For {case.work.count} trajectories a step, as long as those of a sample of {len(lengths):,} (mean "
        f"{sum(lengths) / len(lengths):,.0f} tokens)."
    )
    if case.calibrated:
        print(f"A step takes {best.step_seconds:.1f} s by what was measured ({case.run.planner.profile}){idle}.")
        print(
            f"Of that, {case.besides:.1f} s are publication and what belongs to no stage. On steps that were not "
            f"fitted to, training was {unsure.train:.0%} off, rollout {unsure.rollout:.0%}, a step {unsure.step:.0%}."
        )
        return
    print(f"A step takes {best.step_seconds:.1f} s by the hardware sheet, not calibrated by any run{idle}.")
    print(
        f"Were each coefficient off by {uncertainty.MOVE:.0%}: training {unsure.train:.0%}, rollout "
        f"{unsure.rollout:.0%}, a step {unsure.step:.0%} more or less."
    )


def _print_sweep(case: Case) -> None:
    rows = table.Table(
        _SWEEP.value, "train", "data x fsdp x tensor", "rollout", "step, s", "tokens/s each", "solved, s"
    )
    refused = []
    for name, one in _cases(case):
        try:
            best, seconds = _timed(one.searched(), one.devices)
        except protocols.ConfigError as error:
            rows.add_row(name, "no plan")
            refused.append(f"{name}: {error}")
            continue
        mesh, work = best.train, one.work
        tokens = sum(turn.generated_tokens for turns in work.turns for turn in turns) / len(work.turns)
        rows.add_row(
            name,
            str(mesh.devices),
            f"{mesh.data} x {mesh.fsdp} x {mesh.tensor}",
            ", ".join(f"{bucket.count} of {bucket.tensor_parallel}" for bucket in best.rollout),
            f"{best.step_seconds:.1f}",
            f"{tokens * work.count / best.step_seconds / best.devices:.1f}",
            f"{seconds:.3f}",
        )
    console.Console().print(rows)
    if _SWEEP.value == "accelerators":
        print(
            f"Each case has {case.work.count / case.devices:.3g} trajectories a step for every accelerator, as the "
            f"base of {case.devices} has."
        )
    print("By what was measured." if case.calibrated else "By hardware sheets, not calibrated by any run.")
    for line in refused:
        print(line)


def _cases(case: Case) -> Iterator[tuple[str, Case]]:
    work, run = case.work, case.run
    if _SWEEP.value == "accelerators":
        for count in ACCELERATORS:  # as much work for each accelerator as the config has
            scaled = dataclasses.replace(work, count=max(1, work.count * count // case.devices))
            yield f"{count:,}", dataclasses.replace(case, work=scaled, devices=count)
    elif _SWEEP.value == "lengths":
        for factor in FACTORS:
            scaled = work.scaled(factor)
            trainer = _with_rows_of(run.trainer, scaled.longest())
            yield f"x {factor:g}", dataclasses.replace(case, work=scaled, run=dataclasses.replace(run, trainer=trainer))
    else:
        for name in hardware.names():
            here, there = case.model, costs.of_hardware(name, case.model.shape, "--sweep")
            keeps = here.coefficients.activation_bytes or there.coefficients.activation_bytes  # but on a CPU
            coefficients = dataclasses.replace(here.coefficients, activation_bytes=keeps)
            model = dataclasses.replace(here, sheet=there.sheet, coefficients=coefficients)
            yield name, dataclasses.replace(case, model=model)


def _with_rows_of(trainer: libra_config.TrainerConfig, longest: int) -> libra_config.TrainerConfig:
    """The trainer with rows that hold a sequence of so many tokens."""
    if longest <= max((trainer.row_tokens, *trainer.row_buckets)):
        return trainer
    whole = -(-longest // trainer.tensor) * trainer.tensor
    return dataclasses.replace(trainer, row_buckets=(*trainer.row_buckets, whole))


def as_json(best: search.Split, case: Case, unsure: forecast.Prediction, seconds: float) -> dict[str, Any]:
    """The plan as its file has it."""
    mesh = best.train
    return {
        "train": {"devices": mesh.devices, "data": mesh.data, "fsdp": mesh.fsdp, "tensor": mesh.tensor},
        "rollout": [dataclasses.asdict(bucket) for bucket in best.rollout],
        "predicted": {
            "train_seconds": best.train_seconds - case.besides,
            "rollout_seconds": best.rollout_seconds,
            "step_seconds": best.step_seconds,
        },
        "uncertainty": {
            "train_seconds": unsure.train,
            "rollout_seconds": unsure.rollout,
            "step_seconds": unsure.step,
        },
        "solve_seconds": seconds,
        "calibrated": case.calibrated,
    }


def _write(output: Path, made: dict[str, Any], best: search.Split, splits: list[search.Split], title: str) -> None:
    picture = output.with_suffix(".svg")
    try:
        output.write_text(json.dumps(made, indent=2) + "\n")
        _draw(picture, best, splits, title)
    except OSError as error:
        raise protocols.DataError(f"--output: {output} cannot be written ({error.strerror or error})") from error
    print(f"wrote {output} and {picture}")


def _draw(path: Path, best: search.Split, splits: list[search.Split], title: str) -> None:
    """Both stages' times against the number of training devices."""
    from matplotlib import figure, rc_context

    devices = [item.train.devices for item in splits]
    with rc_context({"svg.hashsalt": "libra-jax", "font.size": 10}):
        drawn = figure.Figure(figsize=(7.0, 3.6), layout="constrained")
        axes = drawn.add_subplot()
        axes.plot(devices, [item.train_seconds for item in splits], "o-", color="#54a24b", label="training")
        axes.plot(devices, [item.rollout_seconds for item in splits], "o-", color="#4c78a8", label="rollout")
        label = f"plan: {best.step_seconds:.0f} s a step"
        axes.axvline(best.train.devices, color="#c44e52", linewidth=1.2, label=label)
        axes.set_ylim(bottom=0.0)
        axes.set_xlabel("accelerators that train; the others roll out")
        axes.set_ylabel("seconds a step")
        axes.set_title(title, loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        drawn.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    cli.run(main, settings.SimulatedRun, default_config="configs/simulate.py")
