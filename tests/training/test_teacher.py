"""On-policy distillation: a frozen teacher of another shape on the mesh, and the policy that approaches it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_model

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.data import batch as batch_lib
from libra_jax.models import transformer
from libra_jax.models.hf import hf

TOKENS = 10


@pytest.fixture(scope="module")
def teacher(small, tmp_path_factory):
    """A teacher with one more layer and peaked predictions, as a directory; and its shape and weights."""
    shape = dataclasses.replace(small.shape, num_layers=3)
    params = jax.device_get(transformer.init_params(shape, jax.random.key(7)))
    # Drawn heads are nearly flat, and would teach nothing.
    params["lm_head"]["weight"] = params["lm_head"]["weight"] * 40
    path = tmp_path_factory.mktemp("teacher") / "model"
    hf.save(params, shape, path)
    return str(path), shape, params


def _algorithm(path, **fields):
    return config_lib.AlgorithmConfig(
        **{
            "advantage": "distillation",
            "teacher": path,
            "kl_coefficient": 1.0,
            "kl_in_reward": True,
            "kl_estimator": "k1",
            **fields,
        }
    )


def _log_probs(params, shape, tokens_BxT, temperature=small_model.ROLLOUT.temperature):
    """Log-probabilities of every next token."""
    positions = jnp.broadcast_to(jnp.arange(tokens_BxT.shape[1]), tokens_BxT.shape)
    options = transformer.ComputeOptions(packed=False)
    hidden = transformer.forward(params, shape, options, tokens_BxT, positions, jnp.ones_like(tokens_BxT))
    logits = hidden @ transformer.unembedding(params, shape)
    return jax.nn.log_softmax(logits / temperature)


_compiled = jax.jit(_log_probs, static_argnums=1)


def _sampled(params, shape, rng, version, count=32):
    """One batch of the policy's own samples after a prompt of one token, without a reward."""
    tokens = np.zeros((count, TOKENS), np.int32)
    tokens[:, 0] = rng.integers(0, shape.vocab_size, count)
    chances = np.zeros((count, TOKENS))
    for at in range(1, TOKENS):
        found = np.asarray(_compiled(params, shape, tokens))[:, at - 1]
        tokens[:, at] = np.argmax(found + rng.gumbel(size=found.shape), axis=1)
        chances[:, at] = found[np.arange(count), tokens[:, at]]
    made = []
    for index in range(count):
        trajectory = protocols.Trajectory(f"p/{index}", "p", reward=0.0)
        trajectory.append_text([int(tokens[index, 0])], protocols.TokenSource.PROMPT)
        delta = (tuple(tokens[index, 1:].tolist()), tuple(chances[index, 1:].tolist()), (version,) * (TOKENS - 1))
        trajectory.append_sampled(protocols.TokenDelta(*delta))
        made.append(trajectory)
    return protocols.TrainBatch(version, (protocols.Group(0, protocols.Task("p", {}), version, made),)), tokens


def test_each_tokens_advantage_is_the_log_ratio_of_teacher_and_policy(small, teacher, start_trainer):
    path, shape, params = teacher
    actor = start_trainer(algorithm=_algorithm(path, kl_coefficient=0.5), trainer={"fsdp": 2, "tensor": 2})
    learner = actor.running().learner
    batch, tokens = _sampled(jax.device_get(learner.params), small.shape, np.random.default_rng(0), 0)
    prepared = batch_lib.prepare(learner.config, batch, small.shape, learner.reference_log_probs)
    wanted = np.asarray(_compiled(params, shape, tokens))
    for row, (trajectory, advantages) in enumerate(zip(batch.groups[0].trajectories, prepared.advantages, strict=True)):
        chosen = wanted[row, np.arange(TOKENS - 1), tokens[row, 1:]]
        np.testing.assert_allclose(advantages[1:], 0.5 * (chosen - np.array(trajectory.log_probs[1:])), atol=1e-4)


