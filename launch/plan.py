"""Plans a cluster: how many accelerators train, on which mesh, and which instances roll out which lengths.

How many of 16 H100s should train Qwen3-8B for search agents of about 4k tokens? No weights and no trace are needed:

  python launch/plan.py --hardware=h100 --model=Qwen3-8B --accelerators=16 --workload=search --generated_tokens=4000

--generated_tokens=4000,7000 gives mean,P90 of a log-normal. A mean alone keeps the wide spread of the workload.
--turns, --payload_tokens and --prompt_tokens set the other lengths; lengths without a flag are the workload's (swe,
search, math). The lengths may also come from a trace or a config's own workload:

  python launch/plan.py --config=configs/simulate.py --output=runs/plan.json
  python launch/plan.py --config=configs/simulate.py --trace=runs/mine/trace.jsonl --accelerators=64
  python launch/plan.py --config=configs/simulate.py --sweep=accelerators
  python launch/plan.py --config=configs/planned_cpu.py --trace=runs/mine/trace.jsonl   # a real run's

Accelerators on several hosts are planned in whole hosts, because no host both trains and rolls out:

  python launch/plan.py --config=configs/mine.py --hardware=h100 --accelerators=16 --workload=search \\
      --config.cluster.accelerators_per_host=8 --output=runs/plan.json
  python launch/slurm.py --config=configs/mine.py --config.cluster.accelerators_per_host=8 --plan=runs/plan.json

The costs of steps are computed from a hardware sheet and the model's shape. Batch, staleness and limits come from
the config (configs/simulate.py without --config). --config.coordinator.groups_per_step=64 changes one of these
settings; a field that no plan reads is refused. launch/train.py and launch/simulate.py take the written plan by --plan.

Unlike accelerators are assigned by what each is good at:

  python launch/plan.py --config=configs/mixed_hardware.py --inventory=h800:32,h20:32
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from support import cli, overrides

from absl import flags
from ml_collections import config_flags
from rich import console, table

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import inventory, planned
from libra_jax.models import config as model_config
from libra_jax.planning.costs import costs, hardware
from libra_jax.planning.forecast import forecast
from libra_jax.planning.search import search
from libra_jax.simulator import scripts, settings, workloads
from libra_jax.utils import checksums

OBJECTIVES = ("step_time", "per_accelerator", "cheapest")
SWEEPS = ("accelerators", "hardware", "lengths")
ACCELERATORS = (16, 32, 48, 64, 96, 128, 256, 512, 1_024, 2_048, 4_096, 10_240)
FACTORS = (0.25, 0.5, 1.0, 2.0)
SIMULATED = 3  # assignments of an inventory

_CONFIG = config_flags.DEFINE_config_file("config", None, "A run's config file, simulated or real.", lock_config=True)
_HARDWARE = flags.DEFINE_string("hardware", None, f"Accelerator: {', '.join(hardware.NAMES)}.")
_MODEL = flags.DEFINE_string(
    "model", None, f"Model's shape, or its Hugging Face id: {', '.join(model_config.preset_names())}."
)
_ACCELERATORS = flags.DEFINE_integer("accelerators", None, "How many there are; default: as many as the config has.")
_WORKLOAD = flags.DEFINE_enum(
    "workload", None, list(workloads.SHAPES), "What rollouts are like; see --generated_tokens."
)
_GENERATED = flags.DEFINE_list(
    "generated_tokens",
    None,
    "Generated tokens of a rollout: mean,P90 of a log-normal, like 4000,7000. The mean alone scales the workload, and "
    "keeps the workload's spread, which the output names.",
)
_TURNS = flags.DEFINE_integer("turns", None, "Model outputs of a rollout; default: as the workload has.")
_PAYLOAD = flags.DEFINE_integer("payload_tokens", None, "Tokens that a tool returns; default: as the workload has.")
_PROMPT = flags.DEFINE_integer("prompt_tokens", None, "Tokens of a prompt; default: as the workload has.")
_TRACE = flags.DEFINE_string("trace", None, "Trace (JSON lines) whose lengths to plan for.")
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write; the picture lies beside it, as .svg.")
_OBJECTIVE = flags.DEFINE_enum(
    "objective",
    "step_time",
    OBJECTIVES,
    "step_time: the shortest step; per_accelerator: the most tokens a second for each accelerator in use, of which "
    "there may be fewer; cheapest: the fewest accelerators whose step takes at most --within seconds.",
)
_WITHIN = flags.DEFINE_float("within", None, "Seconds that a step may take, for --objective=cheapest.")
_INVENTORY = flags.DEFINE_list(
    "inventory",
    None,
    "Unlike accelerators and their numbers, like h800:32,h20:32: which kind trains, and what do the others roll out "
    "as? Ranked by lower bounds; the best three are simulated. Takes a simulated run's --config.",
)
_SWEEP = flags.DEFINE_enum("sweep", None, SWEEPS, "Plan again and again: for other numbers, hardware or lengths.")


def main() -> None:
    if _INVENTORY.value is not None:
        _print_assignments()
        return
    # Before the workload is sampled, which takes seconds.
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
    case = planned.case(config_lib.to_dict(_CONFIG.value), _request())
    output = None if _OUTPUT.value is None else Path(_OUTPUT.value)
    if output is not None:
        cli.check_output(output)
    if _SWEEP.value:
        _print_sweep(case)
        return
    searched = case.searched()
    best, seconds = _timed(searched, case.devices)
    splits = list(searched.splits(case.devices, near=best if _OBJECTIVE.value == "step_time" else None))
    # Relative errors of the times: from a profile's held-out steps, or from the coefficients.
    if (profile := case.setting.profile) is not None:
        unsure = forecast.Prediction(*(profile.errors[name] for name in ("train", "rollout", "total")))
    else:
        unsure = forecast.uncertainty(case.setting, case.work.prompts, case.work.turns, best.plan)
    _print(best, case, unsure)
    bounds = [bucket.max_remaining_tokens for bucket in best.rollout]
    print("\n".join(case.predictions.confusion(len(bounds)).lines(bounds)))
    if _OBJECTIVE.value == "step_time":
        print(f"Runner-up: {search.compared(best, splits, case.setting.staleness)}.")
    else:
        shortest = min(split.step_seconds for split in splits)
        print(f"The shortest step that {case.devices} accelerators allow takes {shortest:.1f} s.")
    if output is not None:
        picture = output.with_suffix(".svg")
        try:
            output.write_text(checksums.indented(as_json(best, case, unsure, seconds)))
            planned.draw(picture, best, splits, case)
        except OSError as error:
            raise protocols.DataError(f"--output: {output} cannot be written ({error.strerror or error})") from error
        print(f"wrote {output} and {picture}")


def _print_assignments() -> None:
    for name in ("hardware", "model", "accelerators", "workload", "generated_tokens", "trace", "output", "sweep"):
        if flags.FLAGS[name].present:
            raise protocols.ConfigError(f"--{name}: is not for --inventory, which takes what it needs from --config")
    run = _CONFIG.value
    if not isinstance(run, settings.SimulatedRun):
        raise protocols.ConfigError("--inventory: needs a simulated run's --config, such as configs/mixed_hardware.py")
    best, *others = inventory.assign(run, inventory.parse(_INVENTORY.value), SIMULATED, print)
    print(f"Best: {best.line()}.")
    for one in others:
        print(f"Then: {one.line()}.")


def _request() -> planned.PlanRequest:
    """Returns the flags' content; refuses config fields that a plan does not read."""
    fields = overrides.fields(flags.FLAGS["config"])
    simulated = isinstance(_CONFIG.value, settings.SimulatedRun)
    overrides.refuse_unread(
        fields,
        script="plan.py",
        read=planned.OF_SIMULATION if simulated else planned.OF_RUN,
        instead=settings.COUNTS if simulated else planned.COUNTS_IN_RUN,
    )
    generated: scripts.LogNormal | float | None = None
    if _GENERATED.value is not None:
        try:
            numbers = [float(text) for text in _GENERATED.value]
        except ValueError:
            numbers = []
        if len(numbers) not in (1, 2):
            raise protocols.ConfigError(
                f"--generated_tokens: {','.join(_GENERATED.value)!r} is neither a mean nor mean,P90, like 4000,7000"
            )
        generated = scripts.LogNormal.fitted(*numbers) if len(numbers) == 2 else numbers[0]
    lengths = scripts.RequestedLengths(generated, _TURNS.value, _PAYLOAD.value, _PROMPT.value)
    return planned.PlanRequest(
        hardware=_HARDWARE.value,
        model=_MODEL.value,
        accelerators=_ACCELERATORS.value,
        trace=_TRACE.value,
        workload=_WORKLOAD.value,
        lengths=lengths,
        overrides=fields,
    )


