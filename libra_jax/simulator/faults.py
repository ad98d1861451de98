"""Faults on a seeded schedule: engines that die or are slow, hanging tools, crashing environments, late weights.

A fault happens inside a machine, so the coordinator of a real run has to handle it. The coordinator restarts engines,
times out hanging tools, retries crashed environments, and finally replaces their groups.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass
from typing import Any

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.simulator import engine, trainer, training_side, trajectory, world


@dataclass
@config_lib.group("faults")
class FaultConfig:
    """Rates of the faults; 0 means never."""

    # Mean seconds of an engine's life (exponential), drawn at each start.
    engine_life_seconds: float = config_lib.field(0.0, ge=0)
    tool_hang: float = config_lib.field(0.0, ge=0, le=1)  # share of tool calls that never return
    # Share of tool calls in which the environment itself crashes.
    environment_crash: float = config_lib.field(0.0, ge=0, le=1)
    slow_node: float = config_lib.field(0.0, ge=0, le=1)  # share of engines' lives that are spent on a slow node
    slow_factor: float = config_lib.field(3.0, ge=1)  # factor on the time of each step on a slow node
    late_weights: float = config_lib.field(0.0, ge=0, le=1)  # share of weight snapshots that are late
    late_seconds: float = config_lib.field(60.0, ge=0)  # mean delay of late snapshots (exponential)
    # Mean life of a hybrid worker's training side (exponential), at each start.
    training_side_life_seconds: float = config_lib.field(0.0, ge=0)
    # Share of calls to a hybrid worker's training side that never return.
    training_side_hang: float = config_lib.field(0.0, ge=0, le=1)
    # Share of training shares that take `slow_factor` times as long.
    training_side_slow: float = config_lib.field(0.0, ge=0, le=1)
    # Share of a hybrid worker's engine's sleep and wake calls that never return.
    engine_hang: float = config_lib.field(0.0, ge=0, le=1)
    # Share of the trainer's openings and closings of a gradient channel that fail.
    channel_failure: float = config_lib.field(0.0, ge=0, le=1)


def parts(config: FaultConfig, seed: int) -> world.MachineFactories:
    """Returns the machines that fail as `config` asks for; the same seed breaks the same things."""
    if config == FaultConfig():
        # Without faults, nothing is drawn, which would slow the simulation.
        return world.MachineFactories()
    rollouts = itertools.count()
    # Engines and hybrid workers draw by name and life, so every policy meets the same faults there. Rollouts draw by
    # the order in which they begin, which a policy changes.
    return world.MachineFactories(
        engine=lambda life, **arguments: FaultyEngine(
            config, random.Random(f"{seed}/{arguments['name']}/{life}"), **arguments
        ),
        environment=lambda book: FaultyEnvironment(
            config, random.Random(f"{seed}/environment/{next(rollouts)}"), book=book
        ),
        trainer=lambda life, **arguments: FaultyTrainer(config, random.Random(f"{seed}/trainer"), **arguments),
        make_training_side=lambda life, **arguments: FaultyTrainingSide(
            config, random.Random(f"{seed}/replica/{arguments['worker']}/{life}"), **arguments
        ),
    )


async def _perhaps_hang(rng: random.Random, share: float) -> None:
    if rng.random() < share:
        await asyncio.get_running_loop().create_future()  # until a deadline aborts the call


class _Faulty:
    """The faults of one life of a machine, drawn from a random generator of its own. It precedes the machine's class.

    Args:
      faults: rates of the faults.
      rng: generator of the draws.
      arguments: arguments of the machine.
    """

    def __init__(self, faults: FaultConfig, rng: random.Random, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._faults, self._rng = faults, rng


class FaultyEngine(_Faulty, engine.SimulatedEngine):
    """One life of an engine: it may be on a slow node, die early, or hang when it falls asleep or wakes."""

    async def start(self) -> protocols.EngineInfo:
        """Starts, and draws this life's faults."""
        info = await super().start()
        if self._rng.random() < self._faults.slow_node:
            self.slowdown = self._faults.slow_factor
        if self._faults.engine_life_seconds:
            life = self._rng.expovariate(1.0 / self._faults.engine_life_seconds)
            self._loop.call_later(life, self.kill)
        return info

    async def sleep(self) -> None:
        """Goes to sleep, or hangs."""
        await _perhaps_hang(self._rng, self._faults.engine_hang)
        await super().sleep()

    async def wake(self) -> None:
        """Wakes, or hangs."""
        await _perhaps_hang(self._rng, self._faults.engine_hang)
        await super().wake()


class FaultyEnvironment(_Faulty, trajectory.ScriptedEnvironment):
    """One rollout's environment: each tool call may crash it, or never return."""

    async def step(self, output: str) -> protocols.StepResult:
        """Runs the scripted tool, unless the environment crashes or the tool hangs."""
        if self._rng.random() < self._faults.environment_crash:
            raise protocols.EnvironmentCrashed(f"the environment of {output} was made to crash (config.faults)")
        result = await super().step(output)
        # Only a step that called a tool can hang, which is known only now.
        if self._rng.random() < self._faults.tool_hang and result.tool_returns:
            await asyncio.get_running_loop().create_future()  # until the step's deadline cancels it
        return result


class FaultyTrainer(_Faulty, trainer.SimulatedTrainer):
    """A trainer with late snapshots and gradient channels that fail to open or close."""

    async def _called(self, call: str) -> None:
        """Delays a snapshot, or fails in opening or closing a channel."""
        if call != "stage_weights":
            if self._rng.random() < self._faults.channel_failure:
                raise protocols.LibraError(f"the trainer's {call} was made to fail (config.faults)")
        elif self._rng.random() < self._faults.late_weights and self._faults.late_seconds:
            await asyncio.sleep(self._rng.expovariate(1.0 / self._faults.late_seconds))


class FaultyTrainingSide(_Faulty, training_side.SimulatedTrainingSide):
    """One life of a hybrid worker's training side: it may be short, any call may hang, any share may be slow."""

    async def start(self) -> protocols.TrainerInfo:
        """Starts, and draws this life's faults."""
        info = await super().start()
        if self._faults.training_side_life_seconds:
            life = self._rng.expovariate(1.0 / self._faults.training_side_life_seconds)
            asyncio.get_running_loop().call_later(life, self.kill)
        return info

    async def _called(self, call: str) -> None:
        """Hangs, or slows a share down."""
        await _perhaps_hang(self._rng, self._faults.training_side_hang)
        # Of this share alone: `training_side_slow` counts shares, not lives.
        if call == "contribute":
            slow = self._rng.random() < self._faults.training_side_slow
            self.slowdown = self._faults.slow_factor if slow else 1.0
        await super()._called(call)
