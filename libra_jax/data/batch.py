"""Turns a batch of groups into micro-batches. The trainer and every hybrid worker do this before a policy update.

The result depends only on the batch and the config (and on the reference model, which hybrid workers do not hold). All
parties therefore hold identical micro-batches with identical numbers. Every number is checked on the way.

Letters: N trajectories, T tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.algorithms import estimators, turn_selection
from libra_jax.data import batch_advantages, dividing, packing, segments, world
from libra_jax.data import sequences as sequences_lib
from libra_jax.models import config as model_config
from libra_jax.models import sharding

Score = Callable[[packing.Packed, Sequence[dict[str, Any]]], "list[jax.Array]"]
"""Returns the reference model's log-probabilities of a packed batch: one [B, T] array per micro-batch. Takes the batch
and each micro-batch's `routing` and `routed`, or empty dicts."""

ScoreNorms = Callable[[Sequence[sequences_lib.Example]], estimators.Scores]
"""Returns the scores of trajectories (`learner.Learner.score_norms`)."""

UNTRAINED = "no token of the batch's {} sequences is under the loss mask."
"""Error of a batch that cannot be trained on, about its number of sequences."""


@dataclass(frozen=True)
class Prepared:
    """The prepared batch of a policy update.

    Attributes:
      packed: the micro-batches.
      extras: further arrays of each micro-batch: `advantages`, `reference`, `moved`, `staleness`, `routed`,
        `rollout_tokens` [B, T], and `routing` [B, T, W] (`packing.Packed.routing`).
      minibatches: micro-batches of each mini-batch, in order.
      targets: arrays of each micro-batch that the critic learns from, [B, T]: `returns`, `values`, and the `mask`
        without truncated rollouts; empty without a critic.
      examples: sequences in the batch's order.
      advantages: advantages of each token, one array per sequence. Of a sequence whose tokens other processes train,
        the array has one number.
      described: counts of what is trained and of all, by the name of the metric that is their quotient; empty if all
        turns are trained.
    """

    packed: packing.Packed
    extras: Sequence[dict[str, Any]]
    minibatches: Sequence[range]
    targets: Sequence[dict[str, Any]]
    examples: Sequence[sequences_lib.Example]
    advantages: Sequence[np.ndarray]
    described: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def work(self) -> tuple[int, ...]:
        """Rows x columns of each micro-batch of the first update, whose work hybrid workers share."""
        return tuple(self.packed.micro_batches[index].tokens.size for index in self.minibatches[0])


