"""The run of a drill: an untrained model of 0.4 M parameters, a few groups a step, every kind of actor.

Two layouts, by the config's argument: "wide" has a trainer of two processes on two hosts and an instance on a third;
"hybrid" a trainer on one host and two instances on two, one of which may help to train; "narrow" one of each.

  python launch/train.py --config=tests/drills/settings.py:narrow
"""

from libra_jax import config as config_lib

HOSTS = {"wide": 3, "hybrid": 3, "narrow": 2}
"""How many a layout takes."""

TRAINING_HOSTS = {"wide": 2, "hybrid": 1, "narrow": 1}
"""How many of them train."""

GROUPS, ATTEMPTS = 2, 2
"""Groups a step, attempts a group."""


def get_config(layout: str = "narrow") -> config_lib.RunConfig:
    config = config_lib.RunConfig()
    config.name = f"drill-{layout}"

    config.model.preset = "libra-tiny"
    config.model.attention_chunk = 64

    config.task.source = "libra_jax.examples.calculator:task_source"
    config.task.environment = "tests.drills.errand:environment"
    config.task.max_turns = 1
    config.tools.use = ("python",)
    config.sandbox.memory_mib = 128
    config.reward.functions = {"digits": {"factory": "tests.drills.errand:reward"}}  # it has an actor of its own

    config.rollout.slots = 8
    config.rollout.max_context = 256
    config.rollout.max_tokens = 24
    config.rollout.kv_cache_gib = 0.1

    config.coordinator.groups_per_step = GROUPS
    config.coordinator.group_size = ATTEMPTS
    config.coordinator.max_staleness = 1  # groups are under way while others train

    config.trainer.platform = "cpu"
    config.trainer.row_tokens = 256
    config.trainer.rows_per_micro_batch = 2
    config.warm_start.steps = 0
    config.evaluation.every = 0
    config.checkpoint.every = 2  # a blow may cost a step that was taken
    config.deadlines.grace = 20.0
    config.telemetry.report = config.telemetry.tensorboard = False

    config.cluster.backend = "ray"
    config.cluster.accelerators_per_host = 1
    if layout == "wide":
        config.trainer.data = config.trainer.processes = 2
    elif layout == "hybrid":
        config.rollout.tensor_parallel = (1, 1)
        config.elastic.hybrid = 1
    return config
