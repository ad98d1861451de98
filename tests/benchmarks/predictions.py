"""Compares the steps that the planner predicts with those that the simulator measures: docs/results/planning.md.

  python -m tests.benchmarks.predictions --folder=runs/predictions [--seeds=0,1,2] [--output=table.md]

48 simulated A800s, Qwen3-14B, C-MLFQ, max staleness 4: three workloads, five splits, and instances of one degree and of
two. Lengths do not drift. Of 19 steps, those before the sixth fill the slots, and the last four empty them: neither
counts. The planner gets the lengths of the counted steps. The layouts that it finds for each workload are simulated,
too, to see how near its choice is to the best.

The folder keeps what was simulated (about a minute each). Without its files, all is simulated again: needed after a
change of costs, of the simulator or of a scheduler, and not after one of the planner.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support import cli

from absl import flags

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.planning.costs import request_costs
from libra_jax.planning.forecast import forecast
from libra_jax.planning.search import plans, search
from libra_jax.scheduling import registry
from libra_jax.scheduling.rivals import known_lengths
from libra_jax.simulator import scripts, settings, workloads, world
from tests.benchmarks import watched as watch

DEVICES, STALENESS, STEPS = 48, 4, 19
WORKLOADS, KINDS = ("swe", "search", "math"), ("one", "two")

SLOTS_AND_ROWS = {"swe": (32, 131_072), "search": (96, 24_576), "math": (32, 40_960)}
"""Slots of an instance, and tokens of a row and of a context, by workload."""

MESHES = {
    "swe": {16: (1, 8, 2), 20: (1, 5, 4), 24: (3, 2, 4), 32: (1, 8, 4), 40: (1, 10, 4)},
    "search": {16: (1, 4, 4), 20: (1, 5, 4), 24: (3, 8, 1), 32: (1, 16, 2), 40: (1, 10, 4)},
    "math": {16: (1, 8, 2), 20: (1, 20, 1), 24: (3, 4, 2), 32: (1, 8, 4), 40: (1, 20, 2)},
}
"""(data, fsdp, tensor) of each workload by the devices that train; the fastest of these devices, by formula."""

TASKS = 10**9
"""Tasks over which lengths would drift: so many that a run in their middle sees no drift."""

WAITED = 0.1
"""Share of the time in which the trainer waits, from which on the rate of generation gives the mean step."""

FITTED = 0
"""The seed that the planner's constants were fitted on."""

_FOLDER = flags.DEFINE_string("folder", "runs/predictions", "Folder that keeps what was simulated.")
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds of the workloads.")
_OUTPUT = flags.DEFINE_string("output", None, "Markdown file to write; default: standard output.")


