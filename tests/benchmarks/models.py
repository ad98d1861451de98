"""The model of the benchmarks that move a train state: large enough for its bytes to count on a CPU."""

from __future__ import annotations

import dataclasses

from libra_jax.models import config as model_config


def hundred_million() -> model_config.TransformerConfig:
    """105 M parameters."""
    return dataclasses.replace(
        model_config.load_preset("libra-tiny"),
        vocab_size=16_384,
        hidden_size=768,
        intermediate_size=2_304,
        num_layers=12,
        num_heads=12,
        num_kv_heads=12,
        head_dim=64,
    )
