"""Attention over rows whose tokens are split over devices, against one dense softmax, and what it sends."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from libra_jax.models import communication_bounds, feasibility, sharding
from libra_jax.models import config as model_config
from libra_jax.models.attention import attention, context_attention
from libra_jax.planning.compiled import compiled
from libra_jax.protocols import ConfigError

AXES = ("data", "fsdp", "tensor", "context")
ROWS, TOKENS, WIDTH = 2, 48, 4
SPLIT = ("batch", "tokens", "heads", None)
# Sequences that end inside and between the parts of a row, and padding; the second row is one sequence.
SEGMENTS = np.array([[1] * 7 + [2] * 20 + [3] * 9 + [0] * 12, [1] * 48], np.int32)
# The second sequence of the first row, and the second row, as trees whose subtrees end inside and between parts.
UNTIL = np.array(
    [
        [7] * 7 + [27] * 3 + [13] * 3 + [22] * 3 + [20] * 4 + [22] * 2 + [27] * 5 + [36] * 9 + [0] * 12,
        [48] * 4 + [24] * 12 + [23] * 7 + [24] * 1 + [48] * 3 + [31] * 4 + [47] * 16 + [48],
    ],
    np.int32,
)


def _mesh(tensor, context):
    devices = jax.devices()[: tensor * context]
    return jax.make_mesh((1, 1, tensor, context), AXES, axis_types=(AxisType.Auto,) * 4, devices=devices)


def _inputs(heads, kv_heads):
    rng = np.random.default_rng(heads)
    shapes = [(ROWS, TOKENS, count, WIDTH) for count in (heads, kv_heads, kv_heads, heads)]
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def _values_and_gradients(attend, q, k, v, grad):
    out, transposed = jax.vjp(attend, q, k, v)
    return out, *transposed(grad)


def _program(mesh, heads, chunk, until=False):
    """Values and gradients of attention on the mesh, from arrays that are split over it."""

    def run(ids, *arrays):
        common = {"kernel": "auto", "chunk": chunk, "heads": heads, "head_dim": WIDTH, "dtype": "float32"}
        segments, *ends = ids
        return _values_and_gradients(attention.prepare(segments, None, *ends, **common, packed=True), *arrays)

    split = NamedSharding(mesh, sharding.spec(SPLIT))
    ids = NamedSharding(mesh, sharding.spec(("batch", "tokens")))
    return jax.jit(run, in_shardings=((ids,) * (1 + until), *[split] * 4), out_shardings=split)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tensor", "context", "chunk"),
    [
        (8, 8, 1, 8, 4),
        (8, 4, 2, 2, 64),
        (8, 2, 1, 4, 4),  # each device is sent a copy of one key head
        (12, 3, 1, 2, 4),  # the second of three key heads serves queries of both devices
        (6, 2, 1, 4, 4),  # queries are split
        (6, 2, 2, 4, 64),
        (3, 1, 1, 2, 5),
        (1, 1, 1, 8, 2),  # parts of 3 columns become two blocks of 2
    ],
)
def test_split_rows_attend_as_whole_rows(monkeypatch, heads, kv_heads, tensor, context, chunk):
    sizes, in_blocks = [], attention._in_blocks
    monkeypatch.setattr(attention, "_in_blocks", lambda size, *rest: sizes.append(size) or in_blocks(size, *rest))
    arrays, mesh = _inputs(heads, kv_heads), _mesh(tensor, context)
    with jax.set_mesh(mesh):
        got = _program(mesh, heads, chunk)((SEGMENTS,), *arrays)
        of_trees = _program(mesh, heads, chunk, until=True)((SEGMENTS, UNTIL), *arrays)
    for found, ids in ((got, (SEGMENTS,)), (of_trees, (SEGMENTS, UNTIL))):
        wanted = jax.jit(
            lambda *arrays: _values_and_gradients(lambda *qkv: attention.dense(*qkv, *ids), *arrays)  # noqa: B023
        )(*arrays)
        for ours, reference in zip(found, wanted, strict=True):
            np.testing.assert_allclose(ours, reference, atol=1e-5 * np.abs(reference).max(), rtol=0)
    assert all(2 * size > min(chunk, TOKENS // context // 2) for size in sizes), "blocks are not much below the chunk"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "context", "kinds"),
    [
        (8, 8, 4, {"all-to-all"}),
        (8, 2, 4, {"all-to-all"}),
        (6, 2, 4, {"all-gather", "reduce-scatter", "collective-permute"}),
    ],
)
def test_attention_sends_what_the_formula_says(heads, kv_heads, context, kinds):
    mesh, arrays = _mesh(1, context), _inputs(heads, kv_heads)
    with jax.set_mesh(mesh):
        text = _program(mesh, heads, 4).lower((SEGMENTS,), *arrays).compile().as_text()
    sizes = compiled.Sizes(dict(mesh.shape), vocabulary=7, hidden=5, tokens=ROWS * TOKENS // context, logits_chunk=1)
    sent = [item for item in compiled.count(text, sizes).collectives if item.wire_bytes > 4 * ROWS * TOKENS]
    assert {item.kind for item in sent} == kinds
    assert all(item.axes == ("context",) for item in sent if item.axes)
    shape = dataclasses.replace(
        model_config.load_preset("libra-tiny"), num_heads=heads, num_kv_heads=kv_heads, head_dim=WIDTH, num_layers=1
    )
    # The formula is in bfloat16, the program in float32.
    formula = 2 * communication_bounds.over_context(shape, ROWS * TOKENS / context, 1, context, passes=2)
    assert sum(item.wire_bytes for item in sent) == pytest.approx(formula, rel=1e-6)


def test_each_device_gets_the_key_heads_of_its_queries_and_no_more():
    assert feasibility.context_heads(8, 8, 4) == feasibility.ContextHeads(2, (0, 1, 2, 3, 4, 5, 6, 7), None)
    assert feasibility.context_heads(8, 2, 4) == feasibility.ContextHeads(1, (0, 0, 1, 1), None)
    uneven = feasibility.context_heads(12, 3, 2)
    assert uneven == feasibility.ContextHeads(2, (0, 1, 1, 2), ((0, 0, 0, 0, 1, 1), (0, 0, 1, 1, 1, 1)))
    for heads, kv_heads, context in [(24, 8, 6), (20, 4, 10), (12, 3, 6), (30, 10, 15)]:
        sent = feasibility.context_heads(heads, kv_heads, context)
        own, group = heads // context, heads // kv_heads
        for device in range(context):
            places = (
                sent.of_query[device] if sent.of_query else [query * sent.per_device // own for query in range(own)]
            )
            held = sent.copies[device * sent.per_device :][: sent.per_device]
            assert [held[place] for place in places] == [(device * own + query) // group for query in range(own)]


@pytest.mark.parametrize(("platform", "kernel"), [("gpu", "cudnn"), ("tpu", "splash")])
def test_kernels_that_need_whole_rows_are_refused_where_queries_are_split(platform, kernel):
    case = feasibility.CompileTarget(platform, (9, 0)), 128, 128, "bfloat16", True
    assert feasibility.choose_attention("auto", *case) == kernel
    assert feasibility.choose_attention("auto", *case, whole_rows=False) == "chunked"
    with pytest.raises(ConfigError, match=f"{kernel} needs a trainer.context that divides the query heads"):
        feasibility.choose_attention(kernel, *case, whole_rows=False)


def test_sizes_that_do_not_divide_are_named():
    config = model_config.load_preset("Qwen2.5-0.5B")  # 14 heads, width 896
    feasibility.check_mesh(config, {"fsdp": 4, "context": 4})
    with pytest.raises(
        ConfigError,
        match=r"config.trainer.context: fsdp x context = 64 x 4 does not divide .* 896; .* of 1, 2, 7 or 14\.",
    ):
        feasibility.check_mesh(config, {"fsdp": 64, "context": 4})
    feasibility.check_context(config.num_heads // 2, 7, 7)
    feasibility.check_context(config.num_heads, 4, 64)
    with pytest.raises(
        ConfigError,
        match=r"row_tokens: context = 4 does not divide the 14 .* 68 .* 2 x 4; use 72 .*: 1, 2, 7 or 14\.",
    ):
        feasibility.check_context(config.num_heads, 4, 68)


def test_early_and_late_parts_of_a_row_are_paired():
    """Causal attention with part p of 2 c takes p + 1 units of work; every device gets 2 c + 1."""

    for ways in (2, 3, 8):
        held = {device: [] for device in range(ways)}
        for parity in (0, 1):
            for sender, receiver in context_attention._owners(ways, parity):
                held[receiver].append(2 * sender + parity)
        assert all(sum(parts) == 2 * ways - 1 and len(parts) == 2 for parts in held.values())


def test_tokens_that_do_not_divide_are_named():
    with (
        jax.set_mesh(_mesh(1, 4)),
        pytest.raises(ConfigError, match="tokens axis of size 6 does not divide over 4"),
    ):
        sharding.constrain(jnp.ones((1, 6)), ("batch", "tokens"))
