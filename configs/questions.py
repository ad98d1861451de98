"""Your own questions: a JSONL or Parquet file with a `prompt` and an `answer` a row, scored by exact match.

Starts from the shipped character model, which has everything to learn; for a pretrained one add
`--config.model.path=DIR --config.task.tokenizer=` (empty: the model's own). The policy may call a calculator. Where
there are several GPUs, add `--config.trainer.platform=cuda`. Expected result: depends on the questions and the model.

  python launch/train.py --config=configs/questions.py --config.task.path=questions.jsonl
"""

import ml_collections

from libra_jax import config as libra_config


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict(libra_config.to_dict(libra_config.RunConfig()))
    config.name = "questions"
    config.task.source = "libra_jax.agents.datasets:task_source"
    config.task.environment = "libra_jax.agents.question:environment"
    config.task.environment_arguments = {"match": "exact", "calculator": True}
    config.task.path = "questions.jsonl"

    config.rollout.max_context = 1024
    config.rollout.max_tokens = 256
    config.trainer.row_tokens = 1024

    config.coordinator.groups_per_step = 16
    config.coordinator.staleness = 1
    return config
