"""Estimates the memory of a run's trainer and engines, and whether it fits, for `--dry_run`."""

from __future__ import annotations

from pathlib import Path

from libra_jax import config as config_lib
from libra_jax.models import config as model_config
from libra_jax.planning.costs import costs, hardware
from libra_jax.planning.forecast import meshes
from libra_jax.utils import machine

ENGINE_BYTES = 1.0 * 2**30
"""Resident memory of an engine's own processes on CPU, beside weights and key-value cache, in bytes."""

_SHEETS = {"cuda": ("a100", "h100", "h200"), "tpu": ("v5e", "v5p", "v6e")}
"""Accelerators of each `trainer.platform` that have a sheet."""


def trainer_bytes(config: config_lib.RunConfig, shape: model_config.TransformerConfig) -> float:
    """Returns the bytes on each of the trainer's devices: state, gradients, activations, logits, and the reference
    model."""
    sheet = hardware.SHEETS[0]  # sizes do not depend on the accelerator
    cost, trainer = costs.CostModel(sheet, shape), config.trainer
    # Memory depends on the rows alone, so one short sequence is enough.
    training = meshes.Training(cost, [2], meshes.TrainerProperties.from_config(config, sheet))
    return training.memory_bytes(trainer.data, trainer.fsdp, trainer.tensor)


def moment_numbers(config: config_lib.RunConfig, shape: model_config.TransformerConfig) -> int:
    """Returns the count of numbers that the run's optimizer keeps of all trained parameters."""
    sheet = hardware.SHEETS[0]  # counts do not depend on the accelerator
    return meshes.TrainerProperties.from_config(config, sheet).moment_numbers(costs.CostModel(sheet, shape))


def wire_bytes(config: config_lib.RunConfig, shape: model_config.TransformerConfig) -> float:
    """Returns the bytes that each of the trainer's devices sends in a micro-batch of the longest rows, by formula."""
    sheet, trainer = hardware.SHEETS[0], config.trainer  # bytes do not depend on the accelerator
    training = meshes.Training(costs.CostModel(sheet, shape), [2], meshes.TrainerProperties.from_config(config, sheet))
    rows = -(-trainer.micro_batch_rows // (trainer.data * trainer.fsdp))  # on each shard
    columns = rows * (trainer.row_tokens, *trainer.row_buckets)[-1] // trainer.context
    return training.volumes(trainer.data, trainer.fsdp, trainer.tensor, columns).total


def weight_bytes(config: config_lib.RunConfig, shape: model_config.TransformerConfig, degree: int) -> float:
    """Returns the bytes of weights on each device of an instance."""
    return model_config.parameter_count(shape) * costs.VALUE_BYTES[config.rollout.dtype] / degree


def verdict(config: config_lib.RunConfig, shape: model_config.TransformerConfig, free: float | None = None) -> str:
    """Estimates whether the run fits, and names the numbers that are compared.

    A run on accelerators is compared with the sheets of its platform, because a dry run may be on a machine without
    one.

    Args:
      free: bytes of memory that this machine has left; None asks the kernel.
    """
    size, train = machine.bytes_text, trainer_bytes(config, shape)
    weights = weight_bytes(config, shape, 1)
    if config.trainer.platform in _SHEETS:
        if config.trainer.platform == "cuda":
            train /= config.trainer.memory_fraction
        narrowest = min(config.rollout.tensor_parallel)
        cache = costs.CostModel(hardware.SHEETS[0], shape).kv_bytes_per_token * config.rollout.max_context
        engine = (weights + cache) / narrowest / config.rollout.gpu_memory_fraction
        sheets = [hardware.sheet(name) for name in _SHEETS[config.trainer.platform]]
        fits = [sheet for sheet in sheets if max(train, engine) <= sheet.memory_bytes]
        sheet_names = ", ".join(f"{sheet.name} ({size(sheet.memory_bytes)})" for sheet in fits or sheets)
        says = f"fits {sheet_names}" if fits else f"DOES NOT FIT any of {sheet_names}"
        return (
            f"{says}\n  a device that trains needs about {size(train)}; one that rolls out at least {size(engine)}: "
            "weights and one whole context"
        )
    trainer = train * config.trainer.devices
    bytes_per_engine = weights + config.rollout.kv_cache_gib * 2**30 + ENGINE_BYTES
    engines = bytes_per_engine * len(config.rollout.tensor_parallel) if config.rollout.engine == "vllm" else 0.0
    if free is None:
        # Memory that new processes can have without swapping, in KiB. It is unlimited where the kernel does not say.
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = float(lines.get("MemAvailable", "inf").split()[0]) * 1024
    says = "fits" if trainer + engines <= free else "DOES NOT FIT"
    return (
        f"{says}: about {size(trainer + engines)} (trainer {size(trainer)}, engines {size(engines)}) of the "
        f"{size(free)} that are free on this machine"
    )
