"""Measures weight syncs that send changed elements (`rollout.full_sync_every`): docs/results/flow.md.

  python -m tests.benchmarks.sparse_sync --part=shares --rates=1e-3,1e-6   # minutes for each rate; starts vLLM
  python -m tests.benchmarks.sparse_sync --part=seconds                    # a minute; starts Ray

`shares` trains the quickstart at some learning rates. It compares each version's wire bytes, in float32 and bfloat16,
with those of the version before. `seconds` sends 128 MB of bfloat16 weights from one relay to another over the
loopback, whole and as differences in turn, at some shares of changed elements.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent import futures
from typing import Any

import jax
import numpy as np
from absl import app, flags

import libra_jax
from benchmarks import bridge
from configs import quickstart
from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.cluster import create as cluster_create
from libra_jax.models import config as models_config
from libra_jax.models import transformer
from libra_jax.telemetry import memory
from libra_jax.weights import create as weights_create
from libra_jax.weights import differences, relay_tree, snapshot

DTYPES = ("float32", "bfloat16")
CHUNK_BYTES = 32 * 2**20
SHARES = (0.0075, 0.04, 1.0)
NEVER = 10**9

_PART = flags.DEFINE_enum("part", "seconds", ["shares", "seconds"], "What to measure.")
_RATES = flags.DEFINE_list("rates", ["1e-3", "1e-5", "1e-6"], "shares: learning rates.")
_STEPS = flags.DEFINE_integer("steps", 14, "shares: training steps of a run, of which the first six do not count.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "seconds: measured syncs each way.")

THREADS = futures.ThreadPoolExecutor(len(os.sched_getaffinity(0)))


def main(argv: list[str]) -> None:
    del argv
    if _PART.value == "shares":
        for rate in map(float, _RATES.value):
            for dtype, (elements, changed, sent) in shares(rate, _STEPS.value).items():
                print(f"rate {rate:g}, {dtype}: {elements:.2%} of elements, {changed:.2%} of bytes, sent {sent:.2%}")
        return
    for share in SHARES:
        for name, value in asyncio.run(seconds(share, _ROUNDS.value)).items():
            print(f"{share:.2%} changed: {name} {value:.3f}")


Plain = snapshot.HostSnapshot


class Comparing(Plain):
    """A snapshot that also compares each version with the one before, in both dtypes."""

    found: Mapping[str, list[tuple[float, float, float]]]

    def __init__(self, shape: models_config.TransformerConfig, *further: Any) -> None:
        super().__init__(shape, *further)
        self._wires = {dtype: Plain(shape, dtype, CHUNK_BYTES, False) for dtype in DTYPES}
        self._before: dict[str, np.ndarray] = {}

    def open(self, version: int, params: Mapping[str, Any], destinations: Sequence[Any] = ()) -> int:
        for dtype, wire in self._wires.items():
            wire.open(version, params)
            data = np.concatenate([np.frombuffer(owner.buffer, np.uint8) for owner in wire._memory])
            old = self._before.get(dtype)
            if old is not None:
                kind = np.dtype(f"u{np.dtype(jax.numpy.dtype(dtype)).itemsize}")
                made = differences.encode(old, data, THREADS)
                # Vectors are float32 on both wires, and less than a hundredth of the bytes.
                elements = float(np.mean(old.view(kind) != data.view(kind)))
                sent = 1.0 if made is None else len(made) / len(data)
                self.found[dtype].append((elements, float(np.mean(old != data)), sent))
            self._before[dtype] = data
        return super().open(version, params, destinations)


def shares(rate: float, steps: int) -> dict[str, tuple[float, ...]]:
    """Returns shares of a step's changed elements, changed bytes and sent bytes by wire dtype, as means over steps."""
    Comparing.found = {dtype: [] for dtype in DTYPES}
    weights_create.snapshot.HostSnapshot = Comparing  # type: ignore[assignment, misc]
    config = quickstart.get_config()
    config.steps, config.evaluation.every, config.checkpoint.every = steps, 0, 0
    config.optimizer.learning_rate = rate
    with tempfile.TemporaryDirectory() as workdir:
        libra_jax.train(config, workdir=f"{workdir}/run")
    # The first syncs bring the warm start's weights, and a learning rate that still rises.
    return {
        dtype: tuple(map(statistics.fmean, zip(*found[-(steps - 6) :], strict=True)))
        for dtype, found in Comparing.found.items()
    }


