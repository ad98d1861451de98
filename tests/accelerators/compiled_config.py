"""A run on accelerators whose programs the gates compile: bfloat16, packed rows, random weights."""

from libra_jax import config as config_lib


def get_config() -> config_lib.RunConfig:
    config = config_lib.RunConfig()
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "dots"
    config.trainer.row_tokens = 8192
    config.rollout.max_context = 8192
    config.rollout.tensor_parallel = (1, 1)
    config.algorithm.correction = "truncated"
    return config
