"""The advantages of a batch's tokens, from its groups and sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.algorithms import estimators, kl
from libra_jax.data import sequences as sequences_lib


def token_advantages(
    config: config_lib.AlgorithmConfig,
    sequences: sequences_lib.BatchSequences,
    references: Sequence[np.ndarray] | None = None,
    values: Sequence[np.ndarray] | None = None,
    scores: estimators.Scores | None = None,
    own_rewards: Sequence[np.ndarray] | None = None,
) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
    """Returns advantages and returns of the tokens, one array per trajectory. Masked trajectories enter no baseline.

    Returns are those that a critic learns; None without values. Of a sequence whose tokens other processes train, the
    advantages have one number.

    An estimator that compares the trajectories of a group gives a group of one its reward alone. A trajectory whose
    whole remaining group is masked has nothing left to compare with: it counts as exactly at its baseline.

    Args:
      config: settings that name the estimator.
      sequences: sequences of the batch.
      references: reference log-probability of each token, one array per trajectory, for the KL penalty in the reward.
      values: the critic's value before each token, one array per trajectory; None without a critic.
      scores: scores of the trajectories; None unless the baseline needs them.
      own_rewards: reward of each token's segment less the trajectory's, one array per trajectory; None: no segment has
        a reward of its own.

    Raises:
      DataError: a reward or an advantage is not finite; the message names the trajectory.
    """
    examples, masked_N, groups_N = sequences.examples, sequences.masked_N, sequences.groups_N
    rewards_N = _rewards(sequences.trajectories)
    alone_N = np.zeros(len(examples), bool)
    if masked_N.any():
        sizes, unmasked_counts = np.bincount(groups_N), np.bincount(groups_N, weights=~masked_N)
        if config.advantage in (*config_lib.GROUP_ADVANTAGES, "distillation"):
            alone_N = (sizes > 1)[groups_N] & (unmasked_counts == 1)[groups_N] & ~masked_N
        # Each masked trajectory gets a group number of its own, so that no other baseline sees its reward.
        groups_N = np.where(masked_N, len(sequences.groups) + np.arange(len(examples)), groups_N).astype(np.int32)
        # A reward of 0 in a group of one gives an advantage of 0: exactly at the baseline.
        rewards_N = np.where(alone_N, 0.0, rewards_N)
    # One number a trajectory needs no arrays of all tokens, which this process may not have.
    one_number = config.compares_only_rewards and own_rewards is None
    if one_number:
        mask_NxT, values = np.array([[example.trained > 0] for example in examples]), None
    else:
        mask_NxT = _stack([example.mask_N for example in examples])
        mask_NxT[:, 0] = False  # no position predicts the first token
    kl_NxT = None
    if references is not None and not one_number:
        behaviour_NxT = _stack([example.behaviour_N for example in examples])
        estimates = kl.estimate(behaviour_NxT, _stack(references), config.kl_estimator)
        # Distillation's penalties are no part of the reward that it compares.
        compares_N = alone_N & (config.advantage != "distillation")
        kl_NxT = np.asarray(estimates) * (mask_NxT & ~compares_N[:, None])
    values_NxT = None if values is None else _stack(values)
    advantages_NxT = estimators.compute(
        config,
        rewards_N=rewards_N,
        groups_N=groups_N,
        mask_NxT=mask_NxT,
        kl_NxT=kl_NxT,
        values_NxT=values_NxT,
        truncated_N=sequences.truncated_N,
        scores=scores,
        own_rewards_NxT=None if own_rewards is None else _stack(own_rewards),
    )
    for example, row_T in zip(examples, advantages_NxT, strict=True):
        if not np.isfinite(row_T).all():
            raise protocols.DataError(f"trajectory {example.sequence_id}: its advantage is not a finite number.")
    if one_number:
        return [_spread(example, row_T[0]) for example, row_T in zip(examples, advantages_NxT, strict=True)], None
    advantages = _cut(advantages_NxT, examples)
    if values_NxT is None:
        return advantages, None
    returns_NxT = estimators.value_targets(
        config, rewards_N=rewards_N, mask_NxT=mask_NxT, values_NxT=values_NxT, kl_NxT=kl_NxT
    )
    return advantages, _cut(returns_NxT, examples)


def _rewards(trajectories: Sequence[protocols.Trajectory]) -> np.ndarray:
    """Returns the reward of each trajectory, float64 [N].

    Raises:
      DataError: a reward is missing or not finite; the message names the trajectory.
    """
    for trajectory in trajectories:
        if trajectory.reward is None or not math.isfinite(trajectory.reward):
            raise protocols.DataError(
                f"trajectory {trajectory.trajectory_id}: its reward is {trajectory.reward}; the environment or reward "
                "function must return a finite number."
            )
    return np.array([trajectory.reward for trajectory in trajectories], np.float64)


def _spread(example: sequences_lib.Example, advantage: np.floating) -> np.ndarray:
    """Returns a trajectory's one advantage at its trained tokens; the number alone if other processes have these."""
    if example.outline is not None:
        return np.array([advantage])
    values_N = np.where(example.mask_N, advantage, np.float32(0.0))
    values_N[:1] = 0.0  # no position predicts the first token
    return values_N


def _cut(rows_NxT: np.ndarray, examples: Sequence[sequences_lib.Example]) -> list[np.ndarray]:
    """Inverts `_stack`."""
    return [row_T[: len(example.tokens_N)] for example, row_T in zip(examples, rows_NxT, strict=True)]


def _stack(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Stacks rows into [N, T], with zeros after each row's end."""
    stacked_NxT = np.zeros((len(rows), max(len(row) for row in rows)), rows[0].dtype)
    for index, row in enumerate(rows):
        stacked_NxT[index, : len(row)] = row
    return stacked_NxT