def prepare(
    config: config_lib.RunConfig,
    batch: protocols.TrainBatch,
    model: model_config.TransformerConfig,
    score: Score | None = None,
    value: Score | None = None,
    score_norms: ScoreNorms | None = None,
) -> Prepared:
    """Packs a batch and lays out the further arrays that the objective needs.

    Args:
      config: configuration of the run.
      batch: whole groups.
      model: shape of the model.
      score: scoring function of the reference model; called only if the trainer has one (`scores_reference`).
      value: values of the critic, in the form of `score`; called only with `critic.enabled`.
      score_norms: scores of single trajectories; called only with `algorithm.baseline=minimum_variance`.

    Raises:
      DataError: a trajectory holds a number that cannot be trained on; the message names the trajectory.
      ConfigError: a trajectory has several segments, and a setting takes rollouts of one only.
      LibraError: no token is under the loss mask, though no rollout was cut off (`task.cut_off`); or the objective
        needs a reference model and none is given.
    """
    trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
    masked = [config.task.masks(trajectory.finish) for trajectory in trajectories]
    truncated = [config.task.cuts(item.finish) and not out for item, out in zip(trajectories, masked, strict=True)]
    references: list[np.ndarray] | None = None
    # Each process checks the tokens that it has.
    with world.agreeing():
        segments.check(config, trajectories)
        sequences = sequences_lib.examples(trajectories, batch.policy_version, model, masked)
        packed, minibatches = _in_minibatches(config, batch.groups, sequences, any(masked))
        segments.check_whole(config.algorithm, packed, trajectories)
        routing: Sequence[dict[str, Any]] = [{} for _ in packed.micro_batches]
        if config.algorithm.routing_replay == "rollout":
            routing = _replayed(packed, sequences, model)
        if config.algorithm.kl_coefficient and config.algorithm.teacher_served:
            references = _taught(trajectories, masked)
    # Further arrays, one of each name for each micro-batch.
    further: dict[str, Sequence[Any]] = {}
    if references is not None:
        further["reference"] = packed.scatter(references)
    elif config.algorithm.kl_coefficient:
        if score is None:
            raise protocols.LibraError(
                "algorithm.kl_coefficient needs a reference model, and a hybrid worker holds none."
            )
        scores = score(packed, routing)
        further["reference"] = scores
        # As a penalty in the reward, the KL enters the advantages, which are computed on the host.
        if config.algorithm.kl_in_reward:
            references = _gathered(packed, scores, sequences)
    values = None
    if config.critic.enabled:
        if value is None:
            raise protocols.LibraError("critic.enabled needs the critic's values, and only the trainer has a critic.")
        values = _gathered(packed, value(packed, routing), sequences)
    of_rollouts = None
    if config.algorithm.baseline == "minimum_variance":
        if score_norms is None:
            raise protocols.LibraError("algorithm.baseline=minimum_variance needs the gradients of single rollouts.")
        of_rollouts = score_norms(sequences)
    own_rewards = segments.reward_offsets(config.algorithm, trajectories)
    advantage, returns = batch_advantages.token_advantages(
        config.algorithm, batch.groups, sequences, references, masked, values, truncated, of_rollouts, own_rewards
    )
    further["advantages"] = packed.scatter(advantage)
    described: dict[str, tuple[int, int]] = {}
    if config.algorithm.entropy_share < 1:
        # Only now, because advantages and a critic's returns are those of whole trajectories.
        packed, sequences, described = _of_high_entropy(config.algorithm.entropy_share, packed, sequences, batch.groups)
    targets: Sequence[dict[str, Any]] = ()
    if values is not None and returns is not None:
        # A truncated rollout has no return to learn from.
        finished = packed.scatter([float(not cut) for cut in truncated])
        masks = [item.mask & (has_return > 0) for item, has_return in zip(packed.micro_batches, finished, strict=True)]
        arrays = zip(packed.scatter(returns), packed.scatter(values), masks, strict=True)
        targets = [dict(zip(("returns", "values", "mask"), triple, strict=True)) for triple in arrays]
    if len(config.rollout.tensor_parallel) > 1:
        # Like every extra, a float32 array: the objective takes a token as moved if the value is above 0.
        moved = [float(trajectory.metrics.get("moves", 0) > 0) for trajectory in trajectories]
        further["moved"] = packed.scatter(moved)
    if config.algorithm.proximal == "interpolate":
        versions = [
            sequences_lib.joined([segment.policy_versions for segment in item.segments], np.float32)
            for item in trajectories
        ]
        further["staleness"] = packed.scatter([batch.policy_version - of_tokens for of_tokens in versions])
    extras = [
        dict(zip(further, arrays, strict=True)) | experts
        for *arrays, experts in zip(*further.values(), routing, strict=True)
    ]
    if config.algorithm.aggregation != "token_mean":
        segments.add_rollout_tokens(extras, packed, sequences)
    return Prepared(packed, extras, minibatches, targets, sequences, advantage, described)


def leaves_out(config: config_lib.RunConfig, groups: Sequence[protocols.Group]) -> bool:
    """Returns True if a rollout is left out of the loss because it was cut off (`task.cut_off`)."""
    return any(config.task.masks(rollout.finish) for group in groups for rollout in group.trajectories)


def _in_minibatches(
    config: config_lib.RunConfig,
    groups: Sequence[protocols.Group],
    sequences: Sequence[sequences_lib.Example],
    masked: bool,
) -> tuple[packing.Packed, list[range]]:
    """Packs the sequences of the mini-batches, and returns the micro-batches of each.

    Args:
      config: configuration of the run.
      groups: whole groups.
      sequences: sequences of their trajectories, in order.
      masked: a trajectory is left out of the loss.
    """
    parts, start = [], 0
    # Of a streamed step, this may be the one group without a trained token.
    may_be_empty = masked or config.trainer.stream != "off" or any(example.trained for example in sequences)
    for of_minibatch in dividing.minibatches(config, groups):
        size = sum(len(group.trajectories) for group in of_minibatch)
        parts.append(pack(config, sequences[start : start + size], may_be_empty=may_be_empty))
        start += size
    ends = np.cumsum([len(part.micro_batches) for part in parts]).tolist()
    ranges = [range(end - len(part.micro_batches), end) for end, part in zip(ends, parts, strict=True)]
    return packing.joined(parts), ranges


