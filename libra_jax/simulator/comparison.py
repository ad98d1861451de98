"""Compares policies on the same work, seed by seed, and tests how their order depends on the cost coefficients."""

from __future__ import annotations

import ast
import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.coordinator import checkpoints
from libra_jax.planning.costs import request_costs
from libra_jax.scheduling import registry
from libra_jax.scheduling.rivals import known_lengths
from libra_jax.simulator import bound, faults, report, results, scripts, settings, traces, workloads, world
from libra_jax.utils import processes

Progress = Callable[[str], None]
"""Receives a line about each run that ended."""

MOVE = 0.3
"""Relative change of a coefficient in the sensitivity analysis."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Result of a comparison: entries (`report.KEYS`), and the bound in seconds a step, mean over seeds."""

    entries: list[dict[str, Any]]
    bound_seconds: float


@dataclasses.dataclass(frozen=True)
class MovedCoefficient:
    """Effect of one moved coefficient.

    Attributes:
      coefficient: name of the coefficient.
      value: its moved value.
      order: policies from the shortest mean step time to the longest.
      step_seconds: mean step time of each policy.
      swapped: pairs of policies whose order differs from that of the unmoved coefficients.
    """

    coefficient: str
    value: float
    order: list[str]
    step_seconds: dict[str, float]
    swapped: list[tuple[str, str]]


