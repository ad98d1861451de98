"""Runs a hybrid worker on two CPU cores: it rolls out while answers are long, and helps to train while they are short.

The core trainer has both cores, and an instance has core 0. The hybrid worker has core 1, for one of two sides: its
instance decodes there, or its training side computes a part of every training step. The other side sleeps. The tasks
follow a curriculum. For thirteen steps they are expressions that one call solves, after a long preamble, so training
costs more than rollout. For the next thirteen they are nested expressions without a preamble, which take several calls.
A step takes longer if the worker is on the wrong side for the phase. The worker switches once two steps have shown
that.

Expected (seed 7, alone on two cores, 2026-11-23): 4 min 45 s in all, two of them the warm start. The worker switches to
training at step 3, back to rollout at step 17, and to training again at step 28, in 0.1 s each. In the last phase it
stays: the core alone would train for about 3 s, which is as long as a step takes then. The best look (step 43) finds 4%
to gain, less than `elastic.gain` (5%). The mean reward of the four phases is 0.20, 0.29, 0.37 and 0.47.
docs/results/elastic.md compares an earlier version (phases of 15 steps) with the layouts that never switch.

Those layouts are the other variants. `rollout`: the worker always rolls out. `training`: core 1 belongs to the trainer.
`apart`: the trainer has core 0, and the only instance has core 1. `shared`: both may use both cores.

  python launch/train.py --config=configs/elastic_cpu.py
  python launch/train.py --config=configs/elastic_cpu.py:shared
"""

from libra_jax import config as config_lib

VARIANTS = ("elastic", "rollout", "training", "apart", "shared")

PHASE_STEPS = 13
"""Training steps of a phase of the curriculum."""


def get_config(variant: str = "elastic") -> config_lib.RunConfig:
    """Returns the run with the hybrid worker, or one of the layouts that never switch."""
    if variant not in VARIANTS:
        raise ValueError(f"configs/elastic_cpu.py has {', '.join(VARIANTS)}, not {variant!r}")
    config = config_lib.RunConfig()
    config.name = "elastic_cpu" if variant == "elastic" else f"elastic_cpu-{variant}"
    config.steps = 4 * PHASE_STEPS

    config.model.preset = "libra-tiny"
    config.model.attention_chunk = 64  # dialogues are short: small blocks skip most of a packed row

    config.coordinator.groups_per_step = 12
    config.coordinator.group_size = 8
    config.coordinator.max_staleness = 1  # rollout and training side by side

    config.task.source = "libra_jax.examples.calculator:task_source"
    config.task.environment = "libra_jax.examples.calculator:environment"
    config.task.arguments = {
        "phases": (("plain", 300), ("nested", 0)),
        "phase_tasks": PHASE_STEPS * config.coordinator.groups_per_step,
    }
    config.task.environment_arguments = {"stepwise": True, "return_width": 20}
    config.task.max_turns = 5

    config.rollout.tensor_parallel = (1, 1)
    config.rollout.slots = 16  # few requests at a time, so that decoding costs as much as training
    config.rollout.max_context = 448
    config.rollout.max_tokens = 24
    config.rollout.kv_cache_gib = 0.25
    config.rollout.cores = (0, 1)

    config.cluster.backend = "ray"  # the training side needs a process of its own
    config.elastic.hybrid = 1
    config.elastic.cores = (1,)
    config.elastic.cooldown = 3
    config.elastic.patience = 1  # a phase is short, and each look sees two steps
    config.elastic.late_min_seconds = 5.0  # other work keeps the cores busy at times
    config.planner.horizon = 10  # steps over which a switch has to pay

    config.optimizer.learning_rate = 4e-4
    config.optimizer.warmup_steps = 5

    config.trainer.platform = "cpu"
    config.trainer.row_tokens = 448
    config.trainer.rows_per_micro_batch = 4

    # Copying is learned on short dialogues, which have a fifth of the tokens. A third of the dialogues has the
    # preamble, so that the policy knows it. Every batch has equal parts of all three kinds.
    config.warm_start.arguments = {"phases": (("plain", 0), ("nested", 0), ("plain", 300)), "phase_tasks": 8}
    config.warm_start.steps = 80
    config.warm_start.batch_size = 64
    config.warm_start.learning_rate = 2e-3
    config.warm_start.target_loss = 0.1

    config.checkpoint.every = 0
    if variant != "elastic":
        _stay(config, variant)
    return config


def _stay(config: config_lib.RunConfig, variant: str) -> None:
    """Removes the hybrid worker and fixes the layout of `variant`."""
    config.elastic.hybrid, config.elastic.cores = 0, ()
    # `rollout` keeps both instances; the second is now a plain one.
    if variant == "rollout":
        return
    config.rollout.tensor_parallel = (1,)
    config.rollout.cores = {"training": (0,), "apart": (1,), "shared": ()}[variant]
    config.trainer.cores = {"training": (0, 1), "apart": (0,), "shared": ()}[variant]
    if variant == "training":
        config.trainer.data = 2
