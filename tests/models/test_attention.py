"""Blockwise attention and the platform kernels against one dense softmax, values and gradients."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from libra_jax.models import attention, feasibility
from libra_jax.protocols import ConfigError

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def _reference(q, k, v, segments):
    """Softmax over the allowed keys, one query at a time in float64."""
    out = np.zeros(q.shape)
    rows, tokens, heads, width = q.shape
    for row in range(rows):
        for query in range(tokens):
            same = (segments[row, : query + 1] == segments[row, query]) & (segments[row, query] != 0)
            keys = np.flatnonzero(same)
            for head in range(heads if len(keys) else 0):
                kv_head = head // (heads // k.shape[2])
                scores = k[row, keys, kv_head].astype(float) @ q[row, query, head].astype(float) / np.sqrt(width)
                weights = np.exp(scores - scores.max())
                out[row, query, head] = weights @ v[row, keys, kv_head] / weights.sum()
    return out


def _inputs(rows, tokens, seed, width=WIDTH):
    rng = np.random.default_rng(seed)
    draw = [rng.normal(size=(rows, tokens, heads, width)) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [array.astype(np.float32) for array in draw]


@functools.partial(jax.jit, static_argnums=0)
def _values_and_gradients(function, q, k, v, grad, segments):
    out, vjp = jax.vjp(lambda q, k, v: function(q, k, v, segments), q, k, v)
    return out, *vjp(grad)


CHUNKED = {chunk: functools.partial(attention.chunked, chunk=chunk) for chunk in (4, 8)}  # one compilation each


@st.composite
def _cases(draw):
    rows, tokens = 2, draw(st.sampled_from([7, 27]))
    # Any ids in any order: blocks are skipped by the range of ids in them, which must not assume sorted segments.
    if draw(st.booleans()):
        segments = np.array(draw(st.lists(st.integers(0, 3), min_size=rows * tokens, max_size=rows * tokens)))
    else:
        runs = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12)), min_size=1, max_size=8))
        segments = np.resize(np.concatenate([np.full(length, name) for name, length in runs]), rows * tokens)
    return tokens, draw(st.sampled_from(list(CHUNKED))), segments.reshape(rows, tokens).astype(np.int32)


@hypothesis.settings(max_examples=40)
@hypothesis.given(_cases())
def test_chunked_equals_dense_values_and_gradients(case):
    tokens, chunk, segments = case
    q, k, v, grad = _inputs(len(segments), tokens, seed=tokens)
    got = _values_and_gradients(CHUNKED[chunk], q, k, v, grad, segments)
    expected = _values_and_gradients(attention.dense, q, k, v, grad, segments)
    np.testing.assert_allclose(expected[0], _reference(q, k, v, segments), atol=1e-5)
    for ours, reference in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, reference, atol=1e-5)


def test_blocks_that_no_segment_needs_are_not_computed():
    segments = np.repeat([[1, 2, 3, 0]], 8, axis=1).astype(np.int32)
    needed = np.asarray(attention._needed_blocks(jnp.asarray(segments), chunk=8))
    np.testing.assert_array_equal(needed, np.diag([True, True, True, False]))


PACKED = np.array([[1] * 100 + [2] * 90 + [3] * 66, [5] * 200 + [0] * 56], np.int32)


def test_splash_equals_dense_in_interpret_mode():
    """On a TPU the same kernel is compiled; interpreting it checks our masks, scaling and padding of heads."""
    q, k, v, grad = _inputs(2, 256, seed=1)
    real = (PACKED != 0)[..., None, None]
    splash = functools.partial(attention.splash, interpret=True)
    got = _values_and_gradients(splash, q, k, v, grad * real, PACKED)
    expected = _values_and_gradients(attention.dense, q, k, v, grad * real, PACKED)
    for ours, reference in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours * real, reference * real, atol=1e-5)


def test_cudnn_serves_single_segments_and_leaves_packed_rows_to_blocks():
    """Run with XLA's implementation of the same call, because the cuDNN one needs a GPU."""
    q, k, v, grad = _inputs(2, 256, seed=2)
    served = []

    def otherwise(*inputs):
        jax.debug.callback(lambda: served.append("blocks"))
        return attention.chunked(*inputs, chunk=64)

    fused = functools.partial(attention.cudnn, otherwise=otherwise, implementation="xla")
    single = np.array([[3] * 256, [1] * 200 + [0] * 56], np.int32)
    for segments, packed in ((single, False), (PACKED, True)):
        real = (segments != 0)[..., None, None]
        got = _values_and_gradients(fused, q, k, v, grad * real, segments)
        jax.effects_barrier()
        assert bool(served) == packed
        expected = _values_and_gradients(attention.dense, q, k, v, grad * real, segments)
        for ours, reference in zip(got, expected, strict=True):
            np.testing.assert_allclose(ours * real, reference * real, atol=1e-5)


def test_a_kernel_of_another_platform_is_refused_with_a_sentence():
    q, k, v = (jnp.ones((1, 128, heads, 128)) for heads in (4, 2, 2))
    segments = jnp.ones((1, 128), jnp.int32)
    for kernel, needs in (("splash", "TPU"), ("cudnn", "GPU")):
        with pytest.raises(ConfigError, match=rf"config.model.attention: {kernel} needs a {needs} \(this is cpu\)"):
            attention.prepare(kernel, 128, segments)(q, k, v)


@pytest.mark.parametrize(
    ("platform", "tokens", "head_dim", "dtype", "auto", "problem"),
    [
        ("cpu", 128, 128, "bfloat16", "chunked", None),
        ("tpu", 256, 64, "float32", "splash", None),
        ("tpu", 200, 64, "float32", "chunked", "splash needs rows of a multiple of 128 tokens, not 200"),
        ("gpu", 200, 128, "bfloat16", "cudnn", None),
        ("gpu", 200, 128, "float32", "chunked", "cudnn needs bfloat16 and heads of at most 128, not float32"),
        ("gpu", 200, 256, "bfloat16", "chunked", "cudnn needs bfloat16 and heads of at most 128, not bfloat16"),
    ],
)
def test_auto_takes_the_platform_kernel_where_it_suffices(platform, tokens, head_dim, dtype, auto, problem):
    case = (platform, tokens, head_dim, dtype)
    assert feasibility.choose_attention("auto", *case) == auto
    assert feasibility.choose_attention("chunked", *case) == "chunked"
    if problem is not None:
        with pytest.raises(ConfigError, match=problem):
            feasibility.choose_attention({"tpu": "splash", "gpu": "cudnn"}[platform], *case)
