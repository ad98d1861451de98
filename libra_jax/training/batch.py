"""Turns trajectories into arrays for the packer and the advantage estimators, and checks every number.

Letters: N trajectories, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.algorithms import advantages, kl
from libra_jax.training import packing


def examples(
    trajectories: Sequence[protocols.Trajectory],
    policy_version: int,
    vocab_size: int,
    masked: Sequence[bool] | None = None,
) -> list[packing.Example]:
    """Makes the per-token arrays of each trajectory.

    Args:
      trajectories: trajectories to train on.
      policy_version: version that trains. Tokens sampled by this version are `on_version`.
      vocab_size: vocabulary size of the model.
      masked: True for each trajectory whose tokens are all left out of the loss; None masks none.

    Raises:
      DataError: a trajectory's lists differ in length, a token is outside the vocabulary, or a log-probability is not a
        number; the message names the trajectory.
    """
    made = [_example(trajectory, policy_version, vocab_size) for trajectory in trajectories]
    if masked is not None:
        for example, out in zip(made, masked, strict=True):
            example.mask_N[:] &= not out
    return made


def _example(trajectory: protocols.Trajectory, policy_version: int, vocab_size: int) -> packing.Example:
    name = trajectory.trajectory_id
    example = packing.Example(
        sequence_id=name,
        tokens_N=np.array(trajectory.token_ids, np.int32),
        mask_N=np.array(trajectory.loss_mask, bool),
        behaviour_N=np.array(trajectory.log_probs, np.float32),
        on_version_N=np.array(trajectory.policy_versions, np.int64) == policy_version,
    )
    lengths = {len(example.tokens_N), len(example.mask_N), len(example.behaviour_N), len(example.on_version_N)}
    if len(lengths) > 1:
        raise protocols.DataError(f"trajectory {name}: its per-token lists have different lengths {sorted(lengths)}.")
    if len(example.tokens_N) and not 0 <= example.tokens_N.min() <= example.tokens_N.max() < vocab_size:
        raise protocols.DataError(
            f"trajectory {name}: holds a token id outside the model's vocabulary of {vocab_size}; tokenizer and model "
            "do not belong together."
        )
    if not np.isfinite(example.behaviour_N).all():
        raise protocols.DataError(f"trajectory {name}: the engine returned a log-probability that is not a number.")
    return example


def rewards(groups: Sequence[protocols.Group]) -> tuple[np.ndarray, np.ndarray]:
    """Returns reward and group number of each trajectory, groups in order; float32 [N] and int32 [N].

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
    return np.array(values, np.float32), np.array(numbers, np.int32)


def token_advantages(
    config: config_lib.AlgorithmConfig,
    groups: Sequence[protocols.Group],
    members: Sequence[packing.Example],
    references: Sequence[np.ndarray] | None,
    masked: Sequence[bool],
) -> list[np.ndarray]:
    """Returns the advantage of each token, one array per trajectory. Masked trajectories enter no baseline.

    An estimator that compares the trajectories of a group gives a group of one its reward alone. A trajectory whose
    whole remaining group is masked has nothing left to compare with: it counts as exactly at its baseline.

    Args:
      config: settings that name the estimator.
      groups: groups of the batch.
      members: `examples` of the batch's trajectories, in the same order.
      references: reference log-probability of each token, one array per trajectory, for the KL penalty in the reward.
      masked: trajectories left out of the loss (`TaskConfig.masks`); `mask_N` excludes their tokens.

    Raises:
      DataError: a reward or an advantage is not finite; the message names the trajectory.
    """
    rewards_N, groups_N = rewards(groups)
    alone_N = np.zeros(len(members), bool)
    if any(masked):
        masked_N = np.array(masked, bool)
        sizes, kept = np.bincount(groups_N), np.bincount(groups_N, weights=~masked_N)
        if config.advantage in config_lib.GROUP_ADVANTAGES:
            alone_N = (sizes > 1)[groups_N] & (kept == 1)[groups_N] & ~masked_N
        # Each masked trajectory gets a group number of its own, so that no other baseline sees its reward.
        groups_N = np.where(masked_N, len(groups) + np.arange(len(members)), groups_N).astype(np.int32)
        # A reward of 0 in a group of one gives an advantage of 0: exactly at the baseline.
        rewards_N = np.where(alone_N, np.float32(0.0), rewards_N)
    mask_NxT = _stack([example.mask_N for example in members])
    mask_NxT[:, 0] = False  # no position predicts the first token
    kl_NxT = None
    if references is not None:
        behaviour_NxT = _stack([example.behaviour_N for example in members])
        estimates = kl.estimate(behaviour_NxT, _stack(references), config.kl_estimator)
        kl_NxT = np.asarray(estimates) * (mask_NxT & ~alone_N[:, None])
    advantages_NxT = advantages.compute(
        config, rewards_N=rewards_N, groups_N=groups_N, mask_NxT=mask_NxT, kl_NxT=kl_NxT
    )
    for example, row_T in zip(members, advantages_NxT, strict=True):
        if not np.isfinite(row_T).all():
            raise protocols.DataError(f"trajectory {example.sequence_id}: its advantage is not a finite number.")
    return [row_T[: len(example.tokens_N)] for example, row_T in zip(members, advantages_NxT, strict=True)]


NO_ADVANTAGE = 1e-6
"""Largest absolute advantage in a group that counts as having no gradient; larger than rounding errors."""


def statistics(
    values: Sequence[np.ndarray], members: Sequence[packing.Example], groups: Sequence[protocols.Group]
) -> dict[str, float]:
    """Describes the advantages of a batch.

    Args:
      values: advantage of each token, one array per trajectory.
      members: `examples` of the trajectories, in the same order.
      groups: groups of the batch, in the same order.

    Returns:
      `groups/without_gradient`: the fraction of groups whose trained tokens have no advantage (equal rewards, or all
      rollouts masked). `advantage/mean`, `/std`, `/min` and `/max`: over trained tokens, absent if there are none.
    """
    # No position predicts the first token, so its advantage never counts.
    trained_each = [value[1:][example.mask_N[1:]] for value, example in zip(values, members, strict=True)]
    largest = iter([float(np.abs(row).max(initial=0.0)) for row in trained_each])
    idle = [max([next(largest) for _ in group.trajectories], default=0.0) <= NO_ADVANTAGE for group in groups]
    found = {"groups/without_gradient": float(np.mean(idle))}
    trained = np.concatenate(trained_each)
    if not len(trained):
        return found
    return found | {
        "advantage/mean": float(trained.mean()),
        "advantage/std": float(trained.std()),
        "advantage/min": float(trained.min()),
        "advantage/max": float(trained.max()),
    }


def _stack(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Stacks rows into [N, T], with zeros after each row's end."""
    stacked_NxT = np.zeros((len(rows), max(len(row) for row in rows)), rows[0].dtype)
    for index, row in enumerate(rows):
        stacked_NxT[index, : len(row)] = row
    return stacked_NxT
