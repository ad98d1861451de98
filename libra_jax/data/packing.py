"""Packs token sequences of any length into micro-batches of a few fixed shapes.

A sequence of N tokens has N - 1 predictions and takes N - 1 columns of one row. Column j holds token j; its target,
mask, behaviour log-probability and so on belong to token j + 1. Columns after the last trained prediction have no
effect and are left out. Several sequences share a row, separated by segment ids (1, 2, ...; 0 is padding). Each
sequence starts at position 0. `row_places` assigns sequences to rows. Numpy only, deterministic.

One indexing operation a field takes the columns of all sequences, because most are short.

A process of a trainer may have the tokens of its own rows alone. Other rows of its micro-batches are empty then.

A rollout of several segments becomes a tree of tokens (`trees`), or parts of one. Trees have micro-batches of their
own, because attention needs one more array for them. A tree without a fork is a plain sequence. The arrays `segments`
number the sequences of a row; they are not the segments of a rollout.

With `trainer.share_prompt`, rollouts of one prompt that follow each other are one tree, too (`shared_prompts`).

Letters: C columns of all sequences, N tokens of an example, B rows of a micro-batch, T columns of a row, M sequences
that a row may hold.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from libra_jax import config as config_lib
from libra_jax.data import row_places
from libra_jax.data import sequences as sequences_lib
from libra_jax.models import rows

LENGTHS = "lengths"
"""Name of a micro-batch's `sequence_lengths` among the arrays of a program. Only cuDNN's attention needs them."""


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


DTYPES: Mapping[str, type[np.generic]] = {
    "tokens": np.int32,
    "targets": np.int32,
    "positions": np.int32,
    "segments": np.int32,
    "mask": np.bool_,
    "behaviour": np.float32,
    "on_version": np.bool_,
}
"""Types of the arrays of `MicroBatch`."""


@dataclass(frozen=True)
class TreeMicroBatch(MicroBatch):
    """A micro-batch of trees; every array is [B, T].

    Attributes:
      until: int32, first column of the row after the token's subtree; 0 in padding.
    """

    until: np.ndarray


UNTIL = "until"
"""Name of that array among the arrays of a program."""

ROLLOUT_TOKENS = "rollout_tokens"
"""Name of the array of each rollout's trained tokens, in micro-batches with a part of a rollout that was split."""


