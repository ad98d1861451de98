"""Trains the quickstart's agent with a mixture of experts: Qwen3-MoE of 8 experts, of which each token takes 2.

On several devices the experts are split over `trainer.fsdp` and their columns over `trainer.tensor`. On two cores one
device trains.

Expected: the reward (mean of 5 steps) rises from 0.30 to 0.97, the held-out accuracy from 0.29 to 0.95. The largest
ratio of the engine's and the trainer's probability of a token is usually 1.00002. A tied expert tips now and then: 1.10
in one step of 200. It took 4 minutes on 2 cores that other work shared.

  python launch/train.py --config=configs/moe_cpu.py
"""

from configs import quickstart
from libra_jax import config as config_lib


def get_config() -> config_lib.RunConfig:
    config = quickstart.get_config()
    config.name = "moe_cpu"
    config.model.preset = "libra-tiny-moe"
    return config
