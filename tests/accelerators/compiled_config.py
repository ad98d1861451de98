"""A run on accelerators whose programs the gates compile: bfloat16, packed rows, random weights."""

from libra_jax import config as libra_config


def get_config() -> libra_config.RunConfig:
    config = libra_config.RunConfig()
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "dots"
    config.trainer.row_tokens = 8192
    config.rollout.max_context = 8192
    config.rollout.tensor_parallel = (1, 1)
    config.algorithm.correction = "truncated"
    return config
