"""Configs that name modules which are gone."""

import pytest

from libra_jax import config, protocols
from libra_jax.agents import factories

ROOM = "libra_jax.agents.environments.verifiers"
ARGUMENTS = {"name": "wordle", "arguments": {"use_think": True}}


def test_environments_of_verifiers_are_refused_with_what_to_use_instead():
    task = config.TaskConfig(
        source=f"{ROOM}:task_source",
        environment=f"{ROOM}:environment",
        arguments=ARGUMENTS,
        environment_arguments=ARGUMENTS,
    )
    why = r"release 0\.4 of verifiers removed .* as harnesses now .*'libra_jax\.agents\.outside\.verifiers_v1:solve'"
    with pytest.raises(protocols.ConfigError, match=rf"config\.task\.source: .*{why}"):
        factories.task_source(task, seed=0)
    with pytest.raises(protocols.ConfigError, match=rf"config\.task\.environment: .*{why}"):
        factories.environment_factory(task)()


def test_a_tool_whose_module_has_moved_is_refused_with_its_present_name():
    task = config.TaskConfig(source="libra_jax.agents.tools.calculator:Calculator")
    with pytest.raises(protocols.ConfigError, match=r"config\.task\.source: .*moved; name it 'calculator', or "):
        factories.task_source(task, seed=0)
