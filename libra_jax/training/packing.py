"""Packs token sequences of any length into micro-batches of a few fixed shapes.

A sequence of N tokens has N - 1 predictions and takes N - 1 columns of one row. Column j holds token j; its target,
mask, behaviour log-probability and so on belong to token j + 1. Columns after the last trained prediction have no
effect and are left out. Several sequences share a row, separated by segment ids (1, 2, ...; 0 is padding). Each
sequence starts at position 0. `planning/rows.py` assigns sequences to rows, because step-time predictions use the same
assignment. Numpy only, deterministic.

Letters: B rows of a micro-batch, T columns of a row, M sequences that a row may hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.planning import rows

LENGTHS = "lengths"
"""Name of a micro-batch's `sequence_lengths` among the arrays of a program. Only cuDNN's attention needs them."""


@dataclass(frozen=True)
class Example:
    """A training sequence of N tokens.

    Attributes:
      sequence_id: names the sequence in errors.
      tokens_N: int32 token ids.
      mask_N: True for each token whose prediction is trained; the first token has no prediction.
      behaviour_N: float32 log-probability under the policy that sampled the token; 0 if no policy sampled it.
      on_version_N: True for each token sampled by the version that trains.
      routing_RxW: experts of the first R tokens, unsigned, layers first; None: no token's are known.
    """

    sequence_id: str
    tokens_N: np.ndarray
    mask_N: np.ndarray
    behaviour_N: np.ndarray
    on_version_N: np.ndarray
    routing_RxW: np.ndarray | None = None

    @property
    def columns(self) -> int:
        """Number of columns: the predictions up to the last trained prediction. Later predictions have no effect."""
        # Column j - 1 predicts token j, so the index of the last trained token is the number of columns.
        return int(np.flatnonzero(self.mask_N)[-1]) if self.mask_N[1:].any() else 0


@dataclass(frozen=True)
class Place:
    """Place of a sequence: micro-batch, row, first column, number of columns."""

    micro_batch: int
    row: int
    start: int
    columns: int


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch on the host; every array is [B, T].

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


@dataclass(frozen=True)
class Packed:
    """Micro-batches, and the place of each sequence in them.

    Attributes:
      micro_batches: micro-batches in order of row length.
      places: one place per example, in the given order; None for an example without a trained prediction.
      padding_fraction: fraction of all columns that hold no token.
    """

    micro_batches: tuple[MicroBatch, ...]
    places: tuple[Place | None, ...]
    padding_fraction: float

    def scatter(self, values: Sequence[np.ndarray | float]) -> list[np.ndarray]:
        """Lays per-sequence values out as one float32 [B, T] array per micro-batch, 0 in padding.

        Args:
          values: one value per example: a number for all its predictions, or an array [N] with one number per token.
        """
        arrays = [np.zeros(micro_batch.tokens.shape, np.float32) for micro_batch in self.micro_batches]
        for place, value in zip(self.places, values, strict=True):
            if place is not None:
                # A column holds the prediction of the next token, so column 0 takes the value of token 1.
                row = value[1 : place.columns + 1] if isinstance(value, np.ndarray) and value.ndim else value
                arrays[place.micro_batch][place.row, place.start : place.start + place.columns] = row
        return arrays

    def routing(self, examples: Sequence[Example], width: int, dtype: np.dtype) -> list[dict[str, np.ndarray]]:
        """Lays out the experts of each input token: `routing` [B, T, W] and `routed`, bool [B, T], by micro-batch.

        Args:
          examples: the packed examples.
          width: W, number of layers times experts of a token.
          dtype: dtype of `routing`.
        """
        made = [
            {"routing": np.zeros((*item.tokens.shape, width), dtype), "routed": np.zeros(item.tokens.shape, bool)}
            for item in self.micro_batches
        ]
        for place, example in zip(self.places, examples, strict=True):
            if place is not None and example.routing_RxW is not None:
                # A column holds its own token as input, so column 0 takes the experts of token 0.
                rows = example.routing_RxW[: place.columns]
                where = place.row, slice(place.start, place.start + len(rows))
                made[place.micro_batch]["routing"][where] = rows
                made[place.micro_batch]["routed"][where] = True
        return made

    def gather(self, arrays: Sequence[np.ndarray], lengths: Sequence[int]) -> list[np.ndarray]:
        """Inverts `scatter`: returns values [N] of each example's tokens, 0 for tokens without a prediction.

        Args:
          arrays: one [B, T] array per micro-batch.
          lengths: N of each example.
        """
        values = [np.zeros(length, np.float32) for length in lengths]
        for value, place in zip(values, self.places, strict=True):
            if place is not None:
                source = arrays[place.micro_batch][place.row]
                value[1 : place.columns + 1] = source[place.start : place.start + place.columns]
        return values


def row_lengths(config: config_lib.TrainerConfig) -> tuple[int, ...]:
    """Returns the row lengths that programs are compiled for, ascending."""
    return (config.row_tokens, *config.row_buckets)


def sequence_lengths(micro_batch: MicroBatch) -> np.ndarray:
    """Returns the tokens of each sequence, int32 [B, M]; 0 for sequences that do not exist.

    M is the first of `rows.segment_bounds` that suffices, because XLA compiles a program for each M.
    """
    segments_BxT = micro_batch.segments
    bounds = rows.segment_bounds(segments_BxT.shape[1], packed=True)
    most = next(bound for bound in bounds if bound >= segments_BxT.max())
    return np.stack([np.bincount(row_T, minlength=most + 1)[1:] for row_T in segments_BxT]).astype(np.int32)


def joined(parts: Sequence[Packed]) -> Packed:
    """Returns several packed batches as one, with their micro-batches and examples one after the other."""
    micro_batches: list[MicroBatch] = []
    places: list[Place | None] = []
    for part in parts:
        offset = len(micro_batches)
        places += [
            place and dataclasses.replace(place, micro_batch=place.micro_batch + offset) for place in part.places
        ]
        micro_batches += part.micro_batches
    columns = [sum(item.tokens.size for item in part.micro_batches) for part in parts]
    padding = sum(part.padding_fraction * size for part, size in zip(parts, columns, strict=True))
    return Packed(tuple(micro_batches), tuple(places), padding / max(1, sum(columns)))


def pack(examples: Sequence[Example], config: config_lib.TrainerConfig) -> Packed:
    """Packs `examples` into micro-batches of `config.rows_per_micro_batch` rows; empty rows fill the last.

    A sequence goes into the first row with room. If no row has room, it opens a row of the shortest length that fits.

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
    fit, each = rows.fit(columns, lengths, config.pack), config.rows_per_micro_batch
    micro_batches: list[MicroBatch] = []
    slot: dict[int, tuple[int, int]] = {}  # row -> (micro-batch, row in it)
    # A micro-batch has one shape, so all of its rows have one length.
    for length in sorted(set(fit.length)):
        of_length = [row for row, its_length in enumerate(fit.length) if its_length == length]
        for position, row in enumerate(of_length):
            slot[row] = (len(micro_batches) + position // each, position % each)
        micro_batches.extend(empty((each, length)) for _ in range(-(-len(of_length) // each)))
    places: list[Place | None] = []
    for index, example in enumerate(examples):
        if columns[index] == 0:
            places.append(None)
            continue
        micro_batch, row = slot[int(fit.row[index])]
        count, start = int(columns[index]), int(fit.start[index])
        places.append(Place(micro_batch, row, start, count))
        target, where = micro_batches[micro_batch], (row, slice(start, start + count))
        # Column j holds token j as input and everything else about token j + 1, which it predicts.
        target.tokens[where] = example.tokens_N[:count]
        target.positions[where] = np.arange(count)
        target.segments[where] = fit.segment[index]
        following = slice(1, count + 1)
        target.targets[where] = example.tokens_N[following]
        target.mask[where] = example.mask_N[following]
        target.behaviour[where] = example.behaviour_N[following]
        target.on_version[where] = example.on_version_N[following]
    total = sum(micro_batch.tokens.size for micro_batch in micro_batches)
    padding = 1.0 - float(columns.sum()) / total if total else 0.0
    return Packed(tuple(micro_batches), tuple(places), padding)


def empty(shape: tuple[int, int]) -> MicroBatch:
    """Returns an empty micro-batch of shape [B, T]."""
    return MicroBatch(
        tokens=np.zeros(shape, np.int32),
        targets=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        segments=np.zeros(shape, np.int32),
        mask=np.zeros(shape, bool),
        behaviour=np.zeros(shape, np.float32),
        on_version=np.zeros(shape, bool),
    )
