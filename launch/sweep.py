"""Runs configs, or a grid of their settings, under several seeds: tables, a picture, and no run is done twice.

  python launch/sweep.py --configs=configs/quickstart.py --sweep=optimizer.learning_rate=1e-4,3e-4 --seeds=0,1,2
  python launch/sweep.py --of=configs/ablation.py --configs=static,homogeneous,heterogeneous,cmlfq,elastic --seeds=0,1
  python launch/sweep.py --configs=configs/simulate.py,configs/ablation.py:greedy --output=runs/mine

Several --sweep make a product. --config.steps=10 and similar flags change all runs, as with launch/train.py. Real runs
go one after the other on this machine, or to a --launcher, each into a workdir of its own in the output folder.
A simulated run leaves a file there. Both are named by config, settings, seed and a hash. So the same
command goes on where it was stopped, and a changed setting is another run. A failed run is a row with its reason, and
the same command tries it again.

  python launch/sweep.py --launcher=slurm --launcher_flags="--partition=gpu" --configs=... --output=/shared/seeds
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import json
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from support import cli, overrides, real_results, sweeps

from absl import flags
from rich import console, table

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.simulator import comparison, report, settings
from libra_jax.telemetry.report import pool_report, recorded_run, timeline
from libra_jax.utils import processes

LAST = 5
"""Divisor of a run's steps: the last fifth is reported apart, because it shows the run after lengths have drifted."""

_CONFIGS = flags.DEFINE_string("configs", None, "Config files (or variants of --of), separated by commas.")
_SWEEP = flags.DEFINE_multi_string(
    "sweep", [], "A field of the config and its values, like optimizer.learning_rate=1e-4,3e-4; several: all pairs."
)
_OF = flags.DEFINE_string("of", None, "Config file whose variants --configs names.")
_SEEDS = flags.DEFINE_string("seeds", "0", "Seeds, separated by commas.")
_STEPS = flags.DEFINE_integer("steps", None, "Training steps of each run; default: as its config says.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", "runs/sweep", "Folder for the results.")
_SENSITIVITY = flags.DEFINE_bool("sensitivity", False, "Move each coefficient by 30%, one at a time, as well.")
_JOBS = flags.DEFINE_integer(
    "jobs", None, "Runs at a time; default: one a core if they are simulated, else one.", lower_bound=1
)
_LAUNCHER = flags.DEFINE_enum("launcher", None, list(sweeps.LAUNCHERS), "Where real runs go; default: here.")
_LAUNCHER_FLAGS = flags.DEFINE_string("launcher_flags", "", "Further flags of the launcher, in one string.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print the commands of real runs, and start none.")
_AGAIN = flags.DEFINE_bool("again", False, "Submit runs that were submitted before, too: their jobs are gone.")


Run = TypeVar("Run", bound=config_lib.RunConfig)


