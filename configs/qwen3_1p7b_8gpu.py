"""Trains Qwen3-1.7B on your own questions (a JSONL file) on one host with 8 GPUs: 4 train, 4 roll out.

Each line of the file has a `prompt` and an `answer`. The policy may call a calculator and is scored by exact match.

Expected on 8 x H100: not run by us yet. `--dry_run` checks the configuration on any machine, and names missing weights
and data.

  python launch/train.py --config=configs/qwen3_1p7b_8gpu.py \
      --config.model.path=models/Qwen3-1.7B --config.task.path=data/questions.jsonl
"""

from libra_jax import config as config_lib


def get_config() -> config_lib.RunConfig:
    config = config_lib.RunConfig()
    config.name = "qwen3-1.7b"
    config.steps = 200

    config.model.path = "models/Qwen3-1.7B"
    config.model.preset = "Qwen3-1.7B"  # the shape that --dry_run checks if the weights are missing
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "dots"

    config.task.source = "libra_jax.environments.datasets:task_source"
    config.task.environment = "libra_jax.environments.question:environment"
    config.task.environment_arguments = {"match": "exact", "calculator": True}
    config.task.path = "data/questions.jsonl"
    config.task.tokenizer = ""  # the model's own
    config.task.max_turns = 6

    config.rollout.tensor_parallel = (1, 1, 1, 1)
    config.rollout.slots = 128
    config.rollout.max_context = 8192
    config.rollout.max_tokens = 2048
    config.rollout.dtype = "bfloat16"
    config.rollout.transport = "memfd"  # through host memory: serves any number of instances
    config.rollout.enforce_eager = False

    config.algorithm.clip_high = 0.28  # DAPO's asymmetric clip
    config.algorithm.correction = "truncated"  # engine and trainer round differently in bfloat16

    config.optimizer.learning_rate = 1e-6
    config.optimizer.warmup_steps = 10

    config.trainer.platform = "cuda"
    config.trainer.fsdp = 4
    config.trainer.row_tokens = 8192
    config.trainer.rows_per_micro_batch = 4

    config.coordinator.groups_per_step = 64
    config.coordinator.group_size = 8
    config.coordinator.max_staleness = 1

    config.evaluation.every = 20
    config.deadlines.first_token = 600.0
    return config
