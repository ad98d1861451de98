"""The decoder against transformers (torch, float32), weights carried by the directories that each of them writes."""

import jax
import numpy as np
import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama

from libra_jax.models import config as model_config
from libra_jax.models import rope, transformer
from libra_jax.models.hf import hf

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
CASES = {
    **{
        f"{architecture}-{'tied' if tied else 'untied'}-{size}": (architecture, tied, size, {})
        for architecture in ("llama", "qwen2", "qwen3")
        for tied in (True, False)
        for size in ("small", "large")
    },
    "llama-rope-llama3": (
        "llama",
        False,
        "small",
        {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32, "rope_theta": 1000.0}},
    ),
    "llama-rope-linear": ("llama", True, "small", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "qwen2-rope-yarn": ("qwen2", False, "small", {"rope_parameters": YARN | {"rope_theta": 1000.0}}),
    "qwen3-rope-yarn": (
        "qwen3",
        True,
        "small",
        {"rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False}},
    ),
    "llama-rope-yarn-mscale": (
        "llama",
        False,
        "small",
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4}},
    ),
    "llama-biases": ("llama", False, "small", {"attention_bias": True, "mlp_bias": True, "head_dim": 8}),
    "qwen3-biases": ("qwen3", False, "small", {"attention_bias": True, "num_key_value_heads": 1}),
}


def _tokens(reference):
    length = reference.config.max_position_embeddings - 5
    return np.random.default_rng(3).integers(0, reference.config.vocab_size, (2, length)).astype(np.int32)


def _torch_logits(reference, tokens):
    with torch.no_grad():
        return reference(torch.tensor(tokens, dtype=torch.long)).logits.numpy()


def _logits(params, config, tokens, positions=None):
    if positions is None:
        positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    options = transformer.ComputeOptions()

    def run(params, tokens, positions):
        hidden = transformer.forward(params, config, options, tokens, positions, jax.numpy.ones_like(tokens))
        return hidden @ transformer.unembedding(params, config)

    return np.asarray(jax.jit(run)(params, tokens, positions))


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_both_ways(case, make_reference, tmp_path):
    architecture, tied, size, fields = CASES[case]
    reference = make_reference(architecture, tied, size, **fields)
    tokens = _tokens(reference)
    expected = _torch_logits(reference, tokens)
    assert np.abs(expected).max() > 1  # far above the tolerance

    reference.save_pretrained(tmp_path / "theirs", max_shard_size="50KB")
    config = model_config.read_directory(tmp_path / "theirs")
    params = hf.load(tmp_path / "theirs", config)
    np.testing.assert_allclose(_logits(params, config, tokens), expected, atol=1e-4, rtol=0)

    hf.save(params, config, tmp_path / "ours", max_shard_bytes=60_000)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    assert again.dtype == torch.float32
    np.testing.assert_array_equal(_torch_logits(again.eval(), tokens), expected)


def test_scaled_rope_changes_the_reference(make_reference):
    """The scaling cases above could not pass with scaling ignored."""
    tokens = _tokens(make_reference("llama", False, "small"))
    fields = [case[3] for name, case in CASES.items() if "rope" in name]
    plain = _torch_logits(make_reference("llama", False, "small"), tokens)
    for field in fields:
        scaled = _torch_logits(make_reference("llama", False, "small", **field), tokens)
        assert np.abs(scaled - plain).max() > 1e-2, field


LONG = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 8192},
    "yarn": YARN | {"original_max_position_embeddings": 32768},
}


