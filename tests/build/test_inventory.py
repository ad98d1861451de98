"""Assignment of unlike accelerators: who trains, and what the others roll out as."""

import dataclasses

import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import inventory
from libra_jax.simulator import settings


def small_run(**rollout) -> settings.SimulatedRun:
    run = settings.SimulatedRun(
        steps=2,
        rollout=config_lib.RolloutConfig(max_context=131_072, max_tokens=65_536, stream_interval=1_000, **rollout),
        trainer=config_lib.TrainerConfig(row_tokens=131_072, rows_per_micro_batch=1),
        model=config_lib.ModelConfig(remat="full"),
        task=config_lib.TaskConfig(max_turns=10_000, tool_seconds=3_600.0),
        coordinator=config_lib.CoordinatorConfig(groups_per_step=4, group_size=4, max_staleness=1),
        deadlines=config_lib.DeadlineConfig(first_token=3_600.0, train_step=36_000.0),
        checkpoint=config_lib.CheckpointConfig(every=0),
    )
    simulation = dataclasses.replace(run.simulation, model="Qwen3-14B", kv_cache="offload")
    return dataclasses.replace(run, simulation=simulation)


def test_the_accelerators_with_the_most_arithmetic_train_and_all_others_roll_out():
    lines: list[str] = []
    best, *others = inventory.assign(small_run(), {"h20": 16, "h800": 16}, 2, lines.append)
    assert best.run.simulation.hardware == "h800"
    rolling = sum(best.run.rollout.tensor_parallel)
    assert best.run.simulation.train_devices + rolling == 32
    assert set(best.run.rollout.accelerators) == {"h20", "h800"}
    assert best.simulated_seconds is not None
    assert all(one.simulated_seconds >= best.simulated_seconds for one in others if one.simulated_seconds)
    assert best.bound_seconds <= best.simulated_seconds
    assert len(lines) == 2
    assert "h800 train" in best.line()


def test_one_kind_of_accelerator_is_divided_as_well():
    (best,) = inventory.assign(small_run(), {"h800": 16}, 1)
    assert set(best.run.rollout.accelerators) == {"h800"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("h800:32,h21:32", "'h21' is not one of .* did you mean 'h20'"),
        ("h800", "'h800' is no kind and number"),
        ("h800:many", "'h800:many' is no kind and number"),
        ("h800:4,h800:4", "h800 comes twice"),
        ("h800:1", "one accelerator cannot train and roll out"),
        ("h800:0,h20:0", "'h800:0' is no kind and number"),
    ],
)
def test_an_inventory_that_cannot_be_used_is_refused(text, problem):
    with pytest.raises(protocols.ConfigError, match=f"--inventory: {problem}"):
        inventory.parse(text.split(","))


def test_limits_that_cut_rollouts_short_are_refused():
    run = small_run()
    run = dataclasses.replace(run, rollout=dataclasses.replace(run.rollout, max_context=20_000, max_tokens=10_000))
    with pytest.raises(protocols.ConfigError, match=r"config\.rollout\.max_context: 20000 cuts rollouts"):
        inventory.assign(run, {"h800": 16}, 1)


def test_no_fewer_accelerators_train_than_hold_the_trainers_state():
    run = small_run()
    (best,) = inventory.assign(run, {"h800": 16}, 1)
    assert 80e9 * best.run.simulation.train_devices > 16 * 14.7e9, "16 bytes a parameter: weights, gradients, moments"
    with pytest.raises(protocols.ConfigError, match=r"--inventory: no division of these .* the trainer's state"):
        inventory.assign(run, {"h800": 3}, 1)


def test_accelerators_that_hold_no_context_are_refused():
    with pytest.raises(protocols.ConfigError, match=r"--inventory: no division .* rollout\.max_context = 131072"):
        inventory.assign(small_run(), {"v5e": 2}, 1)


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"planner": config_lib.PlannerConfig(period=5)}, "planner.period: 5"),
        ({"elastic": config_lib.ElasticConfig(hybrid=1)}, "elastic.hybrid: 1"),
    ],
)
def test_a_run_that_changes_its_layout_is_refused_by_the_setting_that_was_given(changed, name):
    run = dataclasses.replace(small_run(tensor_parallel=(1, 1)), **changed)
    with pytest.raises(protocols.ConfigError, match=rf"^config\.{name} .* --inventory compares fixed layouts"):
        inventory.assign(run, {"h800": 16}, 1)
