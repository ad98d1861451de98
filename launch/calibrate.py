"""Calibrates plans by finished runs: writes a table of their errors on held-out steps, a profile and a picture.

  python launch/calibrate.py                           # records configs/calibrate.py's runs first: a quarter of an hour
  python launch/calibrate.py --workdirs=runs/a,runs/b  # finished runs of your own; writes runs/a/profile.json
  python launch/plan.py --config=configs/calibrate.py --trace=runs/calibration/single/trace.jsonl \\
    --config.planner.profile=runs/calibration/profile.json

The first half of each run's steps is fitted to, the other half is predicted. Runs need coordinator.max_staleness=0, so
that their stages follow each other, and one rollout instance. `planner.profile` makes plans use the profile.
"""

from __future__ import annotations

import collections
import dataclasses
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import cli

from absl import flags
from rich import console, table

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.cluster import resolved_run
from libra_jax.models.hf import hub
from libra_jax.planning.costs import calibration, costs, hardware, profiles
from libra_jax.planning.forecast import meshes, serving
from libra_jax.simulator import recording, twin

_WORKDIRS = flags.DEFINE_string(
    "workdirs", None, "Folders of finished runs, separated by commas; default: those of configs/calibrate.py, recorded."
)
_OUTPUT = flags.DEFINE_string(
    "output", None, "The profile; its picture lies beside it. Default: profile.json with the first of the workdirs."
)

FOLDER = Path("runs/calibration")
"""Folder of the runs that are recorded here."""

RECORDING_SECONDS = 1800.0
"""Deadline of a recorded run in seconds; a run takes about four minutes on 2 cores."""

STAGES = ("rollout", "train", "total")
"""Stages with a target."""

COMPOUND = 1.5
"""Target of the whole step's error, as a multiple of a stage's target."""


@dataclass(frozen=True)
class Run:
    """A recorded run.

    Attributes:
      name: name of its folder.
      model: cost model of its model on its machine.
      steps: measured steps.
      work: work of each step; equal for steps that did the same.
      streams: streams of its instance, in the steps that are fitted to.
    """

    name: str
    model: costs.CostModel
    steps: tuple[profiles.MeasuredStep, ...]
    work: tuple[Any, ...]
    streams: tuple[calibration.RequestStay, ...]

    @property
    def fitted(self) -> int:
        """Number of steps, from the first, that are fitted to."""
        return len(self.steps) // 2


@dataclass(frozen=True)
class Verdict:
    """Prediction quality of a stage of the held-out steps.

    Attributes:
      error: mean of |predicted - measured| / measured.
      constant: error of predicting the mean of a run's fitted steps for all others.
      spread: relative spread of steps that did the same work; None if no two did.
      target: largest error that meets the target.
    """

    error: float
    constant: float
    spread: float | None
    target: float


def main() -> None:
    folders: list[Path] = []
    if _WORKDIRS.value is not None:
        folders = list(dict.fromkeys(Path(name.strip()) for name in _WORKDIRS.value.split(",") if name.strip()))
        if not folders:
            raise protocols.ConfigError("--workdirs: names no folder; leave the flag out to record runs made for this")
    output = Path(_OUTPUT.value) if _OUTPUT.value else (folders[0] if folders else FOLDER) / "profile.json"
    if folders:  # read first: the profile's folder is one of them, and must not be created if it is missing
        runs = [_read(folder) for folder in folders]
        cli.check_output(output)
    else:
        cli.check_output(output)
        runs = [_read(folder) for folder in _recorded(FOLDER)]
    model = runs[0].model
    for run in runs[1:]:
        if run.model != model:
            raise protocols.ConfigError(
                f"--workdirs: {run.name} has another model or other planner.hardware than {runs[0].name}"
            )
    by_degree: dict[int, list[Sequence[calibration.RequestStay]]] = collections.defaultdict(list)
    for run in runs:
        by_degree[run.steps[0].degree].append(run.streams)
    # The first halves alone, because the other halves judge the profile.
    profile = profiles.fit(model, [step for run in runs for step in run.steps[: run.fitted]], by_degree)
    predicted = {run.name: [profile.predict(model, step) for step in run.steps] for run in runs}
    verdicts = {stage: _verdict(stage, runs, predicted) for stage in STAGES}
    errors = {stage: verdict.error for stage, verdict in verdicts.items()}
    errors["sync"] = _mean_error("sync", runs, predicted)
    _print(runs, predicted, profile)
    for stage, verdict in verdicts.items():
        spread = "not known" if verdict.spread is None else f"{verdict.spread:.1%}"
        met = "met" if verdict.error <= verdict.target else "NOT met"
        print(
            f"{'step' if stage == 'total' else stage}: mean error {verdict.error:.1%} on held-out steps; spread of "
            f"steps that did the same work {spread}; target {verdict.target:.1%}: {met} (the mean of a run's fitted "
            f"steps would be {verdict.constant:.1%} off)"
        )
    print(f"weight sync: {profile.sync:.2f} s, mean error {errors['sync']:.0%}; of no stage: {profile.between:.2f} s")
    if len({step.mesh for run in runs for step in run.steps}) > 1:
        print(_elsewhere(runs))
    picture = output.with_suffix(".svg")
    try:
        profiles.write(dataclasses.replace(profile, errors=errors), output)
        _draw(picture, runs, predicted)
    except OSError as error:
        raise protocols.DataError(f"--output: {output} cannot be written ({error.strerror or error})") from error
    print(f"wrote {output} and {picture}")


