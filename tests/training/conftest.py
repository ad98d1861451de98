"""A model and sequences small enough to train on many meshes, and XLA options that compile fast."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from libra_jax import config as config_lib
from libra_jax.models import config as model_config
from libra_jax.training import learner, packing, state

FAST = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}
ROW_TOKENS = 48
VOCABULARY = 16


def _model() -> model_config.TransformerConfig:
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


def _run_config(trainer=None, model=None, **groups) -> config_lib.RunConfig:
    """A RunConfig for the small model; `trainer` and `model` are fields of theirs to set."""
    return config_lib.RunConfig(
        rollout=config_lib.RolloutConfig(max_context=ROW_TOKENS, max_tokens=8, temperature=0.8),
        trainer=config_lib.TrainerConfig(**{"row_tokens": ROW_TOKENS, "rows_per_micro_batch": 8, **(trainer or {})}),
        model=config_lib.ModelConfig(**{"logits_chunk": 64, **(model or {})}),
        **groups,
    )


def _examples(count: int, seed: int = 0, longest: int = 24) -> list[packing.Example]:
    """Random sequences, their first tokens a prompt, log-probabilities near uniform, half the tokens on-version."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(count):
        length = int(rng.integers(4, longest + 1))
        mask_N = np.arange(length) >= 2
        made.append(
            packing.Example(
                sequence_id=f"s{index}",
                tokens_N=rng.integers(0, VOCABULARY, length).astype(np.int32),
                mask_N=mask_N,
                behaviour_N=np.where(mask_N, rng.normal(-np.log(VOCABULARY), 0.1, length), 0).astype(np.float32),
                on_version_N=mask_N & (rng.random(length) < 0.5),
            )
        )
    return made


@pytest.fixture(scope="session")
def small():
    """The small model: its shape, host parameters, and makers of configs, sequences and learners."""
    shape = _model()
    one_device = learner.Learner(_run_config(), shape, jax.devices())
    params = jax.device_get(state.random_params(shape, one_device.layout, 0))

    def make_learner(config: config_lib.RunConfig) -> learner.Learner:
        made = learner.Learner(config, shape, jax.devices(), compiler_options=FAST)
        made.begin(jax.device_put(params, state.shardings_of(made.layout.state.params)))
        return made

    return types.SimpleNamespace(
        shape=shape,
        params=params,
        config=_run_config,
        examples=_examples,
        learner=make_learner,
        row_tokens=ROW_TOKENS,
        vocabulary=VOCABULARY,
        fast=FAST,
    )