def _timed(searched: search.PlanSearch, devices: int) -> tuple[search.DeviceSplit, float]:
    """Returns the best split by --objective, and the seconds of the search."""
    began = time.perf_counter()
    if _OBJECTIVE.value == "cheapest":
        found = searched.cheapest(_WITHIN.value, devices)
    elif _OBJECTIVE.value == "per_accelerator":
        found = searched.thriftiest(devices)
    else:
        found = searched.best(devices)
    return found, time.perf_counter() - began


def _print(best: search.DeviceSplit, case: planned.PlanInputs, unsure: forecast.Prediction) -> None:
    mesh, rows = best.train, table.Table("stage", "accelerators", "as", "serves", "seconds a step")
    shape = f"data {mesh.data} x fsdp {mesh.fsdp} x tensor {mesh.tensor}"
    shape += f" x context {mesh.context}" * (mesh.context > 1)
    rows.add_row("train", str(mesh.devices), shape, "", f"{best.train.seconds - case.besides(best):.1f}")
    for index, bucket in enumerate(best.rollout):
        last = index == len(best.rollout) - 1
        rows.add_row(
            "rollout",
            str(bucket.count * bucket.tensor_parallel),
            f"{bucket.count} of degree {bucket.tensor_parallel}",
            "longer requests" if last else f"up to {bucket.max_remaining_tokens:,} tokens",
            f"{best.rollout_seconds:.1f}" if index == 0 else "",
        )
    console.Console().print(rows)
    unused = case.devices - best.devices
    idle = f"; {unused} of {case.devices} accelerators have no use" if unused else ""
    rolling = best.plan.rollout_devices
    print(f"{case.subject()}: {mesh.devices} train, {rolling} roll out{idle}.")
    if said := _hosts(best, case):
        print(said)
    usable = case.model.sheet.memory_bytes * case.model.coefficients.memory_fraction
    print(
        f"A training device needs {mesh.memory_bytes / 1e9:.0f} of its {usable / 1e9:.0f} usable GB (1e9 bytes): "
        "weights, optimizer, gradients, activations and logits."
    )
    slots = ", ".join(
        f"{count} at degree {degree}" for degree, count in zip(case.setting.degrees, case.setting.slots, strict=True)
    )
    print(
        f"For {case.work.count} trajectories a step and a staleness of at most {case.setting.staleness} "
        f"(config.coordinator.max_staleness), by a sample of {len(case.work.turns):,} ({case.work.source}): "
        f"{case.lengths}. An instance serves at once: {slots}."
    )
    if case.work.cut:
        print(
            f"Of these, {case.work.cut:.0%} end because their context is full (config.rollout.max_context = "
            f"{case.run.rollout.max_context:,}), as they would in the run."
        )
    _print_spread(case)
    positions = case.model.shape.max_position_embeddings
    if case.lengths.context_max > positions:
        print(f"{case.name} was made for {positions:,} tokens: longer contexts need its rotary embedding stretched.")
    if case.run.planner.profile:
        print(f"A step takes {best.step_seconds:.1f} s by what was measured ({case.run.planner.profile}).")
        print(
            f"Of that, {case.besides(best):.1f} s are weight sync and what belongs to no stage. On steps that were not "
            f"fitted to, training was {unsure.train:.0%} off, rollout {unsure.rollout:.0%}, a step {unsure.step:.0%}."
        )
        return
    print(f"A step takes {best.step_seconds:.1f} s by the hardware sheet, not calibrated by any run.")
    print(
        f"Were each coefficient off by {forecast.MOVE:.0%}: training {unsure.train:.0%}, rollout "
        f"{unsure.rollout:.0%}, a step {unsure.step:.0%} more or less."
    )


