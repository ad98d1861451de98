"""The derivatives that norms and gated activations define themselves, against those of the plain formulas."""

import jax
import jax.numpy as jnp
import pytest

from libra_jax.models import layers

EPS = 1e-6


def _plain_norm(x, weight):
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS) * weight


def _norm(x, weight):
    return layers.rms_norm(x, weight, EPS)


def _plain_gated(gate, up):
    return gate / (1 + jnp.exp(-gate)) * up


CASES = {
    "norm of the residual stream": (_norm, _plain_norm, (2, 33, 48), (48,)),
    "norm of heads": (_norm, _plain_norm, (2, 33, 4, 16), (16,)),
    "gated activation": (layers.gated, _plain_gated, (2, 33, 48), (2, 33, 48)),
}


def _arrays(shapes, dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    first, second = (3 * jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=False))
    return first.astype(dtype), second.astype(dtype), jax.random.normal(keys[2], shapes[0]).astype(dtype)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2**-8)])
def test_gradients_equal_those_of_the_plain_formula(case, dtype, tolerance):
    own, plain, *shapes = CASES[case]
    first, second, grad = _arrays(shapes, dtype)
    got, backward = jax.vjp(own, first, second)
    exact, exact_backward = jax.vjp(plain, first.astype(jnp.float32), second.astype(jnp.float32))
    wanted = exact, *exact_backward(grad.astype(jnp.float32))

    for value, reference in zip((got, *backward(grad)), wanted, strict=True):
        assert value.dtype == dtype
        assert jnp.linalg.norm(value - reference) < tolerance * jnp.linalg.norm(reference)


@pytest.mark.parametrize("case", CASES)
def test_the_backward_pass_keeps_only_the_inputs(case):
    own, _, *shapes = CASES[case]
    first, second, _ = _arrays(shapes, "bfloat16")

    kept = jax.tree.leaves(jax.vjp(own, first, second)[1])

    assert sorted((x.shape, x.dtype) for x in kept if x.size > 1) == sorted((x.shape, x.dtype) for x in (first, second))