@dataclass(frozen=True)
class Columns:
    """The columns of the sequences whose tokens this process has, one sequence after the other. C is their number.

    Attributes:
      shapes: shape of each micro-batch.
      place_C: index of the column in the micro-batches, each flattened, one after the other.
      example_C: example that the column is of.
      inputs_C: index of its input token in the example.
      targets_C: index of the token that it predicts; `sequences.NONE` without one.
    """

    shapes: Sequence[tuple[int, int]]
    place_C: np.ndarray
    example_C: np.ndarray
    inputs_C: np.ndarray
    targets_C: np.ndarray

    def of_inputs(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the value of each column's input token, [C], of one array [N] an example."""
        return _end_to_end(values)[self.tokens([len(value) for value in values], self.inputs_C)]

    def of_targets(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the value of each column's target, [C], of one array [N] an example; 0 for columns without one."""
        values_C = _end_to_end(values)[self.tokens([len(value) for value in values], np.maximum(self.targets_C, 0))]
        return np.where(self.targets_C == sequences_lib.NONE, values_C.dtype.type(0), values_C)

    def tokens(self, lengths: Sequence[int], index_C: np.ndarray) -> np.ndarray:
        """Returns the index in all examples' tokens, [C], of a token of each column's example."""
        counts = np.array(lengths, np.int64)
        # Past the end of its example, an index would read the next one's.
        assert (index_C < counts[self.example_C]).all()
        return (np.cumsum(counts) - counts)[self.example_C] + index_C

    def lay_out(self, values_C: np.ndarray, dtype: npt.DTypeLike) -> list[np.ndarray]:
        """Returns one array [B, T] a micro-batch with the columns' values, 0 elsewhere."""
        sizes = [rows * width for rows, width in self.shapes]
        flat = np.zeros(sum(sizes), dtype)
        flat[self.place_C] = values_C
        parts = np.split(flat, np.cumsum(sizes)[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)]


@dataclass(frozen=True)
class Packed:
    """Micro-batches, and the places of all sequences in them.

    Attributes:
      micro_batches: micro-batches of each mini-batch in order of row length, those of trees last.
      places: places of the sequences, examples in the given order. An example without a trained prediction has none;
        one that was split has several.
      layouts: layout of each place's sequence.
      columns: columns of the places whose tokens this process has.
      examples: number of examples.
      minibatches: micro-batches of each mini-batch, at least one.
      shared_columns: columns that were saved because segments share tokens.
    """

    micro_batches: tuple[MicroBatch, ...]
    places: Sequence[row_places.RowPlace]
    layouts: Sequence[row_places.Layout]
    columns: Columns
    examples: int
    minibatches: Sequence[range]
    shared_columns: int = 0

    @property
    def size(self) -> int:
        """Number of columns of all micro-batches, padding included."""
        return sum(count * width for count, width in self.columns.shapes)

    def scatter(self, values: Sequence[np.ndarray | float]) -> list[np.ndarray]:
        """Lays per-sequence values out as one float32 [B, T] array per micro-batch, 0 in padding.

        Args:
          values: one value per example: for each a number for all its predictions, or for each an array [N] with one
            number per token.
        """
        assert len(values) == self.examples
        if all(np.ndim(value) == 0 for value in values):
            return self.columns.lay_out(np.asarray(values, np.float32)[self.columns.example_C], np.float32)
        # A column holds the prediction of its target, so it takes the target's value.
        return self.columns.lay_out(self.columns.of_targets([np.asarray(value) for value in values]), np.float32)

    def sequence_lengths(self, number: int) -> np.ndarray:
        """Returns the tokens of each sequence of a micro-batch, int32 [B, M]; 0 for sequences that do not exist.

        M is the first of `rows.segment_bounds` that suffices, because XLA compiles a program for each M.
        """
        count, width = self.columns.shapes[number]
        places = self._of_micro_batches.get(number, [])
        needed = max((place.segment for place in places), default=0)
        capacity = next(bound for bound in rows.segment_bounds(width, packed=True) if bound >= needed)
        lengths_BxM = np.zeros((count, capacity), np.int32)
        for place in places:
            lengths_BxM[place.row, place.segment - 1] = place.columns
        return lengths_BxM

    @functools.cached_property
    def _of_micro_batches(self) -> dict[int, list[row_places.RowPlace]]:
        """The places of each micro-batch."""
        places: dict[int, list[row_places.RowPlace]] = {}
        for place in self.places:
            places.setdefault(place.micro_batch, []).append(place)
        return places

    def batch_order(self, part: range) -> np.ndarray:
        """Returns the trained tokens of some micro-batches in the order of the batch, which no layout changes, [K].

        The numbers index all trained tokens of these micro-batches in the order of their columns.
        """
        trained = [item.mask & (number in part) for number, item in enumerate(self.micro_batches)]
        chosen_C = _end_to_end([np.ravel(mask) for mask in trained])[self.columns.place_C]
        places_K, examples_K, targets_K = (
            values_C[chosen_C] for values_C in (self.columns.place_C, self.columns.example_C, self.columns.targets_C)
        )
        return np.argsort(np.argsort(places_K))[np.lexsort((targets_K, examples_K))]

    def split(self) -> dict[int, list[int]]:
        """Returns the micro-batches of each example that was split into several sequences, by example."""
        micro_batches: dict[int, list[int]] = {}
        for place in self.places:
            micro_batches.setdefault(place.example, []).append(place.micro_batch)
        return {example: numbers for example, numbers in micro_batches.items() if len(numbers) > 1}

    def routing(
        self, examples: Sequence[sequences_lib.Example], width: int, dtype: np.dtype
    ) -> list[dict[str, np.ndarray]]:
        """Lays out the experts of each input token: `routing` [B, T, W] and `routed`, bool [B, T], by micro-batch.

        Args:
          examples: the packed examples.
          width: W, number of layers times experts of a token.
          dtype: dtype of `routing`.
        """
        routings = [
            {"routing": np.zeros((*item.tokens.shape, width), dtype), "routed": np.zeros(item.tokens.shape, bool)}
            for item in self.micro_batches
        ]
        for place, layout in zip(self.places, self.layouts, strict=True):
            example = examples[place.example]
            if example.routing_RxW is None:
                continue
            # A column holds its own token as input, so it takes the experts of that one.
            row_N = np.full(len(example.tokens_N), -1)
            routed_tokens = slice(len(example.routing_RxW)) if example.routed_R is None else example.routed_R
            row_N[routed_tokens] = np.arange(len(example.routing_RxW))
            row_C = row_N[layout.inputs_C]
            arrays = routings[place.micro_batch]
            arrays["routing"][place.where][row_C >= 0] = example.routing_RxW[row_C[row_C >= 0]]
            arrays["routed"][place.where] = row_C >= 0
        return routings

    def gather(self, arrays: Sequence[np.ndarray], lengths: Sequence[int]) -> list[np.ndarray]:
        """Inverts `scatter`: returns values [N] of each example's tokens, 0 for tokens without a prediction.

        Args:
          arrays: one [B, T] array per micro-batch.
          lengths: N of each example.
        """
        columns = self.columns
        assert [array.shape for array in arrays] == list(columns.shapes)
        has_target = columns.targets_C != sequences_lib.NONE
        token_C = columns.tokens(lengths, columns.targets_C)
        values_C = _end_to_end([np.ravel(array) for array in arrays])[columns.place_C]
        flat = np.zeros(sum(lengths), np.float32)
        flat[token_C[has_target]] = values_C[has_target]
        return np.split(flat, np.cumsum(lengths)[:-1]) if lengths else []


def pack(
    examples: Sequence[sequences_lib.Example], config: config_lib.TrainerConfig, minibatches: Sequence[int] = ()
) -> Packed:
    """Packs `examples` into micro-batches of `config.micro_batch_rows` rows; empty rows fill the last.

    Args:
      minibatches: number of examples of each mini-batch; default: all examples are one.

    Raises:
      ConfigError: a sequence is longer than the longest row.
    """
    placement = row_places.place(examples, config, config.micro_batch_rows, minibatches)
    # Of other sequences, this process has outlines alone.
    local_sequences = [
        (place, layout)
        for place, layout in zip(placement.places, placement.layouts, strict=True)
        if examples[place.example].outline is None
    ]
    columns = _columns(local_sequences, placement.shapes)
    micro_batches = _micro_batches(examples, columns, local_sequences, placement.of_trees)
    return Packed(
        tuple(micro_batches),
        placement.places,
        placement.layouts,
        columns,
        len(examples),
        placement.minibatches,
        placement.saved,
    )


def _columns(
    local_sequences: Sequence[tuple[row_places.RowPlace, row_places.Layout]], shapes: Sequence[tuple[int, int]]
) -> Columns:
    """Joins the columns of placed sequences."""
    places, layouts = [place for place, _ in local_sequences], [layout for _, layout in local_sequences]
    counts = np.array([place.columns for place in places], np.int64)
    begins = np.cumsum([0, *(rows * width for rows, width in shapes)])
    starts = [begins[at.micro_batch] + at.row * shapes[at.micro_batch][1] + at.start for at in places]
    within_C = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return Columns(
        shapes,
        place_C=np.repeat(np.array(starts, np.int64), counts) + within_C,
        example_C=np.repeat(np.array([place.example for place in places], np.int64), counts),
        inputs_C=_end_to_end([layout.inputs_C for layout in layouts]),
        targets_C=_end_to_end([layout.targets_C for layout in layouts]),
    )


def _micro_batches(
    examples: Sequence[sequences_lib.Example],
    columns: Columns,
    local_sequences: Sequence[tuple[row_places.RowPlace, row_places.Layout]],
    of_trees: Sequence[bool],
) -> list[MicroBatch]:
    """Returns the micro-batches with the columns of the sequences whose tokens are there.

    Args:
      local_sequences: place and layout of each of these sequences.
      of_trees: True for each micro-batch of trees.
    """
    # A column holds its own token as input, and everything else about the token that it predicts.
    fields = {
        "tokens": columns.of_inputs([example.tokens_N for example in examples]),
        "targets": columns.of_targets([example.tokens_N for example in examples]),
        "positions": _end_to_end([layout.positions_C for _, layout in local_sequences]),
        "segments": np.repeat(
            np.array([place.segment for place, _ in local_sequences], np.int32),
            [place.columns for place, _ in local_sequences],
        ),
        "mask": columns.of_targets([example.mask_N for example in examples]),
        "behaviour": columns.of_targets([example.behaviour_N for example in examples]),
        "on_version": columns.of_targets([example.on_version_N for example in examples]),
    }
    arrays = {name: columns.lay_out(values_C, DTYPES[name]) for name, values_C in fields.items()}
    micro_batches = [
        MicroBatch(**dict(zip(arrays, values, strict=True))) for values in zip(*arrays.values(), strict=True)
    ]
    if not any(of_trees):
        return micro_batches
    ends = [
        np.zeros(place.columns, np.int32) if layout.until_C is None else place.start + layout.until_C
        for place, layout in local_sequences
    ]
    ends_by_micro_batch = columns.lay_out(_end_to_end(ends), np.int32)
    return [
        TreeMicroBatch(**vars(item), until=until) if is_tree else item
        for item, until, is_tree in zip(micro_batches, ends_by_micro_batch, of_trees, strict=True)
    ]


def _end_to_end(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the arrays as one; an empty one if there are none."""
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int32)


def empty(shape: tuple[int, int], trees_only: bool = False) -> MicroBatch:
    """Returns an empty micro-batch of shape [B, T], for trees or for plain sequences."""
    micro_batch = MicroBatch(**{name: np.zeros(shape, dtype) for name, dtype in DTYPES.items()})
    return TreeMicroBatch(**vars(micro_batch), until=np.zeros(shape, np.int32)) if trees_only else micro_batch
