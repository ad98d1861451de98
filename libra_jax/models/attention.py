"""Causal attention within segments: one dense block for short rows, online softmax over blocks for long rows.

On a current mesh, each device attends over its own rows and heads (`shard_map`), because no row or head needs data of
another device. Platform kernels (Splash on TPU, cuDNN on GPU) compute the cases that their masks can express.

Letters: B rows, T queries, S keys, C chunk, H query heads, N key and value heads, G = H / N query heads a key head,
K head width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu import splash_attention

from libra_jax.models import feasibility, sharding

SAVED_NAMES = ("attention_output", "attention_normalizer")
"""`checkpoint_name`s of the forward results that the chunked backward pass needs."""

# Finite, because -inf minus -inf is NaN.
_MASKED = -1e30
_FLOOR = -1e20  # a query without a key has maximum _FLOOR, so that all its weights underflow to exactly 0


Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Attention over one set of segments: [B, T, H, K] from queries [B, T, H, K], keys and values [B, T, N, K]."""

LocalAttention = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""Attention on one device: [B, T, H, K] from queries, keys, values and segment ids [B, T]."""


def prepare(kernel: str, chunk: int, segments_BxT: jax.Array) -> Attend:
    """Returns the attention function for these segments.

    Args:
      kernel: "chunked"; "splash" (TPU); "cudnn" (GPU, bfloat16); "auto" takes the platform's kernel if it can compute
        this case, else "chunked".
      chunk: number of queries and keys in a block of "chunked"; rows up to this length are one dense block.
      segments_BxT: int; 0 is padding.

    Raises:
      ConfigError: the kernel cannot run here or cannot compute this case.
    """

    def attend(q_BxTxHxK: jax.Array, k_BxTxNxK: jax.Array, v_BxTxNxK: jax.Array) -> jax.Array:
        _, tokens, _, head_dim = q_BxTxHxK.shape
        chosen = feasibility.choose_attention(
            kernel, jax.default_backend(), tokens, head_dim, jnp.dtype(q_BxTxHxK.dtype).name
        )
        local: LocalAttention = functools.partial(chunked, chunk=chunk)
        if chosen == "splash":
            local = splash
        elif chosen == "cudnn":
            local = functools.partial(cudnn, otherwise=local)
        if (mesh := sharding.current_mesh()) is not None:
            heads, segments = sharding.spec(("batch", None, "heads", None)), sharding.spec(("batch", None))
            local = jax.shard_map(
                local, mesh=mesh, in_specs=(heads, heads, heads, segments), out_specs=heads, check_vma=False
            )
        return local(q_BxTxHxK, k_BxTxNxK, v_BxTxNxK, segments_BxT)

    return attend


def chunked(
    q_BxTxHxK: jax.Array, k_BxTxNxK: jax.Array, v_BxTxNxK: jax.Array, segments_BxT: jax.Array, chunk: int
) -> jax.Array:
    """Computes attention in blocks, so that no [T, T] array exists in either pass if T exceeds the chunk.

    Uses online softmax over key blocks (arXiv 2205.14135, algorithm 1). Its backward pass recomputes the weights from
    the saved normalizers. Skips key blocks after the diagonal, and before the first segment of the query block.

    Returns:
      [B, T, H, K]; 0 at padding.
    """
    rows, tokens, heads, head_dim = q_BxTxHxK.shape
    if tokens <= chunk:
        return dense(q_BxTxHxK, k_BxTxNxK, v_BxTxNxK, segments_BxT)
    kv_heads = k_BxTxNxK.shape[2]

    def pad(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, -tokens % chunk), *(((0, 0),) * (x.ndim - 2))))

    q_BxNxGxTxK = pad(q_BxTxHxK).reshape(rows, -1, kv_heads, heads // kv_heads, head_dim).transpose(0, 2, 3, 1, 4)
    k_BxNxTxK, v_BxNxTxK = (pad(x).transpose(0, 2, 1, 3) for x in (k_BxTxNxK, v_BxTxNxK))
    out_BxNxGxTxK = _flash(chunk, q_BxNxGxTxK, k_BxNxTxK, v_BxNxTxK, pad(segments_BxT))
    return out_BxNxGxTxK.transpose(0, 3, 1, 2, 4).reshape(rows, -1, heads, head_dim)[:, :tokens]


def dense(q_BxTxHxK: jax.Array, k_BxTxNxK: jax.Array, v_BxTxNxK: jax.Array, segments_BxT: jax.Array) -> jax.Array:
    """Computes attention with the whole [T, T] matrix at once; softmax in float32.

    Returns:
      [B, T, H, K]; 0 at padding.
    """
    rows, tokens, _, head_dim = q_BxTxHxK.shape
    q_BxTxNxGxK = q_BxTxHxK.reshape(rows, tokens, k_BxTxNxK.shape[2], -1, head_dim)
    scores = jnp.einsum("btngk,bsnk->bngts", q_BxTxNxGxK, k_BxTxNxK, preferred_element_type=jnp.float32)
    scores = jnp.where(_mask(segments_BxT, segments_BxT, 0), scores * head_dim**-0.5, _MASKED)
    # The maximum cancels in weights / total, so it needs no gradient.
    top = jax.lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), _FLOOR))
    weights = jnp.exp(scores - top)
    total = weights.sum(-1)
    weights = weights.astype(v_BxTxNxK.dtype)
    out = jnp.einsum("bngts,bsnk->btngk", weights, v_BxTxNxK, preferred_element_type=jnp.float32)
    # A padding query has no key: its total is 0, and its output becomes 0.
    total_BxTxNxG = jnp.where(total == 0, 1.0, total).transpose(0, 3, 1, 2)
    return (out / total_BxTxNxG[..., None]).astype(q_BxTxHxK.dtype).reshape(q_BxTxHxK.shape)


def splash(
    q_BxTxHxK: jax.Array,
    k_BxTxNxK: jax.Array,
    v_BxTxNxK: jax.Array,
    segments_BxT: jax.Array,
    interpret: bool = False,
) -> jax.Array:
    """Runs JAX's Splash attention (Pallas, TPU) with a causal mask and segment ids; padding attends to padding.

    Heads are padded with zeros to the lane width, which changes no score and no output.
    """
    _, tokens, heads, head_dim = q_BxTxHxK.shape
    # Cached by shape, because every layer and every step asks for the same kernel.
    kernel = _splash_kernel(tokens, heads, interpret)

    def by_head(x_BxTxHxK: jax.Array) -> jax.Array:
        widened = jnp.pad(x_BxTxHxK, ((0, 0), (0, 0), (0, 0), (0, -head_dim % feasibility.SPLASH_LANES)))
        return widened.transpose(0, 2, 1, 3)

    segment_ids = splash_attention.SegmentIds(q=segments_BxT, kv=segments_BxT)
    # Splash applies no scale of its own; the true width counts, not the padded one.
    scaled = by_head(q_BxTxHxK * head_dim**-0.5)
    out_BxHxTxK = jax.vmap(kernel)(scaled, by_head(k_BxTxNxK), by_head(v_BxTxNxK), segment_ids)
    return out_BxHxTxK.transpose(0, 2, 1, 3)[..., :head_dim]


def cudnn(
    q_BxTxHxK: jax.Array,
    k_BxTxNxK: jax.Array,
    v_BxTxNxK: jax.Array,
    segments_BxT: jax.Array,
    otherwise: LocalAttention,
    implementation: str = "cudnn",
) -> jax.Array:
    """Runs cuDNN's fused attention if every row is one segment followed by padding, else `otherwise`.

    cuDNN's mask is causal with one length per row, which covers only unpacked rows. The device decides at run time, so
    one compiled step serves both cases.
    """
    tokens = segments_BxT.shape[1]
    lengths_B = (segments_BxT != 0).sum(-1, dtype=jnp.int32)
    inside_BxT = jnp.arange(tokens) < lengths_B[:, None]
    one_segment = jnp.all(segments_BxT == jnp.where(inside_BxT, segments_BxT[:, :1], 0))

    def fused(q_BxTxHxK: jax.Array, k_BxTxNxK: jax.Array, v_BxTxNxK: jax.Array, _: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(
            q_BxTxHxK,
            k_BxTxNxK,
            v_BxTxNxK,
            is_causal=True,
            query_seq_lengths=lengths_B,
            key_value_seq_lengths=lengths_B,
            implementation=implementation,
        )

    return jax.lax.cond(one_segment, fused, otherwise, q_BxTxHxK, k_BxTxNxK, v_BxTxNxK, segments_BxT)


@functools.lru_cache(maxsize=8)
def _splash_kernel(tokens: int, heads: int, interpret: bool) -> Any:
    block = max(size for size in (128, 256, 512) if tokens % size == 0)
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    sizes = splash_attention.BlockSizes(**dict.fromkeys(names, block))
    mask = splash_attention.MultiHeadMask([splash_attention.CausalMask((tokens, tokens))] * heads)
    # Built outside of any trace, so that the cached kernel holds constants and no tracer.
    with jax.ensure_compile_time_eval():
        return splash_attention.make_splash_mha_single_device(mask=mask, block_sizes=sizes, interpret=interpret)


def _mask(queries_BxT: jax.Array, keys_BxS: jax.Array, ahead: jax.Array | int) -> jax.Array:
    """Returns [B, 1, 1, T, S]: True if the key has the query's segment and is not later. Queries start at `ahead`."""
    same = (queries_BxT[:, :, None] == keys_BxS[:, None, :]) & (queries_BxT[:, :, None] != 0)
    query_T, key_S = jnp.arange(queries_BxT.shape[1]) + ahead, jnp.arange(keys_BxS.shape[1])
    return (same & (query_T[:, None] >= key_S[None, :]))[:, None, None]


