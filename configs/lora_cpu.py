"""Trains the quickstart's agent with a low-rank adapter (LoRA) on frozen weights, on two CPU cores.

The warm start trains all weights, as in the quickstart. Then they are frozen, and reinforcement learning trains an
adapter of rank 8 on every projection. Each weight sync sends the adapter alone to vLLM's LoRA runtime.

  python launch/train.py --config=configs/lora_cpu.py
"""

from configs import quickstart
from libra_jax import config as libra_config


def get_config() -> libra_config.RunConfig:
    config = quickstart.get_config()
    config.name = "lora_cpu"
    config.steps = 40
    config.model.lora.rank = 8
    config.model.lora.alpha = 16.0
    # Ten times the quickstart's: the two factors of an adapter start near zero, and their product moves slowly.
    config.optimizer.learning_rate = 1e-2
    return config
