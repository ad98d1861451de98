"""Planners of small runs, and steps that they see."""

from __future__ import annotations

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.models import config as model_config
from libra_jax.planning import planner
from libra_jax.planning.costs import costs, hardware
from libra_jax.planning.forecast import forecast, meshes

MODEL = costs.CostModel(hardware.sheet("a800"), model_config.load_preset("Qwen3-1.7B"))
TRAINER = meshes.TrainerProperties(lengths=(65_536,))
NARROW = protocols.Plan(1, 2, 1, (protocols.PlannedBucket(1, 14, 60_000),))


def make(plan=NARROW, setting=None, **changes) -> planner.GlobalPlanner:
    config = config_lib.PlannerConfig(**{"period": 2, "cooldown": 0, **changes})
    setting = setting or forecast.PlanConditions(MODEL, TRAINER, (1, 2, 4), (32, 32, 32), 16, 64, 1)
    masks = config_lib.TaskConfig(cut_off="mask", cut_off_limits=("max_context",)).masks
    return planner.GlobalPlanner(config, setting, plan, masks=masks)


def trained(tokens: int, count: int = 64) -> list[protocols.Trajectory]:
    """Two turns each, from half of `tokens` to one and a half times as many."""
    made = []
    for index in range(count):
        each = tokens * (count + 2 * index) // (4 * count)
        trajectory = protocols.Trajectory(f"t{index}", "p")
        trajectory.append_text([0] * 100, protocols.TokenSource.PROMPT)
        trajectory.turns = [
            protocols.Turn(each, "bash", "success", 500, 1.0),
            protocols.Turn(each),
        ]
        made.append(trajectory)
    return made


def steps(made: planner.GlobalPlanner, measured: planner.ObservedStep, tokens: int, count: int, begin: int = 1):
    return [made.after(step, measured, trained(tokens)) for step in range(begin, begin + count)]
