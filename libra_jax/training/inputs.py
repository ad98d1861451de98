"""The arrays that a learner's programs take: names and shapes, known before the first batch, and a batch's own.

A batch with other arrays or shapes would need another program, so what is compiled ahead and what a step brings come
from one place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from libra_jax import config as config_lib
from libra_jax.algorithms import batch_statistics
from libra_jax.data import packing, row_places
from libra_jax.models import config as model_config
from libra_jax.models import feasibility, rows
from libra_jax.training import step


@dataclass(frozen=True)
class Inputs:
    """Arrays of micro-batches.

    Attributes:
      config: the run's configuration, with this learner's mesh.
      model: shape of the model, with the adapter that this learner trains.
      target: device that runs the programs.
      critic: the learner trains the critic of PPO.
      first_update_only: the learner only sums gradients for a batch's first update, in which the policy is its own
        proximal policy.
      teacher: shape of a reference model that is read from a directory; None: it is the initial policy.
    """

    config: config_lib.RunConfig
    model: model_config.TransformerConfig
    target: feasibility.CompileTarget
    critic: bool
    first_update_only: bool
    teacher: model_config.TransformerConfig | None

    @property
    def loss(self) -> str:
        """Name of the loss that a step trains: `step.POLICY` or `step.VALUE`."""
        return step.VALUE if self.critic else step.POLICY

    @property
    def compares(self) -> bool:
        """True if the objective compares the policy with a reference model."""
        return self.config.algorithm.kl_coefficient > 0 and not self.critic

    @property
    def refers(self) -> bool:
        """True if the reference model is on this learner's mesh. Else a teacher has scored the batch elsewhere."""
        return self.config.algorithm.scores_reference and not self.critic

    @property
    def scores_proximal(self) -> bool:
        """True if the policy's objective takes the log-probabilities of before the batch's first update."""
        return self.config.algorithm.scores_proximal and not self.first_update_only and not self.critic

    @property
    def lists_sequences(self) -> bool:
        """True if programs take `packing.LENGTHS`, because cuDNN computes the attention of packed rows."""
        trainer, model = self.config.trainer, self.config.model
        if not trainer.pack or self.target.platform != "gpu":
            return False
        whole_rows = feasibility.splits_heads(self.model.num_heads // trainer.tensor, trainer.context)
        kernel = feasibility.choose_attention(
            model.attention,
            self.target,
            trainer.row_tokens,
            self.model.head_dim,
            model.compute_dtype,
            trainer.pack,
            whole_rows=whole_rows,
        )
        return kernel == "cudnn"

    def row_shapes(self) -> list[tuple[int, int]]:
        """Returns the rows that a step may need, as length and most sequences: the shortest with the fewest first."""
        packs = self.config.trainer.pack
        return [
            (row_tokens, max_sequences)
            for row_tokens in row_places.row_lengths(self.config.trainer)
            # Only the time of cuDNN's attention depends on the number, so other kernels need one program.
            for max_sequences in rows.segment_bounds(row_tokens, packs)[0 if self.lists_sequences else -1 :]
        ]

    def shapes(self, *, trees: bool = False) -> list[step.Shape]:
        """Returns the shapes of the micro-batches that a step may need, in the order of `row_shapes`.

        Args:
          trees: those of trees, which only a batch with rollouts of several segments needs.
        """
        algorithm, trains_policy = self.config.algorithm, not self.critic
        statistics = trains_policy and batch_statistics.find(algorithm) is not None
        # A warm start comes before the adapter and trains all weights: another learner takes its steps.
        warms_up = self.config.warm_start.steps > 0 and self.model.adapter is None and trains_policy
        names = [step.SUPERVISED] * warms_up + [step.SCORE] * self.refers
        names += [step.PROXIMAL] * (self.scores_proximal or statistics or self.critic)
        names += [step.NORMS] * (algorithm.baseline == "minimum_variance" and trains_policy)
        program_shapes = []
        row_shapes = self.row_shapes()
        if trees:
            row_shapes = [(row_tokens, 0) for row_tokens in row_places.row_lengths(self.config.trainer)]
        for row_tokens, max_sequences in row_shapes:
            for name in (*names, self.loss):
                arrays = self.empty(name, row_tokens, max_sequences, trees=trees).items()
                program_shapes.append(
                    (name, {field: jax.ShapeDtypeStruct(array.shape, array.dtype) for field, array in arrays})
                )
        return program_shapes

    def empty(
        self, name: str, row_tokens: int | None = None, max_sequences: int | None = None, *, trees: bool = False
    ) -> dict[str, np.ndarray]:
        """Returns an empty micro-batch with the arrays that a program takes.

        Args:
          name: `step.POLICY`, `SUPERVISED`, `VALUE`, `SCORE`, `PROXIMAL` or `NORMS`.
          row_tokens: length of the rows; None for the shortest.
          max_sequences: sequences that a row may hold; None for the fewest of `row_shapes`.
          trees: a micro-batch of trees.
        """
        shape = (self.config.trainer.micro_batch_rows, row_tokens or self.config.trainer.row_tokens)
        batch: dict[str, np.ndarray] = dict(vars(packing.empty(shape, trees)))
        # The rows of NORMS hold a sequence each, whose attention needs no list of them; nor does attention of trees.
        if self.lists_sequences and name != step.NORMS and not trees:
            max_sequences = max_sequences or rows.segment_bounds(shape[1], packed=True)[0]
            batch[packing.LENGTHS] = np.zeros((shape[0], max_sequences), np.int32)
        if name == step.POLICY:
            # The extras of `batch.prepare`.
            extras = ["advantages"]
            extras += ["reference"] * self.compares
            extras += ["moved"] * (len(self.config.rollout.tensor_parallel) > 1)
            extras += ["staleness"] * (self.config.algorithm.proximal == "interpolate")
            extras += ["proximal"] * self.scores_proximal
            extras += [
                batch_statistics.PREFIX + name for name in batch_statistics.NAMES.get(self.config.algorithm.loss, ())
            ]
            batch |= {name: np.zeros(shape, np.float32) for name in extras}
        if name == step.VALUE:
            batch |= {name: np.zeros(shape, np.float32) for name in ("returns", "values")}
        # A critic's routers choose for themselves: the engine's experts are those of another model.
        replays = self.config.algorithm.routing_replay == "rollout" and not self.critic
        if name == step.SCORE and self.teacher is not None:
            replays = False
        if name != step.SUPERVISED and replays:
            width, dtype = self.model.routing_width, self.model.routing_dtype
            batch |= {"routing": np.zeros((*shape, width), dtype), "routed": np.zeros(shape, bool)}
        return batch

    def arrays(self, packed: packing.Packed, number: int, extras: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a micro-batch and its further arrays as programs take them, like those of `empty`."""
        micro_batch = packed.micro_batches[number]
        arrays = {**vars(micro_batch), **extras}
        if self.lists_sequences and not isinstance(micro_batch, packing.TreeMicroBatch):
            arrays[packing.LENGTHS] = packed.sequence_lengths(number)
        return arrays


def teacher(
    config: config_lib.RunConfig, model: model_config.TransformerConfig
) -> model_config.TransformerConfig | None:
    """Returns the shape of the reference model that the config's directory holds; None if it names none.

    Raises:
      ConfigError: it has another vocabulary than the policy.
      DataError: the directory cannot be read.
    """
    if not config.algorithm.scores_reference or not config.algorithm.teacher_directory:
        return None
    shape = model_config.read_directory(config.algorithm.teacher_directory)
    config_lib.check(
        shape.vocab_size == model.vocab_size,
        "algorithm.teacher",
        f"{config.algorithm.teacher} has a vocabulary of {shape.vocab_size} tokens, and the policy one of "
        f"{model.vocab_size}; take a teacher with the policy's tokenizer",
    )
    return shape
