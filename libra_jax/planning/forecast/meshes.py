"""Predicts the time of a training step on each mesh (the training half of the cost evaluator), and finds good meshes.

A step models the trainer. The batch is packed into rows (`rows`, by the trainer's own rule). Each of the data x fsdp
shards then processes micro-batches of these rows one after another, and one update follows. A micro-batch takes the
longer of two times: its slowest shard's arithmetic, or the collectives that hide behind it. Those collectives gather
parameters twice and scatter gradients over `fsdp` and `context`, and reduce gradients over `data`. The all-reduces over
`tensor` and the exchanges of attention over `context` come on top, because nothing hides them. So do the tokens that
experts gather over `fsdp` (`models.experts`); the experts themselves stay where they are. Devices that are parts of one
CPU take turns, and nothing hides behind anything. A device has to hold its part of the state, its tokens' activations
and one chunk of logits.

The tree of meshes is pruned from above. Tensor degrees must stay inside a node and divide the model. Then come the
sizes of `fsdp` with which the state fits, then `data`. The size of `context` stays the config's. Of the remaining
meshes, those that no other beats in both devices and time are kept.

Memory and communication of a mesh come from the compiled programs where they were compiled for this model, these rows
and this mesh (`TrainerProperties.compiled`), and from formulas elsewhere.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.models import communication_bounds, rows
from libra_jax.models import config as model_config
from libra_jax.models.adapters import adapters
from libra_jax.planning.compiled import programs
from libra_jax.planning.costs import costs, hardware

TENSOR_DEGREES = (1, 2, 4, 8)

MOST_SHARDS = 4_096
"""Most shards of the parameters that the advice of a refusal looks at."""

MASTER_BYTES = 12
"""Bytes of each parameter in float32: master weight, summed gradient, and the gradient being added."""

VALUE_BYTES = 4
"""Bytes of each weight, gradient and moment in float32."""

RECOMPUTED = {"none": 0.0, "dots": 0.1, "full": 1.0, "offload": 1.0}
"""Part of a forward pass that the backward pass computes again, by `model.remat`."""

LAYER_ACTIVATIONS = {"none": 34.0, "dots": 18.0, "full": 2.0, "offload": 0.0}
"""Bytes that a layer keeps for the backward pass, of each token and hidden column, by `model.remat`. Korthikanti et
al. (arXiv 2205.05198, eq. 2) without attention's scores, which are never whole: 34. With only products kept: 18.
With only the layer's input kept: 2, or none if it is in the host's memory."""

EXPERT_MOVES = 5
"""Gathers and scatters of tokens for a layer's experts in a micro-batch: the input and the sum in the forward pass; the
input again, the gradient and its sum in the backward pass. Recomputation adds none, because nothing needs the sum."""

EXPERTS_RECOMPUTED = 2 / 3
"""Part of an expert's forward pass that its backward pass computes again with each `model.remat`: two of three
products."""

GATHERED_BYTES = 10
"""Bytes of each hidden value of the tokens that a device gathers for its experts: input and gradient in bfloat16, their
sum in float32, and its copy in bfloat16."""


@dataclass(frozen=True)
class TrainerProperties:
    """Properties of a trainer that do not depend on its mesh.

    Attributes:
      lengths: columns of a row, ascending.
      packed: several sequences share a row.
      remat: what the backward pass computes again: none, dots, full.
      logits_chunk: tokens whose vocabulary logits exist at once.
      scorings: passes that only compute the batch's log-probs (decoupled objective with several updates, or a loss that
        takes statistics).
      critic: a critic of the model's size learns beside the policy.
      epochs: passes of a step over its batch.
      updates: updates of a step.
      reference_bytes: bytes of each parameter of the frozen reference model; 0 without one.
      teacher_parameters: parameters of the reference model if it is read from a directory; 0: those of the policy.
      frozen_bytes: bytes of each frozen weight under an adapter; 0 if all weights are trained.
      rows: rows of a micro-batch, over all shards; at least one each.
      cores: cores of the CPU on which all devices take turns, so that nothing hides behind anything else; None if
        each device is an accelerator.
      compiled: programs that were compiled for this trainer.
      context: parts that the tokens of a row are split into. Every mesh has this many devices for each of data x fsdp
        x tensor.
      moments: numbers that the optimizer keeps of each parameter of the layers, and of the tables.
    """

    lengths: tuple[int, ...]
    packed: bool = True
    remat: str = "full"
    logits_chunk: int = 1024
    scorings: int = 0
    critic: bool = False
    epochs: int = 1
    updates: int = 1
    reference_bytes: int = 0
    teacher_parameters: int = 0
    frozen_bytes: int = 0
    rows: int = 1
    cores: int | None = None
    compiled: tuple[programs.CompiledCase, ...] = ()
    context: int = 1
    moments: tuple[int, int] = (2, 2)

    @classmethod
    def from_config(cls, run: config_lib.RunConfig, sheet: hardware.HardwareSheet) -> TrainerProperties:
        """Returns a run's trainer on devices of this sheet.

        Raises:
          ConfigError: the file of `planner.compiled` is missing, or is no file of launch/compile.py.
        """
        value = costs.VALUE_BYTES[run.model.compute_dtype]
        return cls(
            lengths=(run.trainer.row_tokens, *run.trainer.row_buckets),
            packed=run.trainer.pack,
            remat=run.model.remat,
            logits_chunk=run.model.logits_chunk,
            scorings=run.algorithm.scorings,
            critic=run.critic.enabled,
            epochs=run.algorithm.epochs,
            updates=run.algorithm.updates,
            # Frozen weights under an adapter are the reference model, too.
            reference_bytes=value
            if run.algorithm.scores_reference and (run.algorithm.teacher or not run.model.lora.rank)
            else 0,
            teacher_parameters=model_config.parameter_count(model_config.read_directory(run.algorithm.teacher))
            if run.algorithm.teacher_directory
            else 0,
            frozen_bytes=value if run.model.lora.rank else 0,
            rows=run.trainer.micro_batch_rows,
            cores=(len(run.trainer.cores) or sheet.devices_per_node) if sheet.name == hardware.THIS_MACHINE else None,
            compiled=programs.read(Path(run.planner.compiled)) if run.planner.compiled else (),
            context=run.trainer.context,
            moments=run.optimizer.moments,
        )

    def moment_numbers(self, model: costs.CostModel) -> int:
        """Returns the count of numbers that the optimizer keeps of all trained parameters."""
        shape, (of_layers, of_tables) = model.shape, self.moments
        tables = shape.vocab_size * shape.hidden_size * (1 if shape.tie_word_embeddings else 2)
        if shape.adapter is not None:
            tables = 0  # frozen
        return of_layers * (model.trained_parameters - tables) + of_tables * tables

    def case(self, model: costs.CostModel, mesh: tuple[int, int, int]) -> programs.CompiledCase | None:
        """Returns what was compiled for a model and a mesh (data, fsdp, tensor), or None."""
        sizes = model.parameters, adapters.parameter_count(model.shape), mesh, self.context
        key = (*sizes, self.rows, self.lengths[-1], self.packed, self.remat, self.reference_bytes > 0)
        for case in self.compiled:
            sizes = case.parameters, case.adapter_parameters, case.mesh, case.context
            if (*sizes, case.rows, case.row_tokens, case.packed, case.remat, case.reference) == key:
                return case
        return None


@dataclass(frozen=True)
class Mesh:
    """A mesh, and the time and memory of a training step on it.

    Attributes:
      data: number of replicas.
      fsdp: ways the state is sharded.
      tensor: ways a layer's matrices are split.
      seconds: seconds of a step.
      memory_bytes: bytes on each device.
      context: ways the tokens of a row are split.
      early: seconds of `seconds` that a streamed step may spend on groups that finish before its last one; 0 if steps
        take whole batches.
      part: seconds of each part of a streamed step beyond its share of `early`: micro-batches that it does not fill.
    """

    data: int
    fsdp: int
    tensor: int
    seconds: float
    memory_bytes: float
    context: int = 1
    early: float = 0.0
    part: float = 0.0

    @property
    def devices(self) -> int:
        """Devices in the mesh."""
        return self.data * self.fsdp * self.tensor * self.context


def check_fits(model: costs.CostModel, trainer: TrainerProperties, sizes: tuple[int, int, int], field: str) -> None:
    """Refuses a mesh that does not divide the model or does not hold it.

    Args:
      model: costs of the accelerators.
      trainer: rows and memory.
      sizes: data, fsdp and tensor.
      field: config field that gives the sizes.

    Raises:
      ConfigError: the message names the field, and what is short.
    """
    data, fsdp, tensor = sizes
    # Memory depends on the rows alone, so one short sequence is enough.
    training = Training(model, [2], trainer)
    if tensor not in training.tensor_degrees() or not training.divides(fsdp):
        experts = f" and of {model.shape.num_experts} experts" if model.shape.num_experts else ""
        raise protocols.ConfigError(
            f"config.{field}: (data, fsdp, tensor) = {sizes} does not divide the model: tensor is one of "
            f"{training.tensor_degrees()}, and fsdp a divisor of {model.shape.hidden_size // trainer.context}{experts}"
        )
    needed, room = (
        training.memory_bytes(data, fsdp, tensor),
        model.sheet.memory_bytes * model.coefficients.memory_fraction,
    )
    if needed > room:
        raise protocols.ConfigError(
            f"config.{field}: on (data, fsdp, tensor) = {sizes} a device needs {needed / 1e9:.1f} GB and has "
            f"{room / 1e9:.1f}; shard more over fsdp or tensor, or take shorter or fewer rows (trainer.row_tokens, "
            "trainer.rows_per_micro_batch)"
        )


def _squares(
    columns: rows.Integers, trainer: TrainerProperties
) -> Iterator[tuple[int, np.ndarray[Any, np.dtype[np.float64]]]]:
    """Yields each length of row of a packed batch, with the sum of squared sequence lengths of each row, descending."""
    fitted = rows.fit(columns, trainer.lengths, trainer.packed)
    squares = np.bincount(fitted.row[columns > 0], weights=columns[columns > 0].astype(np.float64) ** 2)
    row_lengths = np.array(fitted.length)
    for length in sorted(set(fitted.length)):
        yield length, np.sort(squares[row_lengths == length])[::-1]


class Training:
    """Training steps on a batch of sequences of these lengths.

    Args:
      model: costs of the accelerators.
      lengths: tokens of each sequence of `batches` steps.
      trainer: rows and memory.
      batches: steps among which the sequences are dealt out in turn. Times are their means: one batch fills its last
        micro-batch by chance.
      parts: groups of a step that takes them one by one, as they finish; 0 if steps take whole batches.

    Raises:
      DataError: there is no sequence.
      ConfigError: a sequence is longer than the longest row.
    """

    def __init__(
        self,
        model: costs.CostModel,
        lengths: Sequence[int],
        trainer: TrainerProperties,
        batches: int = 1,
        parts: int = 0,
    ) -> None:
        if not len(lengths):
            raise protocols.DataError("a plan needs the lengths of a training step's sequences, and there is none")
        if max(lengths) > trainer.lengths[-1] + 1:
            raise protocols.ConfigError(
                f"config.trainer.row_tokens: a sequence of {max(lengths)} tokens does not fit the longest row, which "
                f"has {trainer.lengths[-1]} columns; raise it, or add a row length to row_buckets"
            )
        self._model = model
        self._trainer = trainer
        # A sequence of N tokens takes N - 1 columns: the last token is only a target.
        self._batches = batches
        self._rows = [
            (length, squares)
            for batch in range(batches)
            for length, squares in _squares(np.asarray(lengths, np.int64)[batch::batches] - 1, trainer)
        ]
        self._parts = min(parts, len(lengths) // batches)
        self._part = Training(model, lengths, trainer, batches * self._parts) if self._parts > 1 else None

    def memory_bytes(self, data: int, fsdp: int, tensor: int) -> float:
        """Returns the bytes on each device."""
        if (case := self._trainer.case(self._model, (data, fsdp, tensor))) is not None:
            return case.memory_bytes
        shape, trainer, row = self._model.shape, self._trainer, self._trainer.lengths[-1]
        state = float(MASTER_BYTES * self._model.parameters)
        if trainer.frozen_bytes:
            state = trainer.frozen_bytes * self._model.parameters + MASTER_BYTES * adapters.parameter_count(shape)
        state = (1 + trainer.critic) * (state + VALUE_BYTES * trainer.moment_numbers(self._model))
        state += trainer.reference_bytes * (trainer.teacher_parameters or self._model.parameters)
        state /= fsdp * tensor * trainer.context
        columns = -(-trainer.rows // (data * fsdp)) * row / trainer.context  # of a micro-batch, on each shard
        activations = shape.num_layers * LAYER_ACTIVATIONS[trainer.remat] * columns * shape.hidden_size / tensor
        working = LAYER_ACTIVATIONS["none"] * columns * shape.hidden_size / tensor
        logits = 2 * 4 * min(trainer.logits_chunk, row) * shape.vocab_size / tensor
        experts = self._model.expert_parameters
        gathered = 2 * costs.BYTES_PER_VALUE * (self._model.parameters - experts) / (shape.num_layers * tensor)
        if experts:
            gathered += GATHERED_BYTES * columns * fsdp * shape.hidden_size
            # A layer's own experts in bfloat16, whole over `context`, and their summed gradients in float32.
            layer_experts = experts / (shape.num_layers * fsdp * tensor)
            gathered += (costs.BYTES_PER_VALUE + communication_bounds.SUM_BYTES) * layer_experts
        return state + activations + working + logits + gathered

    def seconds(self, data: int, fsdp: int, tensor: int) -> float:
        """Returns the seconds of a step."""
        coefficients, sums = self._model.coefficients, self.sum_seconds(data, fsdp, tensor)
        turns = self._turns(data, fsdp, tensor) * (self._trainer.updates * (1 + self._trainer.critic))
        rate = self._model.sheet.memory_bytes_per_second * coefficients.memory_share
        # An update reads and writes weights, summed gradients and moments.
        numbers = 2 * self._model.trained_parameters + self._trainer.moment_numbers(self._model)
        update = turns * 2 * VALUE_BYTES * numbers / (fsdp * tensor * self._trainer.context * rate)
        return coefficients.train_overhead + sums + update

    def _turns(self, data: int, fsdp: int, tensor: int) -> float:
        """Returns the number of devices that take turns on a core; 1 on accelerators."""
        devices, cores = data * fsdp * tensor * self._trainer.context, self._trainer.cores
        return 1.0 if cores is None else max(1.0, devices / cores)

    def sum_seconds(self, data: int, fsdp: int, tensor: int) -> float:
        """Returns the seconds of a step's sums of gradients, without the update."""
        case = self._trainer.case(self._model, (data, fsdp, tensor))
        coefficients, shape = self._model.coefficients, self._model.shape
        again = RECOMPUTED[self._trainer.remat]
        rows_per_shard = -(-self._trainer.rows // (data * fsdp))
        cores, context, total = self._trainer.cores, self._trainer.context, 0.0
        turns = self._turns(data, fsdp, tensor)
        further, epochs, critic = self._further_operations(), self._trainer.epochs, self._trainer.critic
        for length, squares in self._rows:
            # Rows are sorted by their squares, so every n-th is the slowest of its micro-batch. Attention stays inside
            # a sequence, so its work grows with the sum of the sequences' squared lengths.
            heaviest = squares[:: data * fsdp * rows_per_shard]
            linear = 2.0 * self._model.active_parameters * length
            forward = linear + 2.0 * shape.num_layers * shape.num_heads * shape.head_dim * heaviest
            # The backward pass costs two forward passes.
            # A critic costs what the policy costs, and scores its batch once.
            passes = (1 + critic) * epochs * (3.0 + again) + self._trainer.scorings + critic
            work = passes * forward + epochs * further * length
            slowest = work / (tensor * context * self._model.sheet.flops * coefficients.train_flops_share)
            busy = turns * (rows_per_shard * slowest + epochs * coefficients.micro_batch_overhead)
            hidden, exposed = self._collective_seconds(data, fsdp, tensor, rows_per_shard * length // context, case)
            hidden *= epochs
            total += float((np.maximum(busy, hidden) if cores is None else busy + hidden).sum())
            total += epochs * len(slowest) * exposed
        return total / self._batches

    def _further_operations(self) -> float:
        """Returns the operations of a token beyond the passes of a dense model whose weights are all trained."""
        model, again = self._model, RECOMPUTED[self._trainer.remat]
        outside = model.parameters - model.expert_parameters
        further = (EXPERTS_RECOMPUTED - again) * (model.active_parameters - outside)
        if model.shape.adapter is not None:
            # Frozen weights have no gradient: one product less. The adapter's own parameters pass as all others do.
            further += (3.0 + again + self._trainer.scorings) * model.trained_parameters - model.active_parameters
        return 2.0 * further

    def with_costs(self, model: costs.CostModel) -> Training:
        """Returns the same steps with other costs."""
        # Shares the packed rows, which do not depend on costs.
        training = copy.copy(self)
        training._model = model
        training._part = None if self._part is None else self._part.with_costs(model)
        return training

    def mesh(self, data: int, fsdp: int, tensor: int) -> Mesh:
        """Returns the mesh of these sizes, even if it does not fit."""
        seconds, memory_bytes = self.seconds(data, fsdp, tensor), self.memory_bytes(data, fsdp, tensor)
        early = part = 0.0
        if self._part is not None:
            # k groups at once take about part + k * (early - part) / groups: right for one group, and for all.
            early, one = self.sum_seconds(data, fsdp, tensor), self._part.sum_seconds(data, fsdp, tensor)
            part = max(0.0, (self._parts * one - early) / (self._parts - 1))
        return Mesh(data, fsdp, tensor, seconds, memory_bytes, self._trainer.context, early, part)

    def front(self, max_devices: int, *, whole_rows: bool = False, host_devices: int = 1) -> tuple[Mesh, ...]:
        """Returns meshes over at most `max_devices` devices, fewest first, each faster than all with fewer.

        Args:
          max_devices: largest number of devices.
          whole_rows: keeps only meshes whose shards divide the rows of a micro-batch, as a running trainer needs.
          host_devices: devices of a host. A mesh on several hosts takes all of their devices, and splits layers and
            rows inside a host (`cluster.hosts`). 1: any number.

        Raises:
          ConfigError: the model fits on none; the message says what is short.
        """
        room = self._model.sheet.memory_bytes * self._model.coefficients.memory_fraction
        hidden_size, context = self._model.shape.hidden_size, self._trainer.context
        candidates: list[Mesh] = []
        for tensor in self.tensor_degrees():
            for fsdp in range(1, min(hidden_size, max_devices // (tensor * context)) + 1):
                if not self.divides(fsdp):
                    continue
                # More replicas would have no rows.
                enough = -(-max(len(squares) for _, squares in self._rows) // fsdp)
                for data in range(1, min(enough, max_devices // (fsdp * tensor * context)) + 1):
                    divides = self._trainer.rows % (data * fsdp) == 0 or not whole_rows
                    if data * fsdp * tensor * context > host_devices > 1:
                        divides &= data * fsdp * tensor * context % host_devices == 0
                        divides &= host_devices % (tensor * context) == 0
                    if divides and self.memory_bytes(data, fsdp, tensor) <= room:
                        candidates.append(self.mesh(data, fsdp, tensor))
        front: list[Mesh] = []
        for mesh in sorted(candidates, key=lambda mesh: (mesh.devices, mesh.seconds)):
            if not front or mesh.seconds < front[-1].seconds:
                front.append(mesh)
        if not front:
            sheet, row = self._model.sheet, self._trainer.lengths[-1]
            degrees = [tensor for tensor in self.tensor_degrees() if tensor * context <= max_devices]
            if not degrees:
                raise protocols.ConfigError(
                    f"config.trainer.context: {context} needs more than the {max_devices} devices that there are; "
                    "lower it"
                )
            needed = min(self.memory_bytes(1, max_devices // (tensor * context), tensor) for tensor in degrees)
            advice = [self._enough(room), "shorter or fewer rows (trainer.row_tokens, trainer.rows_per_micro_batch)"]
            if RECOMPUTED[self._trainer.remat] < 1:
                advice.append("model.remat='full'")
            raise protocols.ConfigError(
                f"the model trains on no mesh of {max_devices} {sheet.name} devices: even sharded over all of them a "
                f"device needs {needed / 1e9:.1f} GB for its part of {self._model.parameters / 1e9:.1f} billion "
                f"parameters and a row of {row} tokens, and has {room / 1e9:.1f}; {' or '.join(advice)}"
            )
        return tuple(front)

    def _enough(self, room: float) -> str:
        """Advises the fewest training devices on which one replica fits into `room` bytes a device."""
        context = self._trainer.context
        shards = (
            (fsdp * tensor * context, fsdp, tensor)
            for tensor in self.tensor_degrees()
            for fsdp in range(1, MOST_SHARDS // (tensor * context) + 1)
            if self.divides(fsdp)
        )
        fitting = (devices for devices, fsdp, tensor in sorted(shards) if self.memory_bytes(1, fsdp, tensor) <= room)
        fewest = next(fitting, None)
        return "take more devices" if fewest is None else f"take more devices (training alone needs {fewest})"

    def divides(self, fsdp: int) -> bool:
        """Returns whether `fsdp` divides the width of the model, with `context`, and its experts."""
        shape = self._model.shape
        return not shape.hidden_size % (fsdp * self._trainer.context) and not shape.num_experts % fsdp

    def tensor_degrees(self) -> list[int]:
        """Returns the tensor degrees that stay inside a node and divide heads, feed-forward columns and rows."""
        shape, context = self._model.shape, self._trainer.context
        heads, columns = (shape.num_heads, shape.num_kv_heads), model_config.feed_forward_columns(shape)
        sizes = *heads, columns, shape.vocab_size, *self._trainer.lengths
        return [
            degree
            for degree in TENSOR_DEGREES
            if degree <= self._model.sheet.devices_per_node
            and not any(size % degree for size in sizes)
            and not any(length % (degree * context) for length in self._trainer.lengths)
        ]

    def volumes(self, data: int, fsdp: int, tensor: int, columns: int) -> communication_bounds.Volumes:
        """Returns the wire bytes of a device and a micro-batch of `columns` columns a device, by formula."""
        model, shape, again, context = self._model, self._model.shape, self._trainer.scorings, self._trainer.context
        passes = 2.0 + RECOMPUTED[self._trainer.remat] + again
        # Parameters travel in bfloat16, gradients in float32. Frozen weights have none, and the adapter has its own.
        frozen = shape.adapter is not None
        summed, experts = 0 if frozen else communication_bounds.SUM_BYTES, model.expert_parameters
        state = communication_bounds.over_fsdp(
            (model.parameters - experts) / tensor, fsdp * context, 2.0 + again, summed
        )
        # Experts are split over `fsdp` already, and whole over `context` while they compute.
        state += communication_bounds.over_fsdp(experts / (fsdp * tensor), context, 2.0 + again, summed)
        if frozen:
            state += communication_bounds.over_fsdp(
                model.trained_parameters / tensor, fsdp * context, 2.0 + again, communication_bounds.SUM_BYTES
            )
        gathered, inside = communication_bounds.for_experts(shape, columns, fsdp, tensor, self._expert_moves)
        # Over `tensor`: an all-reduce for attention and one for a dense feed-forward layer, in each layer and pass, of
        # one hidden vector a token. Each takes as much as a gather and a scatter.
        moves = (2 if experts else 4) * shape.num_layers * passes
        return communication_bounds.Volumes(
            state,
            communication_bounds.over_data(
                model.trained_parameters / (fsdp * tensor * context), data, communication_bounds.SUM_BYTES
            ),
            communication_bounds.over_tensor(columns, shape.hidden_size, tensor, moves) + inside,
            communication_bounds.over_context(shape, columns, tensor, context, passes),
            gathered,
        )

    @property
    def _expert_moves(self) -> int:
        """Gathers and scatters of tokens for a layer's experts; 0 for a dense model."""
        # Scoring is one more forward pass: a gather and a scatter.
        return EXPERT_MOVES + 2 * self._trainer.scorings if self._model.expert_parameters else 0

    def _collective_seconds(
        self, data: int, fsdp: int, tensor: int, columns: int, case: programs.CompiledCase | None
    ) -> tuple[float, float]:
        """Returns the seconds of a micro-batch's collectives: of those over `fsdp` and `data`, which its arithmetic may
        hide, and of those over `tensor`, of attention over `context` and of tokens for experts, which nothing hides.

        Args:
          data: replicas.
          fsdp: ways that the state is sharded.
          tensor: ways that a layer's matrices are split.
          columns: columns of the micro-batch on each device.
          case: the programs that were compiled for the mesh, if there are any.
        """
        sheet, coefficients, again = self._model.sheet, self._model.coefficients, self._trainer.scorings
        shares, layers = (coefficients.large_message_share, coefficients.network_share), self._model.shape.num_layers
        context = self._trainer.context
        along_fsdp = sheet.collective_rate(fsdp * tensor * context, *shares)
        if case is not None:
            hidden = case.communication_seconds(sheet, coefficients, over_tensor=False)
            if again and "score" in case.programs:
                hidden += case.communication_seconds(sheet, coefficients, over_tensor=False, program="score")
            # A program's record does not tell tokens for experts from parameters, so the formula says how many are.
            tokens = min(hidden, self.volumes(data, fsdp, tensor, case.columns).experts / along_fsdp)
            exposed = tokens + (
                case.communication_seconds(sheet, coefficients, over_tensor=True) if tensor > 1 else 0.0
            )
            # Bytes over `tensor` and of tokens grow with the columns; those over the other axes are of parameters.
            return hidden - tokens, exposed * columns / case.columns
        volumes = self.volumes(data, fsdp, tensor, columns)
        passes = 2.0 + RECOMPUTED[self._trainer.remat] + again
        # Groups along `fsdp` lie inside those along `data`, so they span fewer neighbouring devices.
        hidden = volumes.fsdp / along_fsdp
        hidden += volumes.data / sheet.collective_rate(data * fsdp * tensor * context, *shares)
        messages = layers * ((3.0 + again) * (fsdp * context > 1) + (data > 1))
        # A layer and pass has two exchanges over `tensor`, one of them for a dense feed-forward layer, and four over
        # `context`: queries, keys, values, outputs.
        moves = self._expert_moves
        latencies = layers * passes * ((1 if moves else 2) * (tensor > 1) + 4 * (context > 1))
        latencies += layers * moves * ((tensor > 1) + (fsdp > 1))
        # `tensor` stays inside a node; `context` is the innermost axis of the mesh.
        exposed = latencies * coefficients.large_message_latency
        exposed += volumes.tensor / (sheet.node_link_bytes_per_second * coefficients.large_message_share)
        exposed += volumes.context / sheet.collective_rate(context, *shares) + volumes.experts / along_fsdp
        return hidden + messages * coefficients.large_message_latency, exposed
