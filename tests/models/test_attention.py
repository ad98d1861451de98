"""Blockwise attention and the platform kernels against one dense softmax, values and gradients."""

import functools
import types

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as stablehlo

from libra_jax.models import config as model_config
from libra_jax.models import feasibility, transformer
from libra_jax.models.attention import attention, cudnn_attention, splash_attention
from libra_jax.protocols import ConfigError
from libra_jax.training import topology

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


def random_trees(rng, rows, tokens):
    """Rows of random trees, depth first: segments, ends of subtrees, and the context of each token, a list of columns.

    A token's context is kept by the walk itself, apart from the ends.
    """
    segments, until = np.zeros((rows, tokens), np.int32), np.zeros((rows, tokens), np.int32)
    contexts = []
    for row in range(rows):
        column, number, of_row = 0, 0, []
        while column < tokens and (number == 0 or rng.random() < 0.8):
            number += 1
            opened, end = [[]], int(rng.integers(column + 1, tokens + 1))
            while column < end:
                if len(opened) > 1 and rng.random() < 0.25:
                    until[row, opened.pop()] = column
                    continue
                if rng.random() < 0.2:
                    opened.append([])
                opened[-1].append(column)
                segments[row, column] = number
                of_row.append([key for frame in opened for key in frame])
                column += 1
            for frame in opened:
                until[row, frame] = column
        contexts.append(of_row)
    return segments, until, contexts


@jax.jit
def _path_by_path(q, k, v, grad, rows_Q, queries_Q, paths_QxT, lengths_Q):
    """Plain causal attention of each query along its own path, padded at the end, with gradients."""
    inside_QxT = (jnp.arange(paths_QxT.shape[1]) < lengths_Q[:, None]).astype(jnp.int32)

    def total(q, k, v):
        along = attention.dense(*(x[rows_Q[:, None], paths_QxT] for x in (q, k, v)), inside_QxT)
        return jnp.zeros(q.shape).at[rows_Q, queries_Q].set(along[jnp.arange(len(rows_Q)), lengths_Q - 1])

    out, vjp = jax.vjp(total, q, k, v)
    return out, *vjp(grad)


@pytest.mark.parametrize("seed", range(4))
def test_trees_attend_as_their_paths_values_and_gradients(seed):
    rng = np.random.default_rng(seed)
    tokens = (27, 32)[seed % 2]
    segments, until, contexts = random_trees(rng, 2, tokens)
    assert (until != np.where(segments, (segments != 0).sum(1, keepdims=True), 0)).any(), "the rows have forks"
    q, k, v, grad = _inputs(2, tokens, seed)
    listed = [(row, query, path) for row, of_row in enumerate(contexts) for query, path in enumerate(of_row)]
    padded = np.array([path + [0] * (tokens - len(path)) for _, _, path in listed])
    places = np.array([(row, query, len(path)) for row, query, path in listed])
    wanted = _path_by_path(q, k, v, grad, places[:, 0], places[:, 1], padded, places[:, 2])
    for chunk in (1, 4, 8, 64):  # 64 is one dense block
        attend = functools.partial(attention.chunked, until_BxT=until, chunk=chunk)
        got = _values_and_gradients(attend, q, k, v, grad, segments)
        for ours, reference in zip(got, wanted, strict=True):
            np.testing.assert_allclose(ours, reference, atol=1e-5)


def test_trees_take_the_chunked_kernel_of_every_platform():
    ids = jnp.ones((1, 1024), jnp.int32)
    heads = jax.ShapeDtypeStruct((1, 1024, 4, 128), jnp.bfloat16)
    for device, kernel in ((GPU, "cudnn"), (TPU, "splash"), (GPU, "auto")):

        def attend(q, k, v):
            common = {"chunk": 128, "heads": 4, "head_dim": 128, "dtype": "bfloat16"}
            chosen = attention.prepare(ids, None, ids, kernel=kernel, on=attention.target(device), **common)  # noqa: B023
            return chosen(q, k, v)

        assert set(_kernels(jax.make_jaxpr(attend)(heads, heads, heads).jaxpr, [])) <= {"while", "cond"}


def test_blocks_that_no_tree_needs_are_not_computed():
    segments = jnp.ones((1, 32), jnp.int32)
    until = jnp.asarray(np.repeat([[32, 16, 24, 32]], 8, axis=1).astype(np.int32))
    needed = np.asarray(attention._needed_blocks(segments, 8, until))
    assert needed.tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [True, False, True, False],
        [True, False, False, True],
    ]