def test_a_teacher_behind_an_endpoint_teaches_what_one_on_the_mesh_does(small, teacher):
    path, shape, params = teacher
    batch, tokens = _sampled(small.params, small.shape, np.random.default_rng(2), 0)
    found = np.asarray(_compiled(params, shape, tokens, 1.0))
    prepared, metrics = [], []
    for source in (path, "http://127.0.0.1:8000/v1"):
        rollout = dataclasses.replace(small_model.ROLLOUT, temperature=1.0)
        config = dataclasses.replace(
            small.config(), algorithm=_algorithm(source, minibatches=1, epochs=2), rollout=rollout
        )
        learner = small.learner(config)
        if source != path:
            with pytest.raises(protocols.DataError, match="p/0: the teacher has scored 0 of its 10 tokens"):
                batch_lib.prepare(config, batch, small.shape)
            for row, trajectory in enumerate(batch.groups[0].trajectories):
                trajectory.teacher_log_probs.extend([0.0, *found[row, np.arange(TOKENS - 1), tokens[row, 1:]].tolist()])
        held = learner.inputs.refers, learner.layout.state.reference is not None
        assert held == ((True, True) if source == path else (False, False))
        score = learner.reference_log_probs if source == path else batch_lib.NO_REFERENCE
        made = batch_lib.prepare(config, batch, small.shape, score)
        prepared.append(made)
        metrics.append(learner.train(made.packed, 1e-3, made.extras, made.packed.minibatches))
    for mesh, served in zip(*(one.advantages for one in prepared), strict=True):
        np.testing.assert_allclose(mesh, served, atol=1e-3)
    assert metrics[1] == pytest.approx(metrics[0], abs=1e-3)


def test_the_policy_approaches_its_teacher_and_goes_on_after_a_restore(small, teacher, start_trainer, tmp_path):
    path, shape, params = teacher
    actor = start_trainer(
        steps=100,
        algorithm=_algorithm(path, minibatches=1, epochs=2),
        optimizer=config_lib.OptimizerConfig(learning_rate=1e-2),
    )
    rng, distances = np.random.default_rng(1), []
    for version in range(30):
        policy = actor.running().learner.params
        batch, tokens = _sampled(policy, small.shape, rng, version)
        own, other = (np.asarray(_compiled(*item, tokens)) for item in ((policy, small.shape), (params, shape)))
        distances.append(float((np.exp(own) * (own - other)).sum(-1).mean()))
        actor.train_step(batch)
    assert distances[-1] < 0.5 * distances[0]
    actor.save(str(tmp_path / "state"))
    actor.wait_saved()
    fresh = start_trainer(
        steps=100, algorithm=_algorithm(path), optimizer=config_lib.OptimizerConfig(learning_rate=1e-2)
    )
    assert fresh.restore(str(tmp_path / "state")) == 30
    pairs = zip(*(jax.tree.leaves(a.running().learner.state.reference) for a in (fresh, actor)), strict=True)
    for leaf, wanted in pairs:
        np.testing.assert_array_equal(leaf, wanted)


def test_a_teacher_that_cannot_teach_is_refused_by_name(small, teacher, start_trainer, tmp_path):
    path, shape, _ = teacher
    for fields, sentence in (
        ({"path": ""}, "teacher: must be a Hugging Face directory or a URL with algorithm.advantage=distillation"),
        ({"kl_in_reward": False}, "kl_in_reward: must be True"),
        ({"kl_estimator": "k3"}, "kl_estimator: must be k1"),
        ({"advantage": "grpo", "kl_coefficient": 0.0, "kl_in_reward": False}, "teacher: .* has no effect with"),
    ):
        with pytest.raises(protocols.ConfigError, match=sentence):
            small.config(algorithm=_algorithm(**{"path": path, **fields}))
    other = dataclasses.replace(shape, vocab_size=24, num_layers=1)
    hf.save(jax.device_get(transformer.init_params(other, jax.random.key(0))), other, tmp_path / "other")
    with pytest.raises(protocols.ConfigError, match="vocabulary of 24 tokens, and the policy one of 16"):
        start_trainer(algorithm=_algorithm(str(tmp_path / "other")))
    with pytest.raises(protocols.DataError, match="no such model directory"):
        start_trainer(algorithm=_algorithm(str(tmp_path / "missing")))