def prepare(run: settings.SimulatedRun, policies: Sequence[str]) -> settings.SimulatedRun:
    """Checks the run before anything is simulated, and sets the steps of a trace replay.

    Raises:
      ConfigError: a policy, a bucket bound, a limit or a slot count cannot be used; the message names the field.
      DataError: the trace cannot be used; the message names file and line.
    """
    for policy in policies:
        with_policy(run, policy)
    work = workload(run)
    if run.workload.fit_buckets and isinstance(work, traces.RecordedWorkload):
        bounds = workloads.fitted_bounds(itertools.chain.from_iterable(work.prompts), run.rollout.kinds)
        run = dataclasses.replace(run, scheduler=dataclasses.replace(run.scheduler, max_remaining_tokens=bounds))
    # Making each scheduler checks its settings.
    for policy in policies:
        variant = with_policy(run, policy)
        _scheduler(
            variant, request_costs.SchedulingCosts(variant.simulation.cost_model(run.model.lora)), lambda request: 0
        )
    # A trace sets the steps: those in which each of its prompts is replayed `passes` times, the last step in part.
    if isinstance(work, traces.RecordedWorkload) and run.workload.passes:
        steps = -(-len(work.prompts) * run.workload.passes // run.coordinator.groups_per_step)
        run = dataclasses.replace(run, steps=max(1, steps))
    workloads.check_fits(work, run, run.simulation)
    return run


def with_policy(run: settings.SimulatedRun, policy: str) -> settings.SimulatedRun:
    """Returns the same run under another policy.

    Args:
      policy: name of the policy, and arguments and fields that it changes:
        "sticky:threshold=0.2+coordinator.redundancy=0.25". A field without a group is one of `scheduler`. The run's
        own arguments are those of its own policy.

    Raises:
      ConfigError: there is no such policy or field, or a value cannot be used; the message names the field.
    """
    name, _, changes = policy.partition(":")
    config_lib.check_choice(name, config_lib.POLICIES, "scheduler.policy")
    arguments = dict(run.scheduler.arguments) if name == run.scheduler.policy else {}
    if not changes:
        return dataclasses.replace(run, scheduler=dataclasses.replace(run.scheduler, policy=name, arguments=arguments))
    values = config_lib.to_dict(run)
    values["scheduler"] |= {"policy": name, "arguments": arguments}
    for change in changes.split("+"):
        field, equals, text = change.partition("=")
        *groups, leaf = field.split(".") if "." in field else ("scheduler", field)
        if field in config_lib.ARGUMENTS.get(name, {}):
            groups = ["scheduler", "arguments"]
        at: Any = values
        for group in groups:
            at = at.get(group)
            at = at if isinstance(at, dict) else {}
        known = at is arguments or leaf in at
        if not equals or not known or (at is values["scheduler"] and leaf == "policy"):
            former = config_lib.now(field if "." in field else f"scheduler.{field}")
            taken = ", ".join(config_lib.ARGUMENTS.get(name, {})) or "none"
            raise protocols.ConfigError(
                f"policy {policy!r}: {change!r} changes no field; {former or 'write FIELD=VALUE'}. FIELD: an argument "
                f"of {name} ({taken}), one of scheduler's, or one with its group, as in coordinator.redundancy=0.25"
            )
        try:
            at[leaf] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            at[leaf] = text
    return config_lib.parse(settings.SimulatedRun, values)


def workload(run: settings.SimulatedRun) -> scripts.Workload:
    """Returns the workload of a run, drawn by its seed."""
    tasks = run.steps * run.coordinator.groups_per_step
    return workloads.create(run.workload, seed=run.seed, tasks=tasks, max_context=run.rollout.max_context)


def simulate(run: settings.SimulatedRun, recorder: results.StepRecorder | None = None) -> results.SimulationResult:
    """Simulates one policy under one seed.

    Args:
      run: from `prepare`.
      recorder: records the run; None makes one.

    Raises:
      ConfigError: the run asks for something that a simulation cannot do.
      LibraError: what ended the run, in one sentence.
    """
    return world.run(
        run,
        run.simulation,
        workload(run),
        lambda costs, remaining: _scheduler(run, costs, remaining),
        parts=faults.parts(run.faults, run.seed),
        recorder=recorder,
    )


def record(run: settings.SimulatedRun) -> list[Mapping[str, Any]]:
    """Simulates a run, and returns its trace: what a real run writes to `trace.jsonl`."""
    recorder = results.TraceRecorder()
    simulate(run, recorder)
    return recorder.trace


def entry(
    run: settings.SimulatedRun, result: results.SimulationResult | None = None, policy: str | None = None
) -> dict[str, Any]:
    """Returns the entry of one policy under one seed in the output file.

    Args:
      result: its result; None simulates it.
      policy: name of the entry, with the fields that the policy changes; None takes that of the policy.
    """
    result = result or simulate(run)
    return {
        "policy": policy or run.scheduler.policy,
        "seed": run.seed,
        "tokens_per_second": result.tokens_per_second,
        "step_seconds": result.step_summary(),
        "utilisation": {"train": result.train_utilisation, "rollout": result.rollout_utilisation},
        "migrated_token_fraction": result.migrated_token_fraction,
        "one_shot_routing_accuracy": result.one_shot_routing_accuracy,
        "kv_recompute_token_fraction": result.kv_recompute_token_fraction,
        "staleness_max": result.staleness_max,
        "lost_trajectories": result.lost_trajectories,
        "duplicated_trajectories": result.duplicated_trajectories,
        "replaced_trajectories": result.replaced_trajectories,
        "trained_trajectories": result.trained_trajectories,
        "trained_tokens_mean": result.trained_tokens_mean,
        "wall_seconds": result.wall_seconds,
    }


def _named_entry(run: tuple[settings.SimulatedRun, str]) -> dict[str, Any]:
    return entry(run[0], policy=run[1])


def bound_seconds(run: settings.SimulatedRun) -> float:
    """Returns the seconds a step that no policy can beat under the run's seed."""
    return bound.lower_bound(run, run.simulation, workload(run)).step_seconds


def compare(
    run: settings.SimulatedRun, policies: Sequence[str], seeds: Sequence[int], *, jobs: int, progress: Progress
) -> Comparison:
    """Runs every policy under every seed, `jobs` at a time; the order of the entries does not depend on `jobs`.

    Args:
      run: from `prepare`.
      seeds: seeds of the workload and of the policies' draws.
      jobs: number of processes; 1 stays in this process.
      progress: receives a line about each run that ended.
    """
    seeded = [dataclasses.replace(run, seed=seed) for seed in seeds]
    runs = [(with_policy(one, policy), policy) for policy in policies for one in seeded]
    entries = []
    for number, policy_entry in enumerate(_each(_named_entry, runs, jobs), start=1):
        entries.append(policy_entry)
        progress(
            f"[{number}/{len(runs)}] {policy_entry['policy']}, seed {policy_entry['seed']}: "
            f"{policy_entry['step_seconds']['mean']:.1f} s a step (simulated in {policy_entry['wall_seconds']:.1f} s)"
        )
    # Once a seed, since a bound holds for every policy.
    bounds = list(_each(bound_seconds, seeded, jobs))
    return Comparison(entries, sum(bounds) / len(bounds))


def sensitivity(
    run: settings.SimulatedRun, policies: Sequence[str], seeds: Sequence[int], *, jobs: int, progress: Progress
) -> tuple[Comparison, list[MovedCoefficient]]:
    """Moves each coefficient by 30% down and up, one at a time, and compares the order of the policies.

    If the workload no longer fits after a move (too little memory for a context), the move is left out and reported.

    Returns:
      The comparison with nothing moved, and each move.
    """
    base = compare(run, policies, seeds, jobs=jobs, progress=progress)
    reference, moves = list(report.mean_step_seconds(base.entries)), []
    # One at a time: all combinations would take a run for each of 2^n.
    for name, value in run.simulation.moved(MOVE):
        coefficients = dataclasses.replace(run.simulation.coefficients, **{name: value})  # type: ignore[arg-type]
        simulation = dataclasses.replace(run.simulation, coefficients=coefficients)
        moved = dataclasses.replace(run, simulation=simulation)
        try:
            prepare(moved, policies)
            entries = compare(moved, policies, seeds, jobs=jobs, progress=lambda line: None).entries
        except protocols.ConfigError as error:
            progress(f"{name} = {value:g}: left out ({error})")
            continue
        means = report.mean_step_seconds(entries)
        moves.append(MovedCoefficient(name, value, list(means), means, swapped(reference, list(means))))
        progress(moved_line(moves[-1]))
    return base, moves


def moved_line(moved: MovedCoefficient) -> str:
    """Returns a line of the sensitivity table."""
    pairs = ", ".join(f"{first} and {second}" for first, second in moved.swapped)
    seconds = ", ".join(f"{policy} {moved.step_seconds[policy]:.0f}" for policy in moved.order)
    verdict = f"swaps {pairs}" if pairs else "order kept"
    return f"{moved.coefficient} = {moved.value:g}: {verdict} ({seconds} s)"


def swapped(reference: Sequence[str], order: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the pairs that stand in the opposite order in `order`; each pair is in its order of `reference`."""
    place = {policy: index for index, policy in enumerate(order)}
    pairs = [(first, second) for index, first in enumerate(reference) for second in reference[index + 1 :]]
    return [(first, second) for first, second in pairs if place[first] > place[second]]


def _scheduler(
    run: settings.SimulatedRun, true_costs: request_costs.SchedulingCosts, remaining: known_lengths.Remaining
) -> Any:
    kinds = run.rollout.kinds
    believed: request_costs.SchedulingCosts | None = None  # takes the costs of the config
    match run.simulation.scheduler_costs:
        case "exact":
            believed = true_costs
        case "alike":
            believed = dataclasses.replace(true_costs, models_by_accelerator={})
    scheduler = registry.create(run.scheduler, costs=believed, remaining=remaining, seed=run.seed, kinds=kinds)
    checkpoints.teach(scheduler, run.scheduler.learnt_from)
    return scheduler


def _each(function: Callable[[Any], Any], arguments: Sequence[Any], jobs: int) -> Iterator[Any]:
    """Yields the function's result for each argument, in order, `jobs` at a time."""
    if jobs == 1:
        yield from map(function, arguments)
        return
    with processes.pool(min(jobs, len(arguments))) as workers:
        yield from workers.map(function, arguments)


TASKS, SAMPLES = 64, 16
"""Tasks over the whole run, and rollouts of each task, that lengths are read from."""


@dataclass(frozen=True)
class Subject:
    """Model, machine and lengths of a simulated run.

    Attributes:
      model: name of the model preset.
      hardware: name of the sheet of the accelerators that train.
      train_devices: accelerators that train.
      instances: number of rollout instances by tensor-parallel degree; where accelerators are unlike, as "2 on h20".
      workload: name of the workload, or of the trace's file.
      lengths: lengths of a sample of the workload.
    """

    model: str
    hardware: str
    train_devices: int
    instances: dict[str, int]
    workload: str
    lengths: workloads.Summary

    @classmethod
    def from_run(cls, run: settings.SimulatedRun) -> Subject:
        """Returns the subject of a run that `prepare` has checked."""
        tasks = run.steps * run.coordinator.groups_per_step
        sampled, samples = range(0, tasks, max(1, tasks // TASKS)), range(min(SAMPLES, run.coordinator.group_size))
        work = workload(run)
        lengths = workloads.summary_of([work.script(task, sample) for task in sampled for sample in samples])
        counted = sorted(collections.Counter(run.rollout.kinds).items())
        instances = {f"{degree} on {name}" if name else str(degree): count for (degree, name), count in counted}
        trace, simulation = run.workload.trace, run.simulation
        name = Path(trace).name if trace else run.workload.shape
        return cls(simulation.model, simulation.hardware, simulation.train_devices, instances, name, lengths)

    def clauses(self) -> tuple[str, str]:
        """Returns a clause with model, hardware and layout, and one with the workload and its lengths."""
        rolling = sum(int(kind.split()[0]) * number for kind, number in self.instances.items())
        layout = ", ".join(f"{number} of degree {kind}" for kind, number in self.instances.items())
        count, train = f"{self.train_devices + rolling:,} {self.hardware}", f"{self.train_devices:,}"
        if any(" on " in kind for kind in self.instances):
            count, train = f"{self.train_devices + rolling:,} accelerators", f"{train} {self.hardware}"
        machine = f"{self.model} on {count}: {train} train, instances {layout}"
        return machine, f"{self.workload}: {self.lengths}"