@pytest.mark.parametrize("kind", LONG)
def test_log_probs_equal_transformers_up_to_position_130k(kind, make_reference, tmp_path):
    fields = {"rope_parameters": LONG[kind] | {"rope_theta": 1e6}, "max_position_embeddings": 131072, "head_dim": 128}
    reference = make_reference("llama", False, "small", num_hidden_layers=1, **fields)
    tokens = np.random.default_rng(3).integers(0, 97, (1, 64)).astype(np.int32)
    positions = np.linspace(0, 131071, tokens.size).astype(np.int32)[None]
    with torch.no_grad():
        # With a mask, transformers does not take the leaps of the positions for ends of packed sequences.
        expected = reference(
            torch.tensor(tokens, dtype=torch.long),
            attention_mask=torch.ones(tokens.shape),
            position_ids=torch.tensor(positions, dtype=torch.long),
        ).logits.log_softmax(-1)
    reference.save_pretrained(tmp_path)
    config = model_config.read_directory(tmp_path)
    logits = _logits(hf.load(tmp_path, config), config, tokens, positions)
    # The contract with the engine. About 1e-5 is usual; one torch frequency's last bit makes 6e-4.
    np.testing.assert_allclose(jax.nn.log_softmax(logits), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("kind", LONG)
def test_rotary_frequencies_equal_transformers(kind, head_dim):
    for theta in (1e4, 5e5, 1e6, 5e6):
        shape = {"hidden_size": 4 * head_dim, "num_attention_heads": 4, "max_position_embeddings": 131072}
        theirs = transformers.AutoConfig.for_model("llama", **shape, rope_parameters=LONG[kind] | {"rope_theta": theta})
        expected = modeling_llama.LlamaRotaryEmbedding(theirs)
        got, scale = rope.frequencies(model_config.from_hf(theirs.to_dict()).rope, head_dim)
        assert scale == expected.attention_scaling
        # Torch's vectorised power is not rounded exactly either: at most the last bit of one in 48 differs.
        radians = 131072 * np.abs(got.astype(np.float64) - expected.inv_freq.numpy())
        assert radians.max() < 5e-4, theta


def test_packed_rows_equal_separate_rows(make_reference, tmp_path):
    reference = make_reference("qwen3", True, "small")
    reference.save_pretrained(tmp_path)
    config = model_config.read_directory(tmp_path)
    params = hf.load(tmp_path, config)
    lengths = (11, 1, 30, 7)
    rng = np.random.default_rng(5)
    parts = [rng.integers(0, config.vocab_size, (1, length)).astype(np.int32) for length in lengths]
    padding = 6
    tokens = np.concatenate([*parts, np.zeros((1, padding), np.int32)], axis=1)
    positions = np.concatenate([np.arange(length) for length in (*lengths, padding)])[None].astype(np.int32)
    segments = np.repeat([4, 2, 9, 1, 0], (*lengths, padding))[None].astype(np.int32)
    for chunk in (8, 64):
        options = transformer.ComputeOptions(attention_chunk=chunk)
        hidden = jax.jit(transformer.forward, static_argnums=(1, 2))(
            params, config, options, tokens, positions, segments
        )
        assert np.isfinite(hidden).all()
        logits = np.asarray(hidden @ transformer.unembedding(params, config))
        start = 0
        for part in parts:
            expected = _torch_logits(reference, part)
            np.testing.assert_allclose(logits[:, start : start + part.shape[1]], expected, atol=1e-4, rtol=0)
            start += part.shape[1]


def test_bfloat16_computes_near_float32_over_float32_weights():
    config = model_config.load_preset("libra-tiny")
    params = jax.jit(transformer.init_params, static_argnums=0)(config, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 128, (2, 40)).astype(np.int32)
    positions = np.broadcast_to(np.arange(40, dtype=np.int32), tokens.shape)
    exact, rounded = (
        jax.jit(transformer.forward, static_argnums=(1, 2))(
            params, config, transformer.ComputeOptions(compute_dtype=dtype), tokens, positions, np.ones_like(tokens)
        )
        for dtype in ("float32", "bfloat16")
    )
    assert rounded.dtype == jax.numpy.bfloat16
    error = np.abs(np.asarray(rounded, np.float32) - exact).mean() / np.abs(exact).mean()
    assert 1e-4 < error < 2e-2  # bfloat16 keeps 8 bits: rounding is there, and stays small


def test_rematerialisation_keeps_less_and_changes_no_gradient():
    config = model_config.load_preset("libra-tiny")
    params = jax.jit(transformer.init_params, static_argnums=0)(config, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 128, (2, 192)).astype(np.int32)
    positions = np.broadcast_to(np.arange(192, dtype=np.int32), tokens.shape)

    def compiled(remat):
        options = transformer.ComputeOptions(remat=remat, attention_chunk=64)

        def loss(params, tokens, positions):
            segments = jax.numpy.ones_like(tokens)
            return transformer.forward(params, config, options, tokens, positions, segments).var()

        return jax.jit(jax.grad(loss)).lower(params, tokens, positions).compile()

    steps = {remat: compiled(remat) for remat in ("none", "dots", "full")}
    held = {remat: step.memory_analysis().temp_size_in_bytes for remat, step in steps.items()}
    assert held["full"] < held["dots"] < held["none"]
    gradients = {remat: jax.tree.leaves(step(params, tokens, positions)) for remat, step in steps.items()}
    for remat in ("dots", "full"):
        for expected, recomputed in zip(gradients["none"], gradients[remat], strict=True):
            np.testing.assert_allclose(recomputed, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
