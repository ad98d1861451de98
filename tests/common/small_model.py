"""A model small enough to train on many meshes, and the rollout it is made for."""

from __future__ import annotations

import dataclasses

from libra_jax import config as config_lib
from libra_jax.models import config as model_config

ROW_TOKENS = 48
VOCABULARY = 16
ROLLOUT = config_lib.RolloutConfig(max_context=ROW_TOKENS, max_tokens=8, temperature=0.8)


def shape() -> model_config.TransformerConfig:
    """Two layers, eight heads of their own keys and values, and an output projection of its own."""
    return dataclasses.replace(
        model_config.load_preset("libra-tiny"),
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_layers=2,
        num_heads=8,
        num_kv_heads=8,
        head_dim=4,
        tie_word_embeddings=False,
    )


def sparse() -> model_config.TransformerConfig:
    """The same with eight experts, of which each token takes two."""
    return dataclasses.replace(
        shape(),
        architecture="qwen3_moe",
        num_experts=8,
        experts_per_token=2,
        expert_intermediate_size=16,
        normalize_expert_shares=True,
    )
