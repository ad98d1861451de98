"""Draws a plan: the time of both stages on each split of the accelerators."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from libra_jax.planning import search
from libra_jax.runs import planned
from libra_jax.simulator import report


def draw(path: Path, best: search.Split, splits: Sequence[search.Split], case: planned.Case) -> None:
    """Draws both stages' times against the number of training devices; a single split gets a bar for each stage."""
    stages = [("training", "#54a24b", "train_seconds"), ("rollout", "#4c78a8", "rollout_seconds")]
    sentence = f"Plan: {best.train.devices} train, {best.step_seconds:.0f} s a step"
    degrees = ", ".join(f"{bucket.count} of degree {bucket.tensor_parallel}" for bucket in best.rollout)
    title = [sentence, f"{case.subject()}; instances {degrees}", f"{case.work.source}: {case.lengths}"]
    with report.drawn(path, 2.6 if len(splits) > 1 else 1.6, title) as axes:
        if len(splits) == 1:  # a line needs two points
            times = [getattr(best, field) for _, _, field in stages]
            report.bars(axes, [name for name, _, _ in stages], times, [0.0, 0.0], "{:.0f}")
            axes.set_xlabel("seconds a step; no other split fits")
            return
        devices = [item.train.devices for item in splits]
        for name, colour, field in stages:
            axes.plot(devices, [getattr(item, field) for item in splits], "o-", color=colour, markersize=4, label=name)
        axes.axvline(best.train.devices, color="#c44e52", linewidth=1.2, label="the plan")
        axes.set_ylim(bottom=0.0)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("accelerators that train; the others roll out")
        axes.set_ylabel("seconds a step")
