"""Estimates the memory of a run's trainer and engines, and whether it fits, for `--dry_run`."""

from __future__ import annotations

from pathlib import Path

from libra_jax import config as libra_config
from libra_jax.models import config as model_config
from libra_jax.planning import costs, hardware, meshes

ENGINE_BYTES = 1.0 * 2**30
"""Resident memory of an engine's own processes on CPU, beside weights and key-value cache, in bytes."""

_SHEETS = {"cuda": ("a100", "h100", "h200"), "tpu": ("v5e", "v5p", "v6e")}
"""Accelerators of each `trainer.platform` that have a sheet."""

VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def size(count: float) -> str:
    """Formats a number of bytes for people, with three digits.

    >>> [size(count) for count in (12, 1536, 1.64e6, 24e9, 3e12)]
    ['12 B', '1.5 KiB', '1.56 MiB', '22.4 GiB', '2.73 TiB']
    """
    unit = 0
    while count >= 999.5 and unit < 4:  # three digits would round up to 1e+03
        count, unit = count / 1024, unit + 1
    return f"{count:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def trainer_bytes(config: libra_config.RunConfig, shape: model_config.TransformerConfig) -> float:
    """Returns the bytes on each of the trainer's devices: state, gradients, activations, logits, and the reference
    model."""
    sheet = hardware.SHEETS[0]  # sizes do not depend on the accelerator
    cost, trainer = costs.CostModel(sheet, shape), config.trainer
    # Memory depends on the rows alone, so one short sequence is enough.
    made = meshes.Training(cost, [2], meshes.Trainer.of_run(config, sheet))
    needed = made.memory_bytes(trainer.data, trainer.fsdp, trainer.tensor)
    if config.algorithm.kl_coefficient:
        reference = VALUE_BYTES[config.model.param_dtype] * cost.parameters
        needed += reference / (trainer.fsdp * trainer.tensor)
    return needed


def weight_bytes(config: libra_config.RunConfig, shape: model_config.TransformerConfig, degree: int) -> float:
    """Returns the bytes of weights on each device of an instance."""
    return model_config.parameter_count(shape) * VALUE_BYTES[config.rollout.dtype] / degree


def verdict(config: libra_config.RunConfig, shape: model_config.TransformerConfig, free: float | None = None) -> str:
    """Estimates whether the run fits, and names the numbers that are compared.

    Args:
      config: the run's configuration.
      shape: shape of its model.
      free: bytes of memory that this machine has left; None asks the kernel.
    """
    if config.trainer.platform in _SHEETS:
        return _on_accelerators(config, shape)
    trainer = trainer_bytes(config, shape) * config.trainer.devices
    each = weight_bytes(config, shape, 1) + config.rollout.kv_cache_gib * 2**30 + ENGINE_BYTES
    engines = each * len(config.rollout.tensor_parallel) if config.rollout.engine == "vllm" else 0.0
    room = available() if free is None else free
    says = "fits" if trainer + engines <= room else "DOES NOT FIT"
    return (
        f"{says}: about {size(trainer + engines)} (trainer {size(trainer)}, engines {size(engines)}) of the "
        f"{size(room)} that are free on this machine"
    )


def available() -> float:
    """Returns the bytes that new processes of this machine can have without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return float(value.split()[0]) * 1024
    return float("inf")


def _on_accelerators(config: libra_config.RunConfig, shape: model_config.TransformerConfig) -> str:
    """Compares with the sheets of the platform's accelerators, because a dry run may be on a machine without one."""
    train = trainer_bytes(config, shape)
    narrowest = min(config.rollout.tensor_parallel)
    cache = costs.CostModel(hardware.SHEETS[0], shape).kv_bytes_per_token * config.rollout.max_context / narrowest
    engine = (weight_bytes(config, shape, narrowest) + cache) / config.rollout.gpu_memory_fraction
    known = [hardware.sheet(name) for name in _SHEETS[config.trainer.platform]]
    fits = [sheet for sheet in known if max(train, engine) <= sheet.memory_bytes]
    named = ", ".join(f"{sheet.name} ({size(sheet.memory_bytes)})" for sheet in fits or known)
    says = f"fits {named}" if fits else f"DOES NOT FIT any of {named}"
    return (
        f"{says}\n  a device that trains needs about {size(train)}; one that rolls out at least {size(engine)}: "
        "weights and one whole context"
    )
