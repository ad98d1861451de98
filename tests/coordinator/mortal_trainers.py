"""A trainer whose processes die at a call of one's choice, and engines that note which parameters they were given."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import coordinator_doubles as doubles

from libra_jax import protocols
from libra_jax.engines import fake_engine

LOST = "actor 'trainer' is lost: its process 7 died; restart it to go on"


class Fate:
    """When the trainer's processes die, and what was seen of all of them.

    Attributes:
      calls: (life, method) of each call, in order.
      policies: version to the parameters that it was ever trained to, or published with.
      given: version to the parameters that engines loaded as it.
      lives: of the trainer's processes that were made.
      restore_seconds: that a restoration takes.
      tokens_per_second: of a request.
    """

    def __init__(self, dies: Callable[[int, str, int], str | None] = lambda *_: None) -> None:
        self._dies = dies
        self.calls: list[tuple[int, str]] = []
        self.policies: dict[int, set[str]] = collections.defaultdict(set)
        self.given: dict[int, set[str]] = collections.defaultdict(set)
        self.lives = 0
        self.restore_seconds, self.tokens_per_second = 0.0, 200.0

    def meets(self, life: int, method: str) -> str | None:
        """ "before" or "after": when in this call the process dies; None: it does not."""
        self.calls.append((life, method))
        return self._dies(len(self.calls), method, self.calls.count((life, method)))


def at(*deaths: tuple[str, int, str]) -> Callable[[int, str, int], str | None]:
    """Each death once: (method, its number among the calls of that method in one life, before or after it)."""
    left = list(deaths)

    def dies(number: int, method: str, of_method: int) -> str | None:
        for death in left:
            if death[:2] == (method, of_method):
                left.remove(death)
                return death[2]
        return None

    return dies


class Trainer(doubles.RecordingTrainer):
    """Its parameters are a digest of all that it was trained on. Once dead, it answers no call."""

    def __init__(self, fate: Fate, log: str = "") -> None:
        super().__init__(0.05, 3, log)
        self.state["parameters"] = "none"
        self._fate, self._life, self._dead = fate, fate.lives, False
        fate.lives += 1

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name.startswith("_") or name == "shutdown" or not asyncio.iscoroutinefunction(found):
            return found

        async def call(*args: Any, **kwargs: Any) -> Any:
            self._check()
            when = self._fate.meets(self._life, name)
            self._dead = when == "before"
            self._check()
            result = await found(*args, **kwargs)
            self._dead = self._dead or when == "after"
            self._check()
            return result

        return call

    def _check(self) -> None:
        if self._dead:
            raise protocols.WorkerLost(LOST)

    async def _learn(self, what: str) -> None:
        self.state["parameters"] = hashlib.sha256(f"{self.state['parameters']} {what}".encode()).hexdigest()

    async def warm_start_step(self, sequences: Sequence[protocols.Trajectory]) -> Mapping[str, float]:
        await self._learn(str([sequence.token_ids for sequence in sequences]))
        return await super().warm_start_step(sequences)

    async def train_step(
        self, batch: protocols.TrainBatch, shares: Sequence[protocols.Share] = ()
    ) -> Mapping[str, float]:
        trained = await super().train_step(batch, shares)
        said = [item for group in batch.groups for item in group.trajectories]
        await self._learn(str(sorted((item.trajectory_id, item.token_ids, item.reward) for item in said)))
        self._fate.policies[self.state["version"]].add(self.state["parameters"])
        return trained

    async def stage_weights(self, policy_version: int, index: int) -> protocols.WeightChunk:
        made = await super().stage_weights(policy_version, index)
        self._fate.policies[policy_version].add(self.state["parameters"])
        return dataclasses.replace(made, checksum=self.state["parameters"])

    async def restore(self, path: str) -> int:
        await asyncio.sleep(self._fate.restore_seconds)
        return await super().restore(path)

    async def shutdown(self) -> None:
        if not self._dead:
            await super().shutdown()

    async def save(self, path: str) -> None:
        await super().save(path)
        half = Path(path) / "half"
        doubles.write(half, "")


class Engine(fake_engine.FakeEngine):
    """Takes a while for each chunk."""

    def __init__(self, fate: Fate, name: str) -> None:
        super().__init__(name, doubles.chatter, 4, 256, 1, 2, fate.tokens_per_second, None)
        self._fate = fate
        self.loading = protocols.NO_VERSION

    async def start_weight_update(self, policy_version: int) -> None:
        await super().start_weight_update(policy_version)
        self.loading = policy_version

    async def update_weights(self, chunk: protocols.WeightChunk) -> None:
        await asyncio.sleep(0.01)
        await super().update_weights(chunk)
        self._fate.given[self.loading].add(str(chunk.checksum))


def bench(tmp_path: Path, fate: Fate, further: Mapping[str, Any] | None = None, **changes: Any) -> doubles.Bench:
    """A run with checkpoints every second step."""
    settings = {"checkpoint": {"every": 2}, "rollout": {"checksum": True, "restarts": 9}, "steps": 7, **changes}
    config = doubles.make_config(**settings)
    specs = [
        protocols.ActorSpec(f"engine-{number}", f"{__name__}:Engine", {"fate": fate, "name": f"engine-{number}"})
        for number in range(2)
    ]
    return doubles.Bench(
        config,
        tmp_path,
        specs=specs,
        trainer={"fate": fate},
        trainer_factory=f"{__name__}:Trainer",
        **(further or {}),
    )


def methods(fate: Fate, life: int) -> Collection[str]:
    """What the processes of one life were asked, in order."""
    return [method for number, method in fate.calls if number == life]
