"""DAPO's soft overlong penalty (arXiv 2503.14476, eq. 13): rollouts that near their token limit lose reward."""

from __future__ import annotations

from libra_jax import config as config_lib
from libra_jax import protocols

METRIC = "reward/overlong"


def penalty(tokens: int, limit: int, buffer: int) -> float:
    """Returns the share of the penalty that a rollout gets: 0 up to `limit - buffer` tokens, 1 from `limit` on.

    clip((tokens - (limit - buffer)) / buffer, 0, 1)

    Args:
      tokens: generated tokens of the rollout.
      limit: largest number of tokens that it may generate.
      buffer: tokens before `limit` over which the penalty rises, above 0.

    Example:
      >>> penalty(90, 100, 20)
      0.5
    """
    return min(1.0, max(0.0, (tokens - (limit - buffer)) / buffer))


def shape(config: config_lib.RunConfig, group: protocols.Group) -> None:
    """Takes the penalty off the reward of each rollout of a scored group, once. Leaves the environment's own reward."""
    algorithm = config.algorithm
    if not algorithm.overlong_buffer:
        return
    for trajectory in group.trajectories:
        assert trajectory.reward is not None
        share = penalty(trajectory.sampled_tokens, config.most_tokens, algorithm.overlong_buffer)
        trajectory.metrics[METRIC] = algorithm.overlong_penalty * share
        for segment in trajectory.segments:
            if segment.reward is not None:  # of a branch: a reward of its own
                segment.reward -= algorithm.overlong_penalty * share
