"""The small model, and sequences for it."""

import types

import jax
import numpy as np
import pytest
import small_model

from libra_jax import config as config_lib
from libra_jax.training import learner, packing, state


def _run_config(trainer=None, model=None, **groups) -> config_lib.RunConfig:
    """A RunConfig for the small model; `trainer` and `model` are fields of theirs to set."""
    return config_lib.RunConfig(
        rollout=small_model.ROLLOUT,
        trainer=config_lib.TrainerConfig(
            **{"row_tokens": small_model.ROW_TOKENS, "rows_per_micro_batch": 8, **(trainer or {})}
        ),
        model=config_lib.ModelConfig(**{"logits_chunk": 64, **(model or {})}),
        **groups,
    )


def _examples(count: int, seed: int = 0, longest: int = 24) -> list[packing.Example]:
    """Random sequences, their first tokens a prompt, log-probabilities near uniform, half the tokens on-version."""
    rng = np.random.default_rng(seed)
    vocabulary, made = small_model.VOCABULARY, []
    for index in range(count):
        length = int(rng.integers(4, longest + 1))
        mask_N = np.arange(length) >= 2
        made.append(
            packing.Example(
                sequence_id=f"s{index}",
                tokens_N=rng.integers(0, vocabulary, length).astype(np.int32),
                mask_N=mask_N,
                behaviour_N=np.where(mask_N, rng.normal(-np.log(vocabulary), 0.1, length), 0).astype(np.float32),
                on_version_N=mask_N & (rng.random(length) < 0.5),
            )
        )
    return made


@pytest.fixture(scope="session")
def small():
    """The small model: its shape, host parameters, and makers of configs, sequences and learners."""
    shape = small_model.shape()
    one_device = learner.Learner(_run_config(), shape, jax.devices())
    params = jax.device_get(state.random_params(shape, one_device.layout, 0))

    def make_learner(config: config_lib.RunConfig) -> learner.Learner:
        made = learner.Learner(config, shape, jax.devices(), compiler_options=small_model.FAST)
        made.begin(jax.device_put(params, state.shardings_of(made.layout.state.params)))
        return made

    return types.SimpleNamespace(
        shape=shape,
        params=params,
        config=_run_config,
        examples=_examples,
        learner=make_learner,
        row_tokens=small_model.ROW_TOKENS,
        vocabulary=small_model.VOCABULARY,
        fast=small_model.FAST,
    )
