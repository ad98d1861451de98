"""Trains in an environment by config alone: FrozenLake, of gymnasium's toy texts, played move by move.

The 0.41 M-parameter character model learns how moves are written from a few supervised steps on random episodes. The
set-up command installs gymnasium. The lake is small, so that ten steps of reinforcement learning are enough.

Expected (seed 0, 2026-11-24): the reward is the share of episodes that reach the goal. It rises from 0.2 to 0.3 in the
first two steps to between 0.8 and 1 from the fourth step on. The whole command takes 3 minutes of CPU time; it took 7.5
minutes on two cores at a load of 6 to 10.

  python launch/train.py --config=configs/environments_cpu.py
"""

from libra_jax import config as config_lib

_ENVIRONMENTS = "libra_jax.environments"


def get_config() -> config_lib.RunConfig:
    config = config_lib.RunConfig()
    config.name = "environments"
    config.steps = 10

    config.task.source = f"{_ENVIRONMENTS}.episodes:task_source"
    config.task.environment = f"{_ENVIRONMENTS}.gym_text:environment"
    config.task.environment_arguments = {
        "name": "FrozenLake-v1",
        # Two rows of three fields without holes: random moves reach the goal in a fifth of the episodes.
        "arguments": {"render_mode": "ansi", "is_slippery": False, "desc": ["SFF", "FFG"]},
        "actions": ["left", "down", "right", "up"],
        "max_steps": 6,
    }
    config.task.max_turns = 6

    config.model.attention_chunk = 128
    config.rollout.slots = 32
    config.rollout.max_context = 512
    config.rollout.max_tokens = 16
    config.warm_start.steps = 30
    config.warm_start.batch_size = 16
    config.warm_start.learning_rate = 2e-3
    config.optimizer.learning_rate = 1e-3
    config.trainer.platform = "cpu"
    config.trainer.row_tokens = config.rollout.max_context
    config.trainer.rows_per_micro_batch = 8
    config.coordinator.groups_per_step = 8
    config.coordinator.group_size = 8
    config.coordinator.max_staleness = 1
    config.evaluation.every = 0
    return config
