"""Simulated clusters of unlike accelerators: each instance has the costs of its own, and no run beats its bound."""

import dataclasses

import pytest
import simulator_doubles as doubles
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax import protocols
from libra_jax.simulator import bound, world

H800 = dataclasses.replace(doubles.SIMULATION, hardware="h800")


def config_of(accelerators, **changes):
    rollout = {"tensor_parallel": (2,) * max(1, len(accelerators)), "accelerators": tuple(accelerators)}
    bounds = (300,) if len(set(accelerators)) > 1 else ()
    return doubles.run_config(rollout=rollout, scheduler={"policy": "cmlfq", "max_remaining_tokens": bounds}, **changes)


@pytest.mark.parametrize("name", ["h800", "h20"])
def test_instances_have_the_costs_of_the_accelerator_that_is_named_for_them(name):
    named, plain = config_of((name, name)), config_of(())
    plain = dataclasses.replace(plain, rollout=dataclasses.replace(plain.rollout, tensor_parallel=(2, 2)))
    simulation = dataclasses.replace(H800, hardware=name)
    alike = doubles.simulate(plain, simulation=simulation).step_seconds
    assert doubles.simulate(named, simulation=simulation).step_seconds == alike
    beside_h800 = doubles.simulate(named, simulation=H800).step_seconds
    assert (beside_h800 == alike) == (name == "h800"), "H800s train"


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1_000),
    accelerators=st.lists(st.sampled_from(("a100", "h20", "h800")), min_size=1, max_size=3),
    kv_cache=st.sampled_from(("recompute", "offload")),
    eta=st.integers(0, 2),
)
def test_no_run_on_unlike_accelerators_is_faster_than_its_bound(seed, accelerators, kv_cache, eta):
    config = config_of(accelerators, steps=3, coordinator={"max_staleness": eta})
    bounds = tuple(range(100, 100 * len(set(accelerators)), 100))
    config = dataclasses.replace(config, scheduler=dataclasses.replace(config.scheduler, max_remaining_tokens=bounds))
    simulation = dataclasses.replace(H800, kv_cache=kv_cache)
    least = bound.lower_bound(config, simulation, doubles.SeededWorkload(seed))
    result = doubles.simulate(config, seed, simulation=simulation)
    doubles.check_whole(result, config)
    assert result.step_summary()["mean"] >= least.step_seconds * (1 - 1e-9)


def test_another_accelerator_beside_lowers_the_bound_of_a_run_that_rollout_limits():
    work = doubles.SeededWorkload(3)
    alone = bound.lower_bound(config_of(("h800",)), H800, work)
    beside = bound.lower_bound(config_of(("h800", "h20")), H800, work)
    both = bound.lower_bound(config_of(("h800", "h800")), H800, work)
    assert beside.work_seconds < alone.work_seconds
    assert beside.work_seconds < 2 * both.work_seconds


def test_an_accelerator_without_a_sheet_ends_the_run_before_it_begins():
    with pytest.raises(protocols.ConfigError, match=r"rollout\.accelerators: 'h21'"):
        world.run(config_of(("h21",)), H800, doubles.SeededWorkload(0), lambda *_: None)
