"""The planner of a run: what it learns of levels, when it looks, and what it keeps."""

from __future__ import annotations

import dataclasses
import json

import pytest

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.models import config as model_config
from libra_jax.planning import costs, hardware, meshes, planner, plans, replanning

MODEL = costs.CostModel(hardware.sheet("a800"), model_config.load_preset("Qwen3-1.7B"))
TRAINER = meshes.Trainer(lengths=(65_536,))
NARROW = protocols.Plan(1, 2, 1, (protocols.PlannedBucket(1, 14, 60_000),))


def make(plan=NARROW, setting=None, **changes) -> planner.GlobalPlanner:
    config = configuration.PlannerConfig(**{"period": 2, "cooldown": 0, **changes})
    setting = setting or planner.Setting(MODEL, TRAINER, (1, 2, 4), (32, 32, 32), 16, 64, 1)
    return planner.GlobalPlanner(config, setting, plan)


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


def steps(made: planner.GlobalPlanner, measured: replanning.Measured, tokens: int, count: int, begin: int = 1):
    return [made.after(step, measured, trained(tokens)) for step in range(begin, begin + count)]


def test_predictions_take_on_the_level_of_what_is_measured():
    made, measured = make(shadow=True), replanning.Measured(step=400.0, train=30.0, wait=370.0, slots=448)
    looks = steps(made, measured, 4_000, 8)
    assert made.calibrated
    metrics = looks[-1][1]
    assert metrics["plan/step_seconds"] == pytest.approx(400.0, rel=1e-2)
    assert metrics["plan/train_seconds"] == pytest.approx(30.0, rel=1e-2)
    assert metrics["plan/step_error"] == pytest.approx(0.0, abs=1e-2)


def test_where_training_hides_rollout_nothing_is_learnt_of_rollout():
    made = make(shadow=True)
    steps(made, replanning.Measured(step=300.0, train=299.0, wait=0.5, slots=448), 4_000, 8)
    assert made.levels["rollout"] == 1.0
    assert made.levels["train"] != 1.0
    assert not made.calibrated


def test_it_does_not_look_before_it_has_seen_enough_and_then_moves_where_it_pays():
    made, measured = make(), replanning.Measured(step=400.0, train=30.0, wait=370.0, slots=448)
    looks = steps(made, measured, 8_000, 8)
    decided = [decision for decision, _ in looks]
    assert decided[: 1 + planner.LEAST_STEPS] == [None] * 5
    moves = [decision for decision in decided if decision is not None and decision.moved]
    assert moves
    assert made.plan != NARROW
    assert made.plan.train_devices + made.plan.rollout_devices <= 16
    assert moves[0].gain > 0.05
    assert moves[0].move_seconds > 0
    assert "plan/saved_seconds" in looks[-1][1]


def test_a_shadow_decides_and_never_moves():
    made, measured = make(shadow=True), replanning.Measured(step=400.0, train=30.0, wait=370.0, slots=448)
    decided = [decision for decision, _ in steps(made, measured, 8_000, 10) if decision is not None]
    assert decided
    assert not any(decision.moved for decision in decided)
    assert any("only watches" in decision.reason for decision in decided)
    assert made.plan == NARROW


def test_a_trainer_that_cannot_change_keeps_its_mesh():
    setting = planner.Setting(MODEL, TRAINER, (1, 2, 4), (32, 32, 32), 16, 64, 1, mesh=(1, 2, 1))
    made, measured = make(setting=setting), replanning.Measured(step=400.0, train=30.0, wait=370.0, slots=448)
    steps(made, measured, 8_000, 10)
    assert (made.plan.data, made.plan.fsdp, made.plan.tensor) == (1, 2, 1)
    assert made.plan != NARROW


def test_where_instances_stay_their_ranges_follow_the_lengths():
    plan = protocols.Plan(1, 2, 1, (protocols.PlannedBucket(1, 6, 1_000), protocols.PlannedBucket(4, 2, 60_000)))
    made = make(plan, least_gain=10.0)
    measured = replanning.Measured(step=100.0, train=30.0, wait=70.0, slots=448)
    steps(made, measured, 2_000, 8)
    short = made.plan.rollout[0].max_remaining_tokens
    steps(made, measured, 16_000, 8, begin=9)
    assert [bucket.count for bucket in made.plan.rollout] == [6, 2]
    assert made.plan.rollout[0].max_remaining_tokens > 2 * short


def test_what_it_knows_survives_a_restart():
    made, measured = make(), replanning.Measured(step=400.0, train=30.0, wait=370.0, slots=448)
    steps(made, measured, 8_000, 8)
    again = make()
    again.restore(json.loads(json.dumps(made.snapshot())))
    assert (again.plan, again.levels) == (made.plan, made.levels)


def test_a_degree_of_the_layout_that_plans_may_not_use_is_refused():
    run = configuration.parse(
        configuration.RunConfig,
        {"rollout": {"tensor_parallel": (1, 2)}, "planner": {"degrees": (1, 4)}, "trainer": {"row_tokens": 512}},
    )
    with pytest.raises(protocols.ConfigError, match=r"config\.planner\.degrees: \(1, 4\) leave out 2"):
        planner.Setting.of_run(run, MODEL, 4)


@pytest.mark.parametrize(
    ("name", "value"),
    [("period", -1), ("horizon", 0), ("least_gain", float("nan")), ("imbalance", 0.5), ("degrees", (3,))],
)
def test_settings_that_make_no_sense_are_refused_by_name(name, value):
    with pytest.raises(protocols.ConfigError, match=rf"config\.planner\.{name}"):
        configuration.PlannerConfig(**{name: value})


def test_a_machine_without_a_sheet_is_measured():
    sheet = hardware.sheet("cpu")
    assert sheet is hardware.sheet("cpu")
    assert sheet.flops > 1e9
    assert sheet.memory_bytes_per_second > 1e8
    assert sheet.memory_bytes > 1e8
    with pytest.raises(protocols.ConfigError, match=r"config\.planner\.hardware: 'h10' is not one of cpu, a100"):
        hardware.sheet("h10", "planner.hardware")


def test_the_plan_of_a_configuration_has_its_buckets():
    values = {"rollout": {"tensor_parallel": (2, 1, 1)}, "scheduler": {"max_remaining_tokens": (100,)}}
    run = configuration.parse(configuration.RunConfig, values)
    plan = plans.of_run(run, (2, 1, 1))
    assert plan.rollout == (protocols.PlannedBucket(1, 2, 100), protocols.PlannedBucket(2, 1, 512))
    assert plans.of_values(json.loads(json.dumps(dataclasses.asdict(plan)))) == plan
