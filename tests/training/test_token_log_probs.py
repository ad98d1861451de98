"""Chunked log-probabilities and entropies against torch in float64, and what the programs hold in memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec

from libra_jax import config as config_lib
from libra_jax.data import packing
from libra_jax.models import transformer
from libra_jax.training import logprobs, losses, state

ROWS, COLUMNS, WIDTH, VOCABULARY = 3, 10, 8, 37
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(ROWS, COLUMNS, WIDTH)).astype(np.float32)
    head = rng.normal(size=(WIDTH, VOCABULARY)).astype(np.float32)
    targets = rng.integers(0, VOCABULARY, (ROWS, COLUMNS)).astype(np.int32)
    weights = rng.normal(size=(2, ROWS, COLUMNS)).astype(np.float32)
    return hidden, head, targets, weights


def _torch_reference(hidden, head, targets, weights, entropy_gradient):
    """Log-probs, entropies, and gradients of their weighted sum, by torch in float64."""
    h, w = (torch.tensor(array, dtype=torch.float64, requires_grad=True) for array in (hidden, head))
    distribution = torch.distributions.Categorical(logits=h @ w / TEMPERATURE)
    log_probs, entropy = distribution.log_prob(torch.tensor(targets)), distribution.entropy()
    total = (torch.tensor(weights[0]) * log_probs).sum()
    if entropy_gradient:
        total = total + (torch.tensor(weights[1]) * entropy).sum()
    total.backward()
    return log_probs.detach().numpy(), entropy.detach().numpy(), h.grad.numpy(), w.grad.numpy()


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 12, 1000])
def test_values_and_gradients_agree_with_torch_for_any_chunk(inputs, chunk, entropy_gradient):
    hidden, head, targets, weights = inputs

    def total(hidden, head):
        log_probs, entropy = logprobs.token_log_probs(
            hidden, head, targets, temperature=TEMPERATURE, chunk=chunk, entropy_gradient=entropy_gradient
        )
        return (weights[0] * log_probs).sum() + (weights[1] * entropy).sum(), (log_probs, entropy)

    (_, (log_probs, entropy)), gradients = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(hidden, head)
    wanted = _torch_reference(hidden, head, targets, weights, entropy_gradient)
    for got, reference in zip((log_probs, entropy, *gradients), wanted, strict=True):
        np.testing.assert_allclose(got, reference, atol=1e-4, rtol=1e-4)


def test_extreme_logits_stay_finite(inputs):
    hidden, head, targets, _ = inputs
    log_probs, entropy = logprobs.token_log_probs(1e4 * hidden, head, targets, temperature=1.0, chunk=12)
    assert np.isfinite(log_probs).all()
    assert np.isfinite(entropy).all()
    assert (np.asarray(entropy) >= 0).all()


def _sizes(jaxpr):
    """Elements of every array that the program makes, inner programs included."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            yield int(np.prod(variable.aval.shape)), variable.aval.shape
        for inner in jax.core.jaxprs_in_params(equation.params):
            yield from _sizes(inner)


def test_no_array_of_tokens_by_vocabulary_exists_for_a_32k_token_row(small):
    tokens, vocabulary, chunk = 32768, 4096, 512
    shape = dataclasses.replace(small.shape, vocab_size=vocabulary, num_layers=1)
    scorer = losses.TokenScorer(shape, transformer.ComputeOptions(), chunk)
    policy = functools.partial(
        losses.policy, scorer=scorer, algorithm=config_lib.AlgorithmConfig(), temperature=1.0, packed=True
    )
    batch = {**vars(packing.empty((1, tokens))), "advantages": np.zeros((1, tokens), np.float32)}
    params = transformer.abstract_params(shape)
    program = jax.make_jaxpr(jax.grad(lambda params, batch: policy(params, batch).loss_sum))(params, batch)
    largest, its_shape = max(_sizes(program.jaxpr))
    assert largest < tokens * 1024, its_shape
    assert max(size for size, its in _sizes(program.jaxpr) if vocabulary in its) == chunk * vocabulary

    hidden = jax.ShapeDtypeStruct((1, tokens, 16), jnp.float32)
    head = jax.ShapeDtypeStruct((16, vocabulary), jnp.float32)
    targets = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    score = functools.partial(logprobs.token_log_probs, temperature=1.0, chunk=chunk)
    gradient = jax.jit(jax.grad(lambda *arrays: score(*arrays)[0].sum(), (0, 1)))
    memory = gradient.lower(hidden, head, targets).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * tokens * vocabulary / 8


