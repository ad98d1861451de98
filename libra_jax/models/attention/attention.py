"""Causal attention within segments: one dense block for short rows, online softmax over blocks for long rows.

On a current mesh, each device attends over its own rows and heads (`shard_map`), because no row or head needs data of
another device. If `context` splits the tokens of rows, the devices exchange heads or keys first (`context_attention`).
A platform's own kernel (Splash on TPU, cuDNN on GPU) takes the rows where it can compute them.

A sequence may be a tree of tokens, laid out depth first (`data.trees`). A key is then visible to the queries of its
own subtree, from its own column up to the column `until`. The chunked kernel alone computes trees.

Letters: B rows, T queries, S keys, C chunk, I query blocks, H query heads, N key and value heads, G = H / N query heads
a key head, K head width, M sequences that a row may hold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from libra_jax.models import feasibility, rows, sharding
from libra_jax.models.attention import context_attention, cudnn_attention, splash_attention

SAVED_NAMES = ("attention_output", "attention_normalizer")
"""`checkpoint_name`s of the forward results that the backward pass of chunked and of Splash attention needs."""

# Finite, because -inf minus -inf is NaN.
_MASKED = -1e30
_FLOOR = -1e20  # a query without a key has maximum _FLOOR, so that all its weights underflow to exactly 0


Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Attention over one set of segments: [B, T, H, K] from queries [B, T, H, K], keys and values [B, T, N, K]."""


def target(device: jax.Device) -> feasibility.CompileTarget:
    """Returns what kind of device this is; works on devices of a topology description too."""
    # AMD's GPUs answer with a name, such as gfx90a, and CPUs and TPUs have no such attribute.
    parts = str(getattr(device, "compute_capability", "")).split(".")
    capability = (int(parts[0]), int(parts[1])) if len(parts) == 2 and all(part.isdigit() for part in parts) else (0, 0)
    return feasibility.CompileTarget(device.platform, capability)


def prepare(
    segments_BxT: jax.Array,
    lengths_BxM: jax.Array | None = None,
    until_BxT: jax.Array | None = None,
    *,
    kernel: str,
    chunk: int,
    heads: int,
    head_dim: int,
    dtype: str,
    on: feasibility.CompileTarget = feasibility.CPU,
    packed: bool = True,
) -> Attend:
    """Returns the attention function for these segments, after it has computed what all layers share.

    Args:
      segments_BxT: int; 0 is padding. "cudnn" needs the sequences of a row numbered from 1, one after another from
        its first column, and at most `models.rows.max_segments` of them, as `data.packing` lays them out.
      lengths_BxM: int32 tokens of each sequence, 0 for sequences that do not exist. Only "cudnn" reads it, whose time
        and memory grow with M. None: M is `models.rows.max_segments`.
      until_BxT: int32, first column of the row after those that may attend to the key, 0 at padding: rows of trees,
        for which any `kernel` gives way to "chunked". None: all later columns of the segment may.
      kernel: "chunked"; "splash" (TPU); "cudnn" (GPU, bfloat16); "auto" takes the platform's kernel if it can compute
        this case, else "chunked".
      chunk: number of queries and keys in a block of "chunked"; rows up to this length are one dense block.
      heads: H.
      head_dim: K.
      dtype: dtype of queries, keys and values.
      on: device that runs the program.
      packed: several sequences may share a row.

    Raises:
      ConfigError: the kernel cannot run on this device or cannot compute this case, or the row does not divide over
        `context`.
    """
    tokens = segments_BxT.shape[1]
    context, own_heads = sharding.ways("context"), heads // sharding.ways("tensor")
    feasibility.check_context(own_heads, context, tokens)
    by_heads = feasibility.splits_heads(own_heads, context)
    chosen = feasibility.choose_attention(kernel, on, tokens, head_dim, dtype, packed, whole_rows=by_heads)
    if until_BxT is not None:
        chosen = "chunked"
    local: context_attention.LocalAttention = functools.partial(chunked, chunk=chunk)
    # Whole on every device of `context`: ids are small, and what follows from them is not.
    segments_BxT = sharding.constrain(segments_BxT, ("batch", None))
    shared: tuple[jax.Array, ...] = (segments_BxT,)
    if until_BxT is not None:
        shared += (sharding.constrain(until_BxT, ("batch", None)),)
    if chosen == "splash":
        local = functools.partial(splash_attention.attend, residual_name=SAVED_NAMES[0])
        shared += (splash_attention.needed_blocks(segments_BxT),)
    elif chosen == "cudnn":
        local = cudnn_attention.attend
        if lengths_BxM is None:
            lengths_BxM = cudnn_attention.sequence_lengths(segments_BxT, rows.max_segments(tokens, packed))
        shared += cudnn_attention.layout(lengths_BxM)
    if (mesh := sharding.current_mesh()) is not None:
        if context > 1:
            part = functools.partial(chunked_part, chunk=chunk)
            local = context_attention.over_heads(local) if by_heads else context_attention.over_queries(part)
        split, batch = sharding.spec(("batch", "tokens", "heads", None)), sharding.spec(("batch",))
        specs = (split, split, split, *(batch for _ in shared))
        local = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=split, check_vma=False)
    return lambda q_BxTxHxK, k_BxTxNxK, v_BxTxNxK: local(q_BxTxHxK, k_BxTxNxK, v_BxTxNxK, *shared)


