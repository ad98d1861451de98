"""Measures a whole weight sync in seconds: snapshot, pause, the four verbs with vLLM's own reload, resume."""

from __future__ import annotations

import asyncio
import pathlib
import statistics
import time
from collections.abc import Sequence

import jax

from benchmarks import bridge, workload
from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.cluster import create as cluster_create
from libra_jax.coordinator import instances, parts, weight_sync
from libra_jax.models import config as models_config
from libra_jax.models import transformer
from libra_jax.telemetry import memory
from libra_jax.weights import snapshot

NAMES = ("rollout-0", "rollout-1")


class Weights:
    """The weight-sync part of a `protocols.Trainer`, over random parameters of this shape that never change."""

    def __init__(
        self, shape: models_config.TransformerConfig, chunk_bytes: int = 256 * 2**20, checksum: bool = False
    ) -> None:
        self._params = jax.block_until_ready(transformer.init_params(shape, jax.random.key(0), "float32"))
        self.snapshots = snapshot.HostSnapshot(shape, "float32", chunk_bytes, checksum)
        self.snapshot_seconds: list[float] = []
        self.lock = asyncio.Lock()

    async def open_weights(self, policy_version: int, destinations: Sequence[protocols.WeightDestination] = ()) -> int:
        start = time.perf_counter()
        count = self.snapshots.open(policy_version, self._params)
        self.snapshot_seconds.append(time.perf_counter() - start)
        return count

    async def stage_weights(self, policy_version: int, index: int) -> protocols.WeightChunk:
        return self.snapshots.stage(policy_version, index)

    async def close_weights(self, policy_version: int) -> None:
        self.snapshots.close(policy_version)


async def measure(
    rounds: int, *, engines: int = 1, at_once: int = 0, chunk_bytes: int = 256 * 2**20
) -> workload.Figures:
    """Times syncs of the bridge's 256 MB model to idle vLLM engines of degree 1; the first round is not counted.

    Args:
      rounds: syncs that are counted.
      engines: one or two.
      at_once: `rollout.sync_at_once`.
      chunk_bytes: bytes of a chunk.
    """
    config = config_lib.RunConfig(
        rollout=config_lib.RolloutConfig(
            slots=8, max_context=256, max_tokens=64, kv_cache_gib=0.25, sync_at_once=at_once
        )
    )
    model = models_config.to_hf(bridge.SHAPE)
    specs = [workload.engine_spec(name, config, model) for name in NAMES[:engines]]
    cluster = cluster_create.create(config.cluster)
    run = parts.CoordinatorContext(config, cluster, memory.MemoryRecorder(), pathlib.Path())
    started = instances.Instances(run, specs)
    weights = Weights(bridge.SHAPE, chunk_bytes)
    seconds, paused = [], []
    try:
        await started.start()
        syncing = weight_sync.WeightSync(config, trainer=weights, engines=started, recorder=run.recorder)
        for version in range(rounds + 1):
            seconds.append(await run.scope.race(syncing.sync_weights(version)))
            paused.append(syncing.paused_seconds)
    finally:
        await run.scope.cancel_background(config.deadlines.shutdown)
        await cluster.shutdown()
        weights.snapshots.shutdown()
    return {
        "megabytes": weights.snapshots.nbytes / 1e6,
        "weight_sync_seconds": statistics.median(seconds[1:]),
        "of_which_snapshot_seconds": statistics.median(weights.snapshot_seconds[1:]),
        "engine_paused_seconds": statistics.median(paused[1:]),
        "rounds": rounds,
    }
