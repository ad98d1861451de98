"""Simulates a cluster under one scheduling policy or several: a table, a JSON file and a picture.

  python launch/simulate.py --config=configs/simulate.py --policies=cmlfq,sticky --seeds=0,1,2 --output=runs/out.json
  python launch/simulate.py --config=configs/simulate.py:trace --trace=runs/mine/trace.jsonl --output=runs/replay.json

With a trace, the script also measures how well the tool returns predict the tokens left to generate, which C-MLFQ
relies on. It prints a table, and with --output it writes a JSON file and a picture (`-causes`).
configs/simulate.py:trace has buckets that fit the trace. The coordinator, the agent loop and the scheduler are those
of a real run, on a virtual clock.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from support import cli, overrides

from absl import flags
from ml_collections import config_flags

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.planning.search import plans
from libra_jax.scheduling.prediction import prediction_quality
from libra_jax.simulator import comparison, report, settings
from libra_jax.telemetry import trace
from libra_jax.telemetry.report import tool_report

COMPARED = (
    "cmlfq",
    "cmlfq:evidence=blind",
    "cmlfq:evidence=mean",
    "sticky_cache",
    "heddle",
    "cmlfq_authors:max_residents=64",
    "sticky",
    "least_loaded",
    "oracle",
    "clairvoyant",
)

MOST_ROWS = 16
"""Most causal states in the table of prediction quality; the most frequent are shown."""

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "The run's config file; configs/simulate.py.", lock_config=True
)
_TRACE = flags.DEFINE_string("trace", None, "Trace (JSON lines) to replay instead of the config's workload.")
_PLAN = flags.DEFINE_string("plan", None, "Plan of launch/plan.py to lay the cluster out by.")
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write; the picture lies beside it, as .svg.")
_POLICIES = flags.DEFINE_string(
    "policies",
    ",".join(COMPARED),
    "Scheduling policies, separated by commas; each may change fields: cmlfq:evidence=mean, "
    "sticky:admission=cache+coordinator.redundancy=0.25.",
)
_SEEDS = flags.DEFINE_string("seeds", "0", "Seeds, separated by commas.")
_JOBS = flags.DEFINE_integer("jobs", None, "Runs simulated at a time; default: one a core.", lower_bound=1)
_RECORD = flags.DEFINE_string("record", None, "Trace (JSON lines) to write, of the first policy under the first seed.")
_SENSITIVITY = flags.DEFINE_bool("sensitivity", False, "Move each coefficient by 30%, one at a time, as well.")


def main() -> None:
    policies, seeds = _policies(_POLICIES.value), cli.seeds(_SEEDS.value)
    if not isinstance(_CONFIG.value, settings.SimulatedRun):
        file = config_flags.get_config_filename(flags.FLAGS["config"])
        raise protocols.ConfigError(
            f"--config={file}: is no simulated run (it has no config.simulation); launch/train.py takes real ones"
        )
    if _CONFIG.value.planner.period:
        raise protocols.ConfigError(
            "config.planner.period: what is compared here has one layout for all, and so a bound; set it to 0, or give "
            "runs that plan to launch/sweep.py"
        )
    given = overrides.fields(flags.FLAGS["config"])
    overrides.refuse_ignored(given, script="simulate.py", ignored=settings.IGNORED, instead=settings.COUNTS)
    values = config_lib.to_dict(_CONFIG.value)
    if _TRACE.value is not None:
        values["workload"] |= {"shape": "trace", "trace": _TRACE.value}
    if _PLAN.value is not None:
        overrides.refuse_planned(given, _PLAN.value)
        values = plans.applied(values, plans.read(Path(_PLAN.value)))
    asked = config_lib.parse(settings.SimulatedRun, values)
    run = comparison.prepare(asked, policies)
    output = None if _OUTPUT.value is None else Path(_OUTPUT.value)
    if output is not None:
        cli.check_output(output)
    jobs = _JOBS.value or os.cpu_count() or 1
    count = run.steps * run.coordinator.groups_per_step * run.coordinator.group_size
    compared = "1 policy" if len(policies) == 1 else f"{len(policies)} policies"
    _progress(
        f"{run.name}: {run.steps} step{'s' * (run.steps != 1)}, {count:,} trajectories, {compared} x {len(seeds)} "
        f"seed{'s' * (len(seeds) != 1)}"
    )
    if run.steps != asked.steps:
        passes = run.workload.passes
        _progress(f"(the trace is replayed {passes} time(s): config.workload.passes sets the steps, not config.steps)")
    if _RECORD.value is not None:
        first = comparison.with_policy(dataclasses.replace(run, seed=seeds[0]), policies[0])
        _write_trace(Path(_RECORD.value), comparison.record(first))
    if _SENSITIVITY.value:
        result, moves = comparison.sensitivity(run, policies, seeds, jobs=jobs, progress=_progress)
    else:
        result, moves = comparison.compare(run, policies, seeds, jobs=jobs, progress=_progress), []
    about = comparison.Subject.from_run(run)
    print("\n".join(about.clauses()))
    print(report.table(result.entries, result.bound_seconds))
    for move in moves:
        print(comparison.moved_line(move))
    records = trace.read(Path(run.workload.trace)) if run.workload.trace else []
    found = prediction_quality.measure([one for record in records for one in prediction_quality.rollouts(record)])
    if found is not None:
        rows = [tool_report.CAUSES_HEADS, *tool_report.states(found)[:MOST_ROWS]]
        further = len(found.states) - MOST_ROWS
        more = [f"({further} more causal states)"] if further > 0 else []
        print(f"\nWhat the tool returns of {run.workload.trace} predict:")
        print(*report.aligned(rows, left_columns=3), *more, *tool_report.verdicts(found), sep="\n")
    if output is not None:
        _write(output, run, about, result, moves, found)


def _policies(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise protocols.ConfigError(f"--policies: name at least one of {', '.join(config_lib.POLICIES)}")
    for name in (each.partition(":")[0] for each in names):
        if name not in config_lib.POLICIES:
            near = difflib.get_close_matches(name, config_lib.POLICIES, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            known = ", ".join(config_lib.POLICIES)
            raise protocols.ConfigError(f"--policies: {name!r} is not one of {known}{hint}")
    return list(dict.fromkeys(names))


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _write_trace(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    try:
        path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    except OSError as error:
        raise protocols.DataError(f"--record: {path} cannot be written ({error.strerror or error})") from error
    print(f"wrote {path}")


def _write(
    output: Path,
    run: settings.SimulatedRun,
    about: comparison.Subject,
    result: comparison.Comparison,
    moves: Sequence[comparison.MovedCoefficient],
    found: prediction_quality.PredictionQuality | None,
) -> None:
    picture = output.with_suffix(".svg")
    try:
        shared = config_lib.to_dict(run)
        # The entries differ in these.
        del shared["seed"], shared["scheduler"]["policy"]
        output.write_text(report.to_json(result.entries, result.bound_seconds, asdict(about), shared))
        title = [run.name, *about.clauses()]
        report.write_picture(result.entries, result.bound_seconds, picture, title)
        if moves:
            beside = output.with_name(f"{output.stem}-sensitivity.json")
            beside.write_text(json.dumps([asdict(move) for move in moves], indent=2) + "\n")
        if found is not None:
            causes = output.with_name(f"{output.stem}-causes.json")
            # JSON has no NaN: unknown values become null.
            values = {
                name: None if isinstance(value, float) and math.isnan(value) else value
                for name, value in asdict(found).items()
            }
            causes.write_text(json.dumps(values, indent=2) + "\n")
            causes.with_suffix(".svg").write_text(tool_report.picture(found.states).standalone())
    except OSError as error:
        raise protocols.DataError(f"--output: {output} cannot be written ({error.strerror or error})") from error
    print(f"wrote {output} and {picture}")


if __name__ == "__main__":
    cli.run(main, settings.SimulatedRun, default_config="configs/simulate.py")
