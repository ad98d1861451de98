"""The precision of matrix products on accelerators."""

from __future__ import annotations

import jax


def keep_float32(platform: str, compute_dtype: str) -> None:
    """Sets JAX's default precision of matrix products so that float32 products are computed in float32.

    By default, JAX lets a GPU round the inputs of float32 products to TF32 (10 bits), and a TPU to bfloat16 (7 bits).
    That breaks the log-prob contract: the trainer's log-probabilities differ from the log-probabilities of an engine
    that computes in float32. A precision that is already set stays (JAX_DEFAULT_MATMUL_PRECISION). The setting holds
    for every thread of the process.

    Args:
      platform: JAX's platform name: "cpu", "gpu" or "tpu". CPUs always compute in float32.
      compute_dtype: compute dtype of the model, as in `config.ModelConfig`.
    """
    if platform != "cpu" and compute_dtype == "float32" and jax.config.jax_default_matmul_precision is None:
        jax.config.update("jax_default_matmul_precision", "highest")
