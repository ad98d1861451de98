"""Attention by JAX's Splash kernels (Pallas) on TPUs, which skip blocks between sequences of a packed row.

JAX builds the masks of these kernels from static shapes, so it skips only blocks after the diagonal. The kernels
themselves read at run time which blocks they compute. This module gives them that information from the segment ids.

Letters as in `attention`, and I query blocks, J key blocks of a row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as masks

from libra_jax.models import feasibility

BLOCKS = (1024, 512, 256, 128)
"""Block sizes in tokens, best first. A step of the kernel's grid costs about 0.35 us beside its products, and the
products of a block of 1024 x 1024 take longer than that; larger blocks skip less between sequences."""

COMPUTE_BLOCK = 512
"""Keys of a block whose scores exist at once, so that the scores of a block of 1024 queries fit the vector memory."""

FUSED_BLOCKS = 8
"""Most key blocks for which one backward kernel computes all gradients. It needs five matrix products where two kernels
need seven, but it writes one partial gradient of the queries for each key block."""


def block_size(tokens: int) -> int:
    """Returns the tokens of a block for rows of this length, which is a multiple of `feasibility.SPLASH_LANES`."""
    return next(size for size in BLOCKS if tokens % size == 0)


def needed_blocks(segments_BxT: jax.Array) -> jax.Array:
    """Returns the blocks that the kernels compute, bool [B, I, J].

    A block is needed if it is not after the diagonal, and some query and some key of it share a segment by the range of
    segment ids. Padding counts as segment 0. Blocks on the diagonal are always needed, because a query without a key
    would divide by 0.
    """
    rows, tokens = segments_BxT.shape
    blocks_BxIxC = segments_BxT.reshape(rows, -1, block_size(tokens))
    # Padding at the end of a block would stretch its range down to 0 and meet every padding before it.
    lowest_BxI = jnp.where(blocks_BxIxC == 0, jnp.iinfo(jnp.int32).max, blocks_BxIxC).min(-1)
    highest_BxI = blocks_BxIxC.max(-1)
    meet_BxIxJ = (lowest_BxI[:, :, None] <= highest_BxI[:, None, :]) & (
        lowest_BxI[:, None, :] <= highest_BxI[:, :, None]
    )
    return jnp.tril(meet_BxIxJ) | jnp.eye(meet_BxIxJ.shape[-1], dtype=bool)


def attend(
    q_BxTxHxK: jax.Array,
    k_BxTxNxK: jax.Array,
    v_BxTxNxK: jax.Array,
    segments_BxT: jax.Array,
    needed_BxIxJ: jax.Array,
    residual_name: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes attention with Splash. Padding attends to padding of its own block.

    Heads are padded with zeros to the lane width, which changes no score and no output.

    Args:
      q_BxTxHxK: queries; T is a multiple of `feasibility.SPLASH_LANES`.
      k_BxTxNxK: keys.
      v_BxTxNxK: values.
      segments_BxT: segment ids; 0 is padding.
      needed_BxIxJ: result of `needed_blocks`.
      residual_name: `checkpoint_name` of the forward results that the backward pass needs.
      interpret: run the kernels in Pallas' interpreter, on any platform.

    Returns:
      [B, T, H, K]; finite and meaningless at padding.
    """
    head_dim = q_BxTxHxK.shape[-1]

    def by_head(x_BxTxHxK: jax.Array) -> jax.Array:
        widened = jnp.pad(x_BxTxHxK, ((0, 0), (0, 0), (0, 0), (0, -head_dim % feasibility.SPLASH_LANES)))
        return widened.transpose(0, 2, 1, 3)

    def row(
        q_HxTxK: jax.Array, k_NxTxK: jax.Array, v_NxTxK: jax.Array, segments_T: jax.Array, needed_IxJ: jax.Array
    ) -> jax.Array:
        kernel = _kernel(len(segments_T), needed_IxJ, residual_name, interpret)
        return kernel(q_HxTxK, k_NxTxK, v_NxTxK, kernels.SegmentIds(q=segments_T, kv=segments_T))

    # Splash applies no scale of its own; the true width counts, not the padded one.
    arrays = (by_head(q_BxTxHxK * head_dim**-0.5), by_head(k_BxTxNxK), by_head(v_BxTxNxK), segments_BxT, needed_BxIxJ)
    # Row after row: `vmap` would loop over rows too, because each row skips other blocks, but around each kernel, so
    # that the partial gradients of all rows would exist at once.
    if len(segments_BxT) == 1:
        out_BxHxTxK = row(*(array[0] for array in arrays))[None]
    else:
        out_BxHxTxK = jax.lax.map(lambda of_row: row(*of_row), arrays)
    return out_BxHxTxK.transpose(0, 2, 1, 3)[..., :head_dim]


def _kernel(
    tokens: int, needed_IxJ: jax.Array, residual_name: str | None, interpret: bool
) -> kernels.SplashAttentionKernel:
    block = block_size(tokens)
    compute = min(block, COMPUTE_BLOCK)
    fused = tokens // block <= FUSED_BLOCKS
    sizes = kernels.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=compute,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=compute,
        block_q_dq=None if fused else block,
        block_kv_dq=None if fused else block,
        use_fused_bwd_kernel=fused,
    )
    by_query = _mask_info(tokens, needed_IxJ, axis=1)
    return kernels.SplashAttentionKernel(
        by_query,
        None if fused else by_query,
        _mask_info(tokens, needed_IxJ, axis=0),
        block_sizes=sizes,
        is_mqa=False,
        save_residuals=False,
        mask_value=kernels.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=None,
        residual_checkpoint_name=residual_name,
        mask_function=_not_later,
        interpret=interpret,
    )


def _mask_info(tokens: int, needed_IxJ: jax.Array, axis: int) -> masks.MaskInfo:
    """Returns what a kernel reads to step over the blocks: which it computes, and which it loads.

    Args:
      tokens: length of the row.
      needed_IxJ: result of `needed_blocks` for the row.
      axis: axis of the blocks that the kernel visits one after another: 1 for keys, 0 for queries.
    """
    count = needed_IxJ.shape[axis]
    index = jnp.arange(count, dtype=jnp.int32).reshape((1, count) if axis else (count, 1))
    first = jnp.argmax(needed_IxJ, axis=axis, keepdims=True).astype(jnp.int32)
    last = count - 1 - jnp.argmax(jnp.flip(needed_IxJ, axis), axis=axis, keepdims=True).astype(jnp.int32)
    # A step over a block that is not needed names a block that is loaded already or that comes next.
    loaded_IxJ = jnp.clip(index, first, last)
    return masks.MaskInfo(
        data_next=loaded_IxJ[None].astype(jnp.int16),
        mask_next=None,
        block_mask=needed_IxJ[None].astype(jnp.int8),
        partial_mask_blocks=None,
        q_sequence=np.arange(tokens, dtype=np.int32),
    )


def _not_later(query: jax.Array, key: jax.Array) -> jax.Array:
    """Returns the causal mask of positions. A module-level function, so that one compilation serves every call."""
    return query >= key
