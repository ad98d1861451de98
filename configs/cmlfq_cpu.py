"""Runs C-MLFQ over real vLLM engines on two CPU cores: an instance of tensor-parallel degree 1 and one of degree 2.

The calculator carries out one operation a call. If several operations are left, the tool `simplifier` returns the rest
of the expression, and further calls follow. Once the `calculator` returns the value or an error, only the answer
follows. So a tool return tells how much is still to be generated, and C-MLFQ moves requests by it. After a
`simplifier`, a request moves towards the wide instance; after a `calculator`, to the narrow one. The new instance
prefills the tokens of a moved request again, and the request goes on from there.

On two cores the wide instance is no faster, and both instances share the cores with the trainer. The scheduler's costs
(`scheduler.costs`) therefore describe instances with devices of their own. The default policy goes by expected cost: a
request stays on its instance unless its remaining tokens are worth the move. Under the published rule a request goes to
the bucket of its length.

Expected: the reward rises from 0.40 to 0.55 or more in 16 steps. A step of 256 rollouts has 20 to 64 moves. Half of the
first decisions name the bucket of the true length. Log-probabilities of moved trajectories are within 2e-5 of the
trainer's (`mismatch/moved_log_prob_max`). It took 6 minutes on 2 cores that others used as well.

  python launch/train.py --config=configs/cmlfq_cpu.py
  python launch/train.py --config=configs/cmlfq_cpu.py:cmlfq_paper  # the published rule, or any other policy
"""

from libra_jax import config as config_lib


def get_config(policy: str = "cmlfq") -> config_lib.RunConfig:
    """Returns the run under a scheduling policy (`scheduler.policy`)."""
    config = config_lib.RunConfig()
    config.name = f"{policy}_cpu"
    config.steps = 16

    config.model.preset = "libra-tiny"
    config.model.attention_chunk = 64  # dialogues are short: small blocks skip most of a packed row

    config.task.source = "libra_jax.examples.calculator:task_source"
    config.task.environment = "libra_jax.examples.calculator:environment"
    config.task.arguments = {"levels": ("plain", "nested")}  # one operation, or two and three
    # Tool returns are expressions too, so they are as wide as prompts: the model copies from the same distance in every
    # turn. During a tool's delay another request may have the slot.
    config.task.environment_arguments = {"stepwise": True, "return_width": 20, "delay": 0.05}
    config.task.max_turns = 5

    config.rollout.tensor_parallel = (1, 2)
    config.rollout.slots_by_instance = (256, 48)
    config.rollout.max_context = 192
    config.rollout.max_tokens = 24
    config.rollout.kv_cache_gib = 0.25

    config.scheduler.policy = policy
    config.scheduler.max_remaining_tokens = (12,)  # an answer has 2 to 9 tokens, a call and an answer 12 or more
    config.scheduler.costs.request_seconds = 1e-3  # beside 20e-3 for the step itself: a full batch costs more
    if policy == "cmlfq":
        config.scheduler.arguments = {"move_margin": 1.0}  # contexts of a hundred tokens are soon prefilled again

    config.optimizer.learning_rate = 4e-4
    config.optimizer.warmup_steps = 5

    config.trainer.platform = "cpu"
    config.trainer.row_tokens = 256
    config.trainer.rows_per_micro_batch = 16

    config.warm_start.steps = 150
    config.warm_start.batch_size = 64
    config.warm_start.learning_rate = 1e-3
    config.warm_start.target_loss = 0.06

    config.coordinator.groups_per_step = 32
    config.coordinator.group_size = 8

    config.checkpoint.every = 0
    return config
