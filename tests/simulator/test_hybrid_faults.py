"""Deterministic simulation testing of the hybrid pool: random transitions, and faults in every state of them.

See `seeds` for how many there are, and for how to repeat one.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import seeds
import simulator_doubles as doubles

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.hybrid import hybrid, switching
from libra_jax.hybrid.pool import WorkerState
from libra_jax.scheduling import registry
from libra_jax.simulator import faults, results, world
from libra_jax.trainer_control import resize


class Restless:
    """Instead of `switching.Switching`: whoever may change sides may be told to, after any step."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def look(self, sight: switching.Sight) -> switching.SwitchDecision:
        if not sight.workers or self._rng.random() < 0.3:
            return switching.SwitchDecision(sight.step, "stay", (), "", 1.0, 1.0)
        kind = self._rng.choice(["to_rollout" if worker.trains else "to_training" for worker in sight.workers])
        able = [worker.name for worker in sight.workers if worker.trains == (kind == "to_rollout")]
        workers = tuple(self._rng.sample(able, self._rng.randint(1, len(able))))
        return switching.SwitchDecision(sight.step, kind, workers, "chance", 1.0, 1.0)


BREAKABLE = ("draining", "fetching", "warming", "joining", "training", "leaving", "activating")
"""States whose work fails here."""


@dataclass(frozen=True)
class Case:
    """One seed's run."""

    config: config_lib.RunConfig
    faults: faults.FaultConfig


def case(seed: int) -> Case:
    rng = random.Random(seed)
    hybrid = rng.randint(1, 2)
    streamed = doubles.streamed(seed)
    config = doubles.run_config(
        steps=rng.randint(4, 8),
        rollout={
            "tensor_parallel": (1,) * rng.randint(1, 2) + (1,) * hybrid,
            "slots": rng.choice((1, 2, 4)),
            "restarts": rng.choice((1, 5, 10_000, 10_000)),
            "generation_retries": 10_000,
        },
        coordinator={
            # A step of one group has nothing to begin early.
            "groups_per_step": rng.randint(1, 3) + (streamed["stream"] != "off"),
            "group_size": rng.randint(1, 4),
            "max_staleness": (staleness := rng.randint(0, 2)),
            "max_replacements": 10_000.0,
            **doubles.recycled(seed, staleness),
        },
        trainer=streamed,
        scheduler={"policy": rng.choice(("cmlfq", "cmlfq", "least_loaded", "sticky")), "max_remaining_tokens": ()},
        elastic={
            "hybrid": hybrid,
            "restarts": rng.choice((0, 1, 3)),
            "late_min_seconds": rng.choice((0.0, 1.0, 100.0)),
        },
        planner={"start_seconds": rng.choice((0.0, 10.8))},
        deadlines={"transition": rng.choice((5.0, 60.0)), "first_token": 3600.0, "train_step": 3600.0},
    )

    def sometimes(value: float) -> float:
        return value if rng.random() < 0.5 else 0.0

    broken = faults.FaultConfig(
        engine_life_seconds=sometimes(rng.uniform(20.0, 300.0)),
        training_side_life_seconds=sometimes(rng.uniform(1.0, 100.0)),
        training_side_hang=sometimes(rng.uniform(0.0, 0.2)),
        training_side_slow=sometimes(0.5),
        slow_factor=rng.uniform(1.0, 50.0),
        late_weights=sometimes(0.3),
        late_seconds=rng.uniform(0.0, 10.0),
        engine_hang=sometimes(rng.uniform(0.0, 0.2)),
        channel_failure=sometimes(rng.uniform(0.0, 0.2)),
    )
    return Case(config, broken)


def simulate(
    seed: int, made: Case, make_handle: Callable[[str, Any], protocols.ActorHandle] = protocols.DirectHandle
) -> tuple[results.SimulationResult, doubles.Trained]:
    def scheduler(costs, remaining):
        return registry.create(made.config.scheduler, costs=costs, remaining=remaining, seed=seed, kinds=((1, ""),))

    simulation = replace(doubles.SIMULATION, warm_seconds=2.0)
    recorder = doubles.Trained()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(switching, "Switching", lambda *_, **__: Restless(seed))
        patch.setattr(hybrid, "HybridWorkers", Watched)
        workload = doubles.SeededWorkload(seed, turns=2, tokens=50)
        parts = replace(
            faults.parts(made.faults, seed),
            trainer=lambda life, **arguments: Checked(made.faults, random.Random(f"{seed}/trainer"), **arguments),
            handle=make_handle,
        )
        result = world.run(made.config, simulation, workload, scheduler, parts=parts, recorder=recorder)
    return result, recorder


