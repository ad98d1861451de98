"""Configs that name modules which are gone."""

import importlib
import re

import pytest

from libra_jax import config, protocols
from libra_jax.rollouts import factories

ROOM = "libra_jax.agents.environments.verifiers"
ARGUMENTS = {"name": "wordle", "arguments": {"use_think": True}}


def test_environments_of_verifiers_are_refused_with_what_to_use_instead():
    task = config.TaskConfig(
        source=f"{ROOM}:task_source",
        environment=f"{ROOM}:environment",
        arguments=ARGUMENTS,
        environment_arguments=ARGUMENTS,
    )
    why = r"release 0\.4 of verifiers removed .* as harnesses now .*'libra_jax\.examples\.outside\.verifiers_v1:solve'"
    with pytest.raises(protocols.ConfigError, match=rf"config\.task\.source: .*{why}"):
        factories.task_source(task, seed=0)
    with pytest.raises(protocols.ConfigError, match=rf"config\.task\.environment: .*{why}"):
        factories.environment_factory(task)()


def test_a_tool_whose_module_has_moved_is_refused_with_its_present_name():
    task = config.TaskConfig(source="libra_jax.agents.tools.calculator:Calculator")
    with pytest.raises(protocols.ConfigError, match=r"config\.task\.source: .*moved; name it 'calculator', or "):
        factories.task_source(task, seed=0)


# What the shipped configs, the guides and the notebook named before the rooms were divided.
FORMER = [
    "libra_jax.agents.calculator:task_source",
    "libra_jax.agents.datasets:task_source",
    "libra_jax.agents.question:environment",
    "libra_jax.agents.answers:number",
    "libra_jax.agents.environments.dialogue:Dialogue",
    "libra_jax.agents.environments.acquaintances:corpus",
    "libra_jax.agents.environments.gym_text:environment",
    "libra_jax.agents.environments.harness:environment",
    "libra_jax.agents.environments.harness.harbor:environment",
    "libra_jax.agents.environments.harness.harbor_tasks:task_source",
    "libra_jax.agents.environments.harness.openai_loop:agent",
    "libra_jax.agents.environments.integers:task_source",
    "libra_jax.agents.environments.math:environment",
    "libra_jax.agents.environments.openenv:environment",
    "libra_jax.agents.environments.reasoning_gym:environment",
    "libra_jax.agents.environments.repo_repair:environment",
    "libra_jax.agents.environments.search_qa:environment",
    "libra_jax.agents.environments.time_zones:task_source",
    "libra_jax.agents.outside.agents_sdk:solve",
    "libra_jax.agents.repair.planted:task_source",
    "libra_jax.agents.wire:status",
]


@pytest.mark.parametrize("former", FORMER)
def test_a_name_of_a_divided_room_is_refused_with_the_one_that_works(former):
    with pytest.raises(protocols.ConfigError, match=r"config\.task\.source: .* has moved; name it \S+$") as refusal:
        factories.task_source(config.TaskConfig(source=former), seed=0)
    module, _, attribute = re.search(r"name it (\S+)$", str(refusal.value))[1].partition(":")
    assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize(
    "former", ["libra_jax.agents.tokenizers", "libra_jax.agents.calculater", "libra_jax.agents.tools.formats"]
)
def test_no_name_is_offered_that_does_not_exist(former):
    with pytest.raises(protocols.ConfigError, match=r"there is no module 'libra_jax\.agents") as refusal:
        factories.task_source(config.TaskConfig(source=f"{former}:nothing"), seed=0)
    assert "has moved" not in str(refusal.value)
