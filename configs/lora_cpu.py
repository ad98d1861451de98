"""Trains the quickstart's agent with a low-rank adapter (LoRA) on frozen weights, on two CPU cores.

The warm start trains all weights, as in the quickstart. Then they are frozen, and reinforcement learning trains an
adapter of rank 8 on every projection. Each weight sync sends the adapter alone to vLLM's LoRA runtime.

Expected: the reward (mean of 5 steps) rises from 0.51 to 0.92 in 40 steps, the held-out accuracy from 0.45 to 0.94. It
took 7 minutes on 2 cores that other work shared.

  python launch/train.py --config=configs/lora_cpu.py
"""

from configs import quickstart
from libra_jax import config as config_lib


def get_config() -> config_lib.RunConfig:
    config = quickstart.get_config()
    config.name = "lora_cpu"
    config.steps = 40
    config.model.lora.rank = 8
    config.model.lora.alpha = 16.0
    # Four times the quickstart's. B starts at zero, so the product of an adapter moves slowly at first.
    config.optimizer.learning_rate = 4e-3
    return config