def _hosts(best: search.DeviceSplit, case: planned.PlanInputs) -> str:
    """Says how many hosts the plan takes, of those that the config or the hardware sheet has."""
    each = case.run.cluster.accelerators_per_host or case.model.sheet.devices_per_node
    train, roll_out = -(-best.train.devices // each), -(-best.plan.rollout_devices // each)
    said = f"of {each}, {train} to train and {roll_out} to roll out: no host does both"
    if case.run.cluster.accelerators_per_host:
        return f"That takes {train + roll_out} hosts {said}."
    if case.devices <= each or train + roll_out <= -(-case.devices // each):
        return ""
    return (
        f"On several hosts {said}. For {-(-case.devices // each)} hosts, plan in whole ones: "
        f"--config.cluster.accelerators_per_host={each}."
    )


def _print_spread(case: planned.PlanInputs) -> None:
    """Says which spread of lengths was assumed where --generated_tokens gives only the mean."""
    if _GENERATED.value is None or len(_GENERATED.value) != 1:
        return
    workload, mean, p90 = case.work.source.partition(",")[0], case.lengths.generated_mean, case.lengths.generated_p90
    wanted = float(_GENERATED.value[0])
    example = f"{wanted:.0f},{1.75 * wanted:.0f}"
    print(
        f"--generated_tokens gives the mean alone, so the spread of the workload {workload} is assumed: P90 {p90:,}, "
        f"{p90 / mean:.1f} times the mean. Give mean,P90 for another, like --generated_tokens={example}."
    )


def _print_sweep(case: planned.PlanInputs) -> None:
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
    subject = f"{case.name} on {case.devices:,} accelerators" if _SWEEP.value == "hardware" else case.subject()
    print(f"{subject}; {case.work.source}: {case.lengths}.")
    _print_spread(case)
    console.Console().print(rows)
    if _SWEEP.value == "accelerators":
        print(
            f"Each case has {case.work.count / case.devices:.3g} trajectories a step for every accelerator, as the "
            f"base of {case.devices} has."
        )
    print("By what was measured." if case.run.planner.profile else "By hardware sheets, not calibrated by any run.")
    for line in refused:
        print(line)


def _cases(case: planned.PlanInputs) -> Iterator[tuple[str, planned.PlanInputs]]:
    work, run = case.work, case.run
    if _SWEEP.value == "accelerators":
        for count in ACCELERATORS:  # with the config's work for each accelerator
            scaled = dataclasses.replace(work, count=max(1, work.count * count // case.devices))
            yield f"{count:,}", dataclasses.replace(case, work=scaled, devices=count)
    elif _SWEEP.value == "lengths":
        for factor in FACTORS:
            scaled = work.scaled(factor)
            trainer, longest = run.trainer, max(script.context_tokens for script in scaled.scripts)
            if longest > max((trainer.row_tokens, *trainer.row_buckets)):
                # A row must hold the longest sequence, and divide by the degrees that split its tokens.
                parts = trainer.tensor * trainer.context
                whole = -(-longest // parts) * parts
                trainer = dataclasses.replace(trainer, row_buckets=(*trainer.row_buckets, whole))
            yield f"x {factor:g}", dataclasses.replace(case, work=scaled, run=dataclasses.replace(run, trainer=trainer))
    else:
        for name in hardware.NAMES:
            here, there = case.model, costs.of_hardware(name, case.model.shape, "--sweep")
            keeps = here.coefficients.activation_bytes or there.coefficients.activation_bytes  # 0 only on a CPU
            coefficients = dataclasses.replace(here.coefficients, activation_bytes=keeps)
            model = dataclasses.replace(here, sheet=there.sheet, coefficients=coefficients)
            yield name, dataclasses.replace(case, model=model)


class Seconds(TypedDict):
    """Times of a step's stages in a plan's file: predicted seconds, or their relative errors."""

    train_seconds: float
    rollout_seconds: float
    step_seconds: float


PlanFile = TypedDict(
    "PlanFile",
    {
        "for": planned.CaseRecord,
        "train": Mapping[str, int],
        "rollout": Sequence[Mapping[str, object]],
        "predicted": Seconds,
        "uncertainty": Seconds,
        "solve_seconds": float,
        "calibrated": bool,
    },
)
"""The file of a plan, which `plans.read` reads back."""


def as_json(
    best: search.DeviceSplit, case: planned.PlanInputs, unsure: forecast.Prediction, seconds: float
) -> PlanFile:
    """Returns the plan as its file has it."""
    mesh = best.train
    return {
        "for": case.as_json(),
        "train": {name: getattr(mesh, name) for name in ("devices", "data", "fsdp", "tensor", "context")},
        "rollout": [dataclasses.asdict(bucket) for bucket in best.rollout],
        "predicted": {
            "train_seconds": best.train.seconds - case.besides(best),
            "rollout_seconds": best.rollout_seconds,
            "step_seconds": best.step_seconds,
        },
        "uncertainty": {
            "train_seconds": unsure.train,
            "rollout_seconds": unsure.rollout,
            "step_seconds": unsure.step,
        },
        "solve_seconds": seconds,
        "calibrated": bool(case.run.planner.profile),
    }


if __name__ == "__main__":
    cli.run(main, settings.SimulatedRun, default_config="configs/simulate.py")
