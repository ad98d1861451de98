"""Norms of single trajectories' gradients against torch's, and VCPO's baseline made of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_model
import torch
import trainer_doubles
import transformers
from test_lora import SOME, make  # noqa: F401 - a fixture

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.algorithms import estimators
from libra_jax.data import batch as batch_lib
from libra_jax.data import packing
from libra_jax.models import transformer
from libra_jax.models.adapters import lora
from libra_jax.models.hf import hf
from libra_jax.training import learner as learner_lib
from libra_jax.training import losses, step
from libra_jax.training import state as state_lib

SHAPE = dataclasses.replace(small_model.shape(), tie_word_embeddings=True)
"""The small model with one table for both uses."""
VCPO = config_lib.AlgorithmConfig(advantage="dr_grpo", baseline="minimum_variance")


def _examples(small):
    """Five sequences, the last without a trained token; nonsense stands at untrained tokens."""
    made = small.examples(5, longest=20)
    made[4].mask_N[:] = False
    for example in made:
        example.behaviour_N[~example.mask_N] = np.nan
    return made


def _by_torch(folder, examples, temperature):
    """Norm and log-weight of each sequence, by one backward pass each in float64."""
    model, found = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64), []
    for example in examples:
        model.zero_grad()
        mask = torch.tensor(example.mask_N[1:])
        tokens = torch.tensor(example.tokens_N, dtype=torch.long)
        scores = torch.log_softmax(model(tokens[None]).logits[0, :-1] / temperature, dim=-1)
        log_probs = scores.gather(1, tokens[1:, None])[:, 0][mask]
        log_probs.sum().backward()
        squares = sum(float(leaf.grad.square().sum()) for leaf in model.parameters() if leaf.grad is not None)
        found.append((squares**0.5, log_probs.sum().item() - float(example.behaviour_N[1:][mask.numpy()].sum())))
    return np.array(found).T


def test_norms_are_those_of_a_backward_pass_over_each_trajectory(small, tmp_path):
    mesh = {"data": 2, "tensor": 2, "rows_per_micro_batch": 4}
    learner = learner_lib.Learner(small.config(trainer=mesh, algorithm=VCPO), SHAPE, jax.devices())
    learner.begin(state_lib.random_params(SHAPE, learner.layout, 0))
    hf.save(learner.params, SHAPE, tmp_path / "model")
    examples = _examples(small)
    scores = learner.score_norms(examples)
    norms, log_weights = _by_torch(tmp_path / "model", examples, small_model.ROLLOUT.temperature)
    np.testing.assert_allclose(scores.norms_N, norms, rtol=2e-5)
    np.testing.assert_allclose(scores.log_weights_N, log_weights, atol=1e-4)
    assert norms[:4].min() > 0
    assert scores.norms_N[4] == 0


def test_norms_of_an_adapter_count_its_own_weights_alone(small, make):  # noqa: F811
    learner, examples = make(SOME, algorithm=VCPO), small.examples(3, longest=20)
    scorer = losses.TokenScorer(learner.model, transformer.ComputeOptions(), 64)
    base, temperature = learner.train_state().base, small_model.ROLLOUT.temperature

    @jax.jit
    @jax.grad
    def score(adapter, batch):
        log_probs, _, _ = scorer(lora.join(base, adapter), batch, temperature=temperature)
        return jnp.sum(jnp.where(batch["mask"], log_probs, 0.0))

    for example, norm in zip(examples, learner.score_norms(examples).norms_N, strict=True):
        (alone,) = packing.pack([example], learner.config.trainer).micro_batches
        squares = [float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(score(learner.params, vars(alone)))]
        assert norm == pytest.approx(sum(squares) ** 0.5, rel=1e-5)


def test_a_batch_takes_its_baseline_from_the_norms_and_masked_rollouts_none(small):
    config, batch = small.config(algorithm=VCPO), trainer_doubles.batch(small)
    trajectories = [item for group in batch.groups for item in group.trajectories]
    for index, item in enumerate(trajectories):
        item.reward, item.finish = float(index % 3), "max_context" if index in (0, 5) else "answered"
    norms, log_weights = np.linspace(1, 3, 12, dtype=np.float32), np.linspace(-1, 1, 12, dtype=np.float32)
    prepared = batch_lib.prepare(
        config, batch, small.shape, score_norms=lambda examples: estimators.Scores(norms, log_weights)
    )
    weights = (norms * np.exp(log_weights)) ** 2
    for number in range(3):
        kept = [index for index in range(4 * number, 4 * number + 4) if index not in (0, 5)]
        baseline = sum(weights[i] * trajectories[i].reward for i in kept) / sum(weights[i] for i in kept)
        for index in kept:
            trained = prepared.advantages[index][prepared.sequences.examples[index].mask_N]
            np.testing.assert_allclose(trained, trajectories[index].reward - baseline, atol=1e-5)
    with pytest.raises(protocols.LibraError, match="needs the gradients of single rollouts"):
        batch_lib.prepare(config, batch, small.shape)


def test_rows_of_a_device_are_taken_one_after_the_other_so_that_memory_stays(small):
    def temporary_bytes(rows):
        config = small.config(trainer={"rows_per_micro_batch": rows}, algorithm=VCPO)
        learner = learner_lib.Learner(config, SHAPE, jax.devices()[:1])
        program = learner.programs.program(step.NORMS, learner.inputs.empty(step.NORMS))
        return program.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(8) < 2 * temporary_bytes(1)
