"""Deterministic simulation testing: small runs of the real coordinator under random faults, sizes and policies.

See `seeds` for how many there are, and for how to repeat one.
"""

import functools
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
import seeds
import simulator_doubles as doubles

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.scheduling import registry
from libra_jax.simulator import faults, results, scripts, world


@dataclass
class Watched:
    """A scheduler, and what it promises: no instance over its slots, and no one young served before who has aged."""

    inner: protocols.Scheduler
    ageing_seconds: float
    slots: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, float] = field(default_factory=dict)  # since when
    decoding: dict[str, str] = field(default_factory=dict)  # where
    longest_wait: float = 0.0

    def on_instance_change(self, instances, now):
        self.slots = {instance.name: instance.slots for instance in instances}
        for request_id in [name for name, instance in self.decoding.items() if instance not in self.slots]:
            del self.decoding[request_id]
            self.waiting[request_id] = now
        return self._checked(self.inner.on_instance_change(instances, now), now)

    def on_arrival(self, request, now):
        assert request.request_id not in self.waiting | self.decoding
        self.waiting[request.request_id] = now
        return self._checked(self.inner.on_arrival(request, now), now)

    def on_tool_call(self, request_id, generated_tokens, now):
        self._forget(request_id)
        return self._checked(self.inner.on_tool_call(request_id, generated_tokens, now), now)

    def on_tool_return(self, request_id, causal_state, context_tokens, now):
        self.waiting[request_id] = now
        return self._checked(self.inner.on_tool_return(request_id, causal_state, context_tokens, now), now)

    def on_progress(self, request_id, generated_tokens, now):
        return self._checked(self.inner.on_progress(request_id, generated_tokens, now), now)

    def on_finish(self, request_id, generated_tokens, now, *, completed=True):
        self._forget(request_id)
        return self._checked(self.inner.on_finish(request_id, generated_tokens, now, completed=completed), now)

    def snapshot(self):
        return self.inner.snapshot()

    def restore(self, snapshot):
        self.inner.restore(snapshot)

    def merge(self, snapshot):
        self.inner.merge(snapshot)

    def _forget(self, request_id):
        self.waiting.pop(request_id, None)
        self.decoding.pop(request_id, None)

    def _checked(self, placements, now):
        youngest = -1.0
        for placement in placements:
            since = self.waiting.pop(placement.request_id, None)
            if not placement.instance:
                assert self.decoding.pop(placement.request_id)
                self.waiting[placement.request_id] = now
                continue
            self.decoding[placement.request_id] = placement.instance
            if since is not None:
                youngest = max(youngest, since)
                self.longest_wait = max(self.longest_wait, now - since)
        load = Counter(self.decoding.values())
        assert all(count <= self.slots[name] for name, count in load.items())
        aged = [name for name, since in self.waiting.items() if now - since > self.ageing_seconds]
        assert not aged or youngest <= now - self.ageing_seconds, f"{aged} were passed over at {now}"
        if self.waiting and self.slots and not self.decoding:
            raise AssertionError(f"{sorted(self.waiting)} wait and every instance is idle at {now}")
        return placements


@dataclass(frozen=True)
class Case:
    """One seed's run."""

    config: config_lib.RunConfig
    faults: faults.FaultConfig
    workload: scripts.Workload


def case(seed: int) -> Case:
    """A run of random size, layout, policy and faults; about 10 to 60 ms."""
    rng = random.Random(seed)
    streamed = doubles.streamed(seed)
    degrees = tuple(sorted(rng.choices((1, 1, 2, 4), k=rng.randint(1, 3))))
    bounds = tuple(sorted(rng.sample((30, 100, 300, 900), len(set(degrees)) - 1))) if rng.random() < 0.8 else ()
    config = doubles.run_config(
        steps=rng.choice((2, 2, 3)),
        rollout={
            "tensor_parallel": degrees,
            "slots": rng.choice((1, 1, 2, 4)),
            "stream_interval": rng.choice((20, 100)),
            "restarts": 10_000,
            "generation_retries": 10_000,
        },
        coordinator={
            # A step of one group has nothing to begin early.
            "groups_per_step": rng.randint(1, 2) + (streamed["stream"] != "off"),
            "group_size": rng.randint(1, 4),
            "max_staleness": (staleness := rng.randint(0, 2)),
            "max_replacements": 10_000.0,
            "redundancy": random.Random(f"{seed}/redundancy").choice((0.0, 0.0, 0.5, 1.5)),
            **doubles.recycled(seed, staleness),
        },
        trainer=streamed,
        scheduler={
            "policy": rng.choice(config_lib.POLICIES),
            "max_remaining_tokens": bounds,
            "ordering": rng.choice(config_lib.ORDERINGS),
            "ageing_seconds": rng.choice((0.2, 1.0, 10.0)),
        },
        task={"tool_seconds": rng.choice((5.0, 60.0)), "environment_retries": rng.randint(0, 2)},
    )

    def sometimes(value: float) -> float:
        return value if rng.random() < 0.4 else 0.0

    broken = faults.FaultConfig(
        engine_life_seconds=sometimes(rng.uniform(20.0, 300.0)),
        tool_hang=sometimes(rng.uniform(0.0, 0.1)),
        environment_crash=sometimes(rng.uniform(0.0, 0.1)),
        slow_node=sometimes(0.5),
        slow_factor=rng.uniform(1.0, 20.0),
        late_weights=sometimes(0.5),
        late_seconds=rng.uniform(0.0, 30.0),
    )
    return Case(config, broken, doubles.SeededWorkload(seed, turns=2, tokens=50))