@dataclass(frozen=True)
class Steady(scripts.Workload):
    """A synthetic workload whose lengths do not drift: that of the middle of a run."""

    drawn: workloads.Synthetic

    def script(self, task_index: int, sample: int) -> scripts.Script:
        return self.drawn.script(TASKS // 2 + task_index, sample)


@dataclass(frozen=True)
class Row:
    """A layout, its predicted and its simulated seconds a step."""

    workload: str
    layout: str
    seed: int
    predicted: float
    simulated: float

    @property
    def error(self) -> float:
        return self.predicted / self.simulated - 1.0


@dataclass(frozen=True)
class Simulated:
    """What a simulation measured.

    Attributes:
      step_seconds: seconds of each step.
      step_tokens: tokens that were generated during each step, whatever step trains on them.
      batch_tokens: tokens of a batch, mean over the counted steps' rollouts.
      late: share of turns that waited longer than `scheduler.ageing_seconds`.
      recomputed: share of the prefilled tokens whose keys and values had been computed before.
      wide: shares of tokens that the widest instances decoded: of the longest band, and of all others. None if all
        instances have one degree.
    """

    step_seconds: tuple[float, ...]
    step_tokens: tuple[float, ...]
    batch_tokens: float
    late: float
    recomputed: float
    wide: tuple[float, float] | None

    def seconds(self, cycle: float) -> float:
        """Returns the seconds of a step in the long run.

        Where the trainer waits, one step of five takes about as long as the others together, and ten steps may have one
        such step or three. Generation goes on evenly. So the seconds in which a batch is generated tell the mean step
        better. Where the trainer never waits, all steps take about equally long.

        Args:
          cycle: the trainer's seconds of a step, the weight sync included.
        """
        counted = slice(STALENESS + 1, STEPS - STALENESS)
        mean = statistics.fmean(self.step_seconds[counted])
        if mean * (1.0 - WAITED) < cycle:
            return mean
        return sum(self.step_seconds[counted]) * self.batch_tokens / sum(self.step_tokens[counted])


def main() -> None:
    if not all(seed.isdecimal() for seed in _SEEDS.value):
        raise protocols.ConfigError(f"--seeds: {','.join(_SEEDS.value)!r} are no seeds")
    folder = Path(_FOLDER.value)
    folder.mkdir(parents=True, exist_ok=True)
    seeds = [int(seed) for seed in _SEEDS.value]
    rows = [row for seed in seeds for row in _rows(folder, seed)]
    chosen = [row for seed in seeds for row in _choices(folder, seed)]
    text = "\n".join([*_table(rows), "", *_summary(rows), "", *_regret(rows, chosen)]) + "\n"
    if _OUTPUT.value is None:
        print(text)
    else:
        Path(_OUTPUT.value).write_text(text)


def run_of(workload: str, seed: int, plan: protocols.Plan | None = None) -> settings.SimulatedRun:
    """Returns the run of a workload, laid out by a plan."""
    from configs import ablation  # found from where scripts are launched, once they run

    config = ablation.get_config(f"static_optimal-{workload}")
    config.scheduler.policy, config.coordinator.max_staleness = "cmlfq", STALENESS
    # The meshes are those that fit with full rematerialisation, and the tables were measured with these slots and rows.
    config.model.remat = "full"
    config.rollout.slots, config.trainer.row_tokens = SLOTS_AND_ROWS[workload]
    config.rollout.max_context = config.trainer.row_tokens
    config.steps, config.seed = STEPS, seed
    values = config_lib.to_dict(config_lib.checked(config))
    return config_lib.parse(settings.SimulatedRun, values if plan is None else plans.applied(values, plan))


def work_of(run: settings.SimulatedRun) -> forecast.StepWork:
    """Returns the planner's view of the counted steps of a run."""
    drawn = counted_rollouts(run)
    model, slots = run.simulation.cost_model(run.model.lora), run.simulation.instance_slots(run.rollout)
    setting = forecast.PlanConditions.from_config(run, model, DEVICES, slots=slots)
    return forecast.StepWork(setting, [one.prompt_tokens for one in drawn], [one.turns for one in drawn])


def counted_rollouts(run: settings.SimulatedRun) -> list[scripts.Script]:
    """Returns the rollouts of the counted steps of a run."""
    groups, workload = run.coordinator.groups_per_step, steady(run)
    counted = range(groups * (STALENESS + 1), groups * (STEPS - STALENESS))
    return [workload.script(task, sample) for task in counted for sample in range(run.coordinator.group_size)]


def batch_tokens(run: settings.SimulatedRun) -> float:
    """Returns the tokens of a batch, mean over the counted steps' rollouts."""
    drawn = counted_rollouts(run)
    size = run.coordinator.groups_per_step * run.coordinator.group_size
    return size * statistics.fmean(one.generated_tokens for one in drawn)


def steady(run: settings.SimulatedRun) -> Steady:
    """Returns the workload of a run without its drift."""
    return Steady(workloads.Synthetic(run.workload.shape, run.seed, TASKS, run.workload.variation))


def layouts(workload: str, work: forecast.StepWork, lengths: list[int]) -> Iterator[tuple[str, protocols.Plan]]:
    """Yields a name and a plan for each split, with instances of degree 2, and of the degrees 2 and 4.

    Args:
      workload: name of the workload.
      work: the work of a seed.
      lengths: lengths of sampled rollouts, ascending.
    """
    longest = math.ceil(work.search.demand.tokens[0])
    for train, mesh in MESHES[workload].items():
        left = DEVICES - train
        one = (protocols.PlannedBucket(2, left // 2, longest),)
        wide = round(2 / 3 * left / 4)
        narrow = (left - 4 * wide) // 2
        # Each degree gets the tokens that its devices ask for.
        enough, taken, bound = 2 * narrow / left * sum(lengths), 0, 0
        while taken < enough:
            taken += lengths[bound]
            bound += 1
        two = protocols.PlannedBucket(2, narrow, lengths[bound - 1]), protocols.PlannedBucket(4, wide, longest)
        for kind, buckets in zip(KINDS, (one, two), strict=True):
            yield f"{train} train, {kind}", protocols.Plan(*mesh, buckets)


def simulated(folder: Path, workload: str, seed: int, plan: protocols.Plan) -> Simulated:
    """Returns what was simulated under a plan: from the folder, or now."""
    instances = "_".join(f"{one.count}x{one.tensor_parallel}" for one in plan.rollout)
    file = folder / f"{workload}-{plan.data}-{plan.fsdp}-{plan.tensor}-{instances}-{seed}.json"
    if not file.exists():
        run = run_of(workload, seed, plan)
        watched: list[watch.Watched] = []

        def scheduler(priced: request_costs.SchedulingCosts, remaining: known_lengths.Remaining) -> protocols.Scheduler:
            made = registry.create(run.scheduler, costs=priced, remaining=remaining, seed=seed, kinds=run.rollout.kinds)
            watched.append(watch.Watched(made, range(1, STEPS - 2 * STALENESS)))
            return watched[0]

        result = world.run(run, run.simulation, steady(run), scheduler)
        bounds = [one.max_remaining_tokens for one in plan.rollout[:-1]]
        shares = watched[0].shares(bounds[-1]) if bounds else None
        record = Simulated(
            result.step_seconds,
            tuple(step["tokens/generated"] for step in result.steps),
            batch_tokens(run),
            statistics.fmean(wait > run.scheduler.ageing_seconds for wait in watched[0].waits),
            result.kv_recompute_token_fraction,
            None if shares is None else (shares.longest, shares.others),
        )
        file.write_text(json.dumps(dataclasses.asdict(record)) + "\n")
        print(f"simulated {file.stem} in {result.wall_seconds:.0f} s", file=sys.stderr, flush=True)
    return Simulated(**json.loads(file.read_text()))


def _rows(folder: Path, seed: int) -> Iterator[Row]:
    for workload in WORKLOADS:
        work, of_seed = work_of(run_of(workload, seed)), steady(run_of(workload, FITTED))
        # The same layouts for all seeds.
        fitted = work if seed == FITTED else work_of(run_of(workload, FITTED))
        lengths = sorted(of_seed.script(task, 0).generated_tokens for task in range(2_048))
        for name, plan in layouts(workload, fitted, lengths):
            yield _row(folder, work, workload, name, seed, plan)


def _choices(folder: Path, seed: int) -> Iterator[Row]:
    """Yields the planner's best splits of each workload, the best first."""
    for workload in WORKLOADS:
        work = work_of(run_of(workload, seed))
        for split in work.searched(forecast.CorrectionLevels()).ranked(DEVICES):
            yield _row(folder, work, workload, _named(split), seed, split.plan)


def _row(folder: Path, work: forecast.StepWork, workload: str, name: str, seed: int, plan: protocols.Plan) -> Row:
    predicted = work.predict(plan, forecast.CorrectionLevels())
    cycle = predicted.train + work.besides(plan.train_devices, forecast.CorrectionLevels())
    return Row(workload, name, seed, predicted.step, simulated(folder, workload, seed, plan).seconds(cycle))


def _named(split: search.DeviceSplit) -> str:
    instances = ", ".join(f"{one.count} of degree {one.tensor_parallel}" for one in split.rollout)
    return f"{split.train.devices} train, {instances}"


def _table(rows: list[Row]) -> list[str]:
    """Returns a row for each layout, means over seeds."""
    lines = [
        "| workload | split, degrees | predicted, s | simulated, s | off, seeds in order |",
        "|---|---|---|---|---|",
    ]
    grouped = collections.defaultdict(list)
    for row in rows:
        grouped[row.workload, row.layout].append(row)
    for (workload, layout), found in grouped.items():
        means = (statistics.fmean(getattr(row, name) for row in found) for name in ("predicted", "simulated"))
        off = ", ".join(f"{row.error:+.1%}" for row in found)
        lines.append(f"| {workload} | {layout} | {' | '.join(f'{mean:,.0f}' for mean in means)} | {off} |")
    return lines


def _summary(rows: list[Row]) -> list[str]:
    lines = []
    for name, chosen in (
        (f"Seed {FITTED}, on which constants were fitted", [row for row in rows if row.seed == FITTED]),
        ("Other seeds", [row for row in rows if row.seed != FITTED]),
    ):
        if chosen:
            errors = [abs(row.error) for row in chosen]
            within = sum(error <= 0.1 for error in errors)
            lines.append(
                f"- {name}: {within} of {len(errors)} within 10%, {statistics.fmean(errors):.1%} off in the mean, "
                f"{max(errors):.1%} at most."
            )
    return lines


def _regret(rows: list[Row], chosen: list[Row]) -> list[str]:
    """Returns a row for each workload: the first choice against the best layout that was simulated."""
    lines = [
        "| workload | seed | first choice | simulated, s | best simulated | s | behind |",
        "|---|---|---|---|---|---|---|",
    ]
    for key in dict.fromkeys((row.workload, row.seed) for row in chosen):
        ranked = [row for row in chosen if (row.workload, row.seed) == key]
        best = min((row for row in [*rows, *chosen] if (row.workload, row.seed) == key), key=lambda row: row.simulated)
        first = ranked[0]
        behind = first.simulated / best.simulated - 1.0
        lines.append(
            f"| {first.workload} | {first.seed} | {first.layout} | {first.simulated:,.0f} | {best.layout} | "
            f"{best.simulated:,.0f} | {behind:.1%} |"
        )
    return lines


if __name__ == "__main__":
    cli.run(main, settings.SimulatedRun)
