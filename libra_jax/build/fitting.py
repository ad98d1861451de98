"""Settings with which a run's training that is too large for its devices may fit them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.models import config as model_config
from libra_jax.models import feasibility
from libra_jax.planning.costs import memory

WANTED = 3
"""Settings that a refusal names."""

MOST_TRIED = 8
"""Largest number of settings that are compiled to find them."""

HOPEFUL = 1.3
"""Settings whose predicted memory exceeds the limit by more than this factor are not compiled."""

_STRICTER = ("none", "dots", "full", "offload")
"""Values of `model.remat`; each keeps less than the one before."""


@dataclass(frozen=True)
class _ConfigChange:
    """A change of a configuration.

    Attributes:
      remat: least strict value of `model.remat`.
      fsdp: factor of the mesh's axis.
      tensor: factor of the mesh's axis.
      context: factor of the mesh's axis.
      one_row: a micro-batch has one row a shard.
    """

    remat: str = "none"
    fsdp: int = 1
    tensor: int = 1
    context: int = 1
    one_row: bool = False


_CHANGES = (
    _ConfigChange(remat="dots"),
    _ConfigChange(remat="full"),
    _ConfigChange(remat="offload"),
    _ConfigChange(one_row=True),
    _ConfigChange(fsdp=2),
    _ConfigChange(tensor=2),
    *(_ConfigChange(remat="full", fsdp=fsdp, tensor=tensor) for fsdp, tensor in ((2, 1), (1, 2), (4, 1), (2, 2))),
    _ConfigChange(fsdp=4),
    *(_ConfigChange(remat="full", context=context, one_row=True) for context in (2, 4, 8)),
    *(_ConfigChange(remat="full", fsdp=fsdp, tensor=tensor) for fsdp, tensor in ((8, 1), (4, 4), (4, 8), (8, 8))),
)
"""Changes to try, the gentlest first."""


@dataclass(frozen=True)
class FittedSetting:
    """A changed configuration.

    Attributes:
      config: the configuration.
      flags: the flags of a command line that change it.
    """

    config: config_lib.RunConfig
    flags: str


def candidates(config: config_lib.RunConfig, shape: model_config.TransformerConfig) -> Iterator[FittedSetting]:
    """Yields changed configurations that the model can be divided by, the gentlest change first."""
    flag_sets, before = set(), config.trainer
    before = dataclasses.replace(before, rows_per_micro_batch=before.micro_batch_rows)
    for change in _CHANGES:
        fsdp, tensor = change.fsdp * before.fsdp, change.tensor * before.tensor
        context = change.context * before.context
        # Rows have to divide over the shards; more shards than rows need more rows.
        shards, rows = before.data * fsdp, before.rows_per_micro_batch
        rows = shards if change.one_row or rows % shards else rows
        remat = max(config.model.remat, change.remat, key=_STRICTER.index)
        try:
            mesh = {"fsdp": fsdp, "tensor": tensor, "context": context}
            after = dataclasses.replace(before, fsdp=fsdp, tensor=tensor, context=context, rows_per_micro_batch=rows)
            candidate = dataclasses.replace(config, model=dataclasses.replace(config.model, remat=remat), trainer=after)
            feasibility.check_mesh(shape, mesh)
            for tokens in (after.row_tokens, *after.row_buckets):
                feasibility.check_context(shape.num_heads // tensor, context, tokens)
        except protocols.ConfigError:
            continue
        named = [f"--config.model.remat={remat}"] * (remat != config.model.remat)
        for name in (*mesh, "rows_per_micro_batch"):
            if getattr(after, name) != getattr(before, name):
                named.append(f"--config.trainer.{name}={getattr(after, name)}")
        flags = " ".join(named)
        # Different changes may come to the same configuration.
        if flags and flags not in flag_sets and rows % shards == 0:
            flag_sets.add(flags)
            yield FittedSetting(candidate, flags)


def search(
    config: config_lib.RunConfig,
    shape: model_config.TransformerConfig,
    measured: float,
    room: float,
    measure: Callable[[config_lib.RunConfig], float],
    tell: Callable[[FittedSetting, float], None] = lambda _setting, _needed: None,
) -> list[tuple[FittedSetting, float]]:
    """Returns settings that fit, with their bytes on a device.

    Args:
      config: configuration of the run that does not fit.
      shape: shape of its model.
      measured: its bytes on a device.
      room: bytes of a device.
      measure: returns the bytes on a device of another configuration, by compiling it.
      tell: called with each setting that was compiled, and its bytes on a device.
    """
    # The formula ranks; how far it is off on the given configuration corrects it.
    off = measured / memory.trainer_bytes(config, shape)
    fits: list[tuple[FittedSetting, float]] = []
    tried = 0
    for setting in candidates(config, shape):
        if len(fits) == WANTED or tried == MOST_TRIED:
            break
        if off * memory.trainer_bytes(setting.config, shape) > HOPEFUL * room:
            continue
        tried += 1
        needed = measure(setting.config)
        tell(setting, needed)
        if needed <= room:
            fits.append((setting, needed))
    return fits
