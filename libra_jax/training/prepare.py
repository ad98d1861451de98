"""From a batch of groups to micro-batches: what the trainer and every replica do alike before a policy update.

Everything here is a function of the batch and the config alone (and of the reference model, which replicas do not
have), so all parties hold identical micro-batches, numbered alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.models import gathering
from libra_jax.training import batch as batch_lib
from libra_jax.training import packing

Score = Callable[[packing.Packed], "list[jax.Array]"]
"""The reference model's log-probabilities of a packed batch: one [B, T] a micro-batch."""


@dataclass(frozen=True)
class Prepared:
    """A policy update's batch.

    Attributes:
      packed: its micro-batches.
      extras: further [B, T] arrays of each micro-batch: `advantages`, `reference`, `moved`.
      examples: the sequences, in the batch's order.
      advantages: of each token, an array a sequence.
    """

    packed: packing.Packed
    extras: Sequence[dict[str, Any]]
    examples: Sequence[packing.Example]
    advantages: Sequence[np.ndarray]

    @property
    def work(self) -> tuple[int, ...]:
        """Rows x columns of each micro-batch."""
        return tuple(rows * columns for rows, columns in (item.shape for item in self.packed.micro_batches))


def prepare(
    config: config_lib.RunConfig, batch: protocols.TrainBatch, vocab_size: int, score: Score | None = None
) -> Prepared:
    """Packs a batch and lays out what the objective needs beside the tokens.

    Args:
      config: the run's.
      batch: whole groups.
      vocab_size: of the model.
      score: the reference model; called only where `algorithm.kl_coefficient` is above 0.

    Raises:
      DataError: a trajectory holds a number that cannot be trained on; the message names it.
      LibraError: nothing is under the loss mask, and not because rollouts were cut off (`task.cut_off`); or the
        objective needs a reference model and there is none.
    """
    trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
    masked = [config.task.masks(trajectory.finish) for trajectory in trajectories]
    examples = batch_lib.examples(trajectories, batch.policy_version, vocab_size, masked)
    packed = pack(config, examples, may_be_empty=any(masked))
    extras: list[dict[str, Any]] = [{} for _ in packed.micro_batches]
    references = _references(config.algorithm, packed, examples, extras, score)
    advantages = batch_lib.token_advantages(config.algorithm, batch.groups, examples, references, masked)
    _add(extras, "advantages", packed.scatter(advantages))
    if len(config.rollout.tensor_parallel) > 1:
        moved = [float(trajectory.metrics.get("moves", 0) > 0) for trajectory in trajectories]
        _add(extras, "moved", packed.scatter(moved))
    return Prepared(packed, extras, examples, advantages)


def pack(
    config: config_lib.RunConfig, examples: Sequence[packing.Example], *, may_be_empty: bool = False
) -> packing.Packed:
    """`packing.pack`, with at least one micro-batch.

    Args:
      config: the run's.
      examples: the sequences.
      may_be_empty: sequences without a token under the loss mask make one empty micro-batch.

    Raises:
      LibraError: nothing is under the loss mask, and `may_be_empty` is not set.
    """
    packed = packing.pack(examples, config.trainer)
    if not packed.micro_batches and may_be_empty:
        # The step is taken all the same: its number is the policy's version, and replicas split its micro-batches.
        shape = (config.trainer.rows_per_micro_batch, config.trainer.row_tokens)
        return packing.Packed((packing.empty(shape),), packed.places, padding_fraction=1.0)
    if not packed.micro_batches:
        raise protocols.LibraError(f"no token of the batch's {len(examples)} sequences is under the loss mask.")
    return packed


def _references(
    algorithm: config_lib.AlgorithmConfig,
    packed: packing.Packed,
    examples: Sequence[packing.Example],
    extras: Sequence[dict[str, Any]],
    score: Score | None,
) -> list[np.ndarray] | None:
    """Adds the reference model's scores to `extras`, if there is one; returns them for a penalty in the reward."""
    if algorithm.kl_coefficient == 0:
        return None
    if score is None:
        raise protocols.LibraError("algorithm.kl_coefficient needs a reference model, and a replica holds none.")
    arrays = score(packed)
    _add(extras, "reference", arrays)
    if not algorithm.kl_in_reward:
        return None
    with gathering.whole(arrays) as whole:
        scores = [np.asarray(array) for array in whole]
    return packed.gather(scores, [len(example.tokens_N) for example in examples])


def _add(extras: Sequence[dict[str, Any]], name: str, arrays: Sequence[Any]) -> None:
    for extra, array in zip(extras, arrays, strict=True):
        extra[name] = array
