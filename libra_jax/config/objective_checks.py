"""Checks of a run's objective: the settings of its loss, critic and teacher, beside what else must fit them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from libra_jax.config import engine_arguments
from libra_jax.config.algorithm import (
    BASELINES,
    BATCH_LOSSES,
    CRITIC_ADVANTAGES,
    GROUP_ADVANTAGES,
    TOKEN_LOSSES,
    WHITENED_ADVANTAGES,
    AlgorithmConfig,
)
from libra_jax.config.checks import check

if TYPE_CHECKING:
    from libra_jax.config.run import RunConfig


def check_algorithm(run: RunConfig) -> None:
    """Refuses settings of the objective that have no effect, and quantised engines that it would not correct."""
    algorithm, defaults = run.algorithm, AlgorithmConfig()
    unmoved = algorithm.objective == "decoupled" and algorithm.proximal == "recompute" and algorithm.updates == 1
    for name in ("clip_low", "clip_high", "dual_clip") if unmoved else ():
        value, default = getattr(algorithm, name), getattr(defaults, name)
        check(
            value == default,
            f"algorithm.{name}",
            f"{value} never binds with algorithm.objective=decoupled and one update a batch: the ratio to the "
            "proximal policy is 1; set algorithm.minibatches or algorithm.epochs above 1, or leave it at "
            f"{default} and bound the importance weight by algorithm.correction and correction_cap, or set "
            "algorithm.objective=behaviour",
        )
    check(
        run.coordinator.group_size > 1 or algorithm.filter != "zero_variance",
        "algorithm.filter",
        "zero_variance replaces every group of one rollout, which has one reward; set coordinator.group_size to 2 "
        "or more",
    )
    check(
        algorithm.budget == "uniform" or algorithm.budget_least <= run.coordinator.group_size <= run.most_rollouts,
        "coordinator.group_size",
        f"{run.coordinator.group_size} is the mean number of rollouts of a prompt, and algorithm.budget gives "
        f"{algorithm.budget_least} to {run.most_rollouts} (algorithm.budget_least, budget_most); change either",
    )
    replays = algorithm.replay != "none"
    for name, read in (("success_reward", run.uses_success or replays), ("success_window", run.uses_success)):
        check(
            read or getattr(algorithm, name) == getattr(defaults, name),
            f"algorithm.{name}",
            f"has no effect: nothing looks at success rates; leave it at {getattr(defaults, name):g}, or set "
            "algorithm.budget=knapsack or task.order=success",
        )
    check(
        algorithm.overlong_buffer <= run.most_tokens,
        "algorithm.overlong_buffer",
        f"{algorithm.overlong_buffer} tokens exceed the {run.most_tokens} that a rollout may generate "
        "(task.max_tokens, or rollout.max_tokens x task.max_turns)",
    )
    check(
        not algorithm.overlong_buffer or run.most_tokens - algorithm.overlong_buffer < run.rollout.max_context,
        "algorithm.overlong_buffer",
        f"no rollout gets there: the penalty begins at {run.most_tokens - algorithm.overlong_buffer} generated "
        f"tokens, and rollout.max_context is {run.rollout.max_context}; set task.max_tokens to what a rollout may "
        "generate within its context",
    )
    check(
        algorithm.loss not in BATCH_LOSSES or algorithm.proximal == "recompute",
        "algorithm.proximal",
        f"interpolate moves with the policy, and algorithm.loss={algorithm.loss} takes statistics of a fixed "
        "proximal policy; set it to recompute, or take another loss",
    )
    check(
        algorithm.correction_level == "token" or algorithm.objective == "decoupled" or algorithm.correction == "masked",
        "algorithm.correction_level",
        f"{algorithm.correction_level} cannot truncate with algorithm.objective=behaviour, whose ratio is that of "
        "a token; set algorithm.objective=decoupled, or algorithm.correction=masked",
    )
    check(
        algorithm.minibatches <= run.coordinator.groups_per_step,
        "algorithm.minibatches",
        f"{algorithm.minibatches} parts of whole groups cannot be made of coordinator.groups_per_step = "
        f"{run.coordinator.groups_per_step} groups; lower it, or raise that",
    )
    arguments = run.rollout.engine_arguments
    quantises = [name for name in ("quantization", "quantization_config") if arguments.get(name)]
    if arguments.get("kv_cache_dtype", "auto") not in engine_arguments.PLAIN_CACHES:
        quantises.append("kv_cache_dtype")
    check(
        not quantises or algorithm.correction != "none",
        engine_arguments.FIELD,
        f"{''.join(quantises[:1])} makes the engine sample from another policy than the trainer's, and "
        "algorithm.correction=none ignores the difference; set algorithm.correction=truncated or masked",
    )


def check_routing_replay(run: RunConfig) -> None:
    """Refuses engines that return no experts."""
    rollout, name = run.rollout, "algorithm.routing_replay"
    check(rollout.engine == "vllm", name, f"rollout.engine={rollout.engine} returns no experts; use vllm, or off")
    check(
        rollout.engine_arguments.get("enable_prefix_caching", True) is not False,
        name,
        "vLLM returns experts only with prefix caching; leave enable_prefix_caching out of "
        "rollout.engine_arguments, or set this to off",
    )


def check_teacher(run: RunConfig) -> None:
    """Refuses a teacher that nothing reads or that is no URL, and a distillation without one."""
    algorithm = run.algorithm
    check(
        "://" not in algorithm.teacher or re.match(r"https?://[^/:]", algorithm.teacher) is not None,
        "algorithm.teacher",
        f"{algorithm.teacher!r} is no URL of a server; write http://host:port/v1",
    )
    check(
        algorithm.teacher_served or not algorithm.teacher_arguments,
        "algorithm.teacher_arguments",
        "are those of a teacher behind a URL; leave them empty, or set algorithm.teacher to http://host:port/v1",
    )
    check(
        not algorithm.teacher_served or run.rollout.temperature == 1,
        "rollout.temperature",
        f"{run.rollout.temperature:g} cannot be compared with a teacher behind a URL, which scores at temperature "
        "1; set it to 1, or algorithm.teacher to a directory",
    )
    if algorithm.advantage != "distillation":
        return
    for name, right, value in (
        ("teacher", bool(algorithm.teacher), "a Hugging Face directory or a URL"),
        ("kl_in_reward", algorithm.kl_in_reward, "True"),
        ("kl_estimator", algorithm.kl_estimator == "k1", "k1"),
    ):
        check(
            right,
            f"algorithm.{name}",
            f"must be {value} with algorithm.advantage=distillation, whose advantage is minus the KL of each token",
        )


def check_stream(run: RunConfig) -> None:
    """Refuses a streamed step with what looks at the whole batch, or updates several times."""
    algorithm = run.algorithm
    of_groups = [name for name in GROUP_ADVANTAGES if name not in WHITENED_ADVANTAGES]
    check(
        run.trainer.stream == "off" or run.coordinator.groups_per_step > 1,
        "coordinator.groups_per_step",
        "1 group is a whole batch, on which no step can begin early; set it to 2 or more, or trainer.stream=off",
    )
    batch = "may look at the whole batch"
    for name, right, why in (
        ("algorithm.minibatches", algorithm.minibatches == 1, "mini-batches divide a whole batch; set it to 1"),
        ("algorithm.epochs", algorithm.epochs == 1, "a second pass takes the whole batch; set it to 1"),
        ("critic.enabled", not run.critic.enabled, "a critic learns from the whole batch; set it to False"),
        (
            "algorithm.advantage",
            algorithm.advantage in (*of_groups, "distillation"),
            f"{algorithm.advantage} {batch}; use one of {', '.join(of_groups)}",
        ),
        (
            "algorithm.baseline",
            ":" not in algorithm.baseline,
            f"{algorithm.baseline} {batch}; use one of {', '.join(BASELINES)}",
        ),
        ("algorithm.loss", algorithm.loss not in BATCH_LOSSES, f"{algorithm.loss} {batch}; use another loss"),
    ):
        check(run.trainer.stream == "off" or right, name, f"{why}, or set trainer.stream=off")


def check_shared_prompts(run: RunConfig) -> None:
    """Refuses shared prompts with what takes the sequences of a row for single rollouts."""
    algorithm = run.algorithm
    for name, right, value, wanted in (
        ("trainer.pack", run.trainer.pack, run.trainer.pack, "True"),
        ("algorithm.aggregation", algorithm.aggregation == "token_mean", algorithm.aggregation, "token_mean"),
        ("algorithm.loss", algorithm.loss in TOKEN_LOSSES, algorithm.loss, f"one of {', '.join(TOKEN_LOSSES)}"),
        ("algorithm.correction_level", algorithm.correction_level == "token", algorithm.correction_level, "token"),
        ("algorithm.ess_scaling", algorithm.ess_scaling == "off", algorithm.ess_scaling, "off"),
        ("algorithm.balance_coefficient", not algorithm.balance_coefficient, algorithm.balance_coefficient, "0"),
        ("critic.enabled", not run.critic.enabled, run.critic.enabled, "False"),
    ):
        check(
            not run.trainer.share_prompt or right,
            name,
            f"{value} looks at single rollouts, and trainer.share_prompt makes one sequence of several; set it to "
            f"{wanted}, or trainer.share_prompt=False",
        )


def check_critic(run: RunConfig) -> None:
    """Refuses a critic that nothing reads, and what cannot move or share a critic."""
    advantage, enabled = run.algorithm.advantage, run.critic.enabled
    check(
        enabled or advantage not in CRITIC_ADVANTAGES,
        "critic.enabled",
        f"algorithm.advantage={advantage} needs the values of a critic; set it to True, or take another advantage",
    )
    bootstraps = run.task.cut_off == "bootstrap"
    check(
        not bootstraps or advantage == "egae" or ":" in advantage,
        "task.cut_off",
        f"bootstrap needs an advantage without the rollout's reward, and algorithm.advantage is {advantage}; set "
        "that to egae, or this to mask",
    )
    check(
        not bootstraps or bool(run.task.cut_off_limits),
        "task.cut_off_limits",
        "must name the limits whose rollouts task.cut_off=bootstrap is for, such as ('max_tokens', 'length')",
    )
    check(
        bootstraps or advantage != "egae",
        "algorithm.advantage",
        f"egae is for rollouts that a limit cuts off, and task.cut_off={run.task.cut_off} leaves it none; set "
        "task.cut_off=bootstrap (limits: task.cut_off_limits), or take gae",
    )
    if not enabled:
        return
    check(
        run.critic.warmup_steps < run.steps,
        "critic.warmup_steps",
        f"{run.critic.warmup_steps} leaves the policy no step of steps = {run.steps}; lower it",
    )
    for name, off in (
        ("elastic.hybrid", run.elastic.hybrid == 0),
        ("elastic.resize", not run.elastic.resize),
        ("model.lora.rank", run.model.lora.rank == 0),
    ):
        check(off, "critic.enabled", f"a critic does not work with {name}; switch one of the two off")
