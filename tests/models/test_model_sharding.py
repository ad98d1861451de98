"""Splitting the model over a mesh changes where it is computed, not what."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from libra_jax.models import config as model_config
from libra_jax.models import feasibility, sharding, transformer
from libra_jax.protocols import ConfigError

AXES = ("data", "fsdp", "tensor", "context")
ROWS, TOKENS = 8, 24


def _mesh(shape, kind=AxisType.Auto):
    return jax.make_mesh(shape, AXES, axis_types=(kind,) * 4, devices=jax.devices()[: int(np.prod(shape))])


@pytest.fixture(scope="module")
def config():
    return model_config.load_preset("libra-tiny")


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    segments = np.sort(rng.integers(0, 4, (ROWS, TOKENS)), axis=1)[:, ::-1]
    tokens = rng.integers(0, 128, (ROWS, TOKENS))
    positions = np.broadcast_to(np.arange(TOKENS), tokens.shape)
    return [np.ascontiguousarray(array, np.int32) for array in (tokens, positions, segments)]


def _step(config, params, tokens, positions, segments):
    options = transformer.ComputeOptions(attention_chunk=8)

    def loss(params):
        hidden = transformer.forward(params, config, options, tokens, positions, segments)
        logits = hidden @ transformer.unembedding(params, config)
        return (jax.nn.logsumexp(logits, axis=-1) * (segments != 0)).sum()

    return jax.value_and_grad(loss)(params)


@pytest.fixture(scope="module")
def reference(config, batch):
    params = jax.jit(transformer.init_params, static_argnums=0)(config, jax.random.key(0))
    return params, jax.jit(_step, static_argnums=0)(config, params, *batch)


@pytest.mark.parametrize("shape", [(1, 8, 1, 1), (1, 4, 2, 1), (2, 2, 2, 1), (1, 2, 2, 2)])
def test_sharded_loss_and_gradient_equal_unsharded(config, batch, reference, shape, capfd):
    params, (loss, gradient) = reference
    mesh = _mesh(shape)
    placed = jax.device_put(params, transformer.shardings(config, mesh))
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "context"))
    with jax.set_mesh(mesh):
        step = jax.jit(_step, static_argnums=0, out_shardings=(None, transformer.shardings(config, mesh)))
        got_loss, got = step(config, placed, *(jax.device_put(array, rows) for array in batch))
    np.testing.assert_allclose(got_loss, loss, rtol=1e-5)
    for ours, whole in zip(jax.tree.leaves(got), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(ours, whole, atol=1e-5 * np.abs(whole).max(), rtol=0)
    assert "Involuntary full rematerialization" not in capfd.readouterr().err


def test_what_a_layer_keeps_is_split_over_the_tensor_axis(config):
    """Under full rematerialisation a layer keeps its input. Every further layer keeps half of it on each device."""
    options = transformer.ComputeOptions(attention_chunk=64, remat="full")
    tokens = jax.ShapeDtypeStruct((1, 1024), jnp.int32)
    mesh = _mesh((1, 1, 2, 1))

    def held(layers: int) -> int:
        deep = dataclasses.replace(config, num_layers=layers)

        def loss(params, tokens):
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
            return transformer.forward(params, deep, options, tokens, positions, jnp.ones_like(tokens)).var()

        where = transformer.shardings(deep, mesh)
        params = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            transformer.abstract_params(deep),
            where,
        )
        with jax.set_mesh(mesh):
            step = jax.jit(jax.grad(loss), out_shardings=where).lower(params, tokens).compile()
        return step.memory_analysis().temp_size_in_bytes

    kept = 4 * 1024 * config.hidden_size
    assert held(16) - held(8) < 0.6 * 8 * kept


def test_parameters_are_drawn_where_they_live(config, reference):
    mesh = _mesh((2, 2, 2, 1))
    shardings = transformer.shardings(config, mesh)
    drawn = jax.jit(transformer.init_params, static_argnums=0, out_shardings=shardings)(config, jax.random.key(0))
    for ours, whole, where in zip(*(jax.tree.leaves(tree) for tree in (drawn, reference[0], shardings)), strict=True):
        assert ours.sharding == where
        np.testing.assert_allclose(ours, whole, rtol=1e-6, atol=1e-8)


def test_every_matrix_is_split_over_fsdp_and_tensor():
    config = model_config.untied(model_config.load_preset("Qwen3-1.7B"))
    mesh = jax.sharding.AbstractMesh((2, 2, 2, 2), AXES, axis_types=(AxisType.Auto,) * 4)
    shardings = jax.tree.leaves(transformer.shardings(config, mesh))
    shapes = jax.tree.leaves(transformer.abstract_params(config))
    for shape, where in zip(shapes, shardings, strict=True):
        assert len(where.spec) == len(shape.shape)
        if shape.size > 10_000_000:
            assert {("fsdp", "context"), "tensor"} <= set(where.spec)
    held = sum(np.prod(where.shard_shape(shape.shape)) for shape, where in zip(shapes, shardings, strict=True))
    assert held < 1.01 * model_config.parameter_count(config) / 8


@pytest.mark.parametrize(
    ("preset", "shape", "sentence"),
    [
        (
            "Qwen2.5-0.5B",
            {"tensor": 4},
            "config.trainer.tensor: 4 does not divide the model's num_attention_heads = 14; use 1 or 2",
        ),
        (
            "Qwen3-0.6B",
            {"tensor": 16},
            "config.trainer.tensor: 16 does not divide the model's num_key_value_heads = 8; use 1, 2, 4 or 8",
        ),
        ("libra-tiny", {"fsdp": 5}, "hidden_size = 128; use 1, 2, 4, 8, 16 or 32"),
        ("libra-tiny-moe", {"fsdp": 16}, "16 does not divide the model's num_experts = 8; use 1, 2, 4 or 8"),
        ("libra-tiny-moe", {"fsdp": 16, "context": 32}, "num_experts = 8; use 1, 2 or 4"),
    ],
)
def test_sizes_that_do_not_divide_are_named(preset, shape, sentence):
    config = model_config.load_preset(preset)
    feasibility.check_mesh(config, {"data": 3, "fsdp": 2, "tensor": 2})
    with pytest.raises(ConfigError, match=sentence):
        feasibility.check_mesh(config, shape)


def test_rows_that_do_not_divide_are_named(config, batch, reference):
    with (
        jax.set_mesh(_mesh((8, 1, 1, 1))),
        pytest.raises(ConfigError, match="batch axis of size 6 does not divide over 8"),
    ):
        _step(config, reference[0], *(array[:6] for array in batch))


def test_a_mesh_of_explicit_axes_is_refused():
    with jax.set_mesh(_mesh((2, 1, 1, 1), AxisType.Explicit)), pytest.raises(ConfigError, match="of type Explicit"):
        sharding.constrain(jnp.ones((2, 2)), ("batch", None))