def test_blocks_that_no_segment_needs_are_not_computed():
    segments = np.repeat([[1, 2, 3, 0]], 8, axis=1).astype(np.int32)
    needed = np.asarray(attention._needed_blocks(jnp.asarray(segments), chunk=8))
    np.testing.assert_array_equal(needed, np.diag([True, True, True, False]))


def _agree(got, expected, segments):
    """Compares outputs and gradients where there is a token; nothing anywhere may be NaN."""
    real = (segments != 0)[..., None, None]
    for ours, reference in zip(got, expected, strict=True):
        assert np.isfinite(ours).all()
        np.testing.assert_allclose(ours * real, reference * real, atol=1e-5)


# Three blocks of 128; the second row ends in padding that shares a block with a sequence, and has a block of its own.
BLOCKED = np.array([[1] * 100 + [2] * 90 + [3] * 194, [1] * 120 + [2] * 20 + [0] * 244], np.int32)


@pytest.mark.parametrize("one_backward_kernel", [True, False])
def test_splash_equals_dense_and_skips_other_segments(monkeypatch, one_backward_kernel):
    """On a TPU the same kernels are compiled; interpreting them checks our masks, scaling and padding of heads."""
    monkeypatch.setattr(splash_attention, "FUSED_BLOCKS", 3 if one_backward_kernel else 2)
    needed = np.asarray(splash_attention.needed_blocks(jnp.asarray(BLOCKED)))
    np.testing.assert_array_equal(needed[0], [[True, False, False], [True, True, False], [False, True, True]])
    np.testing.assert_array_equal(needed[1], [[True, False, False], [True, True, False], [False, False, True]])

    def splash(q, k, v, segments):
        return splash_attention.attend(q, k, v, segments, splash_attention.needed_blocks(segments), interpret=True)

    q, k, v, grad = _inputs(2, 384, seed=1)
    grad = grad * (BLOCKED != 0)[..., None, None]
    # Values of a block that is skipped are never read.
    got = _values_and_gradients(splash, q, k, v, grad, BLOCKED)
    _agree(got, _values_and_gradients(attention.dense, q, k, v, grad, BLOCKED), BLOCKED)


MOST = 4  # sequences of a row in the tests of cuDNN's layout


@st.composite
def _rows(draw):
    """Rows as the trainer packs them: sequences numbered from 1, then padding; some rows are empty."""
    tokens, lengths = 27, st.lists(st.integers(1, 12), max_size=MOST)
    rows = []
    for sequences in draw(st.lists(lengths, min_size=3, max_size=3)):
        ids = np.repeat(np.arange(1, len(sequences) + 1), sequences)[:tokens]
        rows.append(np.pad(ids, (0, tokens - len(ids))))
    return np.array(rows, np.int32)


@hypothesis.settings(max_examples=60)
@hypothesis.given(_rows())
def test_cudnn_layout_lists_each_sequence_once(segments):
    lengths = cudnn_attention.sequence_lengths(jnp.asarray(segments), MOST)
    starts, lengths = map(np.asarray, cudnn_attention.layout(lengths))
    for row, ids in enumerate(segments):
        # An empty row hands over its first token, so that no call of the kernel is without a sequence.
        expected = [(np.flatnonzero(ids == name)[0], (ids == name).sum()) for name in np.unique(ids[ids > 0])] or [
            (0, 1)
        ]
        none = [(-1, -1)] * (MOST - len(expected))
        assert list(zip(starts[row], lengths[row], strict=False)) == expected + none
        assert starts[row, -1] == -1


@jax.custom_vjp
def _on_flat_memory(q, k, v, owner_q, owner_k, scale):
    """Attention over all tokens of all rows as one array; `owner` is the sequence of a token, 0 if it has none."""
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    allowed = (owner_q[:, None] == owner_k) & (owner_k > 0) & (jnp.arange(len(q))[:, None] >= jnp.arange(len(k)))
    weights = jax.nn.softmax(jnp.where(allowed, jnp.einsum("qhd,khd->hqk", q, k) * scale, -1e30))
    return jnp.where(owner_q[:, None, None] > 0, jnp.einsum("hqk,khd->qhd", weights, v), jnp.nan)


def _forward(q, k, v, owner_q, owner_k, scale):
    out, vjp = jax.vjp(lambda q, k, v: _on_flat_memory.fun(q, k, v, owner_q, owner_k, scale), q, k, v)
    return out, (vjp, owner_q, owner_k)


def _backward(saved, grad):
    vjp, owner_q, owner_k = saved
    dq, dk, dv = vjp(jnp.where(owner_q[:, None, None] > 0, grad, 0.0))
    blank_q, blank_k = ((owner == 0)[:, None, None] for owner in (owner_q, owner_k))
    return jnp.where(blank_q, jnp.nan, dq), *(jnp.where(blank_k, jnp.nan, d) for d in (dk, dv)), None, None, None


