"""Records a run for its twin: the simulator, calibrated on the first half of its steps, predicts the second half.

Every step can be repeated: the learning rate is 0, sampling is as good as greedy, and the tasks repeat after eight
steps. The steps of a cycle differ, because one asks for one call of the calculator and another for three. The trainer's
threads have one core and vLLM's worker the other, so neither disturbs the other. The coordinator is not bound to a
core.

Expected: 40 steps in 3 to 4 minutes on 2 cores, the start and the warm start included.

  python launch/train.py --config=configs/twin.py --workdir=runs/twin
  python launch/train.py --config=configs/twin.py:overlapped --workdir=runs/twin_overlapped
  python launch/twin.py --workdir=runs/twin
"""

from libra_jax import config as config_lib

# Steps of a cycle: the same tasks come again after these.
DISTINCT_STEPS = 8


def get_config(variant: str = "synchronous") -> config_lib.RunConfig:
    """Returns the run of `variant`: synchronous (max staleness 0) or overlapped (1: rollout while the trainer
    trains)."""
    if variant not in ("synchronous", "overlapped"):
        raise ValueError(f"configs/twin.py has synchronous and overlapped, not {variant!r}")
    config = config_lib.RunConfig()
    config.name = "twin"
    config.steps = 5 * DISTINCT_STEPS

    config.model.preset = "libra-tiny"
    config.model.attention_chunk = 64

    config.coordinator.groups_per_step = 4
    config.coordinator.group_size = 48
    config.coordinator.max_staleness = 1 if variant == "overlapped" else 0

    config.task.source = "libra_jax.examples.calculator:task_source"
    config.task.environment = "libra_jax.examples.calculator:environment"
    config.task.arguments = {"period": DISTINCT_STEPS * config.coordinator.groups_per_step}
    config.task.environment_arguments = {"stepwise": True, "return_width": 20, "delay": 0.02}
    config.task.max_turns = 5

    config.rollout.cores = (1,)
    config.rollout.slots = 64
    config.rollout.max_context = 192
    config.rollout.max_tokens = 32
    config.rollout.temperature = 0.01  # the lowest temperature above greedy that vLLM accepts

    config.optimizer.learning_rate = 0.0  # the policy must not change, or a repeated step would differ

    config.trainer.platform = "cpu"
    config.trainer.cores = (0,)
    config.trainer.row_tokens = 256
    config.trainer.rows_per_micro_batch = 8

    config.warm_start.steps = 150
    config.warm_start.batch_size = 64
    config.warm_start.learning_rate = 1e-3
    config.warm_start.target_loss = 0.06

    config.checkpoint.every = 0
    config.telemetry.tensorboard = False
    return config
