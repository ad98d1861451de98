"""The coordinator's doubles with weights: a trainer that publishes through shared memory, an engine that reads it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import coordinator_doubles as doubles

from libra_jax import protocols
from libra_jax.engines import fake_engine
from libra_jax.weights import memfd

NBYTES = 1 << 16


def content(version: int, index: int) -> bytes:
    return bytes([version + 1, index]) * (NBYTES // 2)


class Trainer(doubles.RecordingTrainer):
    """A piece of memory a chunk, which is gone once the snapshot is closed."""

    async def open_weights(self, policy_version: int, destinations: Sequence[protocols.WeightDestination] = ()) -> int:
        self._owners = [memfd.Owner(NBYTES, "a test") for _ in range(self._chunks)]
        return await super().open_weights(policy_version, destinations)

    async def stage_weights(self, policy_version: int, index: int) -> protocols.WeightChunk:
        await super().stage_weights(policy_version, index)
        owner = self._owners[index]
        owner.buffer[:] = content(policy_version, index)
        return protocols.WeightChunk(policy_version, index, self._chunks, (), NBYTES, owner.address)

    async def close_weights(self, policy_version: int) -> None:
        for owner in self._owners:
            owner.close()
        await super().close_weights(policy_version)


class Engine(fake_engine.FakeEngine):
    """Writes down every chunk that arrived whole: reader, owner, version, index."""

    def __init__(self, name: str, log: str) -> None:
        super().__init__(
            name=name,
            script=doubles.chatter,
            slots=4,
            max_context=256,
            tensor_parallel=1,
            stream_interval=2,
            tokens_per_second=20_000.0,
            fail_after_tokens=None,
        )
        self._log = Path(log)

    async def update_weights(self, chunk: protocols.WeightChunk) -> None:
        await super().update_weights(chunk)
        with memfd.open_peer(chunk.transport) as memory:
            assert memory[:] == content(chunk.policy_version, chunk.index)
        with self._log.open("a") as log:
            print(os.getpid(), chunk.transport["pid"], chunk.policy_version, chunk.index, file=log)


def trainer(log: str) -> Trainer:
    return Trainer(0.05, 3, log)
