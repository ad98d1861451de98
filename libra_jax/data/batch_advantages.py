"""The advantages of a batch's tokens, from its groups and sequences, and what a step reports of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.algorithms import estimators, kl
from libra_jax.data import dividing
from libra_jax.data import sequences as sequences_lib

NO_ADVANTAGE = 1e-6
"""Largest absolute advantage in a group that counts as having no gradient; larger than rounding errors."""


def rewards(groups: Sequence[protocols.Group]) -> tuple[np.ndarray, np.ndarray]:
    """Returns reward and group number of each trajectory, groups in order; float64 [N] and int32 [N].

    Raises:
      DataError: a reward is missing or not finite; the message names the trajectory.
    """
    values: list[float] = []
    numbers: list[int] = []
    for number, group in enumerate(groups):
        for trajectory in group.trajectories:
            reward = trajectory.reward
            if reward is None or not math.isfinite(reward):
                raise protocols.DataError(
                    f"trajectory {trajectory.trajectory_id}: its reward is {reward}; the environment or reward "
                    "function must return a finite number."
                )
            values.append(reward)
            numbers.append(number)
    return np.array(values, np.float64), np.array(numbers, np.int32)


def token_advantages(
    config: config_lib.AlgorithmConfig,
    groups: Sequence[protocols.Group],
    sequences: Sequence[sequences_lib.Example],
    references: Sequence[np.ndarray] | None,
    masked: Sequence[bool],
    values: Sequence[np.ndarray] | None = None,
    truncated: Sequence[bool] | None = None,
    scores: estimators.Scores | None = None,
    own_rewards: Sequence[np.ndarray] | None = None,
) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
    """Returns advantages and returns of the tokens, one array per trajectory. Masked trajectories enter no baseline.

    Returns are those that a critic learns; None without values.

    An estimator that compares the trajectories of a group gives a group of one its reward alone. A trajectory whose
    whole remaining group is masked has nothing left to compare with: it counts as exactly at its baseline.

    Args:
      config: settings that name the estimator.
      groups: groups of the batch.
      sequences: `sequences.examples` of the batch's trajectories, in the same order.
      references: reference log-probability of each token, one array per trajectory, for the KL penalty in the reward.
      masked: trajectories left out of the loss (`TaskConfig.masks`); `mask_N` excludes their tokens.
      values: the critic's value before each token, one array per trajectory; None without a critic.
      truncated: trajectories that are trained without their reward (`TaskConfig.cuts`); None: none of them.
      scores: scores of the trajectories; None unless the baseline needs them.
      own_rewards: reward of each token's segment less the trajectory's, one array per trajectory; None: no segment has
        a reward of its own.

    Raises:
      DataError: a reward or an advantage is not finite; the message names the trajectory.
    """
    rewards_N, groups_N = rewards(groups)
    alone_N = np.zeros(len(sequences), bool)
    if any(masked):
        masked_N = np.array(masked, bool)
        sizes, unmasked_counts = np.bincount(groups_N), np.bincount(groups_N, weights=~masked_N)
        if config.advantage in (*config_lib.GROUP_ADVANTAGES, "distillation"):
            alone_N = (sizes > 1)[groups_N] & (unmasked_counts == 1)[groups_N] & ~masked_N
        # Each masked trajectory gets a group number of its own, so that no other baseline sees its reward.
        groups_N = np.where(masked_N, len(groups) + np.arange(len(sequences)), groups_N).astype(np.int32)
        # A reward of 0 in a group of one gives an advantage of 0: exactly at the baseline.
        rewards_N = np.where(alone_N, 0.0, rewards_N)
    if dividing.of_rewards(config) and own_rewards is None:
        return _of_rewards(config, sequences, rewards_N, groups_N, truncated), None
    mask_NxT = _stack([example.mask_N for example in sequences])
    mask_NxT[:, 0] = False  # no position predicts the first token
    kl_NxT = None
    if references is not None:
        behaviour_NxT = _stack([example.behaviour_N for example in sequences])
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
        truncated_N=None if truncated is None else np.array(truncated, bool),
        scores=scores,
        own_rewards_NxT=None if own_rewards is None else _stack(own_rewards),
    )
    returns_NxT = None
    if values_NxT is not None:
        returns_NxT = estimators.value_targets(
            config, rewards_N=rewards_N, mask_NxT=mask_NxT, values_NxT=values_NxT, kl_NxT=kl_NxT
        )
    for example, row_T in zip(sequences, advantages_NxT, strict=True):
        if not np.isfinite(row_T).all():
            raise protocols.DataError(f"trajectory {example.sequence_id}: its advantage is not a finite number.")
    lengths = [len(example.tokens_N) for example in sequences]

    def cut(rows_NxT: np.ndarray) -> list[np.ndarray]:
        return [row_T[:length] for length, row_T in zip(lengths, rows_NxT, strict=True)]

    return cut(advantages_NxT), None if returns_NxT is None else cut(returns_NxT)


def _of_rewards(
    config: config_lib.AlgorithmConfig,
    sequences: Sequence[sequences_lib.Example],
    rewards_N: np.ndarray,
    groups_N: np.ndarray,
    truncated: Sequence[bool] | None,
) -> list[np.ndarray]:
    """Returns advantages that are one number a trajectory, without arrays of all tokens (`dividing.of_rewards`)."""
    advantage_Nx1 = estimators.compute(
        config,
        rewards_N=rewards_N,
        groups_N=groups_N,
        mask_NxT=np.array([[example.trained > 0] for example in sequences]),
        truncated_N=None if truncated is None else np.array(truncated, bool),
    )
    advantages = []
    for example, advantage in zip(sequences, advantage_Nx1[:, 0], strict=True):
        if not np.isfinite(advantage):
            raise protocols.DataError(f"trajectory {example.sequence_id}: its advantage is not a finite number.")
        values_N = np.where(example.mask_N, advantage, np.float32(0.0))
        values_N[:1] = 0.0  # no position predicts the first token
        advantages.append(values_N if example.outline is None else np.array([advantage]))
    return advantages


def statistics(
    values: Sequence[np.ndarray], sequences: Sequence[sequences_lib.Example], groups: Sequence[protocols.Group]
) -> dict[str, float]:
    """Describes the advantages of a batch.

    Args:
      values: advantage of each token, one array per trajectory (`Prepared.advantages`).
      sequences: `sequences.examples` of the trajectories, in the same order.
      groups: groups of the batch, in the same order.

    Returns:
      `groups/without_gradient`: the fraction of groups whose trained tokens have no advantage (equal rewards, or all
      rollouts masked). `advantage/mean`, `/std`, `/min` and `/max`: over trained tokens, absent if there are none.
    """
    # No position predicts the first token, so its advantage never counts.
    trained_each = [
        value[1:][example.mask_N[1:]] if example.outline is None else value[: example.trained]
        for value, example in zip(values, sequences, strict=True)
    ]
    largest = iter([float(np.abs(row).max(initial=0.0)) for row in trained_each])
    idle = [max([next(largest) for _ in group.trajectories], default=0.0) <= NO_ADVANTAGE for group in groups]
    metrics = {"groups/without_gradient": float(np.mean(idle))}
    trained = np.concatenate(trained_each)
    if not len(trained):
        return metrics
    # A number that stands for all trained tokens of a sequence counts as often.
    times = [
        np.full(len(row), 1 if example.outline is None else example.trained, np.int64)
        for row, example in zip(trained_each, sequences, strict=True)
    ]
    weights = np.concatenate(times)
    mean = np.average(trained, weights=weights)
    return metrics | {
        "advantage/mean": float(mean),
        "advantage/std": float(np.sqrt(np.average((trained - mean) ** 2, weights=weights))),
        "advantage/min": float(trained.min()),
        "advantage/max": float(trained.max()),
    }


def _stack(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Stacks rows into [N, T], with zeros after each row's end."""
    stacked_NxT = np.zeros((len(rows), max(len(row) for row in rows)), rows[0].dtype)
    for index, row in enumerate(rows):
        stacked_NxT[index, : len(row)] = row
    return stacked_NxT
