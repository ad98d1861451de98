"""A run over three hosts that Ray emulates: a trainer, an engine, and a hybrid worker that changes sides when it can.

Trainer, relays and replica are real; the engines are doubles, which reach for each chunk's memory. A relay is killed
between two versions, one while a chunk is on its way to it and its engine sleeps, and one whose engine serves.

  PYTHONPATH=.:launch:tests/common python relayed_hybrid_run.py WORKDIR STEPS [FULL_SYNC_EVERY]

With FULL_SYNC_EVERY, weights travel in bfloat16 as differences, and the learning rate is one of a large model.

Prints a line for each kill.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
from pathlib import Path
from typing import Any

import restless_run

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import preflight, wiring, workdirs
from libra_jax.cluster import emulated, placement
from libra_jax.engines import fake_engine
from libra_jax.hybrid import switching
from libra_jax.tools import toolkit
from libra_jax.weights import memfd, relay_tree

BETWEEN, ASLEEP, SERVING = 3, 6, 9
"""Versions: before one a relay is killed, and during two."""


class Reader(fake_engine.FakeEngine):
    """Reaches each chunk as a real engine does, and is refused what lies on another host."""

    async def update_weights(self, chunk: protocols.WeightChunk) -> None:
        with memfd.open_peer(chunk.transport) as memory:
            assert any(memory[: chunk.nbytes])
            with memoryview(memory) as data:
                assert chunk.checksum is None or memfd.digest(data[: chunk.nbytes]) == chunk.checksum
        await super().update_weights(chunk)


def engine(**arguments: Any) -> fake_engine.FakeEngine:
    made = fake_engine.create(**arguments)
    made.__class__ = Reader
    return made


def config(steps: int, address: str, full_sync_every: int = 1) -> config_lib.RunConfig:
    run = restless_run.config(steps)
    rollout = dataclasses.replace(run.rollout, chunk_mib=1)
    if full_sync_every > 1:
        rollout = dataclasses.replace(rollout, full_sync_every=full_sync_every, dtype="bfloat16", checksum=True)
        optimizer = dataclasses.replace(run.optimizer, learning_rate=1e-6)
        # A replica computes with what engines get.
        model = dataclasses.replace(run.model, compute_dtype="bfloat16")
        run = dataclasses.replace(run, optimizer=optimizer, model=model)
    cluster = dataclasses.replace(run.cluster, address=address, accelerators_per_host=1)
    return dataclasses.replace(
        run,
        name="relayed-hybrid",
        cluster=cluster,
        rollout=rollout,
        checkpoint=config_lib.CheckpointConfig(every=0),
    )


def kill_relays() -> None:
    killed: set[str] = set()

    def kill(self: relay_tree.RelayTree, name: str, when: str) -> None:
        if when not in killed:
            killed.add(when)
            os.kill(self._cluster._actors[name].birth.pid, signal.SIGKILL)  # type: ignore[attr-defined]
            print(f"killed {name} {when}", flush=True)

    pass_on, transfer = relay_tree.RelayTree.pass_on, relay_tree.RelayTree._transfer

    async def before(self: relay_tree.RelayTree, staged: relay_tree.Chunks, *further: Any) -> None:
        if (await relay_tree.came(staged[0])).policy_version == BETWEEN:
            kill(self, "relay-1", "between two versions")
        await pass_on(self, staged, *further)

    async def during(
        self: relay_tree.RelayTree, above: Any, relay: Any, source: protocols.WeightChunk, *further: Any
    ) -> Any:
        if (relay.host, source.policy_version, source.index) == (2, ASLEEP, source.count - 1):
            kill(self, "relay-2", "on the way")
        if (relay.host, source.policy_version, source.index) == (1, SERVING, source.count - 1):
            kill(self, "relay-1", "on the way while its engine serves")
        return await transfer(self, above, relay, source, *further)

    relay_tree.RelayTree.pass_on, relay_tree.RelayTree._transfer = before, during  # type: ignore[method-assign]


def main() -> None:
    placement.ENGINES["fake"] = "relayed_hybrid_run:engine"
    switching.Switching = restless_run.Restless  # type: ignore[misc, assignment]
    kill_relays()
    with emulated.EmulatedHosts(3, accelerators=1) as hosts:
        os.environ.update(hosts.environment)  # before Ray is imported, which reads it then
        run = config(int(sys.argv[2]), hosts.address, *map(int, sys.argv[3:]))
        resolved = preflight.validate(run, need_weights=True)
        tools = toolkit.Toolkit(run.tools, run.sandbox)
        asyncio.run(wiring.train(resolved, workdirs.open_workdir(run, str(Path(sys.argv[1]))), tools))


if __name__ == "__main__":
    main()
