"""Trains a 0.41 M-parameter character model to answer with one or two searches, on two CPU cores.

The corpus is a made-up society of 2,000 people in SQLite FTS5. A question names a person and asks for the city of that
person or of that person's friend. The policy searches for the name and reads the passage. If the question is about the
friend, it searches once more. Then it answers with a word of the last passage. The reward is exact match. A short
supervised warm start leaves the policy right in a third to a half of its rollouts; reinforcement learning does the
rest.

Expected (seed 0, from a fresh clone, 2026-11-22), in 30 steps: the reward rises from 0.40 (mean of the first five
steps) to 0.66 (of the last five). The held-out accuracy rises from 0.33 over 0.51 to 0.62. It takes 4.4 minutes in all,
of which the warm start takes about half.

  python launch/train.py --config=configs/search_cpu.py
"""

from libra_jax import config as config_lib

WORLD = {"people": 2000, "world": 0}


def get_config() -> config_lib.RunConfig:
    config = config_lib.RunConfig()
    config.name = "search_cpu"
    config.steps = 30

    config.model.preset = "libra-tiny"
    config.model.attention_chunk = 64  # dialogues are short: small blocks skip most of a packed row

    config.task.source = "libra_jax.examples.acquaintances:task_source"
    config.task.arguments = {**WORLD, "asked": ("City",)}  # copied letter by letter; a job is one of only twelve words
    config.task.environment = "libra_jax.environments.search_qa:environment"
    config.task.environment_arguments = {"match": "em"}
    config.task.max_turns = 4

    config.tools.use = ("search",)
    config.tools.format = "tags"  # <search>Kamoru</search>
    config.tools.describe = False  # the warm start has shown it the tool
    config.tools.arguments = {
        "search": {
            "source": "libra_jax.examples.acquaintances:corpus",
            "source_arguments": WORLD,
            "results": 1,
            "template": "{snippet}",  # all passages have one length, so the model always copies from the same distance
            "paging": False,
        }
    }

    config.rollout.slots = 128
    config.rollout.max_context = 256
    config.rollout.max_tokens = 32
    config.rollout.temperature = 1.0

    config.algorithm.advantage = "grpo"
    config.algorithm.loss = "clipped"

    config.optimizer.learning_rate = 5e-4
    config.optimizer.warmup_steps = 5  # Adam's first steps have full size even at tiny gradients

    config.trainer.platform = "cpu"
    config.trainer.row_tokens = 256
    config.trainer.rows_per_micro_batch = 16

    config.warm_start.steps = 400
    config.warm_start.batch_size = 64
    config.warm_start.learning_rate = 1e-3
    config.warm_start.target_loss = 0.04  # leaves the policy right in a third to a half of its rollouts

    config.coordinator.groups_per_step = 32
    config.coordinator.group_size = 8
    config.coordinator.max_staleness = 0  # synchronous: on two cores, rollout and training take turns anyway

    config.evaluation.every = 15
    config.evaluation.tasks = 128
    config.evaluation.temperature = 1.0  # the policy as it samples, which is what the reward sees
    return config
