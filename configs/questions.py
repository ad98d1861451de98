"""Trains on your own questions: a JSONL or Parquet file with a `prompt` and an `answer` a row, scored by exact match.

Without weights, the run starts from the shipped character model, which has everything to learn. A model's directory
after the colon trains that model, with its own tokenizer. The run then uses settings that pretrained weights survive:
learning rate, bfloat16, recomputed activations, longer outputs. The policy may call a calculator. On a machine with
several GPUs, add `--config.trainer.platform=cuda`.

Expected result: depends on the questions and the model.

  python launch/train.py --config=configs/questions.py --config.task.path=questions.jsonl
  python launch/train.py --config=configs/questions.py:models/Qwen3-1.7B --config.task.path=questions.jsonl
"""

from libra_jax import config as config_lib


def get_config(weights: str = "") -> config_lib.RunConfig:
    config = config_lib.RunConfig()
    config.name = "questions"
    config.task.source = "libra_jax.environments.datasets:task_source"
    config.task.environment = "libra_jax.environments.question:environment"
    config.task.environment_arguments = {"match": "exact", "calculator": True}
    config.task.path = "questions.jsonl"

    config.rollout.max_context = 1024
    config.rollout.max_tokens = 256
    config.trainer.row_tokens = 1024

    config.coordinator.groups_per_step = 16
    config.coordinator.max_staleness = 1
    if weights:
        _pretrained(config, weights)
    return config


def _pretrained(config: config_lib.RunConfig, weights: str) -> None:
    """Changes the settings that differ between pretrained weights and the character model."""
    config.model.path = weights
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "dots"
    config.task.tokenizer = ""  # the model's own

    config.rollout.dtype = "bfloat16"
    config.rollout.max_context = 4096
    config.rollout.max_tokens = 1024
    config.trainer.row_tokens = 4096
    config.trainer.rows_per_micro_batch = 4

    config.algorithm.correction = "truncated"  # engine and trainer round differently in bfloat16
    config.optimizer.learning_rate = 1e-6
    config.optimizer.warmup_steps = 10
