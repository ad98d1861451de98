"""Divides a batch among the processes of a trainer: each takes the tokens of the sequences in its own rows.

A process takes outlines of all other sequences. From outlines it computes the same places, advantages and counts as
every other process. That needs an advantage which is one number a rollout, computed from its group's rewards alone.
With other settings, each process takes the whole batch.

The trainer's client calls this, so nothing here imports JAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.data import row_places
from libra_jax.data import sequences as sequences_lib


def divides(config: config_lib.RunConfig) -> bool:
    """Returns True if processes can train on parts of a batch: nothing but the devices looks at all its tokens."""
    algorithm = config.algorithm
    return (
        algorithm.compares_only_rewards
        and algorithm.loss not in config_lib.BATCH_LOSSES
        and algorithm.entropy_share == 1
        and not config.critic.enabled
        and not config.trainer.share_prompt
    )


def divide(
    config: config_lib.RunConfig, batch: protocols.TrainBatch, rows: Sequence[Sequence[int]]
) -> Sequence[protocols.BatchPart] | None:
    """Divides a batch. See `protocols.DivideBatch`.

    Raises:
      ConfigError: a sequence is longer than the longest row.
    """
    rollouts = [rollout for group in batch.groups for rollout in group.trajectories]
    if not divides(config) or any(rollout.branches for rollout in rollouts):
        return None
    numbers = {id(rollout): number for number, rollout in enumerate(rollouts)}
    groups = [
        dataclasses.replace(
            group,
            task=protocols.Task(group.task.prompt_id, {}),
            trajectories=[_outlined(config, rollout) for rollout in group.trajectories],
            replay=None,
        )
        for group in batch.groups
    ]
    outlined = [rollout for group in groups for rollout in group.trajectories]
    # Processes that hold the same rows share one object.
    rollouts_by_rows: dict[tuple[int, ...], dict[int, protocols.Trajectory]] = {
        tuple(sorted(process_rows)): {} for process_rows in rows
    }
    holders: dict[int, list[dict[int, protocols.Trajectory]]] = {}
    for process_rows, holding in rollouts_by_rows.items():
        for row in process_rows:
            holders.setdefault(row, []).append(holding)
    # Begun groups are packed apart from the rest, by a trainer that has lost their sums.
    for part in (batch.of(batch.begun), batch.rest):
        member_numbers = [numbers[id(rollout)] for group in part.groups for rollout in group.trajectories]
        examples = [sequences_lib.of_outline(outlined[number]) for number in member_numbers]
        sizes = row_places.minibatch_sizes(config, part.groups)
        for place in row_places.place(examples, config.trainer, len(holders), sizes).places:
            for holding in holders[place.row]:
                holding[member_numbers[place.example]] = rollouts[member_numbers[place.example]]
    # Rollouts without a trained token lie in no row. One process checks them, as it would those of a whole batch.
    first = rollouts_by_rows[tuple(sorted(rows[0]))]
    for number, rollout in enumerate(outlined):
        if rollout.outline is not None and not rollout.outline.columns:
            first[number] = rollouts[number]
    outlined_batch = dataclasses.replace(batch, groups=tuple(groups))
    return [protocols.BatchPart(outlined_batch, rollouts_by_rows[tuple(sorted(process_rows))]) for process_rows in rows]


def _outlined(config: config_lib.RunConfig, rollout: protocols.Trajectory) -> protocols.Trajectory:
    """Returns a rollout's name, rewards and end with an outline instead of its tokens."""
    mask_N = np.array(rollout.loss_mask, bool) & (not config.task.masks(rollout.finish))
    return protocols.Trajectory(
        rollout.trajectory_id,
        rollout.prompt_id,
        reward=rollout.reward,
        finish=rollout.finish,
        outline=protocols.Outline(
            sequences_lib.columns_of(mask_N), int(np.count_nonzero(mask_N[1:])), bool(rollout.routing)
        ),
    )