async def seconds(share: float, rounds: int) -> dict[str, float]:
    """Returns the seconds of a sync to one host, whole and as differences, and what the differences cost; medians."""
    shape = bridge.SHAPE
    kept = snapshot.HostSnapshot(shape, "bfloat16", CHUNK_BYTES, True)
    kept.open(0, transformer.init_params(shape, jax.random.key(0), "float32"))
    cluster = cluster_create.create(config_lib.ClusterConfig(backend="ray"))
    trees, spent, sent = {}, {"whole": list[float](), "differences": list[float]()}, []
    for way, every in (("whole", 1), ("differences", NEVER)):
        config = config_lib.RunConfig(rollout=config_lib.RolloutConfig(full_sync_every=every))
        specs = {host: _relay(f"{way}-{host}", host) for host in (0, 1)}
        recorder = memory.MemoryRecorder()
        trees[way] = relay_tree.RelayTree(config, cluster=cluster, specs=specs, recorder=recorder)
        await trees[way].start([1])
    random, stages = np.random.default_rng(0), []
    try:
        for version in range(1, rounds + 2):
            for owner in kept._memory:
                elements = np.frombuffer(owner.buffer, np.uint16)
                places = np.flatnonzero(random.random(len(elements), np.float32) < share)
                old = elements.tobytes()
                elements[places] ^= 1
                if version == 2:
                    stages.append(_stages(np.frombuffer(old, np.uint8), np.frombuffer(owner.buffer, np.uint8)))
            kept._version = kept._written = version
            kept._checksums.clear()
            chunks = [kept.stage(version, index) for index in range(len(kept._memory))]
            for way, tree in trees.items():
                staged, copy = relay_tree.expected(len(chunks)), relay_tree.expected(len(chunks))
                for chunk, place in zip(chunks, staged, strict=True):
                    place.set_result(chunk)
                begin = time.perf_counter()
                await tree.pass_on(staged, {1: copy}, {1})
                spent[way].append(time.perf_counter() - begin)
                if [chunk.result().checksum for chunk in copy] != [chunk.checksum for chunk in chunks]:
                    raise protocols.LibraError("a host holds other bytes than the trainer's")
            sent.append(trees["differences"].sent_bytes / trees["differences"].whole_bytes)
    finally:
        await cluster.shutdown()
        nbytes = kept.nbytes
        kept.shutdown()
    medians = {f"{way}, seconds": statistics.median(found[1:]) for way, found in spent.items()}
    compared, applied = (nbytes / sum(stage[kind] for stage in stages) / 1e9 for kind in (0, 1))
    return {
        "megabytes": nbytes / 1e6,
        **medians,
        "whole over differences": medians["whole, seconds"] / medians["differences, seconds"],
        "sent over whole bytes": statistics.median(sent[1:]),
        "compared, GB/s": compared,
        "applied, GB/s": applied,
    }


def _stages(old: np.ndarray, new: np.ndarray) -> tuple[float, float]:
    """Returns the seconds to compare two versions of a chunk, and to apply the difference."""
    target = old.copy()
    begin = time.perf_counter()
    made = differences.encode(old, new, THREADS)
    compared = time.perf_counter()
    if made is not None:
        differences.apply(target, made)
    return compared - begin, time.perf_counter() - compared


def _relay(name: str, host: int) -> protocols.ActorSpec:
    arguments = {"name": name, "link_seconds": 60.0, "cluster": "127.0.0.1:1"}
    return protocols.ActorSpec(name, "libra_jax.weights.relay:create", arguments, cpus=0.0, host=host)


if __name__ == "__main__":
    app.run(main)
