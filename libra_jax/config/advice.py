"""Settings that a run may have, and that would likely spoil it: a sentence each, which names the field and the fix."""

from __future__ import annotations

from libra_jax.config.algorithm import GROUP_ADVANTAGES, AlgorithmConfig
from libra_jax.config.run import RunConfig
from libra_jax.config.training import LoraConfig

ADAPTIVE = ("adam", "adamw", "muon", "lion")
"""Optimizers whose update of a weight has about the size of the learning rate, for gradients of any size."""

TOY_RATE = 1e-4
"""Adam's learning rate from which on full fine-tuning of pretrained weights is warned of. Each step moves a weight by
about the rate; published RL runs use 1e-7 to 1e-5."""

SHORT_ANSWER = 128
"""Generated tokens a turn below which most answers of a pretrained model are cut off."""

WIDE_CLIP = 0.05
"""Distance from 1 from which on a clip is made for ratios of tokens. GSPO's are below a hundredth of it."""

REAL_PARAMETERS = 50_000_000
"""Parameters from which on float32 on an accelerator is a waste, rather than a test."""

MOST_DEVICES_A_CORE = 4
"""Virtual CPU devices a core above which a step takes minutes: devices take turns, and wait for each other."""

LARGE_PARAMETERS = 500_000_000
"""Parameters from which on the activations of all layers outgrow weights and optimizer."""


def advice(config: RunConfig, *, parameters: int, accelerated: bool, cores: int = 0) -> list[str]:
    """Returns what a run should be warned of; empty if nothing is odd.

    Args:
      config: the run's.
      parameters: of the policy.
      accelerated: the trainer runs on GPUs or TPUs.
      cores: CPU cores that all devices of the trainer share; 0 if they are not this machine's.
    """
    found, algorithm, defaults = [], config.algorithm, AlgorithmConfig()
    if config.rollout.engine == "fake":
        found.append(
            "config.rollout.engine: fake is a test double without a model, so its tokens are noise, its "
            "log-probabilities made up (the mismatch with the trainer's, KL and ratios mean nothing), and the policy "
            "learns nothing from them; use vllm"
        )
    if config.coordinator.group_size == 1 and algorithm.advantage in GROUP_ADVANTAGES:
        found.append(
            f"config.coordinator.group_size: with 1, {algorithm.advantage} has no one to compare a rollout with, so "
            "its advantage is its reward and a reward of 0 teaches nothing; use 4 or more, or "
            "algorithm.advantage=reinforce_plus_plus"
        )
    # Settings of the KL term without the term. Only a warning, as a coefficient of 0 is a usual point of a sweep.
    for name in () if algorithm.kl_coefficient else ("kl_in_reward", "kl_estimator"):
        if getattr(algorithm, name) != getattr(defaults, name):
            found.append(
                f"config.algorithm.{name}: {getattr(algorithm, name)} has no effect with algorithm.kl_coefficient=0; "
                "set a coefficient above 0, or leave it out"
            )
    found += _sequences(algorithm)
    found += _pretrained(config)
    found += _no_adapter(config)
    devices = config.trainer.devices
    if cores and config.trainer.platform == "cpu" and devices > MOST_DEVICES_A_CORE * cores:
        axes = {name: getattr(config.trainer, name) for name in ("data", "fsdp", "tensor", "context")}
        field, size = max(axes.items(), key=lambda item: item[1])
        found.append(
            f"config.trainer.{field}: {size} makes {devices} virtual CPU devices on {cores} cores, so a step may take "
            f"minutes; use at most {MOST_DEVICES_A_CORE * cores} devices here"
        )
    if accelerated and parameters >= REAL_PARAMETERS and config.model.compute_dtype == "float32":
        found.append(
            "config.model.compute_dtype: float32 takes twice the memory of bfloat16 and several times its time on an "
            "accelerator; use bfloat16 (master weights stay float32)"
        )
    if accelerated and parameters >= REAL_PARAMETERS and config.rollout.dtype == "float32":
        found.append(
            "config.rollout.dtype: float32 takes twice the memory and time of bfloat16 to decode on an accelerator; "
            "use bfloat16"
        )
    instances = len(config.rollout.tensor_parallel)
    if config.rollout.sync_at_once >= instances and not config.planner.period:
        found.append(
            f"config.rollout.sync_at_once: all {instances} instances of rollout.tensor_parallel take weights at "
            "once, as with 0; set it below their number for some to go on decoding"
        )
    if config.rollout.full_sync_every > 1 and config.rollout.dtype == "float32":
        found.append(
            "config.rollout.full_sync_every: in float32 (rollout.dtype) nearly every weight changes in every step, so "
            "chunks are sent whole in any case; set rollout.dtype=bfloat16, or set it to 1"
        )
    if config.model.remat == "none" and parameters >= LARGE_PARAMETERS:
        found.append(
            f"config.model.remat: none keeps the activations of every layer of {parameters / 1e9:.2g} billion "
            "parameters for the backward pass; use dots, or full for the least memory"
        )
    return found


