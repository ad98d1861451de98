"""Attention by cuDNN's fused kernels on NVIDIA GPUs, for packed and for unpacked rows.

A packed row is handed over as the first column and the length of each of its sequences; cuDNN computes nothing between
sequences, and nothing at padding. Without packing, each row is one sequence with a length.

Letters as in `attention`, and M sequences that a row may hold.
"""

from __future__ import annotations

import math
from typing import Protocol

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as stablehlo

from libra_jax.protocols import ConfigError

FORWARD_PRIMITIVE = "dot_product_attention_fwd_wrapper"
"""Name of the JAX primitive of the forward kernel. Its results are what the backward kernel needs: the output, and
the logarithm of the sum of exponentiated scores."""


class Fused(Protocol):
    """The call contract of `jax._src.cudnn.fused_attention_stablehlo.dot_product_attention`."""

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        q_seqlen: jax.Array,
        kv_seqlen: jax.Array,
        q_offsets: jax.Array | None,
        kv_offsets: jax.Array | None,
        scale: float,
        mask_type: stablehlo.MaskType,
    ) -> jax.Array:
        """Returns [B, T, H, K]. Leaves results outside of all sequences unwritten."""
        ...


def takes_grouped() -> bool:
    """Returns whether the installed JAX finds packed keys of grouped heads.

    Releases before 0.11.1 count the keys' offsets with the number of query heads (`_fix_seqlen_offsets`). So `attend`
    copies keys and values to every query head.
    """
    return jax.__version_info__ >= (0, 11, 1)


def sequence_lengths(segments_BxT: jax.Array, max_segments: int) -> jax.Array:
    """Returns the tokens of each sequence, int32 [B, M]; 0 for sequences that do not exist.

    Args:
      segments_BxT: int; the sequences of a row are numbered from 1; 0 is padding.
      max_segments: M, at least the largest number (static).
    """
    return (segments_BxT[:, None, :] == jnp.arange(1, max_segments + 1)[:, None]).sum(-1, dtype=jnp.int32)


def layout(lengths_BxM: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns where the sequences of each row begin and how long they are, as cuDNN takes them.

    A row without a sequence counts as one sequence of its first token, because a call without any sequence is not
    covered by JAX's tests of the kernel. `attend` clears what the kernel computes for this token.

    Args:
      lengths_BxM: int32 tokens of each sequence; 0 for sequences that do not exist. The sequences of a row follow one
        another from its first column.

    Returns:
      Starts [B, M + 1] and lengths [B, M], int32; -1 for sequences that do not exist. The last start is always -1.
    """
    first_M = jnp.arange(lengths_BxM.shape[1]) == 0
    lengths_BxM = jnp.where((lengths_BxM.max(-1, keepdims=True) == 0) & first_M, 1, lengths_BxM)
    starts_BxM = jnp.cumsum(lengths_BxM, axis=-1) - lengths_BxM
    exists_BxM = lengths_BxM > 0
    starts_BxM, lengths_BxM = (jnp.where(exists_BxM, x, -1) for x in (starts_BxM, lengths_BxM))
    return jnp.pad(starts_BxM, ((0, 0), (0, 1)), constant_values=-1), lengths_BxM


def attend(
    q_BxTxHxK: jax.Array,
    k_BxTxNxK: jax.Array,
    v_BxTxNxK: jax.Array,
    segments_BxT: jax.Array,
    starts_BxS: jax.Array,
    lengths_BxM: jax.Array,
    fused: Fused | None = None,
) -> jax.Array:
    """Computes attention with cuDNN.

    Args:
      q_BxTxHxK: bfloat16 queries.
      k_BxTxNxK: bfloat16 keys.
      v_BxTxNxK: bfloat16 values.
      segments_BxT: segment ids; 0 is padding.
      starts_BxS: starts of `layout`.
      lengths_BxM: lengths of `layout`. If M is 1, every row is one sequence that starts at column 0.
      fused: the kernel; a test's replacement for cuDNN.

    Returns:
      [B, T, H, K]; 0 at padding.

    Raises:
      ConfigError: packed arrays are too large for cuDNN's 32-bit offsets.
    """
    heads, kv_heads, head_dim = q_BxTxHxK.shape[2], k_BxTxNxK.shape[2], q_BxTxHxK.shape[3]
    packed = lengths_BxM.shape[1] > 1
    if packed and math.prod(q_BxTxHxK.shape) >= 2**31:
        raise ConfigError(
            f"config.trainer.rows_per_micro_batch: queries of shape {q_BxTxHxK.shape} on one device exceed the 32-bit "
            "offsets of cuDNN's packed rows; lower rows_per_micro_batch or raise trainer.tensor."
        )
    real_BxTx1x1 = (segments_BxT != 0)[..., None, None]

    # The kernel writes nothing at padding, in either pass. Clearing the result clears the output; clearing the inputs
    # clears the gradients.
    def clear(x_BxTxHxK: jax.Array) -> jax.Array:
        return jnp.where(real_BxTx1x1, x_BxTxHxK, jnp.zeros((), x_BxTxHxK.dtype))

    def widen(x_BxTxNxK: jax.Array) -> jax.Array:
        if takes_grouped() or not packed:
            return x_BxTxNxK
        shape = (*x_BxTxNxK.shape[:3], heads // kv_heads, head_dim)
        return jnp.broadcast_to(x_BxTxNxK[:, :, :, None], shape).reshape(q_BxTxHxK.shape)

    starts, lengths = (starts_BxS, lengths_BxM) if packed else (None, lengths_BxM[:, 0])
    out_BxTxHxK = (fused or stablehlo.dot_product_attention)(
        clear(q_BxTxHxK),
        widen(clear(k_BxTxNxK)),
        widen(clear(v_BxTxNxK)),
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=starts,
        kv_offsets=starts,
        scale=head_dim**-0.5,
        mask_type=stablehlo.MaskType.PADDING_CAUSAL,
    )
    return clear(out_BxTxHxK)
