"""The planner of a run: what it learns of levels, when it looks, and what it keeps."""

from __future__ import annotations

import dataclasses
import json

import planner_cases
import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.models import config as model_config
from libra_jax.planning import planner
from libra_jax.planning.costs import costs, hardware
from libra_jax.planning.forecast import forecast, meshes
from libra_jax.planning.search import plans

MODEL, TRAINER, NARROW = planner_cases.MODEL, planner_cases.TRAINER, planner_cases.NARROW
make, trained, steps = planner_cases.make, planner_cases.trained, planner_cases.steps


def test_predictions_take_on_the_level_of_what_is_measured():
    made, measured = make(shadow=True), planner.ObservedStep(step=400.0, train=30.0, wait=370.0, slots=448)
    looks = steps(made, measured, 4_000, 8)
    assert made.calibrated
    metrics = looks[-1][1]
    assert metrics["plan/step_seconds"] == pytest.approx(400.0, rel=1e-2)
    assert metrics["plan/train_seconds"] == pytest.approx(30.0, rel=1e-2)
    assert metrics["plan/step_error"] == pytest.approx(0.0, abs=1e-2)


def test_masked_rollouts_take_rollout_and_no_training():
    def predicted(masked: int) -> dict[str, float]:
        made, rollouts = make(shadow=True), trained(4_000)
        for trajectory in rollouts[:: max(1, 64 // masked)] if masked else []:
            trajectory.finish = "max_context"
        measured = planner.ObservedStep(step=400.0, train=0.0, wait=0.0, slots=448, disturbed=True)  # the sheet's level
        looks = [made.after(step, measured, rollouts) for step in range(1, 9)]
        return looks[-1][1]

    whole, half = predicted(0), predicted(32)
    assert half["plan/train_seconds"] < 0.75 * whole["plan/train_seconds"]
    # With overlap, the training step that follows a path is a part of the window.
    assert half["plan/rollout_seconds"] == pytest.approx(whole["plan/rollout_seconds"], rel=0.1)
    assert predicted(64)["plan/train_seconds"] == whole["plan/train_seconds"]  # nothing says what training takes


def test_a_step_whose_rollouts_are_all_masked_says_nothing_of_training():
    made, rollouts = make(shadow=True), trained(4_000)
    for trajectory in rollouts:
        trajectory.finish = "max_context"
    for step in range(1, 9):
        made.after(step, planner.ObservedStep(step=400.0, train=0.1, wait=390.0, slots=448), rollouts)
    assert made.levels == forecast.CorrectionLevels()


def test_where_training_hides_rollout_nothing_is_learnt_of_rollout():
    made = make(shadow=True)
    steps(made, planner.ObservedStep(step=300.0, train=299.0, wait=0.5, slots=448), 4_000, 8)
    assert made.levels.rollout == 1.0
    assert made.levels.train != 1.0
    assert not made.calibrated


def test_it_does_not_look_before_it_has_seen_enough_and_then_moves_where_it_pays():
    made, measured = make(), planner.ObservedStep(step=400.0, train=30.0, wait=370.0, slots=448)
    looks = steps(made, measured, 8_000, 8)
    decided = [decision for decision, _ in looks]
    assert decided[: 1 + planner.LEAST_STEPS] == [None] * 5
    moves = [decision for decision in decided if decision is not None and decision.moved]
    assert moves
    assert made.plan != NARROW
    assert made.plan.train_devices + made.plan.rollout_devices <= 16
    assert moves[0].record()["gain"] > 0.05
    assert moves[0].move_seconds > 0


def test_what_a_move_saved_is_the_old_plans_step_less_the_one_that_was_measured():
    made, measured = make(), planner.ObservedStep(step=400.0, train=30.0, wait=370.0, slots=448)
    decided = [decision for decision, _ in steps(made, measured, 8_000, 6)][-1]
    assert decided is not None
    assert decided.moved
    best = dataclasses.replace(measured, step=decided.best_seconds, wait=decided.best_seconds - 30.0)
    _, metrics = made.after(7, best, trained(8_000))
    assert metrics["plan/saved_seconds"] == pytest.approx(400.0 - decided.best_seconds, rel=0.1)


def test_a_step_that_a_move_or_a_loss_touched_says_nothing_of_levels():
    made = make(shadow=True)
    steps(made, planner.ObservedStep(step=400.0, train=30.0, wait=370.0, slots=448), 4_000, 6)
    before = made.levels
    steps(made, planner.ObservedStep(step=4_000.0, train=30.0, wait=3_970.0, slots=448, disturbed=True), 4_000, 2, 7)
    assert made.levels == before
    steps(made, planner.ObservedStep(step=4_000.0, train=30.0, wait=3_970.0, slots=448), 4_000, 1, 9)
    assert made.levels.rollout > 1.5 * before.rollout


def test_nothing_is_decided_while_it_may_not_move():
    made, measured = make(), planner.ObservedStep(step=400.0, train=30.0, wait=370.0, slots=448)
    for step in range(1, 11):
        decision, metrics = made.after(step, measured, trained(8_000), may_move=False)
        assert decision is None
    assert metrics["plan/step_seconds"] > 0


def test_weight_sync_is_part_of_the_trainers_cycle():
    made = make(shadow=True)
    looks = steps(made, planner.ObservedStep(step=60.0, train=40.0, sync=20.0, wait=0.0, slots=448), 500, 8)
    assert made.levels.sync == pytest.approx(20.0)
    metrics = looks[-1][1]
    assert metrics["plan/step_seconds"] == pytest.approx(metrics["plan/train_seconds"] + 20.0)


def test_a_shadow_decides_and_never_moves():
    made, measured = make(shadow=True), planner.ObservedStep(step=400.0, train=30.0, wait=370.0, slots=448)
    decided = [decision for decision, _ in steps(made, measured, 8_000, 10) if decision is not None]
    assert decided
    assert not any(decision.moved for decision in decided)
    assert any("only watches" in decision.reason for decision in decided)
    assert made.plan == NARROW


def test_a_trainer_that_cannot_change_keeps_its_mesh():
    setting = forecast.PlanConditions(MODEL, TRAINER, (1, 2, 4), (32, 32, 32), 16, 64, 1, mesh=(1, 2, 1))
    made, measured = make(setting=setting), planner.ObservedStep(step=400.0, train=30.0, wait=370.0, slots=448)
    steps(made, measured, 8_000, 10)
    assert (made.plan.data, made.plan.fsdp, made.plan.tensor) == (1, 2, 1)
    assert made.plan != NARROW


@pytest.mark.parametrize("reach", [2, 6])
def test_a_trainer_that_runs_is_planned_meshes_that_it_can_change_to(reach):
    trainer = dataclasses.replace(TRAINER, rows=4)
    setting = forecast.PlanConditions(MODEL, trainer, (1, 2, 4), (32, 32, 32), 16, 64, 1, reach=reach)
    made, measured = make(setting=setting), planner.ObservedStep(step=400.0, train=390.0, wait=0.0, slots=448)
    steps(made, measured, 8_000, 10)
    plan = made.plan
    assert plan != NARROW
    assert plan.train_devices <= reach
    assert 4 % (plan.data * plan.fsdp) == 0


def test_a_move_that_could_not_be_carried_out_leaves_the_plan_before_and_its_cooldown():
    made = make(cooldown=3)
    measured = planner.ObservedStep(step=400.0, train=30.0, wait=370.0, slots=448)
    moved = next(decision for decision, _ in steps(made, measured, 8_000, 8) if decision is not None and decision.moved)
    made.refuse(NARROW)
    assert made.plan == NARROW
    again = [decision for decision, _ in steps(made, measured, 8_000, 2) if decision is not None]
    assert not any(decision.moved for decision in again if decision.step < moved.step + 3)


def test_where_instances_stay_their_ranges_follow_the_lengths():
    plan = protocols.Plan(1, 2, 1, (protocols.PlannedBucket(1, 6, 1_000), protocols.PlannedBucket(4, 2, 60_000)))
    made = make(plan, least_gain=10.0)
    measured = planner.ObservedStep(step=100.0, train=30.0, wait=70.0, slots=448)
    steps(made, measured, 2_000, 8)
    short = made.plan.rollout[0].max_remaining_tokens
    steps(made, measured, 16_000, 8, begin=9)
    assert [bucket.count for bucket in made.plan.rollout] == [6, 2]
    assert made.plan.rollout[0].max_remaining_tokens > 2 * short


def test_stages_that_take_turns_may_differ_as_much_as_they_like():
    setting = forecast.PlanConditions(MODEL, TRAINER, (1, 2, 4), (32, 32, 32), 16, 64, 0)
    made, measured = make(setting=setting, period=100), planner.ObservedStep(400.0, train=30.0, wait=370.0, slots=448)
    assert not any(decision for decision, _ in steps(made, measured, 4_000, 30))


def test_levels_are_found_where_streamed_steps_hide_training_behind_rollout():
    setting = forecast.PlanConditions(MODEL, TRAINER, (1, 2, 4), (32, 32, 32), 16, 64, 0, group_size=4, part_tokens=0)
    right, rollouts = forecast.CorrectionLevels(1.5, 2.0, sync=5.0), trained(8_000)
    work = forecast.StepWork(setting, [100] * len(rollouts), [list(one.turns) for one in rollouts])
    expected = work.predict(NARROW, right)
    assert expected.train > 100.0
    wait = expected.step - expected.train - 5.0
    made = make(setting=setting, shadow=True)
    steps(made, planner.ObservedStep(expected.step, expected.train, wait, sync=5.0, slots=448), 8_000, 8)
    assert made.levels.train == pytest.approx(right.train, rel=0.05)
    assert made.levels.rollout == pytest.approx(right.rollout, rel=0.05)


def test_what_it_knows_survives_a_restart():
    made, measured = make(), planner.ObservedStep(step=400.0, train=30.0, wait=370.0, slots=448)
    assert any(decision and decision.moved for decision, _ in steps(made, measured, 8_000, 8))
    again = make()
    steps(again, measured, 500, 3)
    again.restore(json.loads(json.dumps(made.snapshot())))
    assert (again.plan, again.levels, again.calibrated) == (made.plan, made.levels, made.calibrated)
    assert again.snapshot() == made.snapshot()


@pytest.mark.parametrize(
    ("name", "layout", "degrees", "context", "why"),
    [
        ("a800", (1, 2), (1, 4), 512, r"degree 2: config\.planner\.degrees: \(1, 4\) leave it out"),
        ("v5p", (1, 8), (1, 4, 8), 512, r"degree 8: a node of v5p has 4 devices"),
        ("v5e", (1, 2), (1, 2), 100_000, r"degree 1: by the sheet of v5e it holds \d+ tokens .* = 100000"),
    ],
)
def test_a_layout_with_instances_that_no_plan_may_have_is_refused(name, layout, degrees, context, why):
    values = {
        "rollout": {"tensor_parallel": layout, "max_context": context},
        "planner": {"degrees": degrees},
        "trainer": {"row_tokens": context},
    }
    run = config_lib.parse(config_lib.RunConfig, values)
    model = costs.CostModel(hardware.sheet(name), MODEL.shape)
    setting = forecast.PlanConditions.from_config(run, model, 16)
    with pytest.raises(protocols.ConfigError, match=rf"config\.rollout\.tensor_parallel: plans cannot use {why}"):
        forecast.check_layout(run, setting)


def test_no_plan_has_an_instance_that_a_host_of_the_run_does_not_hold():
    values = {"planner": {"degrees": (1, 2, 4, 8)}, "cluster": {"backend": "ray", "accelerators_per_host": 2}}
    run = config_lib.parse(config_lib.RunConfig, values)
    model = costs.CostModel(hardware.sheet("a800"), MODEL.shape)
    assert forecast.PlanConditions.from_config(run, model, 16).degrees == (1, 2)


@pytest.mark.parametrize(("rows", "tokens"), [(0, 8 * 4_096), (3, 3 * 4_096)])
def test_a_step_that_streams_micro_batches_begins_on_one_whole_micro_batch(rows, tokens):
    trainer = {"stream": "micro_batch", "row_tokens": 4_096, "rows_per_micro_batch": rows}
    run = config_lib.parse(config_lib.RunConfig, {"trainer": trainer, "coordinator": {"groups_per_step": 4}})
    model = costs.CostModel(hardware.sheet("a800"), MODEL.shape)
    assert forecast.PlanConditions.from_config(run, model, 16).part_tokens == tokens


def test_a_context_that_no_instance_holds_is_refused_before_the_run():
    values = {"rollout": {"max_context": 900_000, "max_tokens": 100}, "trainer": {"row_tokens": 900_000}}
    run = config_lib.parse(config_lib.RunConfig, values)
    model = costs.CostModel(hardware.sheet("v5e"), MODEL.shape)
    with pytest.raises(
        protocols.ConfigError, match=r"config\.rollout\.max_context: .* holds 900000 tokens; the most is"
    ):
        forecast.PlanConditions.from_config(run, model, 16)


def test_a_mesh_that_does_not_hold_the_model_or_divide_it_is_refused():
    model = costs.CostModel(hardware.sheet("a800"), model_config.load_preset("Qwen3-14B"))
    meshes.check_fits(model, TRAINER, (1, 5, 4), "simulation.train_mesh")
    with pytest.raises(
        protocols.ConfigError, match=r"config\.simulation\.train_mesh: .* a device needs \d+\.\d GB and"
    ):
        meshes.check_fits(model, TRAINER, (20, 1, 1), "simulation.train_mesh")
    with pytest.raises(
        protocols.ConfigError, match=r"\(1, 4, 3\) does not divide the model: tensor is one of \[1, 2, 4"
    ):
        meshes.check_fits(model, TRAINER, (1, 4, 3), "simulation.train_mesh")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("period", -1),
        ("horizon", 0),
        ("least_gain", float("nan")),
        ("imbalance", 0.5),
        ("degrees", (3,)),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(name, value):
    with pytest.raises(protocols.ConfigError, match=rf"config\.planner\.{name}"):
        config_lib.PlannerConfig(**{name: value})


def test_a_machine_without_a_sheet_is_measured():
    sheet = hardware.sheet("cpu", "planner.hardware")
    assert sheet is hardware.sheet("cpu", "planner.hardware")
    assert sheet.flops > 1e9
    assert sheet.memory_bytes_per_second > 1e8
    assert sheet.memory_bytes > 1e8
    model = costs.of_hardware("cpu", model_config.load_preset("libra-tiny"), "planner.hardware")
    assert model.kv_tokens(1) > 100_000, "nothing is kept for graphs"
    with pytest.raises(
        protocols.ConfigError, match=r"config\.planner\.hardware: 'h10' is not one of a100, .* did you mean"
    ):
        hardware.sheet("h10", "planner.hardware")
    with pytest.raises(protocols.ConfigError, match=r"config\.simulation\.hardware: 'cpu' is not one of"):
        hardware.sheet("cpu")  # a simulation repeats exactly, wherever it runs


def test_the_plan_of_a_configuration_has_its_buckets():
    values = {"rollout": {"tensor_parallel": (2, 1, 1)}, "scheduler": {"max_remaining_tokens": (100,)}}
    run = config_lib.parse(config_lib.RunConfig, values)
    plan = plans.from_config(run, (2, 1, 1))
    assert plan.rollout == (protocols.PlannedBucket(1, 2, 100), protocols.PlannedBucket(2, 1, 512))
    assert plans.of_values(json.loads(json.dumps(dataclasses.asdict(plan)))) == plan
