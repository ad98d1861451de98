"""Measures streamed steps and recycled groups in simulated runs: docs/results/flow.md.

  python -m tests.benchmarks.flow [--seeds=0,1,2] [--steps=8] [--output=table.md]     # about 20 minutes

48 simulated A800s as configs/simulate.py has them, under C-MLFQ.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from support import cli

from absl import flags
from scipy import stats

from libra_jax import config as config_lib
from libra_jax.simulator import comparison, results, settings

WORKLOADS = ("swe", "search", "math")
STEPS, SPARE = 8, 0.25

STREAMS: Mapping[str, Mapping[str, object]] = {
    f"staleness {staleness}, {name}": {"coordinator.max_staleness": staleness, "trainer.stream": stream}
    for staleness in (0, 1)
    for name, stream in (("whole batches", "off"), ("by group", "group"), ("by micro-batch", "micro_batch"))
}
GROUPS: Mapping[str, Mapping[str, object]] = {
    "staleness 0": {"coordinator.max_staleness": 0},
    "staleness 0, a quarter more groups": {"coordinator.max_staleness": 0, "coordinator.redundancy": SPARE},
    "staleness 1, a quarter more groups, recycled": {
        "coordinator.max_staleness": 1,
        "coordinator.redundancy": SPARE,
        "coordinator.recycle": True,
    },
    "staleness 1": {"coordinator.max_staleness": 1},
}

_SEEDS = flags.DEFINE_string("seeds", "0,1,2", "Seeds of the workloads.")
_STEPS = flags.DEFINE_integer("steps", STEPS, "Training steps of a run.", lower_bound=2)
_OUTPUT = flags.DEFINE_string("output", None, "Markdown file to write; default: standard output.")


@dataclass(frozen=True)
class Run:
    """A simulated run, and the generated tokens of the rollouts that it trained and of all that its prompts have."""

    result: results.SimulationResult
    trained: Sequence[int]
    sampled: Sequence[int]


def main() -> None:
    text = "\n".join([*_table(STREAMS, _streamed), "", *_table(GROUPS, _recycled), ""])
    if _OUTPUT.value is None:
        print(text)
    else:
        Path(_OUTPUT.value).write_text(text)


def _table(ways: Mapping[str, Mapping[str, object]], cell: Callable[[Sequence[Run]], str]) -> Iterator[str]:
    yield f"| | {' | '.join(WORKLOADS)} |"
    yield "|---|" + "---|" * len(WORKLOADS)
    for name, changes in ways.items():
        of_workloads = [[_run(work, seed, changes) for seed in cli.seeds(_SEEDS.value)] for work in WORKLOADS]
        yield f"| {name} | {' | '.join(map(cell, of_workloads))} |"


def _streamed(runs: Sequence[Run]) -> str:
    """Returns the seconds of a step, and the share of them in which the trainer does nothing."""
    idle = [100 * (1 - run.result.train_utilisation) for run in runs]
    return f"{_seconds(runs)}, {statistics.fmean(idle):.0f}%"


def _recycled(runs: Sequence[Run]) -> str:
    """Returns the seconds of a step, the generated tokens of a trained rollout, and how far the lengths of trained
    rollouts are from those of all rollouts (Kolmogorov and Smirnov's distance)."""
    apart = [stats.ks_2samp(run.trained, run.sampled).statistic for run in runs]
    tokens = statistics.fmean(statistics.fmean(run.trained) for run in runs)
    return f"{_seconds(runs)}, {tokens:,.0f}, {statistics.fmean(apart):.3f}"


def _seconds(runs: Sequence[Run]) -> str:
    means = [run.result.step_summary()["mean"] for run in runs]
    spread = f" ± {statistics.stdev(means):,.1f}" if len(means) > 1 else ""
    return f"{statistics.fmean(means):,.1f}{spread}"


def _run(workload: str, seed: int, changes: Mapping[str, object]) -> Run:
    given = {"seed": seed, "steps": _STEPS.value, **changes}
    overrides = [f"--config.{name}={value}" for name, value in given.items()]
    read = cli.read_config(settings.SimulatedRun, f"configs/simulate.py:{workload}", overrides)
    run = comparison.prepare(config_lib.parse(settings.SimulatedRun, config_lib.to_dict(read)), ["cmlfq"])
    recorder = results.TraceRecorder()
    result = comparison.simulate(run, recorder)
    drawn, groups = comparison.workload(run), run.coordinator.groups_per_step * run.steps
    sampled = [
        drawn.script(task, sample).generated_tokens
        for task in range(groups)
        for sample in range(run.coordinator.group_size)
    ]
    trained = [sum(turn["generated_tokens"] for turn in record["turns"]) for record in recorder.trace]
    print(f"{workload}, {given}: {result.step_summary()['mean']:.1f} s a step", file=sys.stderr, flush=True)
    return Run(result, trained, sampled)


if __name__ == "__main__":
    cli.run(main, settings.SimulatedRun)
