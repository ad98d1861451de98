"""Measures a whole weight sync in seconds: snapshot, pause, the four verbs with vLLM's own reload, resume."""

from __future__ import annotations

import asyncio
import pathlib
import statistics
import time
from collections.abc import Sequence

import jax

from benchmarks import bridge, workload
from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.cluster import create as cluster_create
from libra_jax.coordinator import instances, parts
from libra_jax.models import config as models_config
from libra_jax.models import transformer
from libra_jax.telemetry import memory
from libra_jax.weights import snapshot, sync

NAME = "rollout-0"


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


async def measure(rounds: int) -> workload.Figures:
    """Times syncs of the bridge's 256 MB model to one idle vLLM engine of degree 1; the first round is not counted."""
    config = configuration.RunConfig(
        rollout=configuration.RolloutConfig(slots=8, max_context=256, max_tokens=64, kv_cache_gib=0.25)
    )
    spec = workload.engine_spec(NAME, config, models_config.to_hf(bridge.SHAPE))
    cluster = cluster_create.create(config.cluster)
    run = parts.RunContext(config, cluster, memory.MemoryRecorder(), pathlib.Path())
    engines = instances.Instances(run, [spec])
    weights = Weights(bridge.SHAPE)
    seconds = []
    try:
        await engines.start()
        syncing = sync.WeightSync(config, trainer=weights, engines=engines, recorder=run.recorder)
        for version in range(rounds + 1):
            seconds.append(await run.scope.race(syncing.sync_weights(version)))
    finally:
        await run.scope.cancel_background(config.deadlines.shutdown)
        await cluster.shutdown()
        weights.snapshots.shutdown()
    return {
        "megabytes": weights.snapshots.nbytes / 1e6,
        "weight_sync_seconds": statistics.median(seconds[1:]),
        "of_which_snapshot_seconds": statistics.median(weights.snapshot_seconds[1:]),
        "rounds": rounds,
    }
