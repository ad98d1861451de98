"""Trains a 0.41 M-parameter character model to compute with a sandboxed Python interpreter, on two CPU cores.

The policy reads one or two operations on integers in words ("846 xor 357 minus 120"). It writes
`<python>846^357</python>` and reads what the interpreter returns. If there is a second operation, it goes on with
`<python>_-120</python>`; then it answers. Every rollout has a sandbox (bubblewrap) and an interpreter of its own. A
short supervised warm start leaves the policy right in about two fifths of its rollouts; reinforcement learning does the
rest.

Expected (seed 0, 24 steps): the reward's mean rises from 0.47 in the first five steps to 0.80 in the last five
(2026-11-22, light work beside it). In another run it rose from 0.47 to 0.84 (2026-11-24). It takes 9.7 minutes in all,
one of them the warm start. A step takes 20 s, most of which goes into starting its 384 sandboxes.

  python launch/train.py --config=configs/python_cpu.py
"""

from libra_jax import config as config_lib


def get_config() -> config_lib.RunConfig:
    config = config_lib.RunConfig()
    config.name = "python_cpu"
    config.steps = 24

    config.model.preset = "libra-tiny"
    config.model.attention_chunk = 64  # dialogues are short: small blocks skip most of a packed row

    config.task.source = "libra_jax.examples.integers:task_source"
    config.task.environment = "libra_jax.environments.math:environment"
    config.task.max_turns = 4
    config.task.tool_seconds = 60.0  # answers wait for the verifier, too, if a whole batch answers at once

    config.tools.use = ("python",)
    config.tools.format = "tags"
    config.tools.describe = False  # the warm start teaches the tool
    config.sandbox.seconds = 2.0
    config.sandbox.cpu_seconds = 1.0
    config.sandbox.memory_mib = 128
    config.sandbox.warm = 32  # a batch takes one sandbox a rollout, and sandboxes start while the trainer works
    config.sandbox.start_seconds = 50.0

    config.rollout.slots = 128
    config.rollout.max_context = 256
    config.rollout.max_tokens = 40
    config.rollout.temperature = 1.0

    config.optimizer.learning_rate = 5e-4
    config.optimizer.warmup_steps = 5

    config.trainer.platform = "cpu"
    config.trainer.row_tokens = 256
    config.trainer.rows_per_micro_batch = 16

    config.warm_start.steps = 200
    config.warm_start.batch_size = 64
    config.warm_start.learning_rate = 1e-3
    config.warm_start.target_loss = 0.04  # leaves the policy right in about two fifths of its rollouts

    config.coordinator.groups_per_step = 48
    config.coordinator.group_size = 8
    config.coordinator.max_staleness = 0  # synchronous: on two cores, rollout and training take turns anyway

    config.evaluation.every = 0
    return config
