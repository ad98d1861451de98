"""Runs a list of configs under several seeds; one table, one picture, and what is done is not done again.

  python launch/sweep.py --of=configs/ablation.py --configs=static,homogeneous,heterogeneous,cmlfq,elastic --seeds=0,1
  python launch/sweep.py --configs=configs/simulate.py,configs/ablation.py:greedy --output=runs/mine

Each run leaves a file in the output folder, named by its config, its seed and a hash of its settings: the same command
goes on where it was stopped, and a changed setting runs anew. These are simulated runs. With --launcher they are real
ones, each in a workdir of its own in the output folder (`submission.py`):

  python launch/sweep.py --launcher=here --configs=configs/quickstart.py --seeds=0,1,2 --output=runs/seeds
  python launch/sweep.py --launcher=slurm --launcher_flags="--partition=gpu" --configs=... --output=/shared/seeds
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.util
import json
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import submission
from absl import flags
from rich import console, table

import cli
from libra_jax import config as libra_config
from libra_jax import protocols
from libra_jax.planning import costs
from libra_jax.simulator import comparison, pools, report, settings
from libra_jax.telemetry import page, pool_picture, timeline, transitions

LAST = 5
"""The last fifth of a run's steps is told apart: what it ends at, once lengths have drifted."""

_CONFIGS = flags.DEFINE_string("configs", None, "Config files (or variants of --of), separated by commas.")
_OF = flags.DEFINE_string("of", None, "Config file whose variants --configs names.")
_SEEDS = flags.DEFINE_string("seeds", "0", "Seeds, separated by commas.")
_STEPS = flags.DEFINE_integer("steps", None, "Training steps of each run; default: as its config says.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", "runs/sweep", "Folder for the results.")
_SENSITIVITY = flags.DEFINE_bool("sensitivity", False, "Move each coefficient by 30%, one at a time, as well.")
_JOBS = flags.DEFINE_integer(
    "jobs", None, "Runs at a time; default: one a core if they are simulated, else one.", lower_bound=1
)
_LAUNCHER = flags.DEFINE_enum("launcher", None, list(submission.LAUNCHERS), "Submit real runs with this launcher.")
_LAUNCHER_FLAGS = flags.DEFINE_string("launcher_flags", "", "Further flags of the launcher, in one string.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "With --launcher: print its commands, and submit nothing.")
_AGAIN = flags.DEFINE_bool("again", False, "Submit runs that were submitted before, too: their jobs are gone.")


@dataclasses.dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
      name: the config's, as the table has it.
      run: its settings, the seed included.
      file: where its result goes.
      moved: the coefficient that was moved and where to; empty if none was.
    """

    name: str
    run: settings.SimulatedRun
    file: Path
    moved: str = ""


def main() -> None:
    if not _CONFIGS.value:
        raise protocols.ConfigError("--configs: name at least one config file, or with --of one of its variants")
    names = list(dict.fromkeys(name.strip() for name in _CONFIGS.value.split(",") if name.strip()))
    folder = Path(_OUTPUT.value)
    cli.check_output(folder / "sweep.json")
    if _LAUNCHER.value:
        _submit(names, folder)
        return
    if _DRY_RUN.value:
        raise protocols.ConfigError("--dry_run: prints what a --launcher would be given; simulated runs have none")
    jobs = [_job(name, seed, folder) for name in names for seed in cli.seeds(_SEEDS.value)]
    if _SENSITIVITY.value:
        jobs += [moved for job in list(jobs) for moved in _moves(job, folder)]
    left = [job for job in jobs if not job.file.exists()]
    _say(f"{len(names)} configs, {len(jobs)} runs, of which {len(jobs) - len(left)} are done already")
    _run(left)
    jobs = [job for job in jobs if job.file.exists()]
    results = {name: [_read(job.file) for job in jobs if (job.name, job.moved) == (name, "")] for name in names}
    _print(results)
    for line in _sensitivity(names, jobs):
        print(line)
    summary = {name: [dict(entry) for entry in entries] for name, entries in results.items()}
    (folder / "sweep.json").write_text(json.dumps(summary, indent=2) + "\n")
    _draw(folder / "sweep.svg", results)
    drawn = [folder / "sweep.svg", *(picture for job in jobs if (picture := _draw_pools(job)) is not None)]
    print(f"wrote {folder / 'sweep.json'} and {', '.join(map(str, drawn))}")


def _submit(names: Sequence[str], folder: Path) -> None:
    if _SENSITIVITY.value:
        raise protocols.ConfigError("--sensitivity: moves coefficients of simulated runs; leave out --launcher")
    runs = []
    for name in names:
        for seed in cli.seeds(_SEEDS.value):
            text, values = _values(name, seed)
            if "simulation" in values:
                raise protocols.ConfigError(f"--configs: {text} is a simulated run; leave out --launcher")
            config = libra_config.parse(libra_config.RunConfig, values)
            workdir = submission.workdir(folder, name, config)
            runs.append(submission.Run(name, text, config, _STEPS.value, workdir))
    jobs, again, dry_run = _JOBS.value or 1, _AGAIN.value, _DRY_RUN.value
    launcher, launcher_flags = _LAUNCHER.value, _LAUNCHER_FLAGS.value
    submission.run(runs, folder, launcher, launcher_flags, jobs=jobs, again=again, dry_run=dry_run)


def _values(name: str, seed: int) -> tuple[str, dict[str, Any]]:
    """The config file with its variant, and what it says with the seed and --steps."""
    text = f"{_OF.value}:{name}" if _OF.value else name
    values = _load(text)
    values["seed"] = seed
    if _STEPS.value:
        values["steps"] = _STEPS.value
    return text, values


def _job(name: str, seed: int, folder: Path) -> Job:
    text, values = _values(name, seed)
    if "simulation" not in values:
        raise protocols.ConfigError(
            f"--configs: {text} is no simulated run (it has no config.simulation); --launcher=here runs real ones"
        )
    run = libra_config.parse(settings.SimulatedRun, values)
    run = comparison.prepare(run, [run.scheduler.policy])
    return Job(name, run, _file(name, run, folder))


def _file(name: str, run: settings.SimulatedRun, folder: Path) -> Path:
    title = name.replace(".py", "").replace("/", "-").replace(":", "-")
    return folder / f"{title}-seed{run.seed}-steps{run.steps}-{libra_config.digest(run)}.json"


def _moves(job: Job, folder: Path) -> Iterator[Job]:
    """The same run with each coefficient moved both ways, save where it does not fit the cluster any more."""
    simulation = job.run.simulation
    for name, value in costs.moved(simulation.coefficients, comparison.MOVE):
        coefficients = dataclasses.replace(simulation.coefficients, **{name: value})  # type: ignore[arg-type]
        moved = dataclasses.replace(simulation, coefficients=coefficients)
        run = dataclasses.replace(job.run, simulation=moved)
        try:
            comparison.prepare(run, [run.scheduler.policy])
        except protocols.ConfigError as error:
            _say(f"{job.name}, {name} = {value:g}: left out ({error})")
            continue
        yield Job(job.name, run, _file(job.name, run, folder), f"{name} = {value:g}")


def _sensitivity(names: Sequence[str], jobs: Sequence[Job]) -> Iterator[str]:
    """A line a moved coefficient: tokens a second of each config over the first's, and what changes places."""

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


def _load(text: str) -> dict[str, Any]:
    """What a config file's get_config says, given the variant behind a colon."""
    file, _, variant = text.partition(":")
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        raise protocols.ConfigError(f"--configs: {file}: no such config file; variants of one file need --of=FILE")
    spec = importlib.util.spec_from_file_location(f"sweep_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        made = module.get_config(variant) if variant else module.get_config()
    except (ValueError, TypeError, AttributeError, ImportError, SyntaxError) as error:
        raise protocols.ConfigError(f"--configs: {text}: {error}") from error
    values: dict[str, Any] = made.to_dict()
    return values


def _run(jobs: Sequence[Job]) -> None:
    workers = min(_JOBS.value or os.cpu_count() or 1, len(jobs))
    if not workers:
        return
    with pools.pool(workers) as pool:
        doing = {pool.submit(result_of, job.run): job for job in jobs}
        failed = []
        for number, done in enumerate(concurrent.futures.as_completed(doing), start=1):
            job = doing[done]
            error = done.exception()
            if job.moved and isinstance(error, protocols.ConfigError):  # the cluster cannot hold it any more
                _say(f"[{number}/{len(jobs)}] {job.name}, {job.moved}: left out ({error})")
                continue
            if error is not None:
                failed.append(f"{job.name}, seed {job.run.seed}: {error}")
                _say(f"[{number}/{len(jobs)}] {failed[-1]}")
                continue
            entry = done.result()
            partial = job.file.with_suffix(".partial")
            partial.write_text(json.dumps(entry) + "\n")
            partial.rename(job.file)
            _say(
                f"[{number}/{len(jobs)}] {job.name}, seed {job.run.seed}{job.moved and f', {job.moved}'}: "
                f"{entry['tokens_per_second']:.0f} tokens/s "
                f"(simulated in {entry['wall_seconds']:.1f} s)"
            )
    if failed:
        raise protocols.LibraError(
            f"{len(failed)} of {len(jobs)} runs failed, the others are kept: {'; '.join(failed)}"
        )


def result_of(run: settings.SimulatedRun) -> dict[str, Any]:
    """A run's entry (`simulator.report.KEYS`), with what its planner did."""
    result = comparison.simulate(run)
    entry = comparison.entry_of(run, result)
    moved = [decision for decision in result.decisions if decision["moved"]]
    moved += [change for change in result.transitions if change["outcome"] == "done" and change["worker"] != "trainer"]
    errors = [step["plan/step_error"] for step in result.steps if "plan/step_error" in step]
    saved = [step["plan/saved_seconds"] for step in result.steps if "plan/saved_seconds" in step]
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
        "end_seconds": statistics.fmean(result.step_seconds[-max(1, len(result.step_seconds) // LAST) :]),
    }


def _read(file: Path) -> Mapping[str, Any]:
    try:
        entry: Mapping[str, Any] = json.loads(file.read_text())
        if not set(report.KEYS) <= set(entry):
            raise ValueError("it is no result of a run")
    except (OSError, ValueError, TypeError) as error:
        raise protocols.DataError(f"{file}: cannot be read ({error}); remove it, and it is run again") from error
    return entry


def _mean(entries: Sequence[Mapping[str, Any]], *path: str) -> float:
    values = []
    for entry in entries:
        value: Any = entry
        for name in path:
            value = value[name]
        values.append(float(value))
    return statistics.fmean(values)


def _print(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    heads = "config", "tokens/s", "+-", "x first", "step, s", "at the end", "train", "rollout"
    rows = table.Table(*heads, "moves", "saved, s", "lost")
    first = _mean(next(iter(results.values())), "tokens_per_second")
    for name, entries in results.items():
        rates = [entry["tokens_per_second"] for entry in entries]
        rows.add_row(
            name,
            f"{statistics.fmean(rates):.0f}",
            f"{statistics.stdev(rates):.0f}" if len(rates) > 1 else "",
            f"{statistics.fmean(rates) / first:.2f}",
            f"{_mean(entries, 'step_seconds', 'mean'):.0f}",
            f"{_mean(entries, 'end_seconds'):.0f}",
            f"{_mean(entries, 'utilisation', 'train'):.0%}",
            f"{_mean(entries, 'utilisation', 'rollout'):.0%}",
            f"{_mean(entries, 'moves'):.1f}",
            f"{_mean(entries, 'saved_seconds'):.0f}",
            str(sum(entry["lost_trajectories"] for entry in entries)),
        )
    console.Console(width=None if sys.stdout.isatty() else 120).print(rows)


def _draw(path: Path, results: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    from matplotlib import figure, rc_context

    names = list(results)
    rates = [[entry["tokens_per_second"] for entry in results[name]] for name in names]
    with rc_context({"svg.hashsalt": "libra-jax", "font.size": 10}):
        drawn = figure.Figure(figsize=(7.0, 1.2 + 0.42 * len(names)), layout="constrained")
        axes = drawn.add_subplot()
        spread = [statistics.stdev(each) if len(each) > 1 else 0.0 for each in rates]
        axes.barh(names, list(map(statistics.fmean, rates)), xerr=spread, color="#4c78a8", capsize=3, height=0.65)
        axes.invert_yaxis()
        axes.set_xlabel("generated tokens a second (mean over seeds, +- one standard deviation)")
        axes.spines[["top", "right"]].set_visible(False)
        drawn.savefig(path, metadata={"Date": None})


def _draw_pools(job: Job) -> Path | None:
    """The pools over a run in which workers changed sides, beside its result."""
    entry = _read(job.file)
    if job.moved or not entry.get("transitions"):
        return None
    sizes = [timeline.PoolSizes(start, devices) for start, devices in entry["pools"]]
    changes = [transitions.parse(record) for record in entry["transitions"]]
    picture = job.file.with_suffix(".pools.svg")
    picture.write_text(page.standalone(pool_picture.draw(sizes, changes, end=entry["seconds"])))
    return picture


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    cli.run(
        main, settings.SimulatedRun, interrupted="interrupted; the same command goes on with the runs that are left."
    )