def saveable(primitive: Any, *arguments: Any, **parameters: Any) -> bool:
    """A policy for `jax.checkpoint`: saves the forward results of attention that its backward pass needs.

    cuDNN's are the results of a primitive, because JAX gives them no name.
    """
    names = jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES)
    return primitive.name == cudnn_attention.FORWARD_PRIMITIVE or bool(names(primitive, *arguments, **parameters))


def chunked(
    q_BxTxHxK: jax.Array,
    k_BxTxNxK: jax.Array,
    v_BxTxNxK: jax.Array,
    segments_BxT: jax.Array,
    until_BxT: jax.Array | None = None,
    *,
    chunk: int,
) -> jax.Array:
    """Computes attention in blocks, so that no [T, T] array exists in either pass if T exceeds the chunk.

    Uses online softmax over key blocks (arXiv 2205.14135, algorithm 1). Its backward pass recomputes the weights from
    the saved normalizers. Skips key blocks after the diagonal, and before the first one that the query block needs.

    Returns:
      [B, T, H, K]; 0 at padding.
    """
    tokens = q_BxTxHxK.shape[1]
    if tokens <= chunk:
        return dense(q_BxTxHxK, k_BxTxNxK, v_BxTxNxK, segments_BxT, until_BxT)

    def pad(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, -tokens % chunk), *(((0, 0),) * (x.ndim - 2))))

    q_BxTxHxK, k_BxTxNxK, v_BxTxNxK, segments_BxT = map(pad, (q_BxTxHxK, k_BxTxNxK, v_BxTxNxK, segments_BxT))
    until_BxT = None if until_BxT is None else pad(until_BxT)
    blocks_I = jnp.arange(-(-tokens // chunk))
    return _in_blocks(chunk, q_BxTxHxK, k_BxTxNxK, v_BxTxNxK, segments_BxT, blocks_I, until_BxT)[:, :tokens]


def chunked_part(
    q_BxTxHxK: jax.Array,
    k_BxSxNxK: jax.Array,
    v_BxSxNxK: jax.Array,
    firsts: jax.Array,
    segments_BxS: jax.Array,
    until_BxS: jax.Array | None = None,
    *,
    chunk: int,
) -> jax.Array:
    """Computes attention of two halves of queries over all keys of their rows, in blocks like `chunked`.

    Args:
      q_BxTxHxK: queries; each half is a run of columns of the row.
      k_BxSxNxK: keys of whole rows; S is a multiple of T / 2.
      v_BxSxNxK: values of whole rows.
      firsts: int [2], first column of each half, ascending, multiples of T / 2.
      segments_BxS: segment ids of whole rows.
      until_BxS: `until_BxT` of `prepare`, for whole rows.
      chunk: most queries and keys of a block.
    """
    half = q_BxTxHxK.shape[1] // 2
    # Each run of T / 2 columns becomes whole blocks, so that a block has one place in the row. As few and as small
    # blocks as possible: most lengths then need no padding, and others few columns.
    blocks = -(-half // chunk)
    size = -(-half // blocks)

    def pad(x: jax.Array) -> jax.Array:
        runs = x.reshape(x.shape[0], -1, half, *x.shape[2:])
        padded = jnp.pad(runs, ((0, 0), (0, 0), (0, blocks * size - half), *(((0, 0),) * (x.ndim - 2))))
        return padded.reshape(x.shape[0], -1, *x.shape[2:])

    q_BxTxHxK, k_BxSxNxK, v_BxSxNxK, segments_BxS = map(pad, (q_BxTxHxK, k_BxSxNxK, v_BxSxNxK, segments_BxS))
    if until_BxS is not None:
        # Its values are columns, which the padding of each run moves.
        until_BxS = pad(until_BxS // half * (blocks * size) + until_BxS % half)
    blocks_I = (firsts[:, None] // half * blocks + jnp.arange(blocks)).reshape(-1)
    out_BxTxHxK = _in_blocks(size, q_BxTxHxK, k_BxSxNxK, v_BxSxNxK, segments_BxS, blocks_I, until_BxS)
    runs = out_BxTxHxK.reshape(out_BxTxHxK.shape[0], 2, blocks * size, *out_BxTxHxK.shape[2:])[:, :, :half]
    return runs.reshape(runs.shape[0], 2 * half, *runs.shape[3:])


def _in_blocks(
    chunk: int,
    q_BxTxHxK: jax.Array,
    k_BxSxNxK: jax.Array,
    v_BxSxNxK: jax.Array,
    segments_BxS: jax.Array,
    blocks_I: jax.Array,
    until_BxS: jax.Array | None,
) -> jax.Array:
    """Runs the kernel on whole blocks; `blocks_I` is the place in the row of each block of queries, ascending."""
    rows, _, heads, head_dim = q_BxTxHxK.shape
    kv_heads = k_BxSxNxK.shape[2]
    q_BxNxGxTxK = q_BxTxHxK.reshape(rows, -1, kv_heads, heads // kv_heads, head_dim).transpose(0, 2, 3, 1, 4)
    k_BxNxSxK, v_BxNxSxK = (x.transpose(0, 2, 1, 3) for x in (k_BxSxNxK, v_BxSxNxK))
    out_BxNxGxTxK = _flash(chunk, q_BxNxGxTxK, k_BxNxSxK, v_BxNxSxK, segments_BxS, blocks_I, until_BxS)
    return out_BxNxGxTxK.transpose(0, 3, 1, 2, 4).reshape(q_BxTxHxK.shape)


def dense(
    q_BxTxHxK: jax.Array,
    k_BxTxNxK: jax.Array,
    v_BxTxNxK: jax.Array,
    segments_BxT: jax.Array,
    until_BxT: jax.Array | None = None,
) -> jax.Array:
    """Computes attention with the whole [T, T] matrix at once; softmax in float32.

    Returns:
      [B, T, H, K]; 0 at padding.
    """
    rows, tokens, _, head_dim = q_BxTxHxK.shape
    q_BxTxNxGxK = q_BxTxHxK.reshape(rows, tokens, k_BxTxNxK.shape[2], -1, head_dim)
    scores = jnp.einsum("btngk,bsnk->bngts", q_BxTxNxGxK, k_BxTxNxK, preferred_element_type=jnp.float32)
    scores = jnp.where(_mask(segments_BxT, segments_BxT, 0, until_BxT), scores * head_dim**-0.5, _MASKED)
    # The maximum cancels in weights / total, so it needs no gradient.
    top = jax.lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), _FLOOR))
    weights = jnp.exp(scores - top)
    total = weights.sum(-1)
    weights = weights.astype(v_BxTxNxK.dtype)
    out = jnp.einsum("bngts,bsnk->btngk", weights, v_BxTxNxK, preferred_element_type=jnp.float32)
    # A padding query has no key: its total is 0, and its output becomes 0.
    total_BxTxNxG = jnp.where(total == 0, 1.0, total).transpose(0, 3, 1, 2)
    return (out / total_BxTxNxG[..., None]).astype(q_BxTxHxK.dtype).reshape(q_BxTxHxK.shape)


def _mask(
    queries_BxT: jax.Array,
    keys_BxS: jax.Array,
    ahead: jax.Array | int,
    until_BxS: jax.Array | None,
) -> jax.Array:
    """Returns [B, 1, 1, T, S]: True if the key has the query's segment, is not later, and the query is in its subtree.

    Args:
      queries_BxT: segments of the queries.
      keys_BxS: segments of the keys.
      ahead: column of the first query, counted from that of the first key.
      until_BxS: ends of the keys' subtrees, counted from the column of the first query; None: no trees.
    """
    same = (queries_BxT[:, :, None] == keys_BxS[:, None, :]) & (queries_BxT[:, :, None] != 0)
    query_T, key_S = jnp.arange(queries_BxT.shape[1]) + ahead, jnp.arange(keys_BxS.shape[1])
    mask_BxTxS = same & (query_T[:, None] >= key_S[None, :])
    if until_BxS is not None:
        mask_BxTxS &= jnp.arange(queries_BxT.shape[1])[:, None] < until_BxS[:, None, :]
    return mask_BxTxS[:, None, None]


# --------------------------------------------------------------------------------------------------------------------
# The chunked kernel. Shapes: q, out [B, N, G, T, K]; k, v [B, N, S, K]; normalizer [B, N, G, T] (log of the sum of
# exponentiated scores); T and S are multiples of the chunk. Block n of the queries stands at block blocks_I[n] of the
# row.
# --------------------------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(
    chunk: int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments_BxS: jax.Array,
    blocks_I: jax.Array,
    until_BxS: jax.Array | None,
) -> jax.Array:
    return _flash_forward(chunk, q, k, v, segments_BxS, blocks_I, until_BxS)[0]


def _flash_forward(
    chunk: int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments_BxS: jax.Array,
    blocks_I: jax.Array,
    until_BxS: jax.Array | None,
) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
    # Each query block visits a contiguous range of key blocks; blocks of the range that are not needed are masked.
    needed = _needed_blocks(segments_BxS, chunk, until_BxS)[blocks_I]
    first = jnp.argmax(needed, axis=1)
    stop = jnp.where(needed.any(axis=1), blocks_I + 1, first)

    def query_block(n: jax.Array) -> tuple[jax.Array, jax.Array]:
        i, q_i = blocks_I[n], _block(q, n, chunk)

        def key_block(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            out, top, total = carry
            scores = _scores(q_i, _block(k, j, chunk), segments_BxS, until_BxS, i, j, chunk)
            new_top = jnp.maximum(top, scores.max(-1))
            weights, shrink = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
            value = jnp.einsum(
                "bngts,bnsk->bngtk", weights.astype(v.dtype), _block(v, j, chunk), preferred_element_type=jnp.float32
            )
            return out * shrink[..., None] + value, new_top, total * shrink + weights.sum(-1)

        shape = q_i.shape[:-1]
        start = (jnp.zeros(q_i.shape, jnp.float32), jnp.full(shape, _FLOOR), jnp.zeros(shape))
        out, top, total = jax.lax.fori_loop(first[n], stop[n], key_block, start)
        # A query without a key gets a huge normalizer, so that exp(score - normalizer) in the backward pass is 0.
        normalizer = jnp.where(total == 0, -_MASKED, top + jnp.log(jnp.where(total == 0, 1.0, total)))
        return (out / jnp.where(total == 0, 1.0, total)[..., None]).astype(q.dtype), normalizer

    out, normalizer = jax.lax.map(query_block, jnp.arange(len(needed)))
    out = checkpoint_name(_unblock(out, -2), SAVED_NAMES[0])
    normalizer = checkpoint_name(_unblock(normalizer, -1), SAVED_NAMES[1])
    return out, (q, k, v, segments_BxS, blocks_I, until_BxS, out, normalizer)


def _flash_backward(
    chunk: int, saved: tuple[Any, ...], grad: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None, None, None]:
    q, k, v, segments_BxS, blocks_I, until_BxS, out, normalizer = saved
    needed = _needed_blocks(segments_BxS, chunk, until_BxS)[blocks_I]
    # The mirror of the forward range: from the first query block that needs the key block to the last one.
    first = jnp.argmax(needed, axis=0)
    stop = jnp.where(needed.any(axis=0), len(needed) - jnp.argmax(needed[::-1], axis=0), 0)
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    # Sum over keys of weight * d(weight): the softmax gradient subtracts it (arXiv 2205.14135, appendix B.2).
    shared = (grad.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)

    def key_block(dq: jax.Array, j: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        k_j, v_j = _block(k, j, chunk), _block(v, j, chunk)

        def query_block(n: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            dq, dk_j, dv_j = carry
            q_i, grad_i = _block(q, n, chunk), _block(grad, n, chunk)
            scores = _scores(q_i, k_j, segments_BxS, until_BxS, blocks_I[n], j, chunk)
            weights = jnp.exp(scores - _block(normalizer, n, chunk, -1)[..., None])
            dv_j += dot("bngts,bngtk->bnsk", weights.astype(grad.dtype), grad_i)
            dweights = dot("bngtk,bnsk->bngts", grad_i, v_j) - _block(shared, n, chunk, -1)[..., None]
            dscores = (weights * dweights * q.shape[-1] ** -0.5).astype(q.dtype)
            dk_j += dot("bngts,bngtk->bnsk", dscores, q_i)
            dq_i = _block(dq, n, chunk) + dot("bngts,bnsk->bngtk", dscores, k_j)
            return jax.lax.dynamic_update_slice_in_dim(dq, dq_i, n * chunk, axis=3), dk_j, dv_j

        zero = jnp.zeros(k_j.shape, jnp.float32)
        dq, dk_j, dv_j = jax.lax.fori_loop(first[j], stop[j], query_block, (dq, zero, zero))
        return dq, (dk_j.astype(k.dtype), dv_j.astype(v.dtype))

    dq, blocks = jax.lax.scan(key_block, jnp.zeros(q.shape, jnp.float32), jnp.arange(needed.shape[1]))
    dk, dv = (_unblock(block, -2) for block in blocks)
    return dq.astype(q.dtype), dk, dv, None, None, None


_flash.defvjp(_flash_forward, _flash_backward)


def _needed_blocks(segments_BxT: jax.Array, chunk: int, until_BxT: jax.Array | None = None) -> jax.Array:
    """Returns [T / C, T / C] bool: True if a query block of any row may attend to the key block. Judges by order and by
    the range of segment ids, padding aside, and by the last query that a key of the block is visible to."""
    blocks = segments_BxT.reshape(segments_BxT.shape[0], -1, chunk)
    lowest = jnp.where(blocks == 0, jnp.iinfo(blocks.dtype).max, blocks).min(-1)
    highest = blocks.max(-1)
    meet = (lowest[:, :, None] <= highest[:, None, :]) & (lowest[:, None, :] <= highest[:, :, None])
    if until_BxT is not None:
        last = until_BxT.reshape(blocks.shape).max(-1)
        meet &= last[:, None, :] > jnp.arange(blocks.shape[1])[:, None] * chunk
    return jnp.tril(meet.any(axis=0))


def _scores(
    q_i: jax.Array,
    k_j: jax.Array,
    segments_BxT: jax.Array,
    until_BxT: jax.Array | None,
    i: jax.Array,
    j: jax.Array,
    chunk: int,
) -> jax.Array:
    """Returns the masked scores of one block, [B, N, G, C, C] in float32."""
    scores = jnp.einsum("bngtk,bnsk->bngts", q_i, k_j, preferred_element_type=jnp.float32) * q_i.shape[-1] ** -0.5
    until = None if until_BxT is None else _block(until_BxT, j, chunk, -1) - i * chunk
    mask = _mask(_block(segments_BxT, i, chunk, -1), _block(segments_BxT, j, chunk, -1), (i - j) * chunk, until)
    return jnp.where(mask, scores, _MASKED)


def _block(x: jax.Array, index: jax.Array, chunk: int, axis: int = -2) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, index * chunk, chunk, axis)


def _unblock(x: jax.Array, axis: int) -> jax.Array:
    """Joins blocks stacked on axis 0 into one token axis at `axis` (negative)."""
    x = jnp.moveaxis(x, 0, axis - 1)
    end = x.ndim + axis
    return x.reshape(*x.shape[: end - 1], -1, *x.shape[end + 1 :])
