"""Trains on one reasoning-gym task, named after the colon, as in `--config=configs/reasoning_gym.py:leg_counting`.

The package's own scorer gives the reward. The run starts from the quickstart's character model, which has to learn the
task from its rewards alone. For a pretrained model, set `--config.model.path=DIR --config.task.tokenizer=`.

Expected result: depends on task and model. Every task of the package can be posed, scored and trained on.

  python launch/train.py --config=configs/reasoning_gym.py:leg_counting --config.model.path=models/Qwen3-0.6B \
      --config.task.tokenizer=
  # with tools, for tasks that are easier with them; calls are turns, too
  python launch/train.py --config=configs/reasoning_gym.py:chain_sum "--config.tools.use=('calculator', 'python')" \
      --config.task.max_turns=4
"""

from libra_jax import config as config_lib


def get_config(name: str = "basic_arithmetic") -> config_lib.RunConfig:
    config = config_lib.RunConfig()
    config.name = f"reasoning-gym-{name}"
    config.task.source = "libra_jax.environments.reasoning_gym:task_source"
    config.task.environment = "libra_jax.environments.reasoning_gym:environment"
    config.task.arguments = {"name": name}
    config.task.max_turns = 1

    config.rollout.max_context = 1024  # the package's prompts have up to a few hundred tokens
    config.rollout.max_tokens = 256
    config.trainer.platform = "cpu"
    config.trainer.row_tokens = 1024

    config.coordinator.groups_per_step = 16
    config.coordinator.max_staleness = 1
    config.algorithm.filter = "zero_variance"  # a group that is all right or all wrong teaches nothing
    config.coordinator.max_replacements = 10.0
    config.evaluation.every = 20
    return config
