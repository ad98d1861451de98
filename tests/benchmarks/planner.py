"""How long the search for a plan takes as the cluster grows, with 8,192 requests in the sample, on one core.

The work grows with the cluster: as many trajectories for each accelerator as configs/simulate.py has. What is built
from the sample before the search (sums, rows, tables) is in the time.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from libra_jax import config as config_lib
from libra_jax.planning.forecast import forecast
from libra_jax.planning.search import search
from libra_jax.simulator import comparison, scripts, settings

ACCELERATORS = (48, 128, 1_024, 10_240)
REPEATS = {48: 9, 128: 5, 1_024: 3, 10_240: 1}


def measure(picture: Path | None = None) -> dict[str, Any]:
    """Seconds by the number of accelerators: medians of some, the search alone and with what it is built from.

    Args:
      picture: where the growth is drawn, as .svg; None draws nothing.
    """
    run, drawn = sample()
    found: dict[int, tuple[float, float]] = {}
    for devices in ACCELERATORS:
        spent = [_spent(run, drawn, devices) for _ in range(REPEATS[devices])]
        found[devices] = statistics.median(item[0] for item in spent), statistics.median(item[1] for item in spent)
    if picture is not None:
        _draw(picture, found)
    figures = {f"solve_seconds_{devices}": found[devices][0] for devices in ACCELERATORS}
    return {
        "requests_in_sample": len(drawn),
        **figures,
        **{f"whole_seconds_{devices}": found[devices][1] for devices in ACCELERATORS},
    }


def sample() -> tuple[settings.SimulatedRun, list[scripts.Script]]:
    """The run of configs/simulate.py, and all of its attempts."""
    from configs import simulate  # found from where scripts are launched, once they run

    run = config_lib.checked(simulate.get_config("swe"))
    workload, groups = comparison.workload(run), run.steps * run.coordinator.groups_per_step
    return run, [
        workload.script(task, sample) for task in range(groups) for sample in range(run.coordinator.group_size)
    ]


def searched(run: settings.SimulatedRun, drawn: Sequence[scripts.Script], devices: int) -> search.PlanSearch:
    """The search for so many accelerators, whose work is as much for each as the run's."""
    setting = forecast.PlanConditions.from_config(
        run, run.simulation.cost_model(run.model.lora), devices, slots=run.simulation.instance_slots(run.rollout)
    )
    setting = dataclasses.replace(setting, requests=setting.requests * devices // ACCELERATORS[0])
    return forecast.StepWork(setting, [one.prompt_tokens for one in drawn], [one.turns for one in drawn]).searched(
        forecast.CorrectionLevels()
    )


def _spent(run: settings.SimulatedRun, drawn: Sequence[scripts.Script], devices: int) -> tuple[float, float]:
    """Seconds of the search alone, and with what it is built from."""
    began = time.perf_counter()
    made = searched(run, drawn, devices)
    built = time.perf_counter()
    made.best(devices)
    ended = time.perf_counter()
    return ended - built, ended - began


def _draw(path: Path, found: dict[int, tuple[float, float]]) -> None:
    from matplotlib import figure, rc_context

    with rc_context({"svg.hashsalt": "libra-jax", "font.size": 10}):
        drawn = figure.Figure(figsize=(6.0, 3.4), layout="constrained")
        axes = drawn.add_subplot()
        axes.plot(list(found), [whole for _, whole in found.values()], "o-", color="#4c78a8", label="from the sample")
        axes.plot(list(found), [solve for solve, _ in found.values()], "o--", color="#54a24b", label="search alone")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("accelerators")
        axes.set_ylabel("seconds")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        drawn.savefig(path, metadata={"Date": None})
