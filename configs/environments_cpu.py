"""Environments that others wrote, by config alone: `:gymnasium` and `:verifiers`.

`:gymnasium` plays FrozenLake, of gymnasium's toy texts, move by move; a few supervised steps on random episodes teach
the 0.41 M-parameter character model how moves are written. `:verifiers` poses and scores by `ReasoningGymEnv`, which
ships with the package; the model, which knows nothing, is only to show that all of it works together. Each takes
about a minute on 2 cores. The set-up command installs both packages.

  python launch/train.py --config=configs/environments_cpu.py:gymnasium
  python launch/train.py --config=configs/environments_cpu.py:verifiers
"""

from libra_jax import config as libra_config

_ENVIRONMENTS = "libra_jax.agents.environments"


def get_config(kind: str = "gymnasium") -> libra_config.RunConfig:
    config = libra_config.RunConfig()
    config.name = f"environments-{kind}"
    config.steps = 4
    {"gymnasium": _gymnasium, "verifiers": _verifiers}[kind](config)

    config.model.attention_chunk = 128
    config.rollout.slots = 32
    config.optimizer.learning_rate = 1e-3
    config.trainer.platform = "cpu"
    config.trainer.row_tokens = config.rollout.max_context
    config.trainer.rows_per_micro_batch = 8
    config.coordinator.groups_per_step = 8
    config.coordinator.group_size = 4
    config.coordinator.staleness = 1
    config.evaluation.every = 0
    return config


def _gymnasium(config: libra_config.RunConfig) -> None:
    config.task.source = f"{_ENVIRONMENTS}.episodes:task_source"
    config.task.environment = f"{_ENVIRONMENTS}.gym_text:environment"
    config.task.environment_arguments = {
        "name": "FrozenLake-v1",
        "arguments": {"render_mode": "ansi", "is_slippery": False},
        "actions": ["left", "down", "right", "up"],
        "max_steps": 10,
    }
    config.task.max_turns = 10
    config.rollout.max_context = 512
    config.rollout.max_tokens = 16
    config.warm_start.steps = 30
    config.warm_start.batch_size = 16
    config.warm_start.learning_rate = 2e-3


def _verifiers(config: libra_config.RunConfig) -> None:
    config.task.source = f"{_ENVIRONMENTS}.verifiers:task_source"
    config.task.environment = f"{_ENVIRONMENTS}.verifiers:environment"
    named = {
        "name": "verifiers:ReasoningGymEnv",
        "arguments": {"gym": "leg_counting", "num_train_examples": 256, "num_eval_examples": 32, "system_prompt": ""},
    }
    config.task.arguments = named
    config.task.environment_arguments = named
    config.task.max_turns = 1
    config.rollout.max_context = 512
    config.rollout.max_tokens = 64
