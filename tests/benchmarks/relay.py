"""Seconds of a publication to an engine on another host, through its relay, against one on the trainer's host.

Both hosts are this machine, so that the link is its loopback and four processes share its cores: a network's bandwidth
is not in it, and what two machines do at the same time is done in turn.
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
from typing import Any

from benchmarks import bridge, workload
from benchmarks import weight_sync as sync_benchmark
from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.cluster import create as cluster_create
from libra_jax.coordinator import instances, parts, weight_sync
from libra_jax.models import config as models_config
from libra_jax.telemetry import memory
from libra_jax.weights import relay_tree

BUCKET_BYTES = 32 * 2**20
"""So that a version is eight, and one is loaded while the next comes."""

LINK_SECONDS = 60.0


def _relay(host: int) -> protocols.ActorSpec:
    arguments = {"name": f"relay-{host}", "link_seconds": LINK_SECONDS, "cluster": "127.0.0.1:1"}
    return protocols.ActorSpec(f"relay-{host}", "libra_jax.weights.relay:create", arguments, cpus=0.0, host=host)


async def measure(rounds: int) -> dict[str, Any]:
    """The bridge's 256 MB model, to one idle vLLM engine: directly, with checksums, and by relays; in turn.

    The first round is not counted.
    """
    config = config_lib.RunConfig(
        rollout=config_lib.RolloutConfig(slots=8, max_context=256, max_tokens=64, kv_cache_gib=0.25),
        cluster=config_lib.ClusterConfig(backend="ray"),
    )
    spec = workload.engine_spec(sync_benchmark.NAMES[0], config, models_config.to_hf(bridge.SHAPE))
    cluster = cluster_create.create(config.cluster)
    specs = [dataclasses.replace(spec, host=1)]
    recorder = memory.MemoryRecorder()
    run = parts.CoordinatorContext(config, cluster, recorder, pathlib.Path())
    engines = instances.Instances(run, specs)
    hosts = relay_tree.RelayTree(
        config, cluster=cluster, specs={host: _relay(host) for host in (0, 1)}, recorder=run.recorder
    )
    plain, summed = (sync_benchmark.Weights(bridge.SHAPE, BUCKET_BYTES, checksum) for checksum in (False, True))
    ways: dict[str, tuple[sync_benchmark.Weights, relay_tree.RelayTree | None]] = {
        "direct_seconds": (plain, None),
        "direct_with_checksums_seconds": (summed, None),
        "by_relay_seconds": (summed, hosts),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    try:
        await engines.start()
        await hosts.start([1])
        for number in range((rounds + 1) * len(ways)):
            way = list(ways)[number % len(ways)]
            weights, through = ways[way]
            publisher = weight_sync.WeightSync(
                config,
                trainer=weights,
                engines=engines,
                recorder=run.recorder,
                hosts=through,
            )
            seconds[way].append(await run.scope.race(publisher.sync_weights(number)))
    finally:
        await run.scope.cancel_background(config.deadlines.shutdown)
        await cluster.shutdown()
        for weights in (plain, summed):
            weights.snapshots.shutdown()
    if engines.losses:
        raise protocols.LibraError(f"the engine was lost: {recorder.notes}")
    crossings = [end - begin for _, name, begin, end, _ in recorder.spans if name == "copy to host 1"]
    return {
        "megabytes": plain.snapshots.nbytes / 1e6,
        **{way: statistics.median(found[1:]) for way, found in seconds.items()},
        "of_which_until_all_was_on_the_host_seconds": statistics.median(crossings[1:]),
        "rounds": rounds,
    }
