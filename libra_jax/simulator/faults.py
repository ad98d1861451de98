"""Faults on a seeded schedule: engines that die or are slow, hanging tools, crashing environments, late weights.

A fault wraps a machine and happens inside it, so the coordinator of a real run has to handle it. The coordinator
restarts engines, times out hanging tools, retries crashed environments, and finally replaces their groups.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.simulator import engine, environment, replica, trainer, world


@configuration.group
@dataclass
class FaultConfig:
    """Rates of the faults; 0 means never."""

    engine_life_seconds: float = 0.0  # mean seconds of an engine's life (exponential), drawn at each start
    tool_hang: float = 0.0  # share of tool calls that never return
    environment_crash: float = 0.0  # share of tool calls in which the environment itself crashes
    slow_node: float = 0.0  # share of engines' lives that are spent on a slow node
    slow_factor: float = 3.0  # factor on the time of each step on a slow node
    late_weights: float = 0.0  # share of weight snapshots that are late
    late_seconds: float = 60.0  # mean delay of late snapshots (exponential)
    replica_life_seconds: float = 0.0  # mean life of a hybrid worker's training side (exponential), at each start
    replica_hang: float = 0.0  # share of calls to a hybrid worker's training side that never return
    replica_slow: float = 0.0  # share of training shares that take `slow_factor` times as long
    engine_hang: float = 0.0  # share of a hybrid worker's engine's sleep and wake calls that never return
    channel_failure: float = 0.0  # share of the trainer's openings and closings of a gradient channel that fail

    def __post_init__(self) -> None:
        for name in ("engine_life_seconds", "late_seconds", "replica_life_seconds"):
            configuration.check(getattr(self, name) >= 0, f"faults.{name}", "must not be negative")
        for name in (
            "tool_hang",
            "environment_crash",
            "slow_node",
            "late_weights",
            "replica_hang",
            "replica_slow",
            "engine_hang",
            "channel_failure",
        ):
            value = getattr(self, name)
            configuration.check(0 <= value <= 1, f"faults.{name}", f"is a share: it must lie in [0, 1], not {value}")
        configuration.check(self.slow_factor >= 1, "faults.slow_factor", f"must be 1 or more, not {self.slow_factor}")


def parts(config: FaultConfig, seed: int) -> world.Parts:
    """Returns the fault injection that `config` asks for; the same seed breaks the same things."""
    if config == FaultConfig():
        # Without faults, no wrapper slows the simulation.
        return world.Parts()
    attempts = itertools.count()
    # Engines and hybrid workers draw by name and life, so every policy meets the same faults there.
    return world.Parts(
        engine=lambda made, life: Engine(made, config, random.Random(f"{seed}/{made.name}/{life}")),
        environment=lambda made: Environment(made, config, random.Random(f"{seed}/environment/{next(attempts)}")),
        trainer=lambda made: Trainer(made, config, random.Random(f"{seed}/trainer")),
        replica=lambda made, life: Replica(made, config, random.Random(f"{seed}/replica/{made.member}/{life}")),
    )


class _Wrapped:
    """Delegates to the machine inside; subclasses override the methods that may fail."""

    def __init__(self, inner: Any, config: FaultConfig, rng: random.Random) -> None:
        self._inner = inner
        self._config = config
        self._rng = rng

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def _perhaps_hang(self, share: float) -> None:
        if self._rng.random() < share:
            await asyncio.get_running_loop().create_future()  # until a deadline aborts the call


class Engine(_Wrapped):
    """One life of an engine: it may be on a slow node, die early, or hang when it falls asleep or wakes."""

    _inner: engine.Engine
    _death: asyncio.TimerHandle | None = None

    async def start(self) -> protocols.EngineInfo:
        """Starts, and draws this life's faults."""
        info = await self._inner.start()
        if self._rng.random() < self._config.slow_node:
            self._inner.slowdown = self._config.slow_factor
        if self._config.engine_life_seconds:
            life = self._rng.expovariate(1.0 / self._config.engine_life_seconds)
            self._death = asyncio.get_running_loop().call_later(life, self._inner.kill)
        return info

    async def sleep(self) -> None:
        """Goes to sleep, or hangs."""
        await self._perhaps_hang(self._config.engine_hang)
        await self._inner.sleep()

    async def wake(self) -> None:
        """Wakes, or hangs."""
        await self._perhaps_hang(self._config.engine_hang)
        await self._inner.wake()

    async def shutdown(self) -> None:
        """Stops, and cancels a scheduled death."""
        if self._death is not None:
            self._death.cancel()
        await self._inner.shutdown()


