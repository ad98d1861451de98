"""A config file is typed: mypy and the run itself see a mistyped field, and what a run holds is frozen."""

import dataclasses
import functools
import operator
import re

import pytest
from mypy import api

from libra_jax import config as config_lib
from libra_jax.protocols import ConfigError
from libra_jax.simulator import settings

TYPED = """
from libra_jax import config as config_lib


def get_config() -> config_lib.RunConfig:
    made = config_lib.RunConfig()
    made.steps = 10
    made.optimizer.learning_rate = 1e-4
    made.rollout.tensor_parallel = (1, 2)
    made.task.arguments = {"anything": 1}
    return made
"""

PLANTED = {
    "    made.step = 10": '"RunConfig" has no attribute "step"',
    "    made.optimizer.learning_rat = 1e-4": '"OptimizerConfig" has no attribute "learning_rat"',
    "    made.optimiser.learning_rate = 1e-4": '"RunConfig" has no attribute "optimiser"',
    '    made.steps = "ten"': 'expression has type "str", variable has type "int"',
    "    made.rollout.tensor_parallel = 1": 'expression has type "int", variable has type "tuple[int, ...]"',
    "    config_lib.RolloutConfig(slot=4)": 'Unexpected keyword argument "slot" for "RolloutConfig"',
}


def test_mypy_sees_each_planted_error_of_a_config_file(tmp_path):
    lines = TYPED.splitlines()
    at = {len(lines) - 1 + place: planted for place, planted in enumerate(PLANTED)}
    lines[-1:-1] = PLANTED
    (tmp_path / "mine.py").write_text("\n".join(lines) + "\n")
    said, errors, _ = api.run(["--no-error-summary", str(tmp_path / "mine.py")])
    assert not errors
    found = {int(line.split(":")[1]) + 0: line for line in said.splitlines() if ": error: " in line}
    assert len(found) == len(PLANTED), said
    for line, planted in at.items():
        assert PLANTED[planted] in found[line + 1], planted


def test_a_mistyped_field_is_refused_with_the_nearest_name():
    made = config_lib.RunConfig()
    with pytest.raises(ConfigError, match="RunConfig has no field 'optimiser'; did you mean optimizer"):
        made.optimiser = config_lib.OptimizerConfig()
    with pytest.raises(ConfigError, match="OptimizerConfig has no field 'learning_rat'; did you mean learning_rate"):
        made.optimizer.learning_rat = 1.0


@pytest.mark.parametrize("kind", [config_lib.RunConfig, settings.SimulatedRun])
def test_what_a_run_holds_is_frozen_and_its_file_stays_as_it_was(kind):
    made = kind()
    held = config_lib.checked(made)
    assert held == made
    made.rollout.slots = 3
    assert held.rollout.slots != 3
    for frozen, name in ((held, "steps"), (held.rollout, "slots"), (held.reward, "environment_weight")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(frozen, name, 3)


def test_values_that_were_set_are_checked_when_the_run_takes_them():
    made = config_lib.RunConfig()
    made.steps = 0
    with pytest.raises(ConfigError, match=r"config\.steps: must be positive"):
        config_lib.checked(made)


def test_a_value_of_the_wrong_type_is_refused_where_it_is_set():
    made = config_lib.RunConfig()
    with pytest.raises(
        ConfigError, match=r"OptimizerConfig\.learning_rate: must be of type float, not 'fast'; .* 0\.001$"
    ):
        made.optimizer.learning_rate = "fast"  # type: ignore[assignment]
    with pytest.raises(
        ConfigError, match=r"config\.optimizer\.learning_rate: must be of type float, not 'fast'; .* 0\.001$"
    ):
        config_lib.parse(config_lib.RunConfig, {"optimizer": {"learning_rate": "fast"}})


@pytest.mark.parametrize(("old", "new"), config_lib.RENAMED.items())
def test_a_former_name_is_refused_with_the_present_one(old, new):
    group, name = old.split(".")
    sentence = f"{old} is now {new}".replace(".", r"\.")
    with pytest.raises(ConfigError, match=rf"config\.{group}\.{name}: no such field; {sentence}"):
        config_lib.parse(config_lib.RunConfig, {group: {name: 1}})
    with pytest.raises(ConfigError, match=f"has no field '{name}'; {sentence}"):
        setattr(getattr(config_lib.RunConfig(), group), name, 1)
    settings_of_new, present = getattr(config_lib.RunConfig(), new.split(".")[0]), new.split(".")[1]
    assert hasattr(settings_of_new, present)


@pytest.mark.parametrize("name", config_lib.REMOVED)
def test_a_removed_setting_is_refused_with_what_runs_do_now(name):
    *groups, field = name.split(".")

    def stored(value):
        return functools.reduce(lambda inner, group: {group: inner}, reversed(groups), value)

    sentence = f"{re.escape(name)} is gone: {re.escape(config_lib.REMOVED[name].advice)}"
    with pytest.raises(ConfigError, match=rf"config\.{re.escape(name)}: no such field; {sentence}"):
        config_lib.parse(config_lib.RunConfig, stored({field: 1}))
    with pytest.raises(ConfigError, match=f"has no field '{field}'; {sentence}"):
        setattr(operator.attrgetter(".".join(groups))(config_lib.RunConfig()), field, 1)
    accepted = config_lib.REMOVED[name].accepted
    for value in (7,) if accepted is None else accepted:
        assert config_lib.renamed(stored({field: value})) == stored({})
    if accepted is not None:
        with pytest.raises(ConfigError, match=sentence):
            config_lib.renamed(stored({field: "other"}))


def test_a_stored_config_is_read_under_present_names():
    stored = {"steps": 3, "rollout": {"bucket_mib": 64, "slots": 2}, "elastic": {"late": 3.0}, "task": {"reward": ""}}
    found = config_lib.renamed(stored)
    assert found == {"steps": 3, "rollout": {"slots": 2, "chunk_mib": 64}, "elastic": {"late_factor": 3.0}, "task": {}}
    assert stored["rollout"] == {"bucket_mib": 64, "slots": 2}
    for former, present in ((False, "none"), (True, "zero_variance")):
        found = config_lib.renamed({"coordinator": {"filter_zero_variance": former}, "algorithm": {}})
        assert found == {"coordinator": {}, "algorithm": {"filter": present}}
    assert config_lib.renamed({"tools": {"servers": {}}}) == {"tools": {}}
    with pytest.raises(
        ConfigError, match=r"config\.task\.reward: no such field; task\.reward is now reward\.functions, e"
    ):
        config_lib.renamed({"task": {"reward": "mine:reward"}})