_on_flat_memory.defvjp(_forward, _backward)


def _cudnn_double(query, key, value, *, q_seqlen, kv_seqlen, q_offsets, kv_offsets, scale, mask_type):
    """Computes what cuDNN computes, from the offsets that JAX hands it. What cuDNN leaves unwritten is NaN here."""
    assert mask_type is stablehlo.MaskType.PADDING_CAUSAL
    rows, tokens = query.shape[:2]
    if q_offsets is None:
        begins, counts = jnp.arange(rows) * tokens, q_seqlen
        begins_k = begins
    else:
        fixed = stablehlo._fix_seqlen_offsets(q_seqlen, kv_seqlen, q_offsets, kv_offsets, query, key)
        # Offsets count elements of the memory of queries or keys.
        begins, begins_k = (
            fixed[2 + i].reshape(-1)[:-rows] // (x.shape[2] * x.shape[3]) for i, x in enumerate((query, key))
        )
        counts = fixed[0].reshape(-1)

    def owner(begins):
        token = jnp.arange(rows * tokens)[:, None]
        inside = (token >= begins) & (token < begins + counts)
        return (inside * (1 + jnp.arange(len(counts)))).max(-1)

    flat = (x.reshape(rows * tokens, *x.shape[2:]) for x in (query, key, value))
    return _on_flat_memory(*flat, owner(begins), owner(begins_k), scale).reshape(query.shape)


def _by_cudnn(most, q, k, v, segments):
    arrays = cudnn_attention.layout(cudnn_attention.sequence_lengths(segments, most))
    return cudnn_attention.attend(q, k, v, segments, *arrays, fused=_cudnn_double)


BY_CUDNN = {most: functools.partial(_by_cudnn, most) for most in (1, MOST)}  # one compilation each


@hypothesis.settings(max_examples=30)
@hypothesis.given(_rows(), st.booleans())
def test_cudnn_call_equals_dense_values_and_gradients(segments, packed):
    """No CPU runs cuDNN, so a double takes the same call: grouped heads, odd lengths, padding, empty rows."""
    if not packed:
        segments = np.minimum(segments, 1)
    q, k, v, grad = _inputs(len(segments), segments.shape[1], seed=3)
    got = _values_and_gradients(BY_CUDNN[MOST if packed else 1], q, k, v, grad, segments)
    expected = _values_and_gradients(attention.dense, q, k, v, grad, segments)
    for ours, reference in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, reference, atol=1e-5)


@pytest.mark.parametrize("grouped", [True, False])
def test_keys_are_copied_only_where_jax_miscounts_their_offsets(monkeypatch, grouped):
    """JAX before 0.11.1 counts offsets of packed keys with the number of query heads."""
    fix, taken = stablehlo._fix_seqlen_offsets, []

    def offsets(q_seqlen, kv_seqlen, q_offsets, kv_offsets, query, key):
        taken.append(key.shape[2])
        of_q, of_k = (fix(q_seqlen, kv_seqlen, q_offsets, kv_offsets, x, x) for x in (query, key if grouped else query))
        return of_q[0], of_k[1], of_q[2], of_k[3]

    monkeypatch.setattr(stablehlo, "_fix_seqlen_offsets", offsets)
    monkeypatch.setattr(cudnn_attention, "takes_grouped", lambda: grouped)
    segments = np.array([[1] * 5 + [2] * 9 + [0] * 2, [1] * 16], np.int32)
    inputs = _inputs(2, 16, seed=5)
    got = _values_and_gradients(functools.partial(_by_cudnn, MOST), *inputs, segments)
    expected = _values_and_gradients(attention.dense, *inputs, segments)
    for ours, reference in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, reference, atol=1e-5)
    assert set(taken) == {KV_HEADS if grouped else HEADS}


def test_the_installed_jax_counts_offsets_as_its_version_says():
    starts, lengths = cudnn_attention.layout(jnp.array([[3, 2], [4, 1]]))
    query, key = (jax.ShapeDtypeStruct((2, 8, heads, WIDTH), jnp.bfloat16) for heads in (HEADS, KV_HEADS))
    offsets = stablehlo._fix_seqlen_offsets(lengths, lengths, starts, starts, query, key)[3]
    right = int(offsets.ravel()[1]) == 3 * KV_HEADS * WIDTH
    assert right == cudnn_attention.takes_grouped()


