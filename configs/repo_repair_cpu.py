"""Trains a 0.41 M-parameter character model to repair code with a planted bug, on two CPU cores.

The policy reads an issue ("f(x) must be x+45-8") and looks at the file in its sandbox. It replaces the wrong part and
says that it is done. Hidden tests then judge the file in another sandbox. A short supervised warm start teaches the
policy to copy; reinforcement learning has to remove most of its slips.

Expected (seed 0, 30 steps, other work beside it): the reward's mean rises from the first five steps to the last five.
It rose by 0.17 in one run (0.43 to 0.60, 2026-11-22) and by 0.06 in another (0.46 to 0.52, 2026-11-24). The mean of 128
rollouts a step is noisy, so run more steps for a clearer result. The run takes 10 to 11 minutes in all, one of them the
warm start. A step takes 16 to 20 s, nearly all of it for the sandboxes of its rollouts and of their hidden tests. At a
learning rate of 1e-3 the reward falls to 0.

  python launch/train.py --config=configs/repo_repair_cpu.py
"""

from libra_jax import config as config_lib


def get_config() -> config_lib.RunConfig:
    config = config_lib.RunConfig()
    config.name = "repo-repair"
    config.steps = 30

    config.model.preset = "libra-tiny"
    config.model.attention_chunk = 64  # dialogues are short: small blocks skip most of a packed row

    config.task.source = "libra_jax.examples.planted:task_source"
    config.task.arguments = {"level": "easy"}
    config.task.environment = "libra_jax.environments.repo_repair:environment"
    config.task.environment_arguments = {"prompt": "{issue}", "test_seconds": 20.0}
    config.task.max_turns = 4
    config.task.tool_seconds = 60.0  # a step also scores, which takes another sandbox

    config.tools.use = ("shell", "edit")
    config.tools.format = "tags"
    config.tools.describe = False

    config.sandbox.warm = 8
    config.sandbox.most = 128  # each rollout holds one sandbox from its first call on

    config.rollout.slots = 128
    config.rollout.max_context = 256
    config.rollout.max_tokens = 112
    config.rollout.temperature = 1.0

    config.algorithm.advantage = "grpo"
    config.algorithm.loss = "clipped"

    config.optimizer.learning_rate = 2.5e-4  # 128 rollouts a step are noisy: at 1e-3 a few steps undo the warm start
    config.optimizer.warmup_steps = 3

    config.trainer.platform = "cpu"
    config.trainer.row_tokens = 384
    config.trainer.rows_per_micro_batch = 16

    config.warm_start.steps = 300
    config.warm_start.batch_size = 32
    config.warm_start.learning_rate = 1e-3
    config.warm_start.target_loss = 0.009  # leaves the policy right in a third of its rollouts

    config.coordinator.groups_per_step = 16
    config.coordinator.group_size = 8
    config.coordinator.max_staleness = 0

    config.checkpoint.every = 4
    config.evaluation.every = 0
    return config
