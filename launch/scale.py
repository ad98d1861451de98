"""Predicts start-up, weight sync and the load of the one coordinator on many accelerators, and the first bottleneck.

  python launch/scale.py [--accelerators=48,1024,10240] [--output=scale.json]
  python -m tests.benchmarks.costs --output=mine.json   # measures the costs of this machine
  python launch/scale.py --costs=mine.json --loop_workers

Without --costs, the costs are those of launch/benchmarks/costs.json, with their date. The work is that of
configs/simulate.py, or of another simulated run by --config. Each accelerator has the same number of trajectories at
any size, so a step takes equally long, by the hardware sheet. Nothing here runs on more than this machine.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, cast

from support import cli, overrides

from absl import flags
from ml_collections import config_flags
from rich import console, table

from libra_jax import config as libra_config
from libra_jax import protocols
from libra_jax.planning import forecast, scale, search
from libra_jax.runs import planned
from libra_jax.simulator import comparison, settings

KEPT = Path(__file__).parent / "benchmarks" / "costs.json"

READ = (*(name for name in planned.OF_SIMULATION if name != "scheduler"), "deadlines.engine_start", "rollout.chunk_mib")
"""Fields and groups of the config that count here: those of a plan, and those of start-up and weight sync."""

_CONFIG = config_flags.DEFINE_config_file("config", None, "A simulated run's config file.", lock_config=True)
_ACCELERATORS = flags.DEFINE_list("accelerators", ["48", "1024", "10240"], "Sizes of clusters, separated by commas.")
_COSTS = flags.DEFINE_string("costs", None, "File of costs, as --output writes it; default: those that come along.")
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.")
_INTERVAL = flags.DEFINE_integer(
    "stream_interval", None, "rollout.stream_interval; default: as any run has it.", lower_bound=1
)
_LOOP_WORKERS = flags.DEFINE_bool("loop_workers", False, "Agent loops beside the engines (rollout.loop_workers).")
_CHUNK = flags.DEFINE_integer("chunk_mib", None, "rollout.chunk_mib; default: the config's.", lower_bound=1)
_LINK = flags.DEFINE_float(
    "link_bytes_per_second", None, "Between two hosts; default: an accelerator's by the sheet.", lower_bound=1.0
)
_START = flags.DEFINE_float(
    "engine_start_seconds", 20.0, "Until an engine is up; here, vLLM with a tiny model took 20.", lower_bound=0.0
)
_MEMORY = flags.DEFINE_float("memory_bytes", 1e12, "Of the coordinator's host.", lower_bound=1.0)


class Check(TypedDict):
    """A predicted cost against its measurement, in seconds; `error` is relative."""

    what: str
    predicted: float
    measured: float
    error: float


class SimulatedLoad(TypedDict):
    """Seconds of the coordinator in a simulated run, measured and predicted."""

    accelerators: int
    requests: int
    turns: int
    coordinator_seconds: float
    virtual_seconds: float
    predicted_seconds: float
    error: float


class Record(TypedDict):
    """A file of costs, as `python -m tests.benchmarks.costs` writes it."""

    date: str
    costs: Mapping[str, Any]
    embedded: Mapping[str, float]
    checks: Sequence[Check]
    simulated: Sequence[SimulatedLoad]


def main() -> None:
    given = _ACCELERATORS.value
    if not all(text.strip().isdecimal() and int(text) for text in given):
        raise protocols.ConfigError(
            f"--accelerators: {','.join(given)!r} must be numbers of accelerators from 1 on, like 48,1024"
        )
    sizes = [int(text) for text in given]
    output = None if _OUTPUT.value is None else Path(_OUTPUT.value)
    if output is not None:
        cli.check_output(output)
    if not isinstance(_CONFIG.value, settings.SimulatedRun):
        raise protocols.ConfigError(
            "--config: has no config.simulation; take the config of a simulated run, like configs/simulate.py"
        )
    chosen = overrides.fields(flags.FLAGS["config"])
    if "rollout.stream_interval" in chosen:  # a simulation's own is far from a real run's
        raise protocols.ConfigError("--config.rollout.stream_interval: launch/scale.py takes --stream_interval instead")
    overrides.refuse_unread(chosen, script="scale.py", read=READ, instead=settings.COUNTS)
    run = comparison.prepare(libra_config.checked(_CONFIG.value), ["cmlfq"])
    work, around = _of_run(run)
    record, costs = _read(KEPT if _COSTS.value is None else Path(_COSTS.value))
    found = [scale.loads(costs, work, around, size) for size in sizes]
    print(f"{run.simulation.model} on {run.simulation.hardware}, {run.name}.")
    _print(record, costs, work, around, found)
    if output is not None:
        loads = [
            {
                **dataclasses.asdict(one),
                "bottleneck": one.bottleneck,
                "remedies": {name: scale.remedy(costs, work, around, one.accelerators, name) for name in one.parts},
            }
            for one in found
        ]
        about = {"model": run.simulation.model, "hardware": run.simulation.hardware, "run": run.name}
        inputs = {"work": dataclasses.asdict(work), "settings": dataclasses.asdict(around)}
        output.write_text(json.dumps({**record, **about, **inputs, "loads": loads}, indent=2) + "\n")
        print(f"wrote {output}")


def _of_run(run: settings.SimulatedRun) -> tuple[scale.Work, scale.Settings]:
    """Returns the work of a mean step of a simulated run, with the layout that the planner finds, and its settings."""
    workload, groups = comparison.workload(run), run.steps * run.coordinator.groups_per_step
    drawn = [workload.script(task, sample) for task in range(groups) for sample in range(run.coordinator.group_size)]
    model = run.simulation.cost_model(run.model.lora)
    devices = run.simulation.train_devices + sum(run.rollout.tensor_parallel)
    setting = forecast.Setting.of_run(run, model, devices, slots=run.simulation.slots)
    made = forecast.Work(setting, [one.prompt_tokens for one in drawn], [one.turns for one in drawn])
    best: search.Split = made.searched(forecast.Levels()).best(devices)
    mean, sent = statistics.fmean, 0
    for one in drawn:
        held = one.prompt_tokens
        for turn in one.turns:  # each turn sends the whole context so far
            sent += held
            held += max(1, turn.generated_tokens) + turn.payload_tokens
    work = scale.Work(
        accelerators=devices,
        engines=sum(bucket.count for bucket in best.rollout),
        rollout_accelerators=best.plan.rollout_devices,
        trajectories=setting.requests,
        turns=mean(len(one.turns) for one in drawn),
        generated_tokens=mean(one.generated_tokens for one in drawn),
        payload_tokens=mean(sum(turn.payload_tokens for turn in one.turns[:-1]) for one in drawn),
        sent_tokens=sent / len(drawn),
        trained_tokens=mean(one.context_tokens for one in drawn),
        step_seconds=best.step_seconds,
        weight_bytes=model.sync_bytes,
    )
    usual = libra_config.RolloutConfig()  # a simulation looks at its engines seldom, to be fast
    by_sheet = model.sheet.network_bytes_per_second * model.coefficients.network_share
    around = scale.Settings(
        stream_interval=usual.stream_interval if _INTERVAL.value is None else _INTERVAL.value,
        loop_workers=_LOOP_WORKERS.value,
        chunk_mib=run.rollout.chunk_mib if _CHUNK.value is None else _CHUNK.value,
        health_seconds=usual.health_seconds,
        staleness=run.coordinator.max_staleness,
        accelerators_per_host=model.sheet.devices_per_node,
        link_bytes_per_second=by_sheet if _LINK.value is None else _LINK.value,
        load_seconds=model.coefficients.load_overhead,
        engine_start_seconds=_START.value,
        start_limit=run.deadlines.engine_start,
        memory_bytes=_MEMORY.value,
    )
    return work, around


def _read(path: Path) -> tuple[Record, scale.Costs]:
    try:
        record = json.loads(path.read_text())
        needed = {name: record[name] for name in ("date", "costs", "embedded")}
    except OSError as error:
        raise protocols.DataError(
            f"--costs: {path} cannot be read ({error.strerror or error}); write it by python -m tests.benchmarks.costs "
            "--output=FILE"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else "it is no JSON object"
        raise protocols.DataError(
            f"--costs: {path} has no costs ({why}); write one by python -m tests.benchmarks.costs --output=FILE"
        ) from error
    measured = {name: record.get(name, []) for name in ("checks", "simulated")}
    values = needed["costs"]
    try:
        # JSON has no numbers for keys.
        by_size = {
            name: {int(size): seconds for size, seconds in values[name].items()} for name in ("decisions", "planner")
        }
        return cast("Record", needed | measured), scale.Costs(**{**values, **by_size})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise protocols.DataError(
            f"--costs: its costs are not those of launch/scale.py ({error}); write them by "
            "python -m tests.benchmarks.costs --output=FILE"
        ) from error


def _print(
    record: Record,
    costs: scale.Costs,
    work: scale.Work,
    around: scale.Settings,
    found: Sequence[scale.Loads],
) -> None:
    print(
        f"Costs of {record['date']}. Each {work.accelerators} accelerators, a step: {work.trajectories} trajectories, "
        f"{work.turns:.1f} turns, {work.generated_tokens:,.0f} generated and {work.trained_tokens:,.0f} trained tokens "
        f"each, {work.step_seconds:.0f} s; {work.engines} engines on {work.rollout_accelerators}; "
        f"{work.weight_bytes / 1e9:.1f} GB of weights. Agent loops "
        + ("beside the engines" if around.loop_workers else "in the coordinator's process")
        + f", a delta every {around.stream_interval} tokens, chunks of {around.chunk_mib} MiB, staleness "
        f"{around.staleness}."
    )
    rows = table.Table("accelerators", *(f"{one.accelerators:,}" for one in found))
    for name in ("engines", "requests", "turns", "deltas", "tokens"):
        values = [one.engines if name == "engines" else one.rates[name] for one in found]
        rows.add_row(name if name == "engines" else f"{name} a second", *(f"{value:,.1f}" for value in values))
    for name in found[0].coordinator:
        rows.add_row(f"coordinator: {name}, cores", *(f"{one.coordinator[name]:.4f}" for one in found))
    for name in found[0].weight_sync:
        rows.add_row(f"weight sync: {name}, s", *(f"{one.weight_sync[name]:.2f}" for one in found))
    rows.add_section()
    for name, part in found[0].parts.items():
        cells = (f"{one.parts[name].value:,.3g}" + (" !" if one.parts[name].ratio >= 1.0 else "") for one in found)
        rows.add_row(f"{name} (limit {part.limit:,.3g} {part.unit})", *cells)
    rows.add_row("nearest to its limit", *(one.bottleneck for one in found))
    console.Console(width=110).print(rows)
    for name in found[0].parts:
        at = scale.reached(costs, work, around, name)
        print(f"{name}: " + ("its limit is out of reach." if at is None else f"at its limit with {at:,} accelerators."))
    if (first := scale.first(costs, work, around)) is not None:
        print(f"The first bottleneck is {first[0]}, from {first[1]:,} accelerators on.")
    for one in found:
        for name in one.parts:
            sentence = scale.remedy(costs, work, around, one.accelerators, name)
            if not sentence.startswith("none"):
                print(f"Remedy at {one.accelerators:,}, {name}: {sentence}.")
    for check in record["checks"]:
        print(
            f"Check: {check['what']}: {1e3 * check['predicted']:.2f} ms predicted, {1e3 * check['measured']:.2f} ms "
            f"measured ({check['error']:+.0%})."
        )
    for load in record["simulated"]:
        share = load["coordinator_seconds"] / load["virtual_seconds"]
        print(
            f"Simulated, {load['accelerators']:,} accelerators: {load['requests']:,} requests of {load['turns']:,} "
            f"turns took the coordinator {load['coordinator_seconds']:.1f} s of CPU time in "
            f"{load['virtual_seconds']:,.0f} virtual seconds ({share:.2%} of a core); predicted "
            f"{load['predicted_seconds']:.1f} s ({load['error']:+.0%})."
        )


if __name__ == "__main__":
    cli.run(main, settings.SimulatedRun, default_config="configs/simulate.py")
