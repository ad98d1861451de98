"""Measures the weight bridge over memcpy, in bytes a second: from JAX arrays to tensors readable in another process."""

from __future__ import annotations

import dataclasses
import statistics
from multiprocessing import connection
from typing import Any

import jax
import numpy as np

from benchmarks import workload
from libra_jax.models import config as models_config
from libra_jax.models import transformer
from libra_jax.utils import processes
from libra_jax.weights import memfd, snapshot

SHAPE = dataclasses.replace(
    models_config.load_preset("libra-tiny"),
    vocab_size=8192,
    hidden_size=1024,
    intermediate_size=2816,
    num_layers=4,
    num_heads=16,
    num_kv_heads=8,
    head_dim=64,
    tie_word_embeddings=False,
)
"""Shape with about 256 MB of float32 parameters."""

DEADLINE_SECONDS = 60.0


def measure(rounds: int) -> workload.Figures:
    """Times the bridge and memcpy in turn.

    The engine's process maps each chunk and sums every tensor's first and last element, as proof of reading.
    """
    params = jax.block_until_ready(transformer.init_params(SHAPE, jax.random.key(0), "float32"))
    snapshots = snapshot.HostSnapshot(SHAPE, "float32", 256 * 2**20, checksum=False)
    source = np.ones(snapshots.nbytes // 4, np.float32)
    target = np.empty_like(source)
    version = 0

    def bridge() -> None:
        nonlocal version
        version += 1
        for index in range(snapshots.open(version, params)):
            reader.ask(snapshots.stage(version, index), DEADLINE_SECONDS)
        snapshots.close(version)

    reader = processes.Peer(_read, name="the reading process")
    try:
        bridge_seconds, copy_seconds = workload.alternate(rounds, bridge, lambda: np.copyto(target, source))
    finally:
        reader.end()
        snapshots.shutdown()
    return {
        "megabytes": snapshots.nbytes / 1e6,
        "bridge_gigabytes_per_second": snapshots.nbytes / 1e9 / statistics.median(bridge_seconds),
        "memcpy_gigabytes_per_second": snapshots.nbytes / 1e9 / statistics.median(copy_seconds),
        "ratio_over_memcpy": workload.median_ratio(copy_seconds, bridge_seconds),
        "rounds": rounds,
    }


def _read(pipe: connection.Connection) -> None:
    import torch

    mappings: dict[tuple[int, int, int], Any] = {}
    while (chunk := pipe.recv()) is not None:
        address = chunk.transport
        key = (address["pid"], address["fd"], address["inode"])
        if key not in mappings:
            mappings[key] = memfd.open_peer(address)
        total = 0.0
        for entry in chunk.entries:
            kind = getattr(torch, entry.dtype)
            flat = torch.frombuffer(mappings[key], dtype=kind, count=entry.nbytes // kind.itemsize, offset=entry.offset)
            total += float(flat[0]) + float(flat[-1])
        pipe.send(total)