def simulate(seed: int, made: Case) -> tuple[results.SimulationResult, Watched, doubles.Trained]:
    watched, recorder = [], doubles.Trained()

    def make(costs, remaining):
        kinds = made.config.rollout.kinds
        inner = registry.create(made.config.scheduler, costs=costs, remaining=remaining, seed=seed, kinds=kinds)
        watched.append(Watched(inner, made.config.scheduler.ageing_seconds))
        return watched[0]

    parts = faults.parts(made.faults, seed)
    result = world.run(made.config, doubles.SIMULATION, made.workload, make, parts=parts, recorder=recorder)
    return result, watched[0], recorder


@functools.cache  # a seed that two tests look at runs once
def check(seed: int) -> tuple[results.SimulationResult, Watched, doubles.Trained]:
    made = case(seed)
    result, watched, recorder = simulate(seed, made)
    doubles.check_whole(result, made.config)
    recorder.check(result, made.config)
    assert not watched.waiting
    assert not watched.decoding
    limits = made.config.coordinator
    kept = limits.recycle or not limits.redundancy
    if made.faults == faults.FaultConfig() and kept:
        assert result.replaced_trajectories == 0
    return result, watched, recorder


@pytest.mark.parametrize("batch", seeds.batches(100), ids=str)
def test_a_run_keeps_its_promises(batch):
    """Every attempt is trained once or replaced, none starves, nothing deadlocks, nothing is too stale."""
    seeds.each(batch, check, told=case)


def test_the_cases_reach_what_they_are_for():
    """Among a hundred of them, faults of each kind happen and requests wait for longer than they may unaged."""
    seen = Counter()
    for seed in range(100):
        result, watched, recorder = check(seed)
        seen["aged"] += watched.longest_wait > case(seed).config.scheduler.ageing_seconds
        seen["died"] += any("was lost" in note for note in result.notes)
        seen["crashed"] += any("(environment)" in note for note in result.notes)
        seen["stale"] += result.staleness_max > 0
        seen["moved"] += result.moves > 0
        seen["streamed"] += recorder.begun > 0
        seen["recycled"] += case(seed).config.coordinator.recycle and result.staleness_max > 0
    names = ("aged", "died", "crashed", "stale", "moved", "streamed", "recycled")
    assert min(seen[name] for name in names) >= 5, seen


@pytest.mark.parametrize("seed", range(20))
def test_a_broken_streamed_run_trains_the_prompts_of_a_whole_unbroken_one(seed):
    made = case(seed)
    limits = made.config.coordinator
    # Nothing replaces a group: neither surplus nor a crash.
    limits = replace(limits, groups_per_step=3, redundancy=0.5 * limits.recycle)
    broken = faults.FaultConfig(60.0, 0.05, 0.0, 0.5, 3.0, 0.5, 10.0)
    trained = []
    for stream, faulty in (("group", broken), ("off", faults.FaultConfig())):
        trainer = replace(made.config.trainer, stream=stream)
        config = replace(made.config, coordinator=limits, trainer=trainer)
        _, _, recorder = simulate(seed, replace(made, config=config, faults=faulty))
        trained.append(recorder.prompts())
    assert sorted(prompt for _, prompt in trained[0]) == sorted(prompt for _, prompt in trained[1])
    if not limits.max_staleness:
        assert trained[0] == trained[1], "a step had other groups"


@pytest.mark.parametrize("seed", range(5))
def test_a_broken_run_repeats_exactly(seed):
    made = case(seed)
    broken = faults.FaultConfig(60.0, 0.05, 0.05, 0.5, 3.0, 0.5, 10.0)
    made = replace(made, faults=broken)
    first, second = (replace(simulate(seed, made)[0], wall_seconds=0.0, steps=()) for _ in range(2))
    assert first == second


def run_with(broken: faults.FaultConfig, **changes) -> results.SimulationResult:
    config = doubles.run_config(
        rollout={"restarts": 1_000, "generation_retries": 1_000}, coordinator={"max_replacements": 1_000.0}, **changes
    )
    return doubles.simulate(config, parts=faults.parts(broken, 0))


def test_engines_that_die_are_started_again_and_nothing_is_lost():
    healthy, result = run_with(faults.FaultConfig()), run_with(faults.FaultConfig(engine_life_seconds=10.0))
    assert any("was lost" in note for note in result.notes)
    assert result.trained_trajectories == healthy.trained_trajectories
    assert result.kv_recompute_token_fraction > healthy.kv_recompute_token_fraction


def test_a_hanging_tool_costs_its_deadline_and_no_trajectory():
    result = run_with(faults.FaultConfig(tool_hang=0.05), task={"tool_seconds": 500.0})
    assert max(result.step_seconds) > 500.0
    assert result.replaced_trajectories == result.lost_trajectories == 0


def test_an_environment_that_keeps_crashing_has_its_group_replaced():
    result = run_with(faults.FaultConfig(environment_crash=0.2), task={"environment_retries": 0})
    assert result.replaced_trajectories > 0
    assert result.lost_trajectories == 0


def test_slow_nodes_and_late_weights_make_steps_longer():
    healthy = run_with(faults.FaultConfig()).seconds
    assert run_with(faults.FaultConfig(slow_node=1.0, slow_factor=20.0)).seconds > 1.2 * healthy
    assert run_with(faults.FaultConfig(late_weights=1.0, late_seconds=100.0)).seconds > 1.2 * healthy


def test_shares_out_of_range_are_named():
    with pytest.raises(protocols.ConfigError, match=r"faults.tool_hang: must lie in"):
        faults.FaultConfig(tool_hang=2.0)
