"""Plans that are simulated before they are taken."""

from __future__ import annotations

import dataclasses

import pytest

from configs import simulate
from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import planned, trial
from libra_jax.simulator import scripts

TURNS = [scripts.Script(100, (protocols.Turn(200 + 50 * index),)) for index in range(32)]


def case() -> planned.Case:
    config = simulate.get_config("math")
    config.coordinator.groups_per_step, config.coordinator.group_size = 4, 4
    made = planned.case(config_lib.to_dict(config), planned.PlanRequest(accelerators=16))
    return dataclasses.replace(made, work=planned.Work.of(made.run, "test", TURNS))


def test_a_sample_gives_whole_groups_and_reaches_all_of_them():
    made = trial.Sampled(TURNS, 4)
    seen = {tuple(TURNS.index(made.script(task, sample)) for sample in range(4)) for task in range(200)}
    assert seen == {tuple(range(first, first + 4)) for first in range(0, 32, 4)}


def test_splits_are_ranked_by_what_their_simulations_take():
    made = case()
    splits = made.searched().ranked(16)
    found = trial.of_splits(made, splits)
    assert {id(one.split) for one in found} == {id(split) for split in splits}
    assert [one.simulated_seconds for one in found] == sorted(one.simulated_seconds for one in found)
    assert found[0].simulated_seconds == pytest.approx(found[0].split.step_seconds, rel=0.25)
    assert "s predicted" in found[0].line()


def test_plans_by_a_profile_are_not_simulated():
    made = case()
    made.__dict__["setting"] = dataclasses.replace(made.setting, profile=object())
    with pytest.raises(protocols.ConfigError, match=r"config\.planner\.simulate_top: .* set it to 0"):
        trial.of_splits(made, [])