def _collectives_in_loops(jaxpr, inside=False):
    """Names of the collectives that a loop of the program repeats."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if inside and any(word in name for word in ("psum", "pmax", "all_gather", "reduce_scatter", "all_to_all")):
            yield name
        for inner in jax.core.jaxprs_in_params(equation.params):
            yield from _collectives_in_loops(inner, inside or name in ("scan", "while"))


@pytest.mark.parametrize("sizes", [(1, 1, 8), (1, 4, 2), (2, 2, 2)], ids=lambda sizes: "x".join(map(str, sizes)))
def test_each_device_of_a_mesh_loops_alone(small, sizes):
    rng = np.random.default_rng(1)
    hidden, targets = (
        0.3 * rng.normal(size=(4, 16, 8)).astype(np.float32),
        rng.integers(0, 40, (4, 16)).astype(np.int32),
    )
    head, weights = rng.normal(size=(8, 40)).astype(np.float32), rng.normal(size=(2, 4, 16)).astype(np.float32)

    def total(hidden, head, targets):
        log_probs, entropy = logprobs.token_log_probs(
            hidden, head, targets, temperature=TEMPERATURE, chunk=3, entropy_gradient=True
        )
        return (weights[0] * log_probs + weights[1] * entropy).sum(), (log_probs, entropy)

    gradient = jax.value_and_grad(total, (0, 1), has_aux=True)
    mesh = state.make_mesh(
        config_lib.TrainerConfig(**dict(zip(("data", "fsdp", "tensor"), sizes, strict=True))), jax.devices()
    )
    split = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
    whole = NamedSharding(mesh, PartitionSpec())
    with jax.set_mesh(mesh):
        traced = jax.jit(gradient, in_shardings=(whole, split, whole), out_shardings=whole).trace(hidden, head, targets)
        assert list(_collectives_in_loops(traced.jaxpr.jaxpr)) == []
        sharded = traced.lower().compile()(hidden, jax.device_put(head, split), targets)
    alone = jax.jit(gradient)(hidden, head, targets)
    for got, wanted in zip(jax.tree.leaves(sharded), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("chunk", [1, 8])
def test_head_gradient_in_bfloat16_is_as_exact_in_chunks_as_whole(chunk):
    """Against float64, on one device and with the sums of 512 and of 64 chunks."""
    tokens, width, vocabulary = 512, 32, 64
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(1, tokens, width)), jnp.bfloat16)
    head = jnp.asarray(rng.normal(size=(width, vocabulary)) / width**0.5, jnp.bfloat16).astype(jnp.float32)
    targets = rng.integers(0, 4, (1, tokens)).astype(np.int32)  # few: their columns are sums of many terms

    def error(chunk):
        score = functools.partial(logprobs.token_log_probs, temperature=1.0, chunk=chunk)
        got = jax.jit(jax.grad(lambda head: score(hidden, head, targets)[0].sum()))(head)
        assert got.dtype == np.float32
        return np.linalg.norm(np.asarray(got, np.float64) - wanted) / np.linalg.norm(wanted)

    exact_hidden, exact_head = (torch.tensor(np.asarray(array, np.float64)) for array in (hidden[0], head))
    exact_head.requires_grad_()
    log_probs = torch.log_softmax(exact_hidden @ exact_head, -1)[torch.arange(tokens), torch.tensor(targets[0]).long()]
    log_probs.sum().backward()
    wanted = exact_head.grad.numpy()
    assert error(chunk) <= 1.001 * error(tokens)
    assert error(chunk) < 2e-3


def test_a_sharded_vocabulary_is_never_gathered(inputs, small):
    hidden, head, targets, _ = inputs
    mesh = state.make_mesh(config_lib.TrainerConfig(tensor=8), jax.devices())
    head = np.pad(head, ((0, 0), (0, 40 - VOCABULARY)))
    split = NamedSharding(mesh, PartitionSpec(None, "tensor"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    score = functools.partial(logprobs.token_log_probs, temperature=TEMPERATURE, chunk=12)
    gradient = jax.jit(
        jax.grad(lambda *arrays: score(*arrays)[0].sum(), (0, 1)),
        in_shardings=(whole, split, whole),
        out_shardings=(whole, split),
    )
    program = gradient.lower(hidden, head, targets).compile()
    assert "all-gather" not in program.as_text()
    sharded = program(*jax.device_put((hidden, head, targets), (whole, split, whole)))
    alone = jax.grad(lambda *arrays: score(*arrays)[0].sum(), (0, 1))(hidden, head, targets)
    for got, wanted in zip(sharded, alone, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5)