class Checked(faults.FaultyTrainer):
    """Checks that what the core and the members computed makes up each batch exactly once."""

    async def train_step(
        self, batch: protocols.TrainBatch, shares: Sequence[protocols.Share] = ()
    ) -> Mapping[str, float]:
        metrics = await super().train_step(batch, shares)
        parts = self.log.parts[-1]
        wanted = [trajectory.trajectory_id for group in batch.groups for trajectory in group.trajectories]
        assert sorted(name for part in parts.values() for name in part) == sorted(wanted)
        assert set(parts) <= {"", *(share.worker for share in shares)}
        late = {name.rpartition("/")[2] for name in metrics if name.startswith("shares/late/")}
        assert not late & set(parts), "what a worker sent counted, and its share was computed again"
        return metrics


class Watched(hybrid.HybridWorkers):
    """Checks, whenever a worker has come into another state, that its devices have one use only."""

    def devices(self) -> dict[str, int]:
        for worker in self.pool.workers:
            engine = self._engines.engines[worker.name]
            if worker.state in (WorkerState.FETCHING, WorkerState.WARMING, WorkerState.JOINING, WorkerState.TRAINING):
                assert engine.state != "serving", f"{worker} serves"
        return super().devices()


@functools.cache  # a seed that two tests look at runs once
def check(seed: int) -> doubles.Trained | None:
    made = case(seed)
    try:
        result, recorder = simulate(seed, made)
    except protocols.WorkerLost as error:
        if made.config.rollout.restarts == 10_000 or "No rollout engine is left" not in str(error):
            raise
        return None
    doubles.check_whole(result, made.config)
    recorder.check(result, made.config)
    devices = {sum(size.devices.values()) for size in recorder.pool_sizes}
    assert len(devices) == 1, "a device was lost or counted twice"
    for transition in recorder.transitions:
        assert transition["outcome"] in ("done", "failed", "cancelled")
        assert transition["end"] >= transition["start"]
    return recorder


@pytest.mark.parametrize("batch", seeds.batches(100), ids=str)
def test_whatever_breaks_in_whatever_state_every_prompt_is_trained_once_and_nothing_sticks(batch):
    seeds.each(batch, check, told=case)


def test_the_cases_reach_what_they_are_for():
    """Among so many of them, workers change sides both ways, fail in every state, and are late with their shares."""
    seen: Counter[str] = Counter()
    for seed in range(250):
        recorder = check(seed)
        if recorder is None:
            seen["no engine left"] += 1
            continue
        for transition in recorder.transitions:
            seen[f"to {transition['to']}"] += 1
            if transition["outcome"] == "failed":
                seen[f"failed in {next(reversed(transition['phases']), transition['from'])}"] += 1
        shared = seen["shared"]
        seen["late"] += sum(step.get("shares/late", 0.0) > 0 for _, step in recorder.steps)
        seen["shared"] += sum(step.get("shares/micro_batches", 0.0) > 0 for _, step in recorder.steps)
        seen["lost"] += any("only rolls out" in note for note in recorder.notes)
        # Runs with streamed steps in which hybrid workers help, too.
        seen["streamed"] += recorder.begun > 0 and seen["shared"] > shared
    names = ("to training", "to rollout", "late", "shared", "lost", "streamed")
    assert min(seen[name] for name in names) >= 5, seen
    assert all(seen[f"failed in {state}"] for state in BREAKABLE), seen


@pytest.mark.parametrize("seed", range(3))
def test_a_run_with_hybrid_workers_repeats_exactly(seed):
    first, second = (replace(simulate(seed, case(seed))[0], wall_seconds=0.0, steps=()) for _ in range(2))
    assert first == second


def test_a_resize_that_does_not_end_keeps_no_transition_from_being_closed(monkeypatch):
    close, closed = Watched.close, []

    async def fails(resizes: resize.Resizing) -> None:
        assert closed, "the hybrid workers' end waits for that of a resize"
        raise protocols.LibraError("the other processes do not end")

    monkeypatch.setattr(resize.Resizing, "close", fails)
    monkeypatch.setattr(Watched, "close", lambda workers: closed.append(close(workers)))
    result, _ = simulate(0, case(0))
    assert any("Not everything ended cleanly: the other processes do not end" in note for note in result.notes)
