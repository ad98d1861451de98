"""Platform kernels for attention: Splash on TPU and cuDNN on GPU, if their masks can express ours.

Letters: B rows, T tokens, H query heads, N key and value heads, K head width.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention

from libra_jax.models import feasibility


class LocalAttention(Protocol):
    """Computes attention on one device: [B, T, H, K] from queries, keys, values and segment ids."""

    def __call__(
        self, q_BxTxHxK: jax.Array, k_BxTxNxK: jax.Array, v_BxTxNxK: jax.Array, segments_BxT: jax.Array, /
    ) -> jax.Array: ...


def choose(kernel: str, query_shape: tuple[int, ...], dtype: Any) -> str:
    """Returns the kernel to run here: "chunked", "splash" or "cudnn" (`models.feasibility.choose_attention`).

    Args:
      kernel: kernel that the config requests.
      query_shape: [B, T, H, K].
      dtype: dtype of the queries.

    Raises:
      ConfigError: the requested kernel cannot run on this platform, or not with these shapes and dtype.
    """
    _, tokens, _, head_dim = query_shape
    return feasibility.choose_attention(kernel, jax.default_backend(), tokens, head_dim, jnp.dtype(dtype).name)


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
