"""Token sequences of any length, packed into micro-batches of a few fixed shapes.

A sequence of N tokens makes N - 1 predictions and takes N - 1 columns of one row: column j holds token j, and what is
said about its prediction (target, mask, behaviour log-probability, ...) is that of token j + 1. Columns after the last
trained prediction have no effect and are left out. Several sequences share a row, told apart by segment ids (1, 2, ...;
0 is padding), and each starts again at position 0. `planning/rows.py` says which row a sequence
goes to, because a step is predicted by it, too. Numpy only, deterministic.

Letters: B rows of a micro-batch, T columns of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.planning import rows


@dataclass(frozen=True)
class Example:
    """A sequence to train on; N tokens.

    Attributes:
      sequence_id: names the sequence in errors.
      tokens_N: int32 token ids.
      mask_N: True for each token whose prediction is trained; the first token has no prediction.
      behaviour_N: float32 log-probability under the policy that sampled the token; 0 where none did.
      on_version_N: True for each token sampled by the version that trains.
    """

    sequence_id: str
    tokens_N: np.ndarray
    mask_N: np.ndarray
    behaviour_N: np.ndarray
    on_version_N: np.ndarray

    @property
    def columns(self) -> int:
        """Columns the sequence takes: its predictions up to the last one trained (nothing after that has effect)."""
        return int(np.flatnonzero(self.mask_N)[-1]) if self.mask_N[1:].any() else 0


@dataclass(frozen=True)
class Place:
    """Where a sequence went: micro-batch, row, first column, number of columns."""

    micro_batch: int
    row: int
    start: int
    columns: int


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch on the host, every array [B, T].

    Attributes:
      tokens: int32 inputs.
      targets: int32 tokens to predict.
      positions: int32, from 0 in each segment.
      segments: int32, from 1 in each row; 0 is padding.
      mask: bool, predictions trained.
      behaviour: float32 behaviour log-probabilities of the targets.
      on_version: bool, targets sampled by the version that trains.
    """

    tokens: np.ndarray
    targets: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    mask: np.ndarray
    behaviour: np.ndarray
    on_version: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T)."""
        rows, columns = self.tokens.shape
        return rows, columns


@dataclass(frozen=True)
class Packed:
    """Micro-batches, and where each sequence lies in them.

    Attributes:
      micro_batches: in order of row length.
      places: one an example, in the order given; None for one without a trained prediction.
      padding_fraction: columns that hold no token, as a part of all columns.
    """

    micro_batches: tuple[MicroBatch, ...]
    places: tuple[Place | None, ...]
    padding_fraction: float

    def scatter(self, values: Sequence[np.ndarray | float]) -> list[np.ndarray]:
        """Lays per-sequence values out as one float32 [B, T] array a micro-batch, 0 in padding.

        Args:
          values: one an example: a number for all its predictions, or an array [N] with one a token.
        """
        arrays = [np.zeros(micro_batch.shape, np.float32) for micro_batch in self.micro_batches]
        for place, value in zip(self.places, values, strict=True):
            if place is not None:
                row = value[1 : place.columns + 1] if isinstance(value, np.ndarray) and value.ndim else value
                arrays[place.micro_batch][place.row, place.start : place.start + place.columns] = row
        return arrays

    def gather(self, arrays: Sequence[np.ndarray], lengths: Sequence[int]) -> list[np.ndarray]:
        """The inverse of `scatter`: per-token values [N] of each example, 0 where nothing was predicted.

        Args:
          arrays: one [B, T] array a micro-batch.
          lengths: N of each example.
        """
        values = [np.zeros(length, np.float32) for length in lengths]
        for value, place in zip(values, self.places, strict=True):
            if place is not None:
                source = arrays[place.micro_batch][place.row]
                value[1 : place.columns + 1] = source[place.start : place.start + place.columns]
        return values


def row_lengths(config: config_lib.TrainerConfig) -> tuple[int, ...]:
    """Row lengths that programs are compiled for, ascending."""
    return (config.row_tokens, *config.row_buckets)


def pack(examples: Sequence[Example], config: config_lib.TrainerConfig) -> Packed:
    """Packs `examples` into micro-batches of `config.rows_per_micro_batch` rows; the last is filled up with empty rows.

    A sequence goes into the first row with room, else opens a row of the shortest length that holds it.

    Raises:
      ConfigError: a sequence is longer than the longest row.
    """
    lengths = row_lengths(config)
    columns = np.array([example.columns for example in examples], np.int64)
    for example, count in zip(examples, columns, strict=True):
        if count > lengths[-1]:
            raise protocols.ConfigError(
                f"config.trainer.row_buckets: {example.sequence_id} needs a row of {count} tokens and the longest row "
                f"has {lengths[-1]}; add a longer row or lower rollout.max_context"
            )
    return _lay_out(examples, columns, rows.fit(columns, lengths, config.pack), config)


def _lay_out(
    examples: Sequence[Example],
    columns: np.ndarray,
    fit: rows.Fit,
    config: config_lib.TrainerConfig,
) -> Packed:
    each = config.rows_per_micro_batch
    micro_batches: list[MicroBatch] = []
    slot: dict[int, tuple[int, int]] = {}  # row -> (micro-batch, row in it)
    for length in sorted(set(fit.length)):
        members = [row for row, its_length in enumerate(fit.length) if its_length == length]
        for position, row in enumerate(members):
            slot[row] = (len(micro_batches) + position // each, position % each)
        micro_batches.extend(empty((each, length)) for _ in range(-(-len(members) // each)))
    places: list[Place | None] = []
    for index, example in enumerate(examples):
        if columns[index] == 0:
            places.append(None)
            continue
        micro_batch, row = slot[int(fit.row[index])]
        place = Place(micro_batch, row, int(fit.start[index]), int(columns[index]))
        _write(micro_batches[micro_batch], example, place, int(fit.segment[index]))
        places.append(place)
    total = sum(micro_batch.tokens.size for micro_batch in micro_batches)
    padding = 1.0 - float(columns.sum()) / total if total else 0.0
    return Packed(tuple(micro_batches), tuple(places), padding)


def empty(shape: tuple[int, int]) -> MicroBatch:
    """A micro-batch of [B, T] that holds nothing."""
    return MicroBatch(
        tokens=np.zeros(shape, np.int32),
        targets=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        segments=np.zeros(shape, np.int32),
        mask=np.zeros(shape, bool),
        behaviour=np.zeros(shape, np.float32),
        on_version=np.zeros(shape, bool),
    )


def _write(micro_batch: MicroBatch, example: Example, place: Place, segment: int) -> None:
    columns = place.columns
    where = (place.row, slice(place.start, place.start + columns))
    micro_batch.tokens[where] = example.tokens_N[:columns]
    micro_batch.targets[where] = example.tokens_N[1 : columns + 1]
    micro_batch.positions[where] = np.arange(columns)
    micro_batch.segments[where] = segment
    micro_batch.mask[where] = example.mask_N[1 : columns + 1]
    micro_batch.behaviour[where] = example.behaviour_N[1 : columns + 1]
    micro_batch.on_version[where] = example.on_version_N[1 : columns + 1]