# --------------------------------------------------------------------------------------------------------------------
# The chunked kernel. Shapes: q, out [B, N, G, T, K]; k, v [B, N, T, K]; normalizer [B, N, G, T] (log of the sum of
# exponentiated scores); T is a multiple of the chunk.
# --------------------------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(chunk: int, q: jax.Array, k: jax.Array, v: jax.Array, segments_BxT: jax.Array) -> jax.Array:
    return _flash_forward(chunk, q, k, v, segments_BxT)[0]


def _flash_forward(
    chunk: int, q: jax.Array, k: jax.Array, v: jax.Array, segments_BxT: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    # Each query block visits a contiguous range of key blocks; blocks of the range that are not needed are masked.
    needed = _needed_blocks(segments_BxT, chunk)
    first = jnp.argmax(needed, axis=1)
    stop = jnp.where(needed.any(axis=1), jnp.arange(len(needed)) + 1, first)

    def query_block(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        q_i = _block(q, i, chunk)

        def key_block(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            out, top, total = carry
            scores = _scores(q_i, _block(k, j, chunk), segments_BxT, i, j, chunk)
            new_top = jnp.maximum(top, scores.max(-1))
            weights, shrink = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
            value = jnp.einsum(
                "bngts,bnsk->bngtk", weights.astype(v.dtype), _block(v, j, chunk), preferred_element_type=jnp.float32
            )
            return out * shrink[..., None] + value, new_top, total * shrink + weights.sum(-1)

        shape = q_i.shape[:-1]
        start = (jnp.zeros(q_i.shape, jnp.float32), jnp.full(shape, _FLOOR), jnp.zeros(shape))
        out, top, total = jax.lax.fori_loop(first[i], stop[i], key_block, start)
        # A query without a key gets a huge normalizer, so that exp(score - normalizer) in the backward pass is 0.
        normalizer = jnp.where(total == 0, -_MASKED, top + jnp.log(jnp.where(total == 0, 1.0, total)))
        return (out / jnp.where(total == 0, 1.0, total)[..., None]).astype(q.dtype), normalizer

    out, normalizer = jax.lax.map(query_block, jnp.arange(len(needed)))
    out = checkpoint_name(_unblock(out, -2), SAVED_NAMES[0])
    normalizer = checkpoint_name(_unblock(normalizer, -1), SAVED_NAMES[1])
    return out, (q, k, v, segments_BxT, out, normalizer)


def _flash_backward(
    chunk: int, saved: tuple[jax.Array, ...], grad: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, segments_BxT, out, normalizer = saved
    needed = _needed_blocks(segments_BxT, chunk)
    count = len(needed)
    # The mirror of the forward range: from the diagonal to the last query block that needs the key block.
    stop = jnp.where(needed.any(axis=0), count - jnp.argmax(needed[::-1], axis=0), 0)
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    # Sum over keys of weight * d(weight): the softmax gradient subtracts it (arXiv 2205.14135, appendix B.2).
    shared = (grad.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)

    def key_block(dq: jax.Array, j: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        k_j, v_j = _block(k, j, chunk), _block(v, j, chunk)

        def query_block(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            dq, dk_j, dv_j = carry
            q_i, grad_i = _block(q, i, chunk), _block(grad, i, chunk)
            weights = jnp.exp(
                _scores(q_i, k_j, segments_BxT, i, j, chunk) - _block(normalizer, i, chunk, -1)[..., None]
            )
            dv_j += dot("bngts,bngtk->bnsk", weights.astype(grad.dtype), grad_i)
            dweights = dot("bngtk,bnsk->bngts", grad_i, v_j) - _block(shared, i, chunk, -1)[..., None]
            dscores = (weights * dweights * q.shape[-1] ** -0.5).astype(q.dtype)
            dk_j += dot("bngts,bngtk->bnsk", dscores, q_i)
            dq_i = _block(dq, i, chunk) + dot("bngts,bnsk->bngtk", dscores, k_j)
            return jax.lax.dynamic_update_slice_in_dim(dq, dq_i, i * chunk, axis=3), dk_j, dv_j

        zero = jnp.zeros(k_j.shape, jnp.float32)
        dq, dk_j, dv_j = jax.lax.fori_loop(j, stop[j], query_block, (dq, zero, zero))
        return dq, (dk_j.astype(k.dtype), dv_j.astype(v.dtype))

    dq, blocks = jax.lax.scan(key_block, jnp.zeros(q.shape, jnp.float32), jnp.arange(count))
    dk, dv = (_unblock(block, -2) for block in blocks)
    return dq.astype(q.dtype), dk, dv, None


_flash.defvjp(_flash_forward, _flash_backward)


def _needed_blocks(segments_BxT: jax.Array, chunk: int) -> jax.Array:
    """Returns [T / C, T / C] bool: True if a query block of any row may attend to the key block. Judges by order and by
    the range of segment ids, padding aside."""
    blocks = segments_BxT.reshape(segments_BxT.shape[0], -1, chunk)
    lowest = jnp.where(blocks == 0, jnp.iinfo(blocks.dtype).max, blocks).min(-1)
    highest = blocks.max(-1)
    meet = (lowest[:, :, None] <= highest[:, None, :]) & (lowest[:, None, :] <= highest[:, :, None])
    return jnp.tril(meet.any(axis=0))


def _scores(
    q_i: jax.Array, k_j: jax.Array, segments_BxT: jax.Array, i: jax.Array, j: jax.Array, chunk: int
) -> jax.Array:
    """Returns the masked scores of one block, [B, N, G, C, C] in float32."""
    scores = jnp.einsum("bngtk,bnsk->bngts", q_i, k_j, preferred_element_type=jnp.float32) * q_i.shape[-1] ** -0.5
    mask = _mask(_block(segments_BxT, i, chunk, -1), _block(segments_BxT, j, chunk, -1), (i - j) * chunk)
    return jnp.where(mask, scores, _MASKED)


def _block(x: jax.Array, index: jax.Array, chunk: int, axis: int = -2) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, index * chunk, chunk, axis)


def _unblock(x: jax.Array, axis: int) -> jax.Array:
    """Joins blocks stacked on axis 0 into one token axis at `axis` (negative)."""
    x = jnp.moveaxis(x, 0, axis - 1)
    end = x.ndim + axis
    return x.reshape(*x.shape[: end - 1], -1, *x.shape[end + 1 :])
