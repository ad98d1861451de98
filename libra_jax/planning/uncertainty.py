"""Estimates how far off a plan's times may be: moves each cost coefficient by 30% both ways, one at a time.

The effects are taken as independent, so the larger effect of each coefficient adds up in squares. This holds for
times computed from a hardware sheet alone; levels correct measured times (`planner`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from libra_jax import protocols
from libra_jax.planning import costs, forecast

MOVE = 0.3
"""Relative change of a coefficient."""

SAMPLES = 512
"""Most trajectories from which the times are computed repeatedly."""


def relative(
    setting: forecast.Setting,
    prompts: Sequence[int],
    turns: Sequence[Sequence[protocols.Turn]],
    plan: protocols.Plan,
) -> forecast.Prediction:
    """Returns the uncertainty of each time of a plan, as a share of the time.

    Args:
      setting: conditions of the plan.
      prompts: tokens of each trajectory's prompt.
      turns: turns of each trajectory.
      plan: the plan.
    """
    # Every n-th trajectory keeps the distribution of lengths.
    every = -(-len(prompts) // SAMPLES)
    prompts, turns = prompts[::every], turns[::every]
    base = _seconds(setting, prompts, turns, plan)
    assert base is not None
    effects: dict[str, list[float]] = {}
    for name, value in costs.moved(setting.model.coefficients, MOVE):
        coefficients = dataclasses.replace(setting.model.coefficients, **{name: value})  # type: ignore[arg-type]
        model = dataclasses.replace(setting.model, coefficients=coefficients)
        other = _seconds(dataclasses.replace(setting, model=model), prompts, turns, plan)
        if other is None:  # the plan no longer fits into the memory, so there is no time to compare
            continue
        changes = [abs(after / before - 1.0) for before, after in zip(base, other, strict=True)]
        # The larger effect of the move down and the move up.
        effects[name] = [max(pair) for pair in zip(changes, effects.get(name, changes), strict=True)]
    return forecast.Prediction(*(math.hypot(*one) for one in zip(*effects.values(), strict=True)))


def _seconds(
    setting: forecast.Setting,
    prompts: Sequence[int],
    turns: Sequence[Sequence[protocols.Turn]],
    plan: protocols.Plan,
) -> tuple[float, float, float] | None:
    try:
        found = forecast.Work(setting, prompts, turns).predict(plan, forecast.Levels())
    except protocols.ConfigError:
        return None
    seconds = found.train, found.rollout, found.step
    return seconds if all(map(math.isfinite, seconds)) else None