@dataclasses.dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
      name: name of the config in the table.
      run: its settings, the seed included.
      file: file of its result.
      moved: the moved coefficient and its value; empty if none was moved.
    """

    name: str
    run: settings.SimulatedRun
    file: Path
    moved: str = ""


def main(given: Sequence[str]) -> None:
    cells = sweeps.cells(_CONFIGS.value or "", _OF.value, given, _SWEEP.value)
    read = {cell.name: _config(cell) for cell in cells}
    simulated = [cell for cell in cells if isinstance(read[cell.name], settings.SimulatedRun)]
    if simulated and len(simulated) < len(cells):
        other = next(cell for cell in cells if cell not in simulated)
        raise protocols.ConfigError(
            f"--configs: {simulated[0].file} is a simulated run and {other.file} a real one; sweep them apart"
        )
    folder = Path(_OUTPUT.value)
    if not _DRY_RUN.value:  # a dry run writes nothing, not even the folder
        cli.check_output(folder / "sweep.json")
    if not simulated:
        _submit(cells, read, folder)
        return
    if _LAUNCHER.value:
        raise protocols.ConfigError(f"--configs: {cells[0].file} is a simulated run; leave out --launcher")
    if _DRY_RUN.value:
        raise protocols.ConfigError("--dry_run: prints the commands of real runs; simulated runs have none")
    names = [cell.name for cell in cells]
    jobs = []
    for cell in cells:
        for seed in cli.seeds(_SEEDS.value):
            run = cast("settings.SimulatedRun", _seeded(read[cell.name], seed))
            run = comparison.prepare(run, [run.scheduler.policy])
            jobs.append(Job(cell.name, run, _file(cell.name, run, folder)))
    for first, second in itertools.combinations(cells, 2):
        if first.file == second.file and read[first.name] == read[second.name]:
            raise protocols.ConfigError(f"--sweep: {first.name!r} and {second.name!r} are the same run; name one")
    if _SENSITIVITY.value:
        jobs += [moved for job in list(jobs) for moved in _moves(job, folder)]
    left = [job for job in jobs if not job.file.exists()]
    sweeps.say(f"{len(names)} configs, {len(jobs)} runs, of which {len(jobs) - len(left)} are done already")
    failed = _run(left)
    jobs = [job for job in jobs if job.file.exists()]
    found = {name: [_read(job.file) for job in jobs if (job.name, job.moved) == (name, "")] for name in names}
    results = {name: entries for name, entries in found.items() if entries}
    if not results:
        raise protocols.LibraError(f"no run ended well: {'; '.join(failed)}")
    machines = {f"{job.run.simulation.model} on {job.run.simulation.hardware}" for job in jobs}
    print(f"{' and '.join(sorted(machines))}:")
    _print(results)
    for line in _sensitivity(list(results), jobs):
        print(line)
    summary = {name: [dict(entry) for entry in entries] for name, entries in results.items()}
    (folder / "sweep.json").write_text(json.dumps(summary, indent=2) + "\n")
    _draw(folder / "sweep.svg", results, sorted(machines))
    drawn = [folder / "sweep.svg", *(picture for job in jobs if (picture := _draw_pools(job)) is not None)]
    print(f"wrote {folder / 'sweep.json'} and {', '.join(map(str, drawn))}")
    if failed:
        raise protocols.LibraError(
            f"{len(failed)} of {len(left)} runs failed, the others are kept: {'; '.join(failed)}"
        )


def _submit(cells: Sequence[sweeps.Cell], read: Mapping[str, config_lib.RunConfig], folder: Path) -> None:
    if _SENSITIVITY.value:
        raise protocols.ConfigError("--sensitivity: moves coefficients of simulated runs, and these are real ones")
    runs = []
    for cell in cells:
        for seed in cli.seeds(_SEEDS.value):
            config = _seeded(read[cell.name], seed)
            workdir = sweeps.workdir(folder, cell.name, config)
            runs.append(sweeps.Run(cell.name, cell.file, config, _STEPS.value, workdir, cell.settings))
    jobs, again, dry_run = _JOBS.value or 1, _AGAIN.value, _DRY_RUN.value
    launcher, launcher_flags = _LAUNCHER.value or "here", _LAUNCHER_FLAGS.value
    sweeps.run(runs, folder, launcher, launcher_flags, jobs=jobs, again=again, dry_run=dry_run)


def _config(cell: sweeps.Cell) -> config_lib.RunConfig:
    """Returns the file's config under the cell's settings."""
    try:
        made = cli.read_config(settings.SimulatedRun, cell.file, cell.settings)
    except protocols.ConfigError as error:
        raise protocols.ConfigError(f"--configs: {cell.name}: {error}") from error
    if isinstance(made, settings.SimulatedRun):
        given = [setting.removeprefix("--config.").split("=")[0] for setting in cell.settings]
        overrides.refuse_ignored(given, script="sweep.py", ignored=settings.IGNORED, instead=settings.COUNTS)
    return made


def _seeded(config: Run, seed: int) -> Run:
    """Returns the checked config of one run."""
    values = config_lib.to_dict(config) | {"seed": seed, "steps": _STEPS.value or config.steps}
    return config_lib.parse(type(config), values)


def _file(name: str, run: settings.SimulatedRun, folder: Path) -> Path:
    return folder / f"{sweeps.title(name)}-seed{run.seed}-steps{run.steps}-{config_lib.digest(run)}.json"


def _moves(job: Job, folder: Path) -> Iterator[Job]:
    """Yields the same run with each coefficient moved both ways, if the run still fits the cluster."""
    simulation = job.run.simulation
    for name, value in simulation.moved(comparison.MOVE):
        coefficients = dataclasses.replace(simulation.coefficients, **{name: value})  # type: ignore[arg-type]
        moved = dataclasses.replace(simulation, coefficients=coefficients)
        run = dataclasses.replace(job.run, simulation=moved)
        try:
            comparison.prepare(run, [run.scheduler.policy])
        except protocols.ConfigError as error:
            sweeps.say(f"{job.name}, {name} = {value:g}: left out ({error})")
            continue
        yield Job(job.name, run, _file(job.name, run, folder), f"{name} = {value:g}")


def _sensitivity(names: Sequence[str], jobs: Sequence[Job]) -> Iterator[str]:
    """Yields a line for each moved coefficient: tokens a second of each config over the first's, and changes of
    order."""

    def rates(moved: str) -> dict[str, float]:
        chosen = {name: [job.file for job in jobs if (job.name, job.moved) == (name, moved)] for name in names}
        return {name: _mean(list(map(_read, files)), "tokens_per_second") for name, files in chosen.items() if files}

    reference = sorted(base := rates(""), key=base.__getitem__)
    for moved in dict.fromkeys(job.moved for job in jobs if job.moved):
        found = rates(moved)
        if names[0] not in found:
            yield f"{moved}: left out, as {names[0]} is"
            continue
        order = sorted(found, key=found.__getitem__)
        pairs = comparison.swapped([name for name in reference if name in found], order)
        verdict = f"swaps {', '.join(' and '.join(pair) for pair in pairs)}" if pairs else "order kept"
        ratios = ", ".join(f"{name} {rate / found[names[0]]:.2f}" for name, rate in found.items())
        yield f"{moved}: {verdict} ({ratios})"


def _run(jobs: Sequence[Job]) -> list[str]:
    """Simulates the runs, each into its file; returns a sentence for each that failed."""
    failed: list[str] = []
    workers = min(_JOBS.value or os.cpu_count() or 1, len(jobs))
    if not workers:
        return failed
    with processes.pool(workers) as pool:
        doing = {pool.submit(result_of, job.run): job for job in jobs}
        for number, done in enumerate(concurrent.futures.as_completed(doing), start=1):
            job = doing[done]
            error = done.exception()
            if job.moved and isinstance(error, protocols.ConfigError):  # the cluster cannot hold the run any more
                sweeps.say(f"[{number}/{len(jobs)}] {job.name}, {job.moved}: left out ({error})")
                continue
            if error is not None:
                failed.append(f"{job.name}, seed {job.run.seed}: {error}")
                sweeps.say(f"[{number}/{len(jobs)}] {failed[-1]}")
                continue
            entry = done.result()
            # Renamed, so that an interrupted sweep leaves no half-written result.
            partial = job.file.with_suffix(".partial")
            partial.write_text(json.dumps(entry) + "\n")
            partial.rename(job.file)
            sweeps.say(
                f"[{number}/{len(jobs)}] {job.name}, seed {job.run.seed}{job.moved and f', {job.moved}'}: "
                f"{entry['tokens_per_second']:.0f} tokens/s "
                f"(simulated in {entry['wall_seconds']:.1f} s)"
            )
    return failed


def result_of(run: settings.SimulatedRun) -> report.Entry:
    """Returns a run's entry (`simulator.report.KEYS`), with the actions of its planner."""
    result = comparison.simulate(run)
    entry = comparison.entry(run, result)
    moved = [decision for decision in result.decisions if decision["moved"]]
    moved += [change for change in result.transitions if change["outcome"] == "done" and change["worker"] != "trainer"]
    errors = [step["plan/step_error"] for step in result.steps if "plan/step_error" in step]
    saved = [step["plan/saved_seconds"] for step in result.steps if "plan/saved_seconds" in step]
    # A user's function that divides the rollouts has no bound.
    bounded = ":" not in run.algorithm.budget
    return {
        **entry,
        "looks": len(result.decisions),
        "moves": len(moved),
        "saved_seconds": sum(saved),
        "plan_error": statistics.fmean(errors) if errors else None,
        "transitions": list(result.transitions),
        "pools": [(sizes.start, dict(sizes.devices)) for sizes in result.pool_sizes],
        "seconds": result.seconds,
        "step_times": list(result.step_seconds),
        "bound_seconds": comparison.bound_seconds(run) if bounded else None,
        "end_seconds": statistics.fmean(result.step_seconds[-max(1, len(result.step_seconds) // LAST) :]),
    }


def _read(file: Path) -> report.Entry:
    try:
        entry: report.Entry = json.loads(file.read_text())
        if not set(report.KEYS) <= set(entry):
            raise ValueError("it is no result of a run")
    except (OSError, ValueError, TypeError) as error:
        raise protocols.DataError(f"{file}: cannot be read ({error}); remove it, and it is run again") from error
    return entry


def _mean(entries: Sequence[report.Entry], *path: str) -> float:
    values = []
    for entry in entries:
        value: Any = entry
        for name in path:
            value = value[name]
        values.append(float(value))
    return statistics.fmean(values)


def _print(results: Mapping[str, Sequence[report.Entry]]) -> None:
    heads = "config", "tokens/s", "+-", "x first", "step, s", "of bound", "at the end", "train", "rollout"
    rows = table.Table(*heads, "moves", "saved, s", "lost")
    rows.columns[0].overflow = "fold"  # names that differ only at their end must stay whole
    first = _mean(next(iter(results.values())), "tokens_per_second")
    for name, entries in results.items():
        rates = [entry["tokens_per_second"] for entry in entries]
        rows.add_row(
            name,
            f"{statistics.fmean(rates):.0f}",
            f"{statistics.stdev(rates):.0f}" if len(rates) > 1 else "",
            f"{statistics.fmean(rates) / first:.2f}",
            f"{_mean(entries, 'step_seconds', 'mean'):.0f}",
            _of_bound(entries),
            f"{_mean(entries, 'end_seconds'):.0f}",
            f"{_mean(entries, 'utilisation', 'train'):.0%}",
            f"{_mean(entries, 'utilisation', 'rollout'):.0%}",
            f"{_mean(entries, 'moves'):.1f}",
            f"{_mean(entries, 'saved_seconds'):.0f}",
            str(sum(entry["lost_trajectories"] for entry in entries)),
        )
    console.Console(width=None if sys.stdout.isatty() else 120).print(rows)
    print(real_results.SPREAD)


def _of_bound(entries: Sequence[report.Entry]) -> str:
    """Returns the bound of the layouts that runs begin with (`simulator.bound`), as a share of their mean step."""
    bounds = [bound for entry in entries if (bound := entry.get("bound_seconds")) is not None]
    if len(bounds) < len(entries):
        return ""
    return f"{statistics.fmean(bounds) / _mean(entries, 'step_seconds', 'mean'):.0%}"


def _draw(path: Path, results: Mapping[str, Sequence[report.Entry]], machines: Sequence[str]) -> None:
    names = list(results)
    rates = [[entry["tokens_per_second"] for entry in results[name]] for name in names]
    spread = [statistics.stdev(each) if len(each) > 1 else 0.0 for each in rates]
    title = ["Generated tokens a second, simulated", *machines]
    with report.picture_axes(path, 0.2 + report.bars_height(names), title) as axes:
        report.bars(axes, names, list(map(statistics.fmean, rates)), spread, "{:,.0f}")
        seeds = max(map(len, rates))
        of_seeds = f"\nmean of {seeds} seeds ± standard deviation" if seeds > 1 else ""
        axes.set_xlabel(f"generated tokens a second{of_seeds}")


def _draw_pools(job: Job) -> Path | None:
    """Draws the pools over a run in which workers switched sides, beside its result."""
    entry = _read(job.file)
    if job.moved or not entry.get("transitions"):
        return None
    sizes = [timeline.PoolSizes(start, devices) for start, devices in entry["pools"]]
    changes = [recorded_run.Transition.from_record(record) for record in entry["transitions"]]
    path = job.file.with_suffix(".pools.svg")
    drawn = pool_report.draw(sizes, changes, end=entry["seconds"])
    for picture in drawn:
        path.write_text(picture.standalone())
    return path if drawn else None


if __name__ == "__main__":
    sys.argv, others = sweeps.taken(sys.argv)
    cli.run(
        functools.partial(main, others),
        settings.SimulatedRun,
        interrupted="interrupted; the same command goes on with the runs that are left.",
    )
