"""Profiles: coefficients found again in steps of known costs, files that survive a round trip, plans that use them."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.models import config as model_config
from libra_jax.planning import planner
from libra_jax.planning.costs import costs, hardware, measured_costs, profiles
from libra_jax.planning.forecast import forecast, meshes, serving
from libra_jax.planning.search import plans
from libra_jax.utils import checksums

SHEET = hardware.HardwareSheet("cpu", 5e10, 1e10, 8e9, 5e9, 5e9, 2)
MODEL = costs.CostModel(SHEET, model_config.load_preset("libra-tiny"), costs.Coefficients(activation_bytes=0.0))
KNOWN = {
    "train_flops_share": 0.3,
    "large_message_share": 0.05,
    "train_overhead": 0.2,
    "micro_batch_overhead": 0.01,
    "large_message_latency": 2e-3,
}
TRUE = dataclasses.replace(MODEL, coefficients=dataclasses.replace(MODEL.coefficients, **KNOWN))
ENGINE = measured_costs.EngineCosts(4e-3, 50e-6, 0.1e-6, 20e-6, 0.0, 300e-6)
ERRORS = {"rollout": 0.05, "train": 0.03, "sync": 0.2, "total": 0.04}
PROFILE = profiles.Profile(SHEET, model_config.to_hf(MODEL.shape), TRUE.coefficients, {1: ENGINE}, 0.1, 0.05, ERRORS)


def trainer(rows: int, cores: int | None = 1) -> meshes.TrainerProperties:
    return meshes.TrainerProperties((256,), rows=rows, cores=cores)


def steps(*shapes: tuple[int, int, int], count: int = 12, cores: int | None = 1) -> list[profiles.MeasuredStep]:
    """Steps on each mesh that take what `TRUE` says."""
    rng, made = np.random.default_rng(0), []
    for sizes in shapes:
        for _ in range(count):
            lengths = tuple(int(length) for length in rng.integers(20, 250, size=rng.integers(40, 400)))
            rows = trainer(int(rng.choice([4, 8])), cores)
            seconds = meshes.Training(TRUE, lengths, rows).seconds(*sizes)
            asked = serving.Demand.of_trajectories([20], [[protocols.Turn(10)]])
            stages = profiles.Stages(1.0, seconds, 0.1, seconds + 1.1)
            made.append(profiles.MeasuredStep(sizes, rows, lengths, asked, 1, 8, stages))
    return made


def test_the_coefficients_of_training_are_found_again_on_three_meshes():
    found = profiles.fit_training(MODEL, steps((1, 1, 1), (1, 2, 1), (1, 1, 2)))
    for name, value in KNOWN.items():
        assert getattr(found, name) == pytest.approx(value, rel=0.02), name


def test_a_few_disturbed_steps_change_little():
    measured = steps((1, 1, 1), (1, 2, 1), (1, 1, 2))
    for index in (3, 17, 30):
        slow = dataclasses.replace(measured[index].seconds, train=4 * measured[index].seconds.train)
        measured[index] = dataclasses.replace(measured[index], seconds=slow)
    model = dataclasses.replace(MODEL, coefficients=profiles.fit_training(MODEL, measured))
    for step in steps((1, 2, 1), (2, 1, 1)):
        predicted = meshes.Training(model, step.lengths, step.trainer).seconds(*step.mesh)
        assert predicted == pytest.approx(step.seconds.train, rel=0.05)


def test_devices_that_share_no_core_are_calibrated_too():
    measured = steps((1, 1, 1), (1, 2, 1), (1, 1, 2), cores=None)
    model = dataclasses.replace(MODEL, coefficients=profiles.fit_training(MODEL, measured))
    for step in measured:
        predicted = meshes.Training(model, step.lengths, step.trainer).seconds(*step.mesh)
        assert predicted == pytest.approx(step.seconds.train, rel=0.02)


def test_what_the_steps_do_not_depend_on_stays_as_the_sheet_has_it():
    found = profiles.fit_training(MODEL, steps((1, 1, 1)))
    assert found.large_message_share == pytest.approx(MODEL.coefficients.large_message_share)
    assert found.large_message_latency == pytest.approx(MODEL.coefficients.large_message_latency)
    assert found.train_flops_share == pytest.approx(KNOWN["train_flops_share"], rel=0.02)


def test_devices_that_take_turns_on_a_core_are_no_faster_than_one():
    lengths = [200] * 64
    one = meshes.Training(TRUE, lengths, trainer(8)).seconds(1, 1, 1)
    assert meshes.Training(TRUE, lengths, trainer(8)).seconds(2, 1, 1) > one
    assert meshes.Training(TRUE, lengths, trainer(8, cores=2)).seconds(2, 1, 1) < one


def test_rows_that_shards_share_cost_each_of_them_less_memory():
    made = meshes.Training(TRUE, [200] * 64, trainer(8))
    assert made.memory_bytes(4, 1, 1) < made.memory_bytes(2, 1, 1) < made.memory_bytes(1, 1, 1)
    assert made.memory_bytes(8, 1, 1) == made.memory_bytes(16, 1, 1), "a shard has a row at least"


@pytest.mark.parametrize("tool_seconds", [0.0, 3.0])
def test_an_engine_is_levelled_until_whole_rollouts_take_what_they_took(tool_seconds):
    """Tools take the time they take, however fast the engine is: there one correction is not enough."""
    asked = serving.Demand.of_trajectories(
        [50] * 8, [[protocols.Turn(200, "bash", "success", 20, tool_seconds)] * 3] * 8
    )
    slower = measured_costs.MeasuredEngines({1: ENGINE.scaled(1.7)})
    step = profiles.MeasuredStep((1, 1, 1), trainer(8), (200,), asked, 1, 8, profiles.Stages(1.0, 1.0, 0.1, 2.0))
    step = dataclasses.replace(step, seconds=profiles.Stages(profiles.rollout_seconds(slower, step), 1.0, 0.1, 2.0))
    assert profiles.levelled(ENGINE, [step], 10**9).step == pytest.approx(1.7 * ENGINE.step, rel=1e-3)


def test_a_full_cache_is_charged_once():
    asked = serving.Demand.of_trajectories([50] * 64, [[protocols.Turn(2_000)]] * 64)
    crowded = measured_costs.MeasuredEngines({1: ENGINE}, cache_tokens={1: 5_000})
    step = profiles.MeasuredStep((1, 1, 1), trainer(8), (200,), asked, 1, 64, profiles.Stages(1.0, 1.0, 0.1, 2.0))
    step = dataclasses.replace(step, seconds=profiles.Stages(profiles.rollout_seconds(crowded, step), 1.0, 0.1, 2.0))
    assert profiles.levelled(ENGINE, [step], 5_000).step == pytest.approx(ENGINE.step, rel=1e-3)
    assert profiles.levelled(ENGINE, [step], 10**9).step > 1.2 * ENGINE.step


def test_a_profile_survives_its_file(tmp_path):
    profiles.write(PROFILE, tmp_path / "profile.json")
    assert profiles.read(tmp_path / "profile.json") == PROFILE


def test_a_changed_number_of_a_profile_is_refused(tmp_path):
    path = tmp_path / "profile.json"
    profiles.write(dataclasses.replace(PROFILE, between=0.25), path)
    path.write_text(path.read_text().replace('"between": 0.25', '"between": 0.35'))
    with pytest.raises(protocols.DataError, match=r"is no profile .* its checksum is not the one"):
        profiles.read(path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("{", "is no profile"), ("[]", "is no profile"), ('{"sheet": {}}', "is no profile"), (None, "cannot be read")],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path, text, sentence):
    path = tmp_path / "profile.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(protocols.DataError, match=rf"config\.planner\.profile: .*{sentence}"):
        profiles.read(path)


def test_a_profile_with_a_share_above_the_peak_is_refused(tmp_path):
    path = tmp_path / "profile.json"
    profiles.write(PROFILE, path)
    values = checksums.read_object(path)
    values["coefficients"]["train_flops_share"] = 1.5
    path.write_text(json.dumps(values))
    with pytest.raises(protocols.DataError, match=r"is no profile .* must lie in"):
        profiles.read(path)


def setting(tmp_path, model=MODEL, **changes) -> forecast.PlanConditions:
    profiles.write(PROFILE, tmp_path / "profile.json")
    values = {"planner": {"profile": str(tmp_path / "profile.json"), "period": 1, **changes}}
    run = config_lib.parse(config_lib.RunConfig, values)
    return forecast.PlanConditions.from_config(run, model, 4)


def test_plans_go_by_the_profile_and_have_degrees_that_were_measured(tmp_path):
    made = setting(tmp_path)
    assert made.degrees == (1,)
    assert made.model.coefficients == PROFILE.coefficients
    work = forecast.StepWork(made, [30] * 64, [[protocols.Turn(40)]] * 64)
    plan = work.best(forecast.CorrectionLevels())
    assert {bucket.tensor_parallel for bucket in plan.rollout} == {1}
    fleet = protocols.Plan(1, 1, 1, (protocols.PlannedBucket(1, 1, 512),))
    alone = work.predict(fleet, forecast.CorrectionLevels()).rollout
    twice = dataclasses.replace(PROFILE, engines={1: ENGINE.scaled(2.0)})
    slower = forecast.StepWork(dataclasses.replace(made, profile=twice), [30] * 64, [[protocols.Turn(40)]] * 64)
    assert slower.predict(fleet, forecast.CorrectionLevels()).rollout == pytest.approx(2 * alone)


def test_a_full_cache_lengthens_rollout_with_a_profile_too():
    small = dataclasses.replace(MODEL, sheet=dataclasses.replace(SHEET, memory_bytes=2.3e6))
    assert 500 < small.kv_tokens(1) < 3_000
    asked = serving.Demand.of_trajectories([30] * 64, [[protocols.Turn(200)]] * 64)
    whole = np.array([0]), np.array([64])
    roomy, tight = (
        serving.Serving(PROFILE.rollout(model), asked, [1], [64], staleness=0).seconds(1, *whole)[0]
        for model in (MODEL, small)
    )
    assert tight > 1.5 * roomy


def test_a_planner_with_a_profile_is_calibrated_from_its_beginning(tmp_path):
    made = setting(tmp_path)
    config = config_lib.PlannerConfig(period=1)
    run = config_lib.parse(config_lib.RunConfig, {})
    plan = plans.from_config(run, (1, 1, 1))
    assert planner.GlobalPlanner(config, made, plan, masks=config_lib.TaskConfig().masks).calibrated
    assert planner.GlobalPlanner(
        config, made, plan, masks=config_lib.TaskConfig().masks
    ).levels == forecast.CorrectionLevels(sync=0.1, between=0.05)


def test_a_profile_of_another_model_or_of_other_degrees_is_refused(tmp_path):
    other = dataclasses.replace(MODEL, shape=model_config.load_preset("Qwen3-1.7B"))
    with pytest.raises(protocols.ConfigError, match=r"planner\.profile: it was measured with a model of another shape"):
        setting(tmp_path, other)
    elsewhere = dataclasses.replace(MODEL, sheet=hardware.sheet("h100"))
    with pytest.raises(protocols.ConfigError, match=r"measured on cpu of 2 cores, and this run is planned for h100"):
        setting(tmp_path, elsewhere)
    with pytest.raises(protocols.ConfigError, match=r"planner\.profile: instances of degree 1 were measured"):
        setting(tmp_path, degrees=(2,))
    run = config_lib.parse(config_lib.RunConfig, {"rollout": {"tensor_parallel": (2,)}})
    with pytest.raises(protocols.ConfigError, match=r"cannot use degree 2: config\.planner\.profile has measured 1"):
        forecast.check_layout(run, setting(tmp_path))
