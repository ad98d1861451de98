"""Shapes of the models that are measured: the presets, and small ones for a dry run."""

from __future__ import annotations

import dataclasses

from gpu import rows
from libra_jax.models import config as model_config

SMALLER = 256
"""Divisor of token counts in a dry run."""


def shape(bench: rows.Bench, preset: str, layers: int | None = None) -> model_config.TransformerConfig:
    """Returns the shape of a preset with fewer layers; in a dry run also with narrow layers and a small vocabulary."""
    found = model_config.load_preset(preset)
    if bench.tiny:
        found = dataclasses.replace(
            found,
            vocab_size=1024,
            hidden_size=found.hidden_size // 16,
            intermediate_size=found.intermediate_size // 16,
            num_layers=2,
            num_heads=found.num_heads // 4,
            num_kv_heads=found.num_kv_heads // 4,
            head_dim=16,
            num_experts=min(found.num_experts, 16),
            expert_intermediate_size=found.expert_intermediate_size // 16,
        )
    return dataclasses.replace(found, num_layers=min(layers or found.num_layers, found.num_layers))


def tokens(bench: rows.Bench, count: int) -> int:
    """Returns a number of tokens, or in a dry run a fraction of it."""
    return count // SMALLER if bench.tiny else count


def dtype(bench: rows.Bench) -> str:
    """Returns the compute dtype: bfloat16, or in a dry run float32, for which CPUs have fast products."""
    return "float32" if bench.tiny else "bfloat16"
