"""Trains the published workloads at the published sizes: 48 A800s, or 64 H100s, in hosts of 8.

A variant names the workload, the model and perhaps the accelerators: `swe-14b`, `search-30b-h100`.

* swe: software engineering on R2E-Gym's repositories, contexts of up to 40,960 tokens.
* search: multi-turn search for Search-R1's questions, contexts of up to 16,384 tokens.
* math: DAPO-Math-17k, whose answers may have 20,480 tokens after a prompt of 2,048.
* 14b: Qwen3-14B. 30b: Qwen3-30B-A3B, a mixture of experts, with routing replay.
* a800 (default): 48 of them; 14b trains on 24, 30b on 16. h100: 64 of them, of which 32 train.

Models, numbers of accelerators and the longest contexts are published; batches and layouts are ours. DAPO's clipping
and learning rate are its authors'.

Expected: not run by us yet, for want of the machines. `--dry_run` checks each variant on any machine and names missing
weights and data; `launch/compile.py` says whether the trainer fits (docs/results/published_sizes.md).

  python launch/prepare_data.py --dataset=dapo_math --input=downloads/dapo-math-17k.parquet --output=data/dapo.jsonl
  python launch/train.py --config=configs/published.py:math-30b-h100 --dry_run
  python launch/compile.py --config=configs/published.py:math-30b-h100 --target=h100
"""

from libra_jax import config as config_lib

MODELS = {"14b": "Qwen3-14B", "30b": "Qwen3-30B-A3B"}
"""Presets by the names that variants have."""

CONTEXTS = {"swe": (40_960, 16_384), "search": (16_384, 4_096), "math": (22_528, 20_480)}
"""Most tokens of a context (and of a row of the trainer), and most tokens of a turn, by workload."""

TRAINING = {
    "14b-a800": (3, 4, 2),
    "14b-h100": (4, 4, 2),
    "30b-a800": (1, 4, 4),
    "30b-h100": (2, 4, 4),
}
"""(data, fsdp, tensor) of the accelerators that train. A replica of 14b fits one host. Of 30b it needs two, with
`tensor` inside a host and experts over both."""

ROLLOUT = {"14b-a800": 24, "14b-h100": 32, "30b-a800": 32, "30b-h100": 32}
"""Accelerators that roll out."""

WIDE = {"swe": 0.75, "search": 0.5, "math": 0.25}
"""Share of the accelerators that roll out which serve long requests, on instances of degree 4; the others have degree
2."""

BOUND = {"swe": 8_192, "search": 2_048, "math": 16_384}
"""Most tokens that a request may have left to generate on an instance of degree 2."""


def get_config(variant: str = "swe-14b") -> config_lib.RunConfig:
    """Returns the run of `variant`: a workload and a model, and perhaps the accelerators, with dashes between."""
    workload, model, accelerator, *more = (*variant.split("-"), "", "")
    accelerator = accelerator or "a800"
    if workload not in CONTEXTS or f"{model}-{accelerator}" not in TRAINING or any(more):
        raise ValueError(
            f"configs/published.py has {', '.join(CONTEXTS)}, each with -{' or -'.join(MODELS)}, and then perhaps "
            f"-h100, not {variant!r}"
        )
    config = config_lib.RunConfig()
    config.name = f"published-{variant}"
    config.steps = 200
    _model(config, model)
    {"swe": _repositories, "search": _search, "math": _math}[workload](config)
    _layout(config, workload, f"{model}-{accelerator}")

    config.algorithm.clip_high = 0.28  # DAPO's asymmetric clip
    config.algorithm.correction = "truncated"  # engine and trainer round differently in bfloat16
    config.optimizer.learning_rate = 1e-6
    config.optimizer.warmup_steps = 10

    config.coordinator.groups_per_step = 32
    config.coordinator.group_size = 16
    config.coordinator.max_staleness = 4
    config.planner.hardware = accelerator
    config.evaluation.every = 20
    config.deadlines.first_token = 600.0
    config.deadlines.engine_start = 1_200.0
    config.deadlines.trainer_start = 1_800.0
    return config


def _model(config: config_lib.RunConfig, model: str) -> None:
    config.model.preset = MODELS[model]  # the shape that --dry_run checks if the weights are missing
    config.model.path = f"models/{MODELS[model]}"
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "full"  # rows this long do not fit otherwise
    config.task.tokenizer = ""  # the model's own
    if model == "30b":
        config.algorithm.routing_replay = "rollout"


def _repositories(config: config_lib.RunConfig) -> None:
    """Repairs repositories, judged by hidden tests. The sandbox needs the packages that the projects import."""
    config.task.source = "libra_jax.environments.repo_repair:task_source"
    config.task.environment = "libra_jax.environments.repo_repair:environment"
    config.task.arguments = {"fail_to_pass_column": "fail_to_pass", "command_column": "command"}
    config.task.environment_arguments = {"test_seconds": 120.0, "most_mib": 256}
    config.task.path = "data/repairs.jsonl"
    config.task.max_turns = 50
    config.task.tool_seconds = 300.0
    config.tools.use = ("shell", "edit")


def _search(config: config_lib.RunConfig) -> None:
    """Answers questions by search in a file of passages."""
    config.task.source = "libra_jax.environments.datasets:task_source"
    config.task.environment = "libra_jax.environments.search_qa:environment"
    config.task.path = "data/search.parquet"
    config.task.max_turns = 8
    config.tools.use = ("search",)
    config.tools.arguments = {"search": {"path": "data/wiki.jsonl", "title_column": "", "text_column": "contents"}}


def _math(config: config_lib.RunConfig) -> None:
    """Answers in one turn, compared as mathematics."""
    config.task.source = "libra_jax.environments.datasets:task_source"
    config.task.environment = "libra_jax.environments.math:environment"
    config.task.path = "data/dapo.jsonl"
    config.task.max_turns = 1


def _layout(config: config_lib.RunConfig, workload: str, machine: str) -> None:
    """Lays the run out over hosts: those that train first, one process each."""
    trainer, rollout = config.trainer, config.rollout
    trainer.platform = "cuda"
    trainer.data, trainer.fsdp, trainer.tensor = TRAINING[machine]
    trainer.processes = trainer.devices // 8
    rollout.max_context, rollout.max_tokens = CONTEXTS[workload]
    trainer.row_tokens = rollout.max_context
    trainer.rows_per_micro_batch = trainer.data * trainer.fsdp  # one row a shard
    config.cluster.backend = "ray"
    config.cluster.accelerators_per_host = 8

    # Whole hosts of one degree, because an instance lies on one host.
    wide = 8 * round(WIDE[workload] * ROLLOUT[machine] / 8)
    rollout.tensor_parallel = (2,) * ((ROLLOUT[machine] - wide) // 2) + (4,) * (wide // 4)
    config.scheduler.max_remaining_tokens = (BOUND[workload],)
    rollout.slots = 96 if workload == "search" else 32
    rollout.dtype = "bfloat16"
    rollout.transport = "memfd"  # a weight relay on every host that rolls out
    rollout.enforce_eager = False
    rollout.stream_interval = 100  # tokens between two looks at a request that outruns its bucket
