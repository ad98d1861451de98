"""A simulated run that plans: it follows lengths that drift, and loses nothing on the way."""

from __future__ import annotations

import dataclasses

import pytest
import simulator_doubles as doubles

from configs import simulate
from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.simulator import comparison, results, settings


def make(steps: int = 14, **planner) -> settings.SimulatedRun:
    config = simulate.get_config("swe")
    config.steps = steps
    config.simulation.model = "Qwen3-1.7B"
    config.simulation.train_devices, config.simulation.train_mesh = 2, (1, 2, 1)
    config.simulation.slots = ()
    config.rollout.tensor_parallel = (1,) * 14
    config.rollout.slots = 32
    config.scheduler.max_remaining_tokens = ()
    config.coordinator.groups_per_step, config.coordinator.group_size = 4, 8
    config.planner = dataclasses.replace(config.planner, **{"period": 3, "degrees": (1, 2, 4), **planner})
    return comparison.prepare(config_lib.checked(config), ["cmlfq"])


def moves(result: results.SimulationResult) -> int:
    return sum(bool(decision["moved"]) for decision in result.decisions)


def test_it_follows_lengths_that_drift_and_is_faster_for_it():
    run, still = make(), make(period=0)
    result, without = comparison.simulate(run), comparison.simulate(still)
    doubles.check_whole(result, run)
    doubles.check_whole(without, still)
    assert moves(result) > 0
    assert not without.decisions
    assert result.seconds < 0.95 * without.seconds
    assert any(step.get("plan/step_seconds") for step in result.steps)


def test_a_run_that_plans_repeats_exactly():
    first, second = comparison.simulate(make(8)), comparison.simulate(make(8))
    assert first.steps == second.steps
    assert first.decisions == second.decisions


def test_devices_go_from_one_stage_to_the_other():
    """Training is twenty times slower than the layout was made for, so the mesh grows and instances go."""
    run = with_slow_training(make(10))
    result = comparison.simulate(run)
    doubles.check_whole(result, run)
    plans = [decision["plan"] for decision in result.decisions if decision["moved"]]
    assert plans
    assert plans[-1]["data"] * plans[-1]["fsdp"] * plans[-1]["tensor"] > 2
    assert sum(bucket["count"] * bucket["tensor_parallel"] for bucket in plans[-1]["rollout"]) < 14


def test_a_plan_is_about_the_devices_that_no_hybrid_worker_has():
    run = with_slow_training(make(10), hybrid=4)
    result = comparison.simulate(run)
    doubles.check_whole(result, run)
    plans = [decision["plan"] for decision in result.decisions if decision["moved"]]
    assert plans
    for plan in plans:
        rollout = sum(bucket["count"] * bucket["tensor_parallel"] for bucket in plan["rollout"])
        assert plan["data"] * plan["fsdp"] * plan["tensor"] + rollout <= 2 + 14 - 4
    assert max(sum(sizes.devices.values()) for sizes in result.pool_sizes) <= 2 + 14


def with_slow_training(run: settings.SimulatedRun, hybrid: int = 0) -> settings.SimulatedRun:
    coefficients = dataclasses.replace(run.simulation.coefficients, train_flops_share=0.02)
    values = config_lib.to_dict(run)
    values["simulation"]["coefficients"] = config_lib.to_dict(coefficients)
    values["elastic"]["hybrid"] = hybrid
    return config_lib.parse(settings.SimulatedRun, values)


def test_a_planner_without_a_mesh_to_start_from_is_refused():
    config = simulate.get_config("swe")
    config.planner.period = 2
    run = config_lib.checked(config)
    with pytest.raises(protocols.ConfigError, match=r"config\.simulation\.train_mesh: is what a planner starts from"):
        comparison.simulate(run)
    config.simulation.train_mesh = (1, 4, 4)
    with pytest.raises(protocols.ConfigError, match=r"simulation\.train_mesh: \(1, 4, 4\) is no"):
        config_lib.checked(config)
