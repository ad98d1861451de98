"""Estimates the CPUs and the memory that a host of a run needs, for launchers that have to ask for them."""

from __future__ import annotations

import dataclasses
import math

from libra_jax.cluster import resolved_run
from libra_jax.models import config as model_config
from libra_jax.planning.costs import costs, memory

CPUS_PER_ACCELERATOR = 6
"""CPUs of a worker on an accelerator: vLLM's core process, its front end, or a trainer's input, compiler and saves."""

ACCELERATOR_BYTES = 6 * 2**30
"""Host memory of a worker on an accelerator, beside weights: libraries, CUDA's context, pinned buffers."""

DRIVER_BYTES = 8 * 2**30
"""Memory of the driver, of Ray and of the environments."""

STEP_GIB = 8
"""GiB that memory is rounded up to: the estimate is no better than that."""


USUAL_ACCELERATORS = 8
"""Accelerators that the hosts of most clusters have at most."""


@dataclasses.dataclass(frozen=True)
class HostSize:
    """CPUs and memory of a host.

    Attributes:
      cpus: CPUs.
      memory_mib: MiB of memory; 0 if it is not known.
    """

    cpus: int
    memory_mib: int


def unlikely(run: resolved_run.ResolvedRun) -> str:
    """Returns what looks wrong with the accelerators of the hosts, as a sentence. Empty if nothing does."""
    config, layout, field = run.config, run.layout, "config.cluster.accelerators_per_host"
    each = config.cluster.accelerators_per_host
    total = run.partition.total
    if layout is None:
        if config.trainer.platform == "cpu" or total <= USUAL_ACCELERATORS:
            return ""
        return f"{field}: is 0, so one host is asked for all {total} accelerators; give the number that a host has"
    idle = each * len(layout.hosts) - total
    if not idle or config.trainer.platform == "cpu" or config.elastic.resize:  # a resized mesh may take them
        return ""
    taken = ", ".join(f"{host.accelerators} of {each} on host {host.number}" for host in layout.hosts)
    return (
        f"{field}: the run takes {taken}, so {idle} stay idle; no host both trains and rolls out. A larger mesh, more "
        "of rollout.tensor_parallel, or a --plan takes them"
    )


def estimate(run: resolved_run.ResolvedRun) -> HostSize:
    """Returns what the largest host of a run needs."""
    config, shape, layout, trainer = run.config, run.shape, run.layout, run.config.trainer
    on_host = [host.accelerators for host in layout.hosts] if layout else [run.partition.total]
    on_cpu = trainer.platform == "cpu"
    cpus = max(on_host) if on_cpu else 1 + CPUS_PER_ACCELERATOR * max(on_host)
    if shape is None:
        return HostSize(cpus, 0)
    engine = memory.weight_bytes(config, shape, 1)
    if on_cpu:
        engine += config.rollout.kv_cache_gib * 2**30 + memory.ENGINE_BYTES
        needed = memory.trainer_bytes(config, shape) * trainer.devices + engine * len(config.rollout.tensor_parallel)
    else:
        # Weights are on the host twice during a weight sync, and a checkpoint is copied there before it is written.
        numbers = model_config.parameter_count(shape) + memory.moment_numbers(config, shape)
        state = costs.VALUE_BYTES[config.model.param_dtype] * numbers
        training = len(layout.of_role("training")) if layout else 1
        needed = 2 * engine + state / training + ACCELERATOR_BYTES * max(on_host)
    return HostSize(cpus, 1024 * STEP_GIB * math.ceil((needed + DRIVER_BYTES) / 2**30 / STEP_GIB))
