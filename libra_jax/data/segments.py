"""Settings, rewards and divisors of rollouts of several segments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.data import packing
from libra_jax.data import sequences as sequences_lib

OWN_REWARDS = ("grpo", "dr_grpo", "rloo", "opo")
"""Advantages that take rewards of single segments: of the others, the baseline has no meaning apart from the reward."""


def check(config: config_lib.RunConfig, sequences: sequences_lib.BatchSequences, packed: packing.Packed) -> None:
    """Checks that the settings take rollouts of several segments, if there are any, and rollouts that were split.

    Raises:
      ConfigError: a setting does not; the message names the setting and a trajectory.
    """
    trajectories = sequences.trajectories
    for several in (trajectory for trajectory in trajectories if trajectory.branches):
        for field, reason in refusing(config).items():
            raise protocols.ConfigError(
                f"config.{field}: trajectory {several.trajectory_id} has {len(several.segments)} segments, and "
                f"{reason}; switch it off, or use an environment whose rollouts have one segment"
            )
    for sentence in looking_at_whole(config.algorithm):
        for example in packed.split():
            raise protocols.ConfigError(
                f"{sentence}, and trajectory {trajectories[example].trajectory_id} is longer than a row; add a longer "
                "row to trainer.row_buckets"
            )


def refusing(config: config_lib.RunConfig) -> dict[str, str]:
    """Returns the settings that take no rollout of several segments, each with the reason."""
    algorithm, refused = config.algorithm, dict[str, str]()
    if config.critic.enabled:
        refused["critic.enabled"] = "a value is that of the rest of one sequence"
    if algorithm.kl_in_reward and algorithm.advantage == "reinforce_plus_plus":
        reason = "a token's return has the penalties of all later tokens, and segments have no order"
        refused["algorithm.kl_in_reward"] = reason
    return refused


def looking_at_whole(config: config_lib.AlgorithmConfig) -> list[str]:
    """Returns the settings that look at whole rollouts, as sentences that begin with the field."""
    looking = {
        "baseline": config.baseline == "minimum_variance",
        "loss": config.loss in ("gspo", "gmpo"),
        "correction_level": config.correction_level != "token",
        "ess_scaling": config.ess_scaling != "off",
        "balance_coefficient": config.balance_coefficient > 0,
    }
    return [
        f"config.algorithm.{name}: {getattr(config, name)} looks at whole rollouts" for name in looking if looking[name]
    ]


def reward_offsets(
    config: config_lib.AlgorithmConfig, trajectories: Sequence[protocols.Trajectory]
) -> list[np.ndarray] | None:
    """Returns the reward of each token's segment less the trajectory's, [N] each; None if no segment has its own.

    Raises:
      ConfigError: the advantage takes no rewards of segments.
      DataError: a segment's reward is not finite; the message names the segment.
    """
    owners = [segment for trajectory in trajectories for segment in trajectory.branches if segment.reward is not None]
    if not owners:
        return None
    config_lib.check(
        config.advantage in OWN_REWARDS,
        "algorithm.advantage",
        f"segment {owners[0].name} has a reward of its own, and {config.advantage} has no baseline to compare it with; "
        f"use one of {', '.join(OWN_REWARDS)}",
    )
    for segment in owners:
        if segment.reward is None or not math.isfinite(segment.reward):
            raise protocols.DataError(f"segment {segment.name}: its reward is {segment.reward}, not a finite number.")
    token_offsets = []
    for trajectory in trajectories:
        # A trajectory without a reward is refused by name later on.
        trajectory_reward = trajectory.reward or 0.0
        offsets = [
            0.0 if segment.reward is None else segment.reward - trajectory_reward for segment in trajectory.segments
        ]
        token_offsets.append(
            np.repeat(np.array(offsets, np.float32), [len(segment.token_ids) for segment in trajectory.segments])
        )
    return token_offsets


def add_rollout_tokens(
    extras: Sequence[dict[str, Any]], packed: packing.Packed, examples: Sequence[sequences_lib.Example]
) -> None:
    """Adds `packing.ROLLOUT_TOKENS` to the arrays of the micro-batches that hold a part of a rollout.

    An aggregation by rollout divides by these tokens, which a part alone does not hold.
    """
    holding = {number for numbers in packed.split().values() for number in numbers}
    if not holding:
        return
    # No position predicts the first token.
    arrays = packed.scatter([float(np.count_nonzero(example.mask_N[1:])) for example in examples])
    for number in sorted(holding):
        extras[number][packing.ROLLOUT_TOKENS] = arrays[number]