def _recorded(folder: Path) -> Iterator[Path]:
    """Yields the folders of configs/calibrate.py's runs. Records an incomplete run from its start again, because a
    timeline has to be uninterrupted."""
    from configs import calibrate  # cli.run has put the working directory on the path only now

    for variant in calibrate.VARIANTS:
        workdir, partial = folder / variant, folder / f"{variant}.partial"
        wanted = config_lib.checked(calibrate.get_config(variant))
        if workdir.exists():
            if recording.read(workdir).config != wanted:
                raise protocols.DataError(
                    f"{workdir} was recorded with other settings than configs/calibrate.py has now; move it away"
                )
            yield workdir
            continue
        shutil.rmtree(partial, ignore_errors=True)
        command = [
            sys.executable,
            str(cli.REPOSITORY / "launch" / "train.py"),
            f"--config={cli.REPOSITORY / 'configs' / 'calibrate.py'}:{variant}",
            f"--workdir={partial}",
        ]
        print(f"recording {workdir}", flush=True)
        try:
            ended = subprocess.run(command, timeout=RECORDING_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise protocols.DataError(
                f"{partial}: the run did not end within {RECORDING_SECONDS:.0f} s; see its logs there"
            ) from None
        if ended.returncode:
            raise protocols.DataError(f"{partial}: the run did not end well; see above")
        # Renamed only when complete, so that an interrupted recording does not count as a run.
        partial.rename(workdir)
        yield workdir


def _read(folder: Path) -> Run:
    """Reads a run's steps, each stage measured apart from the others.

    Raises:
      DataError: the run is not finished, or cannot be used; the message says why.
    """
    recorded = recording.read(folder)
    config = recorded.config
    if config.coordinator.max_staleness or len(config.rollout.tensor_parallel) != 1:
        raise protocols.DataError(
            f"{folder}: plans are calibrated by runs with coordinator.max_staleness=0 and one rollout instance, and "
            f"this one has {config.coordinator.max_staleness} and {len(config.rollout.tensor_parallel)}"
        )
    shape = resolved_run.resolve(hub.with_model(config), need_weights=True).policy
    model = costs.of_hardware(config.planner.hardware, shape, "planner.hardware")
    wrong = ("cuda", "tpu") if config.planner.hardware == hardware.THIS_MACHINE else ("cpu",)
    if config.trainer.platform in wrong:
        raise protocols.DataError(
            f"{folder}: trainer.platform is {config.trainer.platform!r} and planner.hardware "
            f"{config.planner.hardware!r}: say in the run's config what it runs on"
        )
    trainer = meshes.TrainerProperties.from_config(config, model.sheet)
    empty = [step.number for step in recorded.steps if not step.lengths]
    if empty:
        raise protocols.DataError(
            f"{folder}: in step {empty[0]} every rollout was masked (task.cut_off), so that nothing was trained; "
            "record a run with longer task.max_seconds and rollout.max_context, or with task.cut_off=zero"
        )
    steps = tuple(
        profiles.MeasuredStep(
            mesh=(config.trainer.data, config.trainer.fsdp, config.trainer.tensor),
            trainer=trainer,
            lengths=step.lengths,
            demand=serving.Demand.in_order(
                [script.prompt_tokens for script in step.scripts], [script.turns for script in step.scripts]
            ),
            degree=config.rollout.tensor_parallel[0],
            slots=config.rollout.instance_slots[0],
            seconds=profiles.Stages(step.parts.rollout, step.parts.train, step.parts.sync, step.parts.total),
        )
        for step in recorded.steps
    )
    work = tuple(step.work for step in recorded.steps)
    return Run(str(folder), model, steps, work, recorded.streams_of(len(steps) // 2))


def _held_out(
    stage: str, runs: Sequence[Run], predicted: dict[str, list[profiles.Stages]]
) -> Iterator[tuple[float, float]]:
    """Yields measured and predicted seconds of the steps that were not fitted to."""
    for run in runs:
        for step, guess in list(zip(run.steps, predicted[run.name], strict=True))[run.fitted :]:
            yield getattr(step.seconds, stage), getattr(guess, stage)


def _verdict(stage: str, runs: Sequence[Run], predicted: dict[str, list[profiles.Stages]]) -> Verdict:
    alike = [
        ((run.name, work), getattr(step.seconds, stage))
        for run in runs
        for step, work in list(zip(run.steps, run.work, strict=True))[run.fitted :]
    ]
    spread, _, _ = twin.spread(alike)
    constant = {}
    for run in runs:
        mean = statistics.fmean(getattr(step.seconds, stage) for step in run.steps[: run.fitted])
        constant[run.name] = [dataclasses.replace(run.steps[0].seconds, **{stage: mean})] * len(run.steps)
    target = twin.target(spread) * (COMPOUND if stage == "total" else 1.0)
    return Verdict(_mean_error(stage, runs, predicted), _mean_error(stage, runs, constant), spread, target)


def _mean_error(stage: str, runs: Sequence[Run], predicted: dict[str, list[profiles.Stages]]) -> float:
    return statistics.fmean(twin.relative_error(*pair) for pair in _held_out(stage, runs, predicted))


def _print(runs: Sequence[Run], predicted: dict[str, list[profiles.Stages]], profile: profiles.Profile) -> None:
    made = table.Table("run", "mesh", "degree", "fitted", "predicted", "rollout s", "error")
    for name in ("train s", "error", "step s", "error"):
        made.add_column(name)
    for run in runs:
        cells = []
        for stage in STAGES:
            pairs = list(_held_out(stage, [run], predicted))
            seconds = statistics.fmean(measured for measured, _ in pairs)
            cells += [f"{seconds:.2f}", f"{_mean_error(stage, [run], predicted):.1%}"]
        first, count = run.steps[0], len(run.steps)
        mesh = " x ".join(map(str, first.mesh))
        made.add_row(Path(run.name).name, mesh, str(first.degree), str(run.fitted), str(count - run.fitted), *cells)
    console.Console(width=None if sys.stdout.isatty() else 120).print(made)
    for degree, engine in sorted(profile.engines.items()):
        print(
            f"engine of degree {degree}: a step {1e3 * engine.step:.2f} ms + {1e6 * engine.request:.1f} us a request + "
            f"{1e6 * engine.context:.3f} us a token of context; prefill {1e6 * engine.prefill_token:.1f} us a token"
        )
    default, fitted = costs.Coefficients(), profile.coefficients
    for name in (*profiles.SHARES, *profiles.SECONDS):
        value = getattr(fitted, name)
        bound = "" if name not in profiles.SHARES or value < 0.999 else ": all of the peak"
        print(f"{name}: {getattr(default, name):.4g} by default, {value:.4g} here{bound}")
    if fitted.train_flops_share > 0.999 and profile.sheet.name == hardware.THIS_MACHINE:
        print(
            "The runs computed faster than this machine does now: what train_flops_share is a share of was measured a "
            "moment ago. If other work shares the cores, calibrate again when it is over."
        )


def _elsewhere(runs: Sequence[Run]) -> str:
    """Describes how well training is predicted on a mesh of which no step was fitted to."""
    told = []
    for mesh in dict.fromkeys(step.mesh for run in runs for step in run.steps):
        steps = [step for run in runs for step in run.steps]
        others = [step for step in steps if step.mesh != mesh]
        fitted = dataclasses.replace(runs[0].model, coefficients=profiles.fit_training(runs[0].model, others))
        errors = [
            twin.relative_error(
                step.seconds.train, meshes.Training(fitted, step.lengths, step.trainer).seconds(*step.mesh)
            )
            for step in steps
            if step.mesh == mesh
        ]
        told.append(f"{' x '.join(map(str, mesh))} {statistics.fmean(errors):.0%}")
    return f"error of training on a mesh that only the others were fitted to: {', '.join(told)}"


def _draw(path: Path, runs: Sequence[Run], predicted: dict[str, list[profiles.Stages]]) -> None:
    """Draws predicted against measured seconds of the held-out steps, a panel a stage."""
    from matplotlib import figure, rc_context

    with rc_context({"svg.hashsalt": "libra-jax", "font.size": 10}):
        drawn = figure.Figure(figsize=(9.0, 3.4), layout="constrained")
        for stage, axes in zip(STAGES, drawn.subplots(1, len(STAGES)), strict=True):
            for run in runs:
                measured, guessed = zip(*_held_out(stage, [run], predicted), strict=True)
                axes.plot(measured, guessed, "o", markersize=4, label=Path(run.name).name)
            most = 1.1 * max(axes.get_xlim()[1], axes.get_ylim()[1])
            axes.plot([0, most], [0, most], color="#999999", linewidth=1)
            axes.set(xlim=(0, most), ylim=(0, most), xlabel="measured s", ylabel="predicted s")
            axes.set_title("step" if stage == "total" else stage, loc="left", fontsize=11)
            axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        drawn.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    cli.run(main, interrupted="interrupted; the same command goes on with the runs that are left.")
