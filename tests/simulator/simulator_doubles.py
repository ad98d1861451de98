"""Small simulated machines for tests: a cost model of round numbers, and scripts from a seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.models import config as model_config
from libra_jax.planning.costs import costs, hardware, request_costs
from libra_jax.scheduling import registry
from libra_jax.simulator import engine, requests, results, scripts, trajectory, world

SAMPLING = protocols.SamplingParams(1.0, 100_000, (trajectory.STOP,))


def model(**coefficients: Any) -> costs.CostModel:
    shape = model_config.load_preset("Qwen3-0.6B")
    return costs.CostModel(hardware.sheet("a800"), shape, costs.Coefficients(**coefficients))


def turn(generated: int, payload: int = 10, seconds: float = 0.5) -> protocols.Turn:
    return protocols.Turn(generated, "look", "success", payload, seconds)


def attempt(name: str, prompt: int, turns: list[protocols.Turn]) -> trajectory.CountedTrajectory:
    made = trajectory.CountedTrajectory(name, name.partition("/")[0], script=scripts.Script(prompt, tuple(turns)))
    made.append_text(trajectory.Runs([(trajectory.TEXT, prompt)]), protocols.TokenSource.PROMPT)
    return made


def make_engine(
    name: str = "engine-0", kind: type[engine.SimulatedEngine] = engine.SimulatedEngine, **changes: Any
) -> engine.SimulatedEngine:
    values: dict[str, Any] = {
        "degree": 1,
        "slots": 64,
        "max_context": 10_000,
        "stream_interval": 1000,
        "model": model(),
        "kv_tokens": 1_000_000,
        "counters": requests.Counters(),
    }
    return kind(name, **{**values, **changes})


class Watched(engine.SimulatedEngine):
    """Checks its accounts whenever steps are planned."""

    def _plan(self, steps: int) -> None:
        assert self._pace is not None
        ending = len(self._prefill.requests) if self._prefill is not None else 0
        full = self._used + self._held.tokens + steps * len(self._decoding)
        assert full + (ending if self._prefill and steps >= self._prefill.steps else 0) <= self._capacity
        assert self._held.tokens == sum(self._held._prefixes.values())
        lengths = sum(item.length + self._steps - item.since for item in self._decoding)
        assert self._context == lengths
        reserved = [*(self._prefill.requests if self._prefill else ()), *self._fetches]
        assert self._used == lengths + sum(item.length for item in reserved)
        super()._plan(steps)


async def serve(made: engine.SimulatedEngine, version: int = 0) -> None:
    """Starts an engine and gives it its first weights in no time."""
    await made.start()
    made._version = version


async def take_turn(made: engine.SimulatedEngine, whose: trajectory.CountedTrajectory) -> protocols.FinishReason:
    """Streams one output into the trajectory, as the dispatcher does."""
    request = protocols.GenerationRequest(whose.trajectory_id, whose.context(), SAMPLING)
    async for delta in made.generate(request):
        whose.append_sampled(delta)
    assert delta.finish_reason is not None
    return delta.finish_reason


@dataclass(frozen=True)
class SeededWorkload:
    """Log-normal turns and lengths."""

    seed: int = 0
    turns: int = 4
    tokens: int = 60

    def script(self, task_index: int, sample: int) -> scripts.Script:
        random_of = random.Random(f"{self.seed}/{task_index}/{sample}")
        count = min(20, max(1, int(random_of.lognormvariate(0, 0.8) * self.turns)))
        return scripts.Script(
            100,
            tuple(
                protocols.Turn(
                    max(1, int(random_of.lognormvariate(0, 0.8) * self.tokens)),
                    "look",
                    "success" if random_of.random() < 0.7 else "failure",
                    int(random_of.lognormvariate(0, 1.0) * 40),
                    random_of.expovariate(0.5),
                )
                for _ in range(count)
            ),
        )


def run_config(**changes: Any) -> config_lib.RunConfig:
    values: dict[str, Any] = {
        "steps": 4,
        "rollout": {
            "engine": "fake",
            "tensor_parallel": (1, 1, 2),
            "slots": 4,
            "max_context": 8192,
            "max_tokens": 4096,
            "stream_interval": 50,
        },
        "trainer": {"row_tokens": 8192},
        "coordinator": {"groups_per_step": 3, "group_size": 4, "max_staleness": 1},
        "scheduler": {"policy": "least_loaded", "max_remaining_tokens": (200,)},
        "task": {"max_turns": 40, "tool_seconds": 300.0},
        "checkpoint": {"every": 0},
        "deadlines": {"first_token": 3600.0},
    }
    for name, change in changes.items():
        values[name] = {**values.get(name, {}), **change} if isinstance(change, dict) else change
    return config_lib.parse(config_lib.RunConfig, values)


SIMULATION = world.SimulationConfig(model="Qwen3-0.6B", train_devices=4, longest_seconds=100_000.0)
"""Runs of `run_config` end within hundreds of seconds, without faults: one that takes the longest is a deadlock."""


def check_whole(result: results.SimulationResult, config: config_lib.RunConfig) -> None:
    """Every prompt admitted was trained once, or reported as replaced, within the staleness bound."""
    limits = config.coordinator
    assert len(result.step_seconds) == config.steps
    assert result.trained_trajectories == config.steps * limits.groups_per_step * limits.group_size
    assert result.lost_trajectories == result.duplicated_trajectories == 0
    assert result.staleness_max <= limits.max_staleness


class Trained(results.TraceRecorder):
    """Keeps what was trained, and counts the calls that began a step before its batch was whole."""

    begun = 0

    def span(self, track: str, name: str, start: float, end: float, arguments: Mapping[str, Any] | None = None) -> None:
        self.begun += name == "train step" and "groups" in (arguments or {})

    def prompts(self) -> list[tuple[int, str]]:
        """Returns step and prompt of each trained rollout, in order."""
        return sorted((record["step"], record["prompt_id"]) for record in self.trace)

    def check(self, result: results.SimulationResult, config: config_lib.RunConfig) -> None:
        """Each group was trained whole and once; without replacements, the run's first groups, each in its step."""
        groups, size = config.coordinator.groups_per_step, config.coordinator.group_size
        names = [record["trajectory_id"] for record in self.trace]
        assert len(names) == len(set(names)) == result.trained_trajectories
        trained = Counter(prompt for _, prompt in self.prompts())
        assert set(trained.values()) == {size}
        if not result.replaced_trajectories:
            assert {int(prompt) for prompt in trained} == set(range(config.steps * groups))
            if not config.coordinator.max_staleness:
                assert all(int(prompt) // groups == step - 1 for step, prompt in self.prompts())
        assert config.trainer.stream != "off" or not self.begun


def streamed(seed: int) -> dict[str, Any]:
    """Settings of the trainer: whether steps begin early, and micro-batches of about a group."""
    stream = random.Random(f"{seed}/stream").choice(("off", "group", "micro_batch"))
    return {"stream": stream, "row_tokens": 256, "row_buckets": (8192,), "rows_per_micro_batch": 2}


def recycled(seed: int, staleness: int) -> dict[str, Any]:
    """Settings of the coordinator: whether later steps train groups left over; empty for most seeds."""
    recycle = staleness > 0 and random.Random(f"{seed}/recycle").random() < 0.3
    return {"redundancy": 0.5, "recycle": True} if recycle else {}


def simulate(config: config_lib.RunConfig, seed: int = 0, **more: Any) -> results.SimulationResult:
    return simulate_workload(config, SeededWorkload(seed), seed, **more)


def simulate_workload(
    config: config_lib.RunConfig,
    workload: scripts.Workload,
    seed: int = 0,
    simulation: world.SimulationConfig | None = None,
    **more: Any,
) -> results.SimulationResult:
    def make(scheduling: request_costs.SchedulingCosts, remaining: world.Remaining) -> protocols.Scheduler:
        return registry.create(config.scheduler, costs=scheduling, remaining=remaining, seed=seed)

    return world.run(config, simulation or SIMULATION, workload, make, **more)
