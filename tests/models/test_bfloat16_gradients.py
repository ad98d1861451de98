"""Gradients with activations in bfloat16, leaf by leaf against transformers in float64 on the same rounded weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from libra_jax.models import config as model_config
from libra_jax.models import layers, transformer
from libra_jax.models.hf import hf, hf_names
from libra_jax.training import losses

TOKENS = 512
CHUNK = 1  # one token: 512 sums of the head's gradient
OFTEN = 5  # fills half of the row: 256 sums into one row of the embedding's gradient

TOLERANCE = 0.02
"""Largest |difference| / |gradient| of a leaf. A backward pass rounds about 20 times on the way through two layers,
each time by up to 2^-9, which sums to about 1% of a leaf. A sum in bfloat16 adds an error that grows with its terms.
"""


def _batch(vocabulary):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocabulary, (1, TOKENS + 1)).astype(np.int32)
    tokens[:, ::2] = OFTEN
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": np.arange(TOKENS, dtype=np.int32)[None],
        "segments": np.ones((1, TOKENS), np.int32),
    }


def _exact(reference, batch):
    """Hugging Face name -> gradient of the summed log-probabilities in float64."""
    logits = reference(torch.tensor(batch["tokens"], dtype=torch.long)).logits
    log_probs = torch.log_softmax(logits, -1)[0, torch.arange(TOKENS), torch.tensor(batch["targets"][0])]
    log_probs.sum().backward()
    return {name: parameter.grad.numpy() for name, parameter in reference.named_parameters()}


@pytest.mark.parametrize(("architecture", "tied"), [("qwen2", False), ("qwen3", True)])
def test_bfloat16_gradients_equal_float64_leaf_by_leaf(architecture, tied, make_reference, tmp_path):
    reference = make_reference(architecture, tied, "small")
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.bfloat16())
    reference.save_pretrained(tmp_path)
    config = model_config.read_directory(tmp_path)
    batch = _batch(config.vocab_size)
    scorer = losses.TokenScorer(config, transformer.ComputeOptions(compute_dtype="bfloat16"), CHUNK)
    gradients = jax.jit(jax.grad(lambda params: scorer(params, batch, temperature=1.0)[0].sum()))(
        hf.load(tmp_path, config)
    )

    exact = _exact(reference.double(), batch)
    errors = {}
    for entry in hf_names.weight_map(config):
        leaf = gradients
        for key in entry.path:
            leaf = leaf[key]
        assert leaf.dtype == np.float32
        got = np.asarray(leaf if entry.layer is None else leaf[entry.layer], np.float64)
        wanted = exact[entry.hf_name]
        errors[entry.hf_name] = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
    assert {name: error for name, error in errors.items() if error > TOLERANCE} == {}


def test_bias_gradient_of_a_long_row_is_a_float32_sum():
    tokens = 1 << 16
    graph, state = nnx.split(layers.Linear(2, 2, True, ("heads", "embed"), nnx.Rngs(params=0)))

    def total(state, x, weights):
        return (nnx.merge(graph, state)(x) * weights).sum(dtype=jnp.float32)

    ones = jnp.ones((1, tokens, 2), jnp.bfloat16)
    gradient = jax.jit(jax.grad(total))(state, ones, ones)
    np.testing.assert_array_equal(gradient.bias[...], [tokens, tokens])