def test_rows_beyond_cudnns_offsets_are_refused():
    q = jax.ShapeDtypeStruct((8, 32768, 64, 128), jnp.bfloat16)
    segments = jax.ShapeDtypeStruct((8, 32768), jnp.int32)
    with pytest.raises(ConfigError, match="rows_per_micro_batch: queries of shape"):
        jax.eval_shape(functools.partial(_by_cudnn, 2), q, q, q, segments)


def _kernels(jaxpr, found):
    """Collects the fused kernels of a program, and the loops and branches that the chunked kernel consists of."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "pallas_call":
            found.append(equation.params["name"])
            continue
        if name.startswith("dot_product_attention") or name in ("while", "cond"):
            found.append(name)
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            _kernels(inner, found)
    return found


GPU = types.SimpleNamespace(platform="gpu", compute_capability="9.0")
TPU = types.SimpleNamespace(platform="tpu")


@pytest.mark.parametrize(("remat", "forwards"), [("none", 1), ("dots", 1), ("full", 2)])
@pytest.mark.parametrize("device", [GPU, TPU])
def test_only_full_remat_runs_the_forward_kernel_again(device, remat, forwards):
    """Packed rows take one fused kernel in each pass, and no branch leads to the chunked loop."""
    config = model_config.TransformerConfig(
        **(vars(model_config.load_preset("Qwen3-0.6B")) | {"num_layers": 2, "vocab_size": 128})
    )
    options = transformer.ComputeOptions("bfloat16", remat, target=attention.target(device))
    params = transformer.abstract_params(config)
    ids = jax.ShapeDtypeStruct((2, 1024), jnp.int32)

    def loss(params, ids):
        return transformer.forward(params, config, options, ids, ids, ids).astype(jnp.float32).sum()

    with topology.answering_for(device):
        found = _kernels(jax.make_jaxpr(jax.grad(loss))(params, ids).jaxpr, [])
    forward, backward = {
        "gpu": ("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"),
        "tpu": ("splash_mha_fwd_segmented_residuals", "splash_mha_dkv_segmented_no_residuals"),
    }[device.platform]
    assert found == [forward] * forwards + [backward]


def test_a_kernel_of_another_platform_is_refused_with_a_sentence():
    segments = jnp.ones((1, 128), jnp.int32)
    for kernel, needs in (("splash", "TPU"), ("cudnn", "GPU")):
        with pytest.raises(ConfigError, match=rf"config.model.attention: {kernel} needs a {needs} \(this is cpu\)"):
            attention.prepare(segments, kernel=kernel, chunk=128, heads=4, head_dim=128, dtype="bfloat16")


def test_a_device_names_its_platform_and_generation():
    assert attention.target(jax.devices("cpu")[0]) == feasibility.CPU
    assert attention.target(GPU) == feasibility.CompileTarget("gpu", (9, 0))
    rocm = types.SimpleNamespace(platform="gpu", compute_capability="gfx90a")
    assert attention.target(rocm) == feasibility.CompileTarget("gpu", (0, 0))


AMPERE, HOPPER = feasibility.CompileTarget("gpu", (8, 0)), feasibility.CompileTarget("gpu", (9, 0))
V6E = feasibility.CompileTarget("tpu", (0, 0))


@pytest.mark.parametrize(
    ("target", "tokens", "head_dim", "dtype", "packed", "auto", "problem"),
    [
        (feasibility.CPU, 128, 128, "bfloat16", True, "chunked", None),
        (V6E, 256, 64, "float32", True, "splash", None),
        (V6E, 200, 64, "float32", True, "chunked", "splash needs rows of a multiple of 128 tokens, not 200"),
        (HOPPER, 200, 128, "bfloat16", True, "cudnn", None),
        (feasibility.CompileTarget("gpu"), 200, 128, "bfloat16", True, "cudnn", None),
        (AMPERE, 200, 128, "bfloat16", False, "cudnn", None),
        (AMPERE, 200, 128, "bfloat16", True, "chunked", "cudnn needs an NVIDIA GPU of the Hopper generation or later"),
        (HOPPER, 200, 128, "float32", True, "chunked", "cudnn needs bfloat16 and heads of at most 128, not float32"),
        (HOPPER, 200, 256, "bfloat16", True, "chunked", "cudnn needs bfloat16 and heads of at most 128, not bfloat16"),
    ],
)
def test_auto_takes_the_platform_kernel_where_it_suffices(target, tokens, head_dim, dtype, packed, auto, problem):
    case = (target, tokens, head_dim, dtype, packed)
    assert feasibility.choose_attention("auto", *case) == auto
    assert feasibility.choose_attention("chunked", *case) == "chunked"
    if problem is not None:
        with pytest.raises(ConfigError, match=problem):
            feasibility.choose_attention({"tpu": "splash", "gpu": "cudnn"}[target.platform], *case)
