"""Turns a batch of groups into micro-batches. The trainer and every hybrid worker do this before a policy update.

The result depends only on the batch and the config (and on the reference model, which hybrid workers do not hold). All
parties therefore hold identical micro-batches with identical numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.models import sharding
from libra_jax.training import batch as batch_lib
from libra_jax.training import packing

Score = Callable[[packing.Packed], "list[jax.Array]"]
"""Returns the reference model's log-probabilities of a packed batch: one [B, T] array per micro-batch."""


@dataclass(frozen=True)
class Prepared:
    """The prepared batch of a policy update.

    Attributes:
      packed: the micro-batches.
      extras: further [B, T] arrays of each micro-batch: `advantages`, `reference`, `moved`.
      examples: sequences in the batch's order.
      advantages: advantages of each token, one array per sequence.
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
    """Packs a batch and lays out the further arrays that the objective needs.

    Args:
      config: configuration of the run.
      batch: whole groups.
      vocab_size: vocabulary size of the model.
      score: scoring function of the reference model; called only if `algorithm.kl_coefficient` is above 0.

    Raises:
      DataError: a trajectory holds a number that cannot be trained on; the message names the trajectory.
      LibraError: no token is under the loss mask, though no rollout was cut off (`task.cut_off`); or the objective
        needs a reference model and none is given.
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
        # Like every extra, a float32 array: the objective takes a token as moved if the value is above 0.
        moved = [float(trajectory.metrics.get("moves", 0) > 0) for trajectory in trajectories]
        _add(extras, "moved", packed.scatter(moved))
    return Prepared(packed, extras, examples, advantages)


def pack(
    config: config_lib.RunConfig, examples: Sequence[packing.Example], *, may_be_empty: bool = False
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
    """Adds the reference model's scores to `extras`, if needed. Returns them for a KL penalty in the reward."""
    if algorithm.kl_coefficient == 0:
        return None
    if score is None:
        raise protocols.LibraError("algorithm.kl_coefficient needs a reference model, and a replica holds none.")
    arrays = score(packed)
    _add(extras, "reference", arrays)
    if not algorithm.kl_in_reward:
        return None
    with sharding.whole(arrays) as whole:
        scores = [np.asarray(array) for array in whole]
    return packed.gather(scores, [len(example.tokens_N) for example in examples])


def _add(extras: Sequence[dict[str, Any]], name: str, arrays: Sequence[Any]) -> None:
    for extra, array in zip(extras, arrays, strict=True):
        extra[name] = array
