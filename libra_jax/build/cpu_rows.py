"""Chooses the rows of a micro-batch for a trainer on CPUs, where `trainer.rows_per_micro_batch` is 0.

The backward pass reads what the forward pass has written. On a CPU that is fast while a micro-batch's activations fit
the processor's largest cache. Any split of a batch into micro-batches gives the same update. Empty rows fill the last
one up, so a shard has a power of two of rows, which divides the usual numbers of unpacked rows.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from libra_jax.cluster import resolved_run
from libra_jax.planning.forecast import meshes

LEAST_TOKENS = 2048
"""Minimum tokens of a micro-batch on a shard. With fewer, the products of weight gradients, which sum over tokens, are
slower (docs/results/speed.md)."""

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def sized(run: resolved_run.ResolvedRun, caches: Path = _CACHES) -> resolved_run.ResolvedRun:
    """Returns the run with the number of rows instead of 0. All workers of a run must get the same number.

    Args:
      run: the run, whose shape is known.
      caches: folder in which the kernel describes the caches of a core.
    """
    config, trainer = run.config, run.config.trainer
    if trainer.rows_per_micro_batch:
        return run
    rows, cache = trainer.micro_batch_rows, _largest(caches)
    if trainer.platform == "cpu" and cache:
        shards = trainer.data * trainer.fsdp
        # `LAYER_ACTIVATIONS` counts bfloat16.
        width = 2 if config.model.compute_dtype == "float32" else 1
        layers = run.policy.num_layers * meshes.LAYER_ACTIVATIONS[config.model.remat] + meshes.LAYER_ACTIVATIONS["none"]
        fitting = cache / (shards * width * layers * run.policy.hidden_size)
        min_rows, max_rows = LEAST_TOKENS / trainer.row_tokens, fitting / trainer.row_tokens
        rows = shards * 2 ** max(0, math.ceil(math.log2(min_rows)), math.floor(math.log2(max_rows)))
    trainer = dataclasses.replace(trainer, rows_per_micro_batch=rows)
    return dataclasses.replace(run, config=dataclasses.replace(config, trainer=trainer))


def _largest(caches: Path) -> int:
    """Returns the bytes of a core's largest cache; 0 if they are unknown."""
    sizes = [0]
    for file in caches.glob("index*/size"):
        try:
            text = file.read_text().strip()
            sizes.append(int(text.rstrip("KMG")) * _UNITS.get(text[-1:], 1))
        except (OSError, ValueError):
            continue
    return max(sizes)
