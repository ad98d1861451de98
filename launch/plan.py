"""Plans a cluster: how many accelerators train, on which mesh, and which instances roll out what lengths.

  python launch/plan.py --config=configs/simulate.py --output=runs/plan.json
  python launch/plan.py --config=configs/simulate.py --trace=runs/mine/trace.jsonl --accelerators=64
  python launch/plan.py --config=configs/simulate.py --sweep=accelerators

What steps cost is computed from a hardware sheet and the model's shape. Without --trace, lengths are those of the
config's workload.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags
from rich import console, table

import cli
from libra_jax import config as libra_config
from libra_jax import protocols
from libra_jax.planning import hardware, planner, search
from libra_jax.simulator import comparison, scripts, settings

SAMPLES = 8_192
"""Trajectories that lengths are taken from, at most."""

SWEEPS = ("accelerators", "hardware", "lengths")
ACCELERATORS = (16, 32, 48, 64, 96, 128, 256, 512, 1_024, 2_048, 4_096, 10_240)
FACTORS = (0.25, 0.5, 1.0, 2.0)

_CONFIG = config_flags.DEFINE_config_file("config", None, "A simulated run's config file.", lock_config=True)
_TRACE = flags.DEFINE_string("trace", None, "Trace (JSON lines) whose lengths to plan for.")
_ACCELERATORS = flags.DEFINE_integer("accelerators", None, "How many there are; default: as many as the config has.")
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write; the picture lies beside it, as .svg.")
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


def main() -> None:
    values = _CONFIG.value.to_dict()
    if _TRACE.value is not None:
        values["workload"] |= {"shape": "trace", "trace": _TRACE.value}
    run = comparison.prepare(libra_config.parse(settings.SimulatedRun, values), [values["scheduler"]["policy"]])
    devices = _ACCELERATORS.value
    if devices is None:
        devices = run.simulation.train_devices + sum(run.rollout.tensor_parallel)
    if devices < 2:
        raise protocols.ConfigError(f"--accelerators: {devices} cannot both train and roll out; give 2 or more")
    output = None if _OUTPUT.value is None else Path(_OUTPUT.value)
    if output is not None:
        cli.check_output(output)
    work = _work(run)
    if _SWEEP.value:
        _print_sweep(run, work, devices)
        return
    searched = _search(run, work, devices)
    best, seconds = search.timed(searched, devices)
    splits = list(searched.splits(devices))
    _print(best, devices, search.compared(best, splits))
    if output is not None:
        _write(output, best, splits, seconds, run.name)


def _work(run: settings.SimulatedRun) -> Work:
    workload, groups = comparison.workload(run), run.steps * run.coordinator.groups_per_step
    size = run.coordinator.group_size
    every = max(1, -(-groups * size // SAMPLES))
    drawn = [workload.script(task, sample) for task in range(0, groups, every) for sample in range(size)]
    return Work(
        [script.prompt_tokens for script in drawn],
        [script.turns for script in drawn],
        run.coordinator.groups_per_step * size,
    )


def _search(run: settings.SimulatedRun, work: Work, most: int) -> search.Search:
    setting = planner.Setting.of_run(run, run.simulation.cost_model(), most, slots=run.simulation.slots)
    setting = dataclasses.replace(setting, requests=work.count)
    return planner.Work(setting, work.prompts, work.turns).search


def _print(best: search.Split, devices: int, runner_up: str) -> None:
    mesh, rows = best.train, table.Table("stage", "accelerators", "as", "serves", "seconds a step")
    shape = f"data {mesh.data} x fsdp {mesh.fsdp} x tensor {mesh.tensor}, {mesh.memory_bytes / 1e9:.0f} GB each"
    rows.add_row("train", str(mesh.devices), shape, "", f"{best.train_seconds:.1f}")
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
    idle = f"; {devices - best.devices} of {devices} accelerators have no use" if best.devices < devices else ""
    print(f"A step takes {best.step_seconds:.1f} s by the hardware sheet, not calibrated by any run{idle}.")
    print(f"Runner-up: {runner_up}.")


def _print_sweep(run: settings.SimulatedRun, work: Work, devices: int) -> None:
    rows = table.Table(
        _SWEEP.value, "train", "data x fsdp x tensor", "rollout", "step, s", "tokens/s each", "solved, s"
    )
    refused = []
    for name, case, scaled, count in _cases(run, work, devices):
        try:
            best, seconds = search.timed(_search(case, scaled, count), count)
        except protocols.ConfigError as error:
            rows.add_row(name, "no plan")
            refused.append(f"{name}: {error}")
            continue
        mesh = best.train
        tokens = sum(turn.generated_tokens for turns in scaled.turns for turn in turns) / len(scaled.turns)
        rows.add_row(
            name,
            str(mesh.devices),
            f"{mesh.data} x {mesh.fsdp} x {mesh.tensor}",
            ", ".join(f"{bucket.count} of {bucket.tensor_parallel}" for bucket in best.rollout),
            f"{best.step_seconds:.1f}",
            f"{tokens * scaled.count / best.step_seconds / count:.1f}",
            f"{seconds:.3f}",
        )
    console.Console().print(rows)
    for line in refused:
        print(line)


def _cases(
    run: settings.SimulatedRun, work: Work, devices: int
) -> Iterator[tuple[str, settings.SimulatedRun, Work, int]]:
    if _SWEEP.value == "accelerators":
        for count in ACCELERATORS:  # as much work for each accelerator as the config has
            yield f"{count:,}", run, dataclasses.replace(work, count=max(1, work.count * count // devices)), count
    elif _SWEEP.value == "lengths":
        for factor in FACTORS:
            longest = work.scaled(factor).longest()
            trainer = dataclasses.replace(run.trainer, row_tokens=max(run.trainer.row_tokens, longest))
            yield f"x {factor:g}", dataclasses.replace(run, trainer=trainer), work.scaled(factor), devices
    else:
        for name in hardware.names():
            simulation = dataclasses.replace(run.simulation, hardware=name)
            yield name, dataclasses.replace(run, simulation=simulation), work, devices


def as_json(best: search.Split, seconds: float) -> dict[str, Any]:
    """The plan as its file has it."""
    mesh = best.train
    return {
        "train": {"devices": mesh.devices, "data": mesh.data, "fsdp": mesh.fsdp, "tensor": mesh.tensor},
        "rollout": [dataclasses.asdict(bucket) for bucket in best.rollout],
        "predicted": {
            "train_seconds": best.train_seconds,
            "rollout_seconds": best.rollout_seconds,
            "step_seconds": best.step_seconds,
        },
        "solve_seconds": seconds,
        "calibrated": False,
    }


def _write(output: Path, best: search.Split, splits: list[search.Split], seconds: float, title: str) -> None:
    picture = output.with_suffix(".svg")
    try:
        output.write_text(json.dumps(as_json(best, seconds), indent=2) + "\n")
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
