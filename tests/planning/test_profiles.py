"""Profiles: coefficients found again in steps of known costs, files that survive a round trip, plans that use them."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.models import config as model_config
from libra_jax.planning import calibration, costs, demand, hardware, meshes, planner, plans, profiles

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
ENGINE = calibration.EngineCosts(4e-3, 50e-6, 0.1e-6, 20e-6, 0.0, 300e-6)
PROFILE = profiles.Profile(SHEET, MODEL.parameters, TRUE.coefficients, {1: ENGINE}, 0.1, 0.05, {"train": 0.03})


def trainer(rows: int, cores: int | None = 1) -> meshes.Trainer:
    return meshes.Trainer((256,), rows=rows, cores=cores)


def steps(*shapes: tuple[int, int, int], count: int = 12, cores: int | None = 1) -> list[profiles.Measured]:
    """Steps on each mesh that take what `TRUE` says."""
    rng, made = np.random.default_rng(0), []
    for sizes in shapes:
        for _ in range(count):
            lengths = tuple(int(length) for length in rng.integers(20, 250, size=rng.integers(40, 400)))
            rows = trainer(8 // (sizes[0] * sizes[1]), cores)
            seconds = meshes.Training(TRUE, lengths, rows).seconds(*sizes)
            asked = demand.of_trajectories([20], [[protocols.Turn(10)]])
            stages = profiles.Stages(1.0, seconds, 0.1, seconds + 1.1)
            made.append(profiles.Measured(sizes, rows, lengths, asked, 1, 8, stages))
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
    one, two = (
        meshes.Training(TRUE, lengths, trainer(rows)).seconds(*sizes)
        for rows, sizes in ((8, (1, 1, 1)), (4, (2, 1, 1)))
    )
    assert two > one
    apart = meshes.Training(TRUE, lengths, trainer(4, cores=2)).seconds(2, 1, 1)
    assert apart < one


def test_a_profile_survives_its_file(tmp_path):
    profiles.write(PROFILE, tmp_path / "profile.json")
    assert profiles.read(tmp_path / "profile.json") == PROFILE


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
    values = json.loads(path.read_text())
    values["coefficients"]["train_flops_share"] = 1.5
    path.write_text(json.dumps(values))
    with pytest.raises(protocols.DataError, match=r"is no profile .* share of a peak"):
        profiles.read(path)


def setting(tmp_path, model=MODEL, **changes) -> planner.Setting:
    profiles.write(PROFILE, tmp_path / "profile.json")
    values = {"planner": {"profile": str(tmp_path / "profile.json"), "period": 1, **changes}}
    run = configuration.parse(configuration.RunConfig, values)
    return planner.Setting.of_run(run, model, 4)


def test_plans_go_by_the_profile_and_have_degrees_that_were_measured(tmp_path):
    made = setting(tmp_path)
    assert made.degrees == (1,)
    assert made.model.coefficients == PROFILE.coefficients
    work = planner.Work(made, [30] * 64, [[protocols.Turn(40)]] * 64)
    plan = work.best(planner.Levels())
    assert {bucket.tensor_parallel for bucket in plan.rollout} == {1}
    fleet = protocols.Plan(1, 1, 1, (protocols.PlannedBucket(1, 1, 512),))
    alone = work.predict(fleet, planner.Levels()).rollout
    twice = dataclasses.replace(PROFILE, engines={1: ENGINE.scaled(2.0)})
    slower = planner.Work(dataclasses.replace(made, profile=twice), [30] * 64, [[protocols.Turn(40)]] * 64)
    assert slower.predict(fleet, planner.Levels()).rollout == pytest.approx(2 * alone)


def test_a_planner_with_a_profile_is_calibrated_from_its_beginning(tmp_path):
    made = setting(tmp_path)
    config = configuration.PlannerConfig(period=1)
    run = configuration.parse(configuration.RunConfig, {})
    plan = plans.of_run(run, (1, 1, 1))
    assert planner.GlobalPlanner(config, made, plan).calibrated
    assert planner.GlobalPlanner(config, made, plan).levels.sync == pytest.approx(0.15)


def test_a_profile_of_another_model_or_of_other_degrees_is_refused(tmp_path):
    other = dataclasses.replace(MODEL, shape=model_config.load_preset("Qwen3-1.7B"))
    with pytest.raises(protocols.ConfigError, match=r"planner\.profile: it was measured on cpu with a model of"):
        setting(tmp_path, other)
    with pytest.raises(protocols.ConfigError, match=r"planner\.profile: instances of degree 1 were measured"):
        setting(tmp_path, degrees=(2,))