def _of_high_entropy(
    share: float, packed: packing.Packed, sequences: Sequence[sequences_lib.Example], groups: Sequence[protocols.Group]
) -> tuple[packing.Packed, list[sequences_lib.Example], dict[str, tuple[int, int]]]:
    """Leaves the turns of the lowest entropy out of the loss (`algorithm.entropy_share`).

    Returns:
      The batch and its sequences with fewer trained tokens, and the metrics of the choice.
    """
    numbers = [number for number, group in enumerate(groups) for _ in group.trajectories]
    masks = [example.mask_N for example in sequences]
    selected_masks = turn_selection.highest_entropy(
        [example.behaviour_N for example in sequences], masks, numbers, share
    )
    laid_out = packed.scatter([mask_N.astype(np.float32) for mask_N in selected_masks])
    micro_batches = tuple(
        dataclasses.replace(item, mask=item.mask & (mask > 0))
        for item, mask in zip(packed.micro_batches, laid_out, strict=True)
    )
    # A turn begins where the mask rises.
    rises = [
        [np.diff(mask_N.astype(np.int8), prepend=0) > 0 for mask_N in mask_list]
        for mask_list in (masks, selected_masks)
    ]
    turns, tokens = (
        [sum(map(np.count_nonzero, arrays)) for arrays in pair] for pair in (rises, (masks, selected_masks))
    )
    described = {"turns/trained_share": (turns[1], turns[0]), "tokens/entropy_share": (tokens[1], tokens[0])}
    chosen = [dataclasses.replace(item, mask_N=mask_N) for item, mask_N in zip(sequences, selected_masks, strict=True)]
    return dataclasses.replace(packed, micro_batches=micro_batches), chosen, described


def _taught(trajectories: Sequence[protocols.Trajectory], masked: Sequence[bool]) -> list[np.ndarray]:
    """Returns the recorded log-probabilities of a teacher behind an endpoint, [N] each; zeros for the masked."""
    log_probs = []
    for trajectory, out in zip(trajectories, masked, strict=True):
        for segment in () if out else trajectory.segments:
            count, recorded = len(segment.token_ids), len(segment.teacher_log_probs)
            if recorded != count:
                raise protocols.DataError(
                    f"trajectory {segment.name}: the teacher has scored {recorded} of its {count} tokens."
                )
        columns = [segment.token_ids if out else segment.teacher_log_probs for segment in trajectory.segments]
        taught_N = sequences_lib.joined(columns, np.float32)
        log_probs.append(np.zeros_like(taught_N) if out else taught_N)
    return log_probs


def _gathered(
    packed: packing.Packed, arrays: Sequence[jax.Array], sequences: Sequence[sequences_lib.Example]
) -> list[np.ndarray]:
    """Returns the numbers of each sequence's tokens, [N], from one [B, T] array per micro-batch on the mesh."""
    with world.explaining(), sharding.whole(arrays) as full_arrays:
        on_host = [np.asarray(array) for array in full_arrays]
    return packed.gather(on_host, [len(example.tokens_N) for example in sequences])


def _replayed(
    packed: packing.Packed, sequences: Sequence[sequences_lib.Example], model: model_config.TransformerConfig
) -> list[dict[str, Any]]:
    """Returns `routing` and `routed` of each micro-batch."""
    trained = [example for example in sequences if example.columns]
    if trained and not any(example.routed for example in trained):
        raise protocols.DataError(
            f"trajectory {trained[0].sequence_id} and all others of the batch came without experts, which "
            "config.algorithm.routing_replay=rollout trains on: use engines that return them, or set it to off."
        )
    return packed.routing(sequences, model.routing_width, np.dtype(model.routing_dtype))


def pack(
    config: config_lib.RunConfig, examples: Sequence[sequences_lib.Example], *, may_be_empty: bool = False
) -> packing.Packed:
    """Runs `packing.pack` and ensures at least one micro-batch.

    Args:
      config: configuration of the run.
      examples: sequences to pack.
      may_be_empty: if no token is under the loss mask, return one empty micro-batch.

    Raises:
      LibraError: no token is under the loss mask, and `may_be_empty` is False.
    """
    packed = packing.pack(examples, config.trainer)
    if not packed.micro_batches and may_be_empty:
        # The step still happens: its number is the policy version, and hybrid workers split its micro-batches.
        shape = (config.trainer.micro_batch_rows, config.trainer.row_tokens)
        columns = dataclasses.replace(packed.columns, shapes=(shape,))
        return dataclasses.replace(packed, micro_batches=(packing.empty(shape),), columns=columns, padding_fraction=1.0)
    if not packed.micro_batches:
        raise protocols.LibraError(UNTRAINED.format(len(examples)))
    return packed