class Environment(_Wrapped):
    """One rollout's environment: each tool call may crash it, or never return."""

    _inner: environment.ScriptedEnvironment

    @property
    def running_tool(self) -> str:
        """Name of the running scripted tool."""
        return self._inner.running_tool

    async def reset(self, task: protocols.Task) -> Sequence[protocols.Message]:
        """Opens the rollout."""
        return await self._inner.reset(task)

    async def step(self, output: str) -> protocols.StepResult:
        """Runs the scripted tool, unless the environment crashes or the tool hangs."""
        if self._rng.random() < self._config.environment_crash:
            raise protocols.EnvironmentCrashed(f"the environment of {output} was made to crash (config.faults)")
        result = await self._inner.step(output)
        # Only a step that called a tool can hang, which is known only now.
        if self._rng.random() < self._config.tool_hang and result.tool_returns:
            await asyncio.get_running_loop().create_future()  # until the step's deadline cancels it
        return result

    async def close(self) -> None:
        """Closes the rollout."""
        await self._inner.close()


class Trainer(_Wrapped):
    """A trainer with late snapshots and gradient channels that fail to open or close."""

    _inner: trainer.Trainer

    async def stage_weights(self, policy_version: int, index: int) -> protocols.WeightChunk:
        """Fills a chunk, perhaps late."""
        if self._rng.random() < self._config.late_weights and self._config.late_seconds:
            await asyncio.sleep(self._rng.expovariate(1.0 / self._config.late_seconds))
        return await self._inner.stage_weights(policy_version, index)

    async def give_up_step(self) -> bool:
        """Delegates: this call never fails."""
        return await self._inner.give_up_step()

    async def listen(self, member: str, epoch: int) -> Mapping[str, Any]:
        """Opens a gradient channel, or fails."""
        self._perhaps_fail("listen")
        return await self._inner.listen(member, epoch)

    async def connect(self, member: str, epoch: int, address: Mapping[str, Any]) -> None:
        """Connects the channel, or fails."""
        self._perhaps_fail("connect")
        await self._inner.connect(member, epoch, address)

    async def dismiss(self, member: str) -> None:
        """Closes the channel, or fails."""
        self._perhaps_fail("dismiss")
        await self._inner.dismiss(member)

    def _perhaps_fail(self, method: str) -> None:
        if self._rng.random() < self._config.channel_failure:
            raise protocols.LibraError(f"the trainer's {method} was made to fail (config.faults)")


class Replica(_Wrapped):
    """One life of a hybrid worker's training side: it may be short, any call may hang, any share may be slow."""

    _inner: replica.Replica
    _death: asyncio.TimerHandle | None = None

    async def start(self) -> protocols.TrainerInfo:
        """Starts, and draws this life's faults."""
        info = await self._inner.start()
        if self._config.replica_life_seconds:
            life = self._rng.expovariate(1.0 / self._config.replica_life_seconds)
            self._death = asyncio.get_running_loop().call_later(life, self._inner.kill)
        return info

    async def start_weight_update(self, policy_version: int) -> None:
        """Prepares, or hangs."""
        await self._perhaps_hang(self._config.replica_hang)
        await self._inner.start_weight_update(policy_version)

    async def warm(self) -> None:
        """Compiles, or hangs."""
        await self._perhaps_hang(self._config.replica_hang)
        await self._inner.warm()

    async def join(self, epoch: int, address: Mapping[str, Any]) -> None:
        """Connects, or hangs."""
        await self._perhaps_hang(self._config.replica_hang)
        await self._inner.join(epoch, address)

    async def contribute(self, batch: protocols.TrainBatch, shares: Sequence[protocols.Share]) -> Mapping[str, float]:
        """Computes, perhaps slowly, or hangs."""
        await self._perhaps_hang(self._config.replica_hang)
        slow = self._rng.random() < self._config.replica_slow
        self._inner.slowdown = self._config.slow_factor if slow else 1.0
        return await self._inner.contribute(batch, shares)

    async def leave(self) -> None:
        """Leaves, or hangs."""
        await self._perhaps_hang(self._config.replica_hang)
        await self._inner.leave()

    async def shutdown(self) -> None:
        """Stops, and cancels a scheduled death."""
        if self._death is not None:
            self._death.cancel()
        await self._inner.shutdown()
