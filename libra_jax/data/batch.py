"""Turns a batch of groups into micro-batches. The trainer and every hybrid worker do this before a policy update.

`prepare` lists the stages: checked sequences, rows, the scores of other models, advantages, and the further arrays that
the objective takes. The result depends only on the batch and the config (and on the reference model, which hybrid
workers do not hold). All parties therefore hold identical micro-batches with identical numbers.

Letters: N trajectories, B rows of a micro-batch, T columns of a row.
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
from libra_jax.data import batch_advantages, packing, row_places, segments, world
from libra_jax.data import sequences as sequences_lib
from libra_jax.models import config as model_config
from libra_jax.models import sharding

Score = Callable[[packing.Packed, Sequence[dict[str, Any]]], "list[jax.Array]"]
"""Returns the reference model's log-probabilities of a packed batch: one [B, T] array per micro-batch. Takes the batch
and each micro-batch's `routing` and `routed`, or empty dicts."""

ScoreNorms = Callable[[Sequence[sequences_lib.Example]], estimators.Scores]
"""Returns the scores of trajectories (`learner.Learner.score_norms`)."""


def _refusing(sentence: str) -> Callable[..., Any]:
    """Returns a function that raises LibraError with a sentence."""

    def refuse(*arguments: Any) -> Any:
        raise protocols.LibraError(sentence)

    return refuse


NO_REFERENCE: Score = _refusing("algorithm.kl_coefficient needs a reference model, and a hybrid worker holds none.")
NO_CRITIC: Score = _refusing("critic.enabled needs the critic's values, and only the trainer has a critic.")
NO_SCORE_NORMS: ScoreNorms = _refusing("algorithm.baseline=minimum_variance needs the gradients of single rollouts.")

NO_ADVANTAGE = 1e-6
"""Largest absolute advantage in a group that counts as having no gradient; larger than rounding errors."""


@dataclass(frozen=True)
class Prepared:
    """The prepared batch of a policy update.

    Attributes:
      packed: the micro-batches.
      extras: further arrays of each micro-batch: `advantages`, `reference`, `moved`, `staleness`, `routed`,
        `rollout_tokens` [B, T], and `routing` [B, T, W] (`packing.Packed.routing`).
      targets: arrays of each micro-batch that the critic learns from, [B, T]: `returns`, `values`, and the `mask`
        without truncated rollouts; empty without a critic.
      sequences: sequences in the batch's order.
      advantages: advantages of each token, one array per sequence. Of a sequence whose tokens other processes train,
        the array has one number.
      described: counts of what is trained and of all, by the name of the metric that is their quotient; empty if all
        turns are trained.
    """

    packed: packing.Packed
    extras: Sequence[dict[str, Any]]
    targets: Sequence[dict[str, Any]]
    sequences: sequences_lib.BatchSequences
    advantages: Sequence[np.ndarray]
    described: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def work(self) -> tuple[int, ...]:
        """Rows x columns of each micro-batch of the first update, whose work hybrid workers share."""
        return tuple(self.packed.micro_batches[index].tokens.size for index in self.packed.minibatches[0])


