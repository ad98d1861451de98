"""Rotary position embedding with the scaling variants of Llama and Qwen.

Letters: B rows, T tokens, H heads, K head width.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from libra_jax.models import config as model_config


def frequencies(rope: model_config.RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Returns the inverse wavelengths, and the scale of cosine and sine.

    Follows transformers' `modeling_rope_utils` (linear, llama3, and yarn: arXiv 2309.00071 section 3).

    Args:
      rope: variant and its settings.
      head_dim: K.

    Returns:
      float32 array [K / 2], in radians a position; and the scale.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # The power in float64, rounded once: numpy's own float32 power differs from torch's in the last bit. At position
    # 100,000 that bit is 0.01 radians. All else is float32, operation by operation as in transformers.
    power = (np.float64(rope.theta) ** exponent.astype(np.float64)).astype(np.float32)
    inverse = np.float32(1.0) / power
    if rope.kind == "linear":
        return inverse / np.float32(rope.factor), 1.0
    if rope.kind == "llama3":
        turns = rope.original_max_positions * inverse / (2 * math.pi)  # full turns over the original context
        smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        return ((1 - smooth) * inverse / rope.factor + smooth * inverse).astype(np.float32), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, power, head_dim)
    return inverse, 1.0


def tables(rope: model_config.RopeConfig, head_dim: int, positions_BxT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine of each position's angles, float32, both [B, T, K / 2]."""
    inverse, scale = frequencies(rope, head_dim)
    angles = positions_BxT[..., None].astype(jnp.float32) * jnp.asarray(inverse)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(x_BxTxHxK: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates each head's halves (x1, x2) to (x1 cos - x2 sin, x2 cos + x1 sin) in float32; keeps the dtype."""
    first, second = jnp.split(x_BxTxHxK.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BxTxHxK.dtype)


def _yarn(rope: model_config.RopeConfig, power: np.ndarray, head_dim: int) -> tuple[np.ndarray, float]:
    """Returns yarn's inverse wavelengths and scale; `power`: the unstretched wavelengths, float32 [K / 2]."""
    # The ramp ends at the (real) dimensions that turn `beta_fast` and `beta_slow` times over the original context.
    low, high = (
        head_dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # As in transformers, 0.001 replaces a ramp of width 0, which would divide by zero.
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low or 0.001)
    keep = 1 - np.clip(ramp, 0, 1)
    stretched, unstretched = 1 / (np.float32(rope.factor) * power), 1 / power
    inverse = (stretched * (1 - keep) + unstretched * keep).astype(np.float32)

    def slope(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    scale = slope(1.0)
    if rope.attention_factor is not None:
        scale = rope.attention_factor
    elif rope.mscale and rope.mscale_all_dim:
        scale = slope(rope.mscale) / slope(rope.mscale_all_dim)
    return inverse, scale
