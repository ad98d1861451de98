"""Compares predicted with simulated streamed steps (`trainer.stream`): docs/results/planning.md.

  python -m tests.benchmarks.streams [--seed=1] [--table=table.md]     # about half an hour

The runs are those of `predictions`, at max staleness 0 and 1. Training takes the time of its mesh, so a part of a step
that does not fill its last micro-batch costs as much as one that does.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from support import cli

from absl import flags

from libra_jax import protocols
from libra_jax.planning.forecast import forecast
from libra_jax.scheduling import registry
from libra_jax.simulator import scripts, settings, world
from tests.benchmarks import predictions

STREAMS, LAYOUTS = ("off", "group"), ("20 train, one", "32 train, two")
STEPS = {0: (0, 5), 1: (2, 8)}
"""By max staleness: the first counted step, and the step after the last. `staleness` more steps empty the slots."""

_SEED = flags.DEFINE_integer("seed", 1, "Seed of the workloads.")
_TABLE = flags.DEFINE_string("table", None, "Markdown file to write; default: standard output.")


def main() -> None:
    lines = ["| workload | split, degrees | staleness | whole batches | by group |", "|" + "---|" * 5]
    errors = collections.defaultdict(list)
    for layout, workload in itertools.product(LAYOUTS, predictions.WORKLOADS):
        plan = _plan(workload, layout)
        for staleness in STEPS:
            cells = []
            for stream in STREAMS:
                predicted, simulated = _compared(workload, plan, staleness, stream)
                error = predicted / simulated - 1.0
                errors[stream, staleness].append(error)
                cells.append(f"{predicted:,.0f}, {simulated:,.0f} ({error:+.1%})")
                print(f"{workload}, {layout}, {staleness}, {stream}: {cells[-1]}", file=sys.stderr, flush=True)
            lines.append(f"| {workload} | {layout} | {staleness} | {' | '.join(cells)} |")
    for (stream, staleness), found in errors.items():
        off = [abs(error) for error in found]
        lines.append(f"- {stream}, staleness {staleness}: {statistics.fmean(off):.1%} off, at most {max(off):.1%}")
    text = "\n".join(lines) + "\n"
    if _TABLE.value is None:
        print(text)
    else:
        Path(_TABLE.value).write_text(text)


def _plan(workload: str, layout: str) -> protocols.Plan:
    """Returns the plan of a layout, whose length ranges are those of the fitted seed."""
    fitted = predictions.run_of(workload, predictions.FITTED)
    drawn = predictions.steady(fitted)
    lengths = sorted(drawn.script(task, 0).generated_tokens for task in range(2_048))
    return dict(predictions.layouts(workload, predictions.work_of(fitted), lengths))[layout]


def _compared(workload: str, plan: protocols.Plan, staleness: int, stream: str) -> tuple[float, float]:
    """Returns the predicted and the simulated seconds of a step."""
    first, last = STEPS[staleness]
    run = predictions.run_of(workload, _SEED.value, plan)
    run = dataclasses.replace(
        run,
        steps=last + staleness,
        coordinator=dataclasses.replace(run.coordinator, max_staleness=staleness),
        trainer=dataclasses.replace(run.trainer, stream=stream),
    )
    drawn, groups = predictions.steady(run), run.coordinator.groups_per_step
    rollouts = [
        drawn.script(task, sample)
        for task in range(groups * first, groups * last)
        for sample in range(run.coordinator.group_size)
    ]
    model, slots = run.simulation.cost_model(run.model.lora), run.simulation.instance_slots(run.rollout)
    setting = forecast.PlanConditions.from_config(run, model, predictions.DEVICES, slots=slots)
    work = forecast.StepWork(setting, [one.prompt_tokens for one in rollouts], [one.turns for one in rollouts])
    predicted = work.predict(plan, forecast.CorrectionLevels()).step
    result = world.run(
        run,
        run.simulation,
        drawn,
        lambda priced, remaining: registry.create(
            run.scheduler, costs=priced, remaining=remaining, seed=_SEED.value, kinds=run.rollout.kinds
        ),
    )
    counted = result.step_seconds[first:last]
    return predicted, statistics.fmean(counted) * _rate(result.steps[first:last], rollouts)


def _rate(steps: Sequence[Mapping[str, float]], rollouts: list[scripts.Script]) -> float:
    """Returns the tokens of the counted batches over those that were generated meanwhile."""
    return sum(one.generated_tokens for one in rollouts) / sum(step["tokens/generated"] for step in steps)


if __name__ == "__main__":
    cli.run(main, settings.SimulatedRun)