def prepare(
    config: config_lib.RunConfig,
    batch: protocols.TrainBatch,
    model: model_config.TransformerConfig,
    score: Score = NO_REFERENCE,
    value: Score = NO_CRITIC,
    score_norms: ScoreNorms = NO_SCORE_NORMS,
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
    algorithm = config.algorithm
    # 1. Sequences and rows. Each process checks the tokens that it has.
    with world.agreeing():
        sequences = sequences_lib.BatchSequences.from_batch(config.task, batch, model)
        branched = any(trajectory.branches for trajectory in sequences.trajectories)
        sizes = row_places.minibatch_sizes(config, batch.groups)
        packed = packing.pack(sequences.examples, config.trainer, sizes)
        # Of a streamed step, this may be the one group without a trained token.
        if config.trainer.stream == "off":
            check_trained([packed], masked=bool(sequences.masked_N.any()))
        routing = _replayed_experts(config, sequences, packed, model)
        taught = _teacher_log_probs(config, sequences)
        own_rewards = None
        if branched:
            segments.check(config, sequences, packed)
            own_rewards = segments.reward_offsets(algorithm, sequences.trajectories)
    # 2. Scores of the reference model, the critic and the policy itself.
    reference: Sequence[Any] | None = None
    if algorithm.kl_coefficient:
        reference = score(packed, routing) if taught is None else packed.scatter(taught)
        # As a penalty in the reward, the KL enters the advantages, which are computed on the host.
        if algorithm.kl_in_reward and taught is None:
            taught = _gathered(packed, reference, sequences)
    values = _gathered(packed, value(packed, routing), sequences) if config.critic.enabled else None
    norms = score_norms(sequences.examples) if algorithm.baseline == "minimum_variance" else None
    # 3. Advantages, and then the turns to train: advantages and a critic's returns are those of whole trajectories.
    advantages, returns = batch_advantages.token_advantages(algorithm, sequences, taught, values, norms, own_rewards)
    described: dict[str, tuple[int, int]] = {}
    arrays: dict[str, Sequence[Any]] = {"advantages": packed.scatter(advantages)}
    if algorithm.entropy_share < 1:
        packed, sequences, described = _of_high_entropy(algorithm.entropy_share, packed, sequences)
    # 4. Arrays of each micro-batch beside its tokens.
    targets = () if values is None or returns is None else _critic_targets(packed, sequences, returns, values)
    arrays |= {} if reference is None else {"reference": reference}
    arrays |= _rollout_arrays(config, packed, sequences, batch.policy_version)
    extras = [
        dict(zip(arrays, further, strict=True)) | experts
        for *further, experts in zip(*arrays.values(), routing, strict=True)
    ]
    if branched and algorithm.aggregation != "token_mean":
        segments.add_rollout_tokens(extras, packed, sequences.examples)
    return Prepared(packed, extras, targets, sequences, advantages, described)


def pack(config: config_lib.RunConfig, examples: Sequence[sequences_lib.Example]) -> packing.Packed:
    """Packs sequences of a supervised step. Raises LibraError if no token is under the loss mask."""
    packed = packing.pack(examples, config.trainer)
    check_trained([packed])
    return packed


def check_trained(packed: Sequence[packing.Packed], *, masked: bool = False) -> None:
    """Checks that a token of a step is under the loss mask.

    Args:
      packed: all parts of the step.
      masked: a rollout is left out of the loss because it was cut off (`task.cut_off`), so the others may have none.

    Raises:
      LibraError: no token is.
    """
    if not masked and not any(part.places for part in packed):
        count = sum(part.examples for part in packed)
        raise protocols.LibraError(f"no token of the batch's {count} sequences is under the loss mask.")


def statistics(parts: Sequence[Prepared]) -> dict[str, float]:
    """Describes the advantages of a step, and what `algorithm.entropy_share` leaves trained.

    Args:
      parts: the step's batch, or the parts in which it was prepared.

    Returns:
      `groups/without_gradient`: the fraction of groups whose trained tokens have no advantage (equal rewards, or all
      rollouts masked). `advantage/mean`, `/std`, `/min` and `/max`: over trained tokens, absent if there are none. The
      quotients of `Prepared.described`.
    """
    idle, trained, times = list[bool](), list[np.ndarray](), list[np.ndarray]()
    for part in parts:
        examples = part.sequences.examples
        # No position predicts the first token, so its advantage never counts.
        rows = [
            value[1:][example.mask_N[1:]] if example.outline is None else value[: example.trained]
            for value, example in zip(part.advantages, examples, strict=True)
        ]
        largest = iter([float(np.abs(row).max(initial=0.0)) for row in rows])
        groups = part.sequences.groups
        idle += [max([next(largest) for _ in group.trajectories], default=0.0) <= NO_ADVANTAGE for group in groups]
        trained += rows
        # A number that stands for all trained tokens of a sequence counts as often.
        times += [
            np.full(len(row), 1 if example.outline is None else example.trained, np.int64)
            for row, example in zip(rows, examples, strict=True)
        ]
    metrics = {"groups/without_gradient": float(np.mean(idle))}
    for name in parts[-1].described:
        count, total = (sum(part.described[name][index] for part in parts) for index in (0, 1))
        metrics[name] = float(count / max(1, total))
    values, weights = np.concatenate(trained), np.concatenate(times)
    if not len(values):
        return metrics
    mean = np.average(values, weights=weights)
    return metrics | {
        "advantage/mean": float(mean),
        "advantage/std": float(np.sqrt(np.average((values - mean) ** 2, weights=weights))),
        "advantage/min": float(values.min()),
        "advantage/max": float(values.max()),
    }


# The stages ---------------------------------------------------------------------------------------------------------


def _replayed_experts(
    config: config_lib.RunConfig,
    sequences: sequences_lib.BatchSequences,
    packed: packing.Packed,
    model: model_config.TransformerConfig,
) -> Sequence[dict[str, Any]]:
    """Returns `routing` and `routed` of each micro-batch; empty dicts without routing replay."""
    if config.algorithm.routing_replay != "rollout":
        return [{} for _ in packed.micro_batches]
    trained = [example for example in sequences.examples if example.columns]
    if trained and not any(example.routed for example in trained):
        raise protocols.DataError(
            f"trajectory {trained[0].sequence_id} and all others of the batch came without experts, which "
            "config.algorithm.routing_replay=rollout trains on: use engines that return them, or set it to off."
        )
    return packed.routing(sequences.examples, model.routing_width, np.dtype(model.routing_dtype))


def _teacher_log_probs(
    config: config_lib.RunConfig, sequences: sequences_lib.BatchSequences
) -> list[np.ndarray] | None:
    """Returns the recorded log-probabilities of a teacher behind an endpoint, [N] each; zeros for the masked."""
    if not (config.algorithm.kl_coefficient and config.algorithm.teacher_served):
        return None
    log_probs = []
    for trajectory, masked in zip(sequences.trajectories, sequences.masked_N, strict=True):
        for segment in () if masked else trajectory.segments:
            count, recorded = len(segment.token_ids), len(segment.teacher_log_probs)
            if recorded != count:
                raise protocols.DataError(
                    f"trajectory {segment.name}: the teacher has scored {recorded} of its {count} tokens."
                )
        columns = [segment.token_ids if masked else segment.teacher_log_probs for segment in trajectory.segments]
        log_probs_N = sequences_lib.joined(columns, np.float32)
        log_probs.append(np.zeros_like(log_probs_N) if masked else log_probs_N)
    return log_probs


def _gathered(
    packed: packing.Packed, arrays: Sequence[jax.Array], sequences: sequences_lib.BatchSequences
) -> list[np.ndarray]:
    """Returns the numbers of each sequence's tokens, [N], from one [B, T] array per micro-batch on the mesh."""
    with world.explaining(), sharding.whole(arrays) as full_arrays:
        on_host = [np.asarray(array) for array in full_arrays]
    return packed.gather(on_host, [len(example.tokens_N) for example in sequences.examples])


def _of_high_entropy(
    share: float, packed: packing.Packed, sequences: sequences_lib.BatchSequences
) -> tuple[packing.Packed, sequences_lib.BatchSequences, dict[str, tuple[int, int]]]:
    """Leaves the turns of the lowest entropy out of the loss (`algorithm.entropy_share`).

    Returns:
      The batch and its sequences with fewer trained tokens, and the metrics of the choice.
    """
    masks = [example.mask_N for example in sequences.examples]
    selected_masks = turn_selection.highest_entropy(
        [example.behaviour_N for example in sequences.examples], masks, sequences.groups_N.tolist(), share
    )
    micro_batches = tuple(
        dataclasses.replace(item, mask=item.mask & (mask > 0))
        for item, mask in zip(
            packed.micro_batches, packed.scatter([mask_N.astype(np.float32) for mask_N in selected_masks]), strict=True
        )
    )
    # A turn begins where the mask rises.
    turns, all_turns = (
        sum(int(np.count_nonzero(np.diff(mask_N.astype(np.int8), prepend=0) > 0)) for mask_N in mask_list)
        for mask_list in (selected_masks, masks)
    )
    tokens, all_tokens = (sum(map(np.count_nonzero, mask_list)) for mask_list in (selected_masks, masks))
    described = {"turns/trained_share": (turns, all_turns), "tokens/entropy_share": (tokens, all_tokens)}
    examples = [
        dataclasses.replace(example, mask_N=mask_N)
        for example, mask_N in zip(sequences.examples, selected_masks, strict=True)
    ]
    packed = dataclasses.replace(packed, micro_batches=micro_batches)
    return packed, dataclasses.replace(sequences, examples=examples), described


def _critic_targets(
    packed: packing.Packed,
    sequences: sequences_lib.BatchSequences,
    returns: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
) -> list[dict[str, Any]]:
    """Returns what the critic learns from each micro-batch (`Prepared.targets`)."""
    # A truncated rollout has no return to learn from.
    finished = packed.scatter((~sequences.truncated_N).astype(np.float32).tolist())
    return [
        {"returns": returns_BxT, "values": values_BxT, "mask": item.mask & (finished_BxT > 0)}
        for item, returns_BxT, values_BxT, finished_BxT in zip(
            packed.micro_batches, packed.scatter(returns), packed.scatter(values), finished, strict=True
        )
    ]


def _rollout_arrays(
    config: config_lib.RunConfig,
    packed: packing.Packed,
    sequences: sequences_lib.BatchSequences,
    policy_version: int,
) -> dict[str, Sequence[Any]]:
    """Returns `moved` and `staleness`, one array [B, T] a micro-batch, if the objective takes them."""
    arrays: dict[str, Sequence[Any]] = {}
    if len(config.rollout.tensor_parallel) > 1:
        # Like every extra, a float32 array: the objective takes a token as moved if the value is above 0.
        moved = [float(trajectory.metrics.get("moves", 0) > 0) for trajectory in sequences.trajectories]
        arrays["moved"] = packed.scatter(moved)
    if config.algorithm.proximal == "interpolate":
        versions = [
            sequences_lib.joined([segment.policy_versions for segment in trajectory.segments], np.float32)
            for trajectory in sequences.trajectories
        ]
        arrays["staleness"] = packed.scatter([policy_version - versions_N for versions_N in versions])
    return arrays
