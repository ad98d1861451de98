"""What the compiled program holds: nothing of [T, T] or [T, vocabulary], and no more code for more layers."""

import dataclasses
import re

import compiling
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from libra_jax.models import config as model_config
from libra_jax.models import feasibility, sharding, transformer
from libra_jax.training import logprobs

TOKENS, VOCABULARY, CHUNK = 32_768, 4096, 1024


def _loss(config, options):
    def loss(params, tokens, positions, segments):
        hidden = transformer.forward(params, config, options, tokens, positions, segments)
        scores, _ = logprobs.token_log_probs(
            hidden, transformer.unembedding(params, config), jnp.roll(tokens, -1), temperature=1.0, chunk=CHUNK
        )
        return -scores.mean()

    return jax.jit(jax.value_and_grad(loss))


@pytest.mark.slow
def test_a_row_of_32k_tokens_runs_without_a_quadratic_or_vocabulary_array():
    config = dataclasses.replace(
        model_config.load_preset("libra-tiny"),
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
    )
    params = jax.jit(transformer.init_params, static_argnums=0)(config, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (1, TOKENS)).astype(np.int32)
    inputs = (params, tokens, np.arange(TOKENS, dtype=np.int32)[None], np.ones_like(tokens))
    step = _loss(config, transformer.ComputeOptions(attention_chunk=CHUNK)).lower(*inputs).compile(compiling.OPTIMISED)

    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", step.as_text())}
    assert any(TOKENS in shape for shape in shapes)
    held = max(np.prod(shape) for shape in shapes)
    assert held <= max(CHUNK * VOCABULARY, CHUNK * CHUNK, TOKENS * 64)  # [T, vocabulary] would be 32 times more
    assert step.memory_analysis().temp_size_in_bytes < 4 * TOKENS * VOCABULARY / 2  # half of that one array

    loss, gradient = step(*inputs)
    assert abs(float(loss) - np.log(VOCABULARY)) < 0.1
    assert all(np.isfinite(leaf).all() and np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))


def test_no_device_holds_the_activations_of_a_whole_row_of_128k_tokens():
    """Compiled only. Memory beside the parameters falls with the devices that a row is split over."""
    config = dataclasses.replace(
        model_config.load_preset("libra-tiny"),
        vocab_size=16,
        hidden_size=16,
        intermediate_size=32,
        num_layers=1,
        num_heads=8,
        num_kv_heads=8,
        head_dim=8,
    )
    options = transformer.ComputeOptions(attention_chunk=CHUNK, remat="full")

    def temporary_bytes(context):
        axes, types = ("data", "fsdp", "tensor", "context"), (jax.sharding.AxisType.Auto,) * 4
        mesh = jax.make_mesh((1, 1, 1, context), axes, axis_types=types, devices=jax.devices()[:context])
        where = transformer.shardings(config, mesh)
        params = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            transformer.abstract_params(config),
            where,
        )
        rows = jax.sharding.NamedSharding(mesh, sharding.spec(("batch", "tokens")))
        ids = jax.ShapeDtypeStruct((1, 4 * TOKENS), np.int32, sharding=rows)
        with jax.set_mesh(mesh):
            step = _loss(config, options).lower(params, ids, ids, ids).compile()
        return step.memory_analysis().temp_size_in_bytes

    whole = temporary_bytes(1)
    for context in (2, 8):
        assert whole / context * 0.8 < temporary_bytes(context) < whole / context * 1.2


@pytest.mark.parametrize(
    ("platform", "shallow"), [("gpu", 2), ("cpu", transformer.UNROLLED_LAYERS + 1)], ids=["gpu", "cpu"]
)
def test_the_program_does_not_grow_with_depth(platform, shallow):
    """A program for CPUs has its first few layers one after the other, so depth counts from there."""
    options = transformer.ComputeOptions(attention="chunked", target=feasibility.CompileTarget(platform, (9, 0)))

    def instructions(layers):
        config = dataclasses.replace(model_config.load_preset("libra-tiny"), num_layers=layers)
        tokens = jax.ShapeDtypeStruct((1, 64), np.int32)
        lowered = _loss(config, options).lower(transformer.abstract_params(config), tokens, tokens, tokens)
        return lowered.as_text().count("\n")

    assert instructions(shallow) == instructions(8)
