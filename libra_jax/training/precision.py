"""The precision of matrix products on accelerators."""

from __future__ import annotations

import jax


def keep_float32(platform: str, compute_dtype: str) -> None:
    """Sets JAX's default precision of matrix products so that float32 products are float32.

    By default JAX lets a GPU take TF32 inputs (10 bits) and a TPU bfloat16 ones (7 bits) for float32 products. The
    log-prob contract then fails: the trainer's log-probabilities leave those of an engine that computes in float32.
    A precision that is set already stays (JAX_DEFAULT_MATMUL_PRECISION). It holds for every thread of the process.

    Args:
      platform: JAX's name of it: "cpu", "gpu" or "tpu". CPUs compute in float32 anyway.
      compute_dtype: the model's, as `config.ModelConfig` has it.
    """
    if platform != "cpu" and compute_dtype == "float32" and jax.config.jax_default_matmul_precision is None:
        jax.config.update("jax_default_matmul_precision", "highest")