def _sequences(algorithm: AlgorithmConfig) -> list[str]:
    """Settings for ratios of tokens beside a loss whose ratio is that of a whole trajectory."""
    if algorithm.loss != "gspo":
        return []
    found = []
    if algorithm.aggregation == "token_mean":
        found.append(
            "config.algorithm.aggregation: token_mean weighs a trajectory by its length, and gspo's ratio is that of a "
            "whole trajectory; use sequence_mean"
        )
    # The decoupled objective has no clip that binds, and refuses changed ones.
    if algorithm.objective != "decoupled" and min(algorithm.clip_low, algorithm.clip_high) >= WIDE_CLIP:
        found.append(
            f"config.algorithm.clip_low: gspo's ratio stays near 1, so bounds of {algorithm.clip_low:g} and "
            f"{algorithm.clip_high:g} (clip_high) hardly ever bind; its paper takes 3e-4 and 4e-4"
        )
    return found


def _no_adapter(config: RunConfig) -> list[str]:
    """Settings of an adapter without its rank. Only a warning, as a rank of 0 is a usual point of a sweep."""
    lora, defaults = config.model.lora, LoraConfig()
    changed = [
        name for name in ("alpha", "targets", "layers", "sync") if getattr(lora, name) != getattr(defaults, name)
    ]
    if lora.rank or not changed:
        return []
    unread = ", ".join(f"model.lora.{name}" for name in changed)
    return [
        f"config.model.lora.rank: 0 trains all weights, at optimizer.learning_rate={config.optimizer.learning_rate:g}, "
        f"and {unread} will not be read; set a rank above 0 to train an adapter, or leave the other settings out"
    ]


def _pretrained(config: RunConfig) -> list[str]:
    """Settings of the shipped character model that pretrained weights do not survive."""
    if not config.model.path:
        return []
    found, optimizer, warm = [], config.optimizer, config.warm_start
    # An adapter takes rates of this size: the weights under it stay as they are.
    if optimizer.name in ADAPTIVE and optimizer.learning_rate >= TOY_RATE and not config.model.lora.rank:
        found.append(
            f"config.optimizer.learning_rate: {optimizer.learning_rate:g} moves every pretrained weight by about as "
            "much in each step, which few models survive; 1e-6 is usual"
        )
    if warm.steps and optimizer.name in ADAPTIVE and warm.learning_rate >= TOY_RATE:
        found.append(
            f"config.warm_start.learning_rate: {warm.learning_rate:g} moves every pretrained weight by about as much "
            "in each step, which few models survive; 1e-5 is usual"
        )
    if not optimizer.clip_norm:
        found.append(
            "config.optimizer.clip_norm: 0 leaves the gradient norm unlimited, so one bad batch may undo pretrained "
            "weights; 1 is usual"
        )
    if config.rollout.max_tokens < SHORT_ANSWER:
        found.append(
            f"config.rollout.max_tokens: {config.rollout.max_tokens} generated tokens a turn cut most answers of a "
            "pretrained model off; 1024 or more is usual, with rollout.max_context and trainer.row_tokens to match"
        )
    return found
