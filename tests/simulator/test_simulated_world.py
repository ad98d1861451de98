"""Whole simulated runs: they repeat exactly, lose nothing, and keep the staleness bound, also when machines break."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
import simulator_doubles as doubles

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.simulator import engine, results, trajectory, world


def comparable(result: results.SimulationResult) -> dict[str, Any]:
    values = dataclasses.asdict(result)
    del values["wall_seconds"]
    return values


@pytest.mark.parametrize("policy", config_lib.POLICIES)
def test_a_run_repeats_exactly_and_loses_nothing(policy):
    config = doubles.run_config(scheduler={"policy": policy})
    first, second = doubles.simulate(config), doubles.simulate(config)
    assert comparable(first) == comparable(second)
    doubles.check_whole(first, config)
    assert comparable(first) != comparable(doubles.simulate(config, seed=1))


def test_every_scripted_token_is_generated_once():
    config = doubles.run_config()
    workload, limits = doubles.SeededWorkload(), config.coordinator
    result = doubles.simulate(config)
    scripted = sum(
        workload.script(task, sample).generated_tokens
        for task in range(config.steps * limits.groups_per_step)
        for sample in range(limits.group_size)
    )
    assert result.generated_tokens == scripted
    assert sum(step["tokens/trained"] for step in result.steps) == scripted


def test_the_staleness_bound_holds_and_asynchrony_saves_time():
    seconds = {}
    for staleness in (0, 2):
        config = doubles.run_config(coordinator={"max_staleness": staleness}, steps=6)
        result = doubles.simulate(config)
        doubles.check_whole(result, config)
        seconds[staleness] = result.seconds
    assert seconds[2] < 0.99 * seconds[0]


def test_engines_that_die_in_the_middle_lose_nothing():
    config = doubles.run_config(rollout={"restarts": 20})
    lives: list[int] = []

    def mortal(life: int, **arguments: Any) -> engine.SimulatedEngine:
        made = engine.SimulatedEngine(**arguments)
        lives.append(life)
        if made.name != "engine-2":
            asyncio.get_running_loop().call_later(3.0 + life, made.kill)
        return made

    result = doubles.simulate(config, parts=world.MachineFactories(engine=mortal))
    doubles.check_whole(result, config)
    assert max(lives) > 1
    assert result.generated_tokens == doubles.simulate(config).generated_tokens


def test_an_environment_that_crashes_is_tried_afresh():
    crashes: list[str] = []

    class Crashing(trajectory.ScriptedEnvironment):
        async def step(self, output: str) -> protocols.StepResult:
            if output == "1/2" and self._turn == 1 and len(crashes) < 2:
                crashes.append(output)
                raise RuntimeError("the sandbox is gone")
            return await super().step(output)

    config = doubles.run_config()
    result = doubles.simulate(config, parts=world.MachineFactories(environment=Crashing))
    assert len(crashes) == 2
    doubles.check_whole(result, config)


def test_a_hung_tool_becomes_a_timeout_that_the_policy_sees():
    class Hanging(trajectory.ScriptedEnvironment):
        async def step(self, output: str) -> protocols.StepResult:
            if output == "0/0" and self._turn == 0:
                self._turn = 1
                await asyncio.sleep(1e5)
            return await super().step(output)

    config = doubles.run_config(task={"tool_seconds": 50.0})
    result = doubles.simulate(config, parts=world.MachineFactories(environment=Hanging))
    doubles.check_whole(result, config)
    assert result.seconds < 1e5


def test_utilisation_and_step_times_add_up():
    result = doubles.simulate(doubles.run_config())
    assert sum(result.step_seconds) == pytest.approx(result.seconds)
    assert 0 < result.train_utilisation < 1
    assert 0 < result.rollout_utilisation <= 1
    assert result.tokens_per_second == pytest.approx(result.generated_tokens / result.seconds)
    summary = result.step_summary()
    assert summary["p50"] <= summary["p90"] <= summary["p99"] == max(result.step_seconds)


def test_routing_is_reported_by_the_coordinator():
    spread = doubles.simulate(doubles.run_config(scheduler={"policy": "round_robin"}))
    assert spread.moves > 0
    assert spread.migrated_token_fraction == pytest.approx(spread.moved_tokens / spread.generated_tokens)
    assert spread.one_shot_routing_accuracy is not None
    assert 0 <= spread.one_shot_routing_accuracy <= 1
    alone = doubles.simulate(
        doubles.run_config(rollout={"tensor_parallel": (1,), "slots": 16}, scheduler={"max_remaining_tokens": ()})
    )
    assert alone.moves == alone.moved_tokens == 0
    assert alone.one_shot_routing_accuracy == 1.0, "with one bucket every decision is right"


@pytest.mark.parametrize(
    ("changes", "simulation", "sentence"),
    [
        ({"checkpoint": {"every": 5}}, {}, r"config\.checkpoint\.every: must be 0"),
        ({"warm_start": {"steps": 5}}, {}, r"config\.warm_start\.steps: must be 0"),
        ({}, {"slots": (4, 4)}, r"simulation\.slots: has 2 entries for 3 instances; give one each, or one for all"),
        ({}, {"train_devices": 0}, r"simulation\.train_devices: must be positive"),
        ({}, {"hardware": "a80"}, r"'a80' is not one of .*did you mean"),
        ({}, {"model": "Llama-3.1-8B", "hardware": "v5e"}, r"do not fit into the key-value cache of engine-0"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_sentence(changes, simulation, sentence, monkeypatch):
    values = {"warm_start": {}, **changes}

    def simulate():
        monkeypatch.setattr(doubles, "SIMULATION", dataclasses.replace(doubles.SIMULATION, **simulation))
        base = doubles.run_config()
        groups = {
            name: dataclasses.replace(getattr(base, name), **change) if isinstance(change, dict) else change
            for name, change in values.items()
        }
        doubles.simulate(dataclasses.replace(base, **groups))

    with pytest.raises(protocols.ConfigError, match=sentence):
        simulate()


def test_one_entry_gives_the_slots_of_all_instances(monkeypatch):
    steps = []
    for slots in ((4,), (4, 4, 4)):
        monkeypatch.setattr(doubles, "SIMULATION", dataclasses.replace(doubles.SIMULATION, slots=slots))
        steps.append(doubles.simulate(doubles.run_config()).step_seconds)
    assert steps[0] == steps[1]


def test_a_run_that_syncs_an_adapter_is_shorter_than_one_that_merges_it():

    alone, merged = (
        doubles.run_config(model={"lora": {"rank": 8, "sync": sync}}, coordinator={"max_staleness": 0})
        for sync in ("adapter", "merge")
    )
    seconds = [sum(doubles.simulate(config).step_seconds) for config in (alone, merged)]
    model = doubles.SIMULATION.cost_model(alone.model.lora)
    assert model.sync_bytes < 0.02 * model.weight_bytes
    # Each step ends with a sync, which is all that differs.
    assert 0 < seconds[1] - seconds[0] < alone.steps * model.weight_bytes / 1e9
