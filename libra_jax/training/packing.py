"""Packs token sequences of any length into micro-batches of a few fixed shapes.

A sequence of N tokens has N - 1 predictions and takes N - 1 columns of one row. Column j holds token j; its target,
mask, behaviour log-probability and so on belong to token j + 1. Columns after the last trained prediction have no
effect and are left out. Several sequences share a row, separated by segment ids (1, 2, ...; 0 is padding). Each
sequence starts at position 0. `planning/rows.py` assigns sequences to rows, because step-time predictions use the same
assignment. Numpy only, deterministic.

A rollout of several segments becomes a tree of tokens (`trees`), or parts of one. Trees have micro-batches of their
own, because attention needs one more array for them. A tree without a fork is a plain sequence. The arrays `segments`
number the sequences of a row; they are not the segments of a rollout.

With `trainer.share_prompt`, rollouts of one prompt that follow each other are one tree, too (`shared_prompts`).

Letters: B rows of a micro-batch, T columns of a row, M sequences that a row may hold.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.planning import rows
from libra_jax.training import columns as columns_lib
from libra_jax.training import shared_prompts, trees

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
      routing_RxW: experts of R tokens, unsigned, layers first; None: no token's are known.
      routed_R: indices of these tokens; None: the first R.
      tree: segments of the rollout, whose own tokens follow one another; None: it has one. Their first own tokens are
        masked.
    """

    sequence_id: str
    tokens_N: np.ndarray
    mask_N: np.ndarray
    behaviour_N: np.ndarray
    on_version_N: np.ndarray
    routing_RxW: np.ndarray | None = None
    routed_R: np.ndarray | None = None
    tree: trees.Tree | None = None

    @property
    def columns(self) -> int:
        """Number of columns without a tree: the predictions up to the last trained prediction; 0 without any."""
        # Column j - 1 predicts token j, so the index of the last trained token is the number of columns.
        trained_N = self.mask_N[1:]
        return len(trained_N) - int(trained_N[::-1].argmax()) if trained_N.any() else 0

    def layouts(self, longest: int) -> list[trees.Layout]:
        """Returns the sequences that hold the trained predictions: one, the parts of a tree, or none.

        Args:
          longest: columns of the longest row; only a path may need more.
        """
        if self.tree is not None:
            return trees.lay_out(self.tree, self.mask_N, longest)
        return [trees.path(columns)] if (columns := self.columns) else []

    @property
    def prompt(self) -> np.ndarray | None:
        """Tokens before the first trained one; None if rollouts cannot share two of them or more."""
        if self.tree is not None or not self.columns:
            return None
        prompt_P = self.tokens_N[: 1 + int(np.argmax(self.mask_N[1:]))]
        return prompt_P if len(prompt_P) > 1 else None


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
class Packed:
    """Micro-batches, and the places of the sequences in them.

    Attributes:
      micro_batches: micro-batches in order of row length, those of trees last; of each part, if parts were joined.
      places: places of the sequences, examples in the given order. An example without a trained prediction has none;
        one that was split has several.
      layouts: layout of each place's sequence.
      columns: columns of all places.
      examples: number of examples.
      padding_fraction: fraction of all columns that hold no token.
      shared_columns: columns that were saved because segments share tokens.
    """

    micro_batches: tuple[MicroBatch, ...]
    places: tuple[columns_lib.Place, ...]
    layouts: tuple[trees.Layout, ...]
    columns: columns_lib.Columns
    examples: int
    padding_fraction: float
    shared_columns: int = 0

    def scatter(self, values: Sequence[np.ndarray | float]) -> list[np.ndarray]:
        """Lays per-sequence values out as one float32 [B, T] array per micro-batch, 0 in padding.

        Args:
          values: one value per example: for each a number for all its predictions, or for each an array [N] with one
            number per token.
        """
        assert len(values) == self.examples
        if all(np.ndim(value) == 0 for value in values):
            return self.columns.laid_out(np.asarray(values, np.float32)[self.columns.example_C], np.float32)
        # A column holds the prediction of its target, so it takes the target's value.
        return self.columns.laid_out(self.columns.of_targets([np.asarray(value) for value in values]), np.float32)

    def split(self) -> dict[int, list[int]]:
        """Returns the micro-batches of each example that was split into several sequences, by example."""
        found: dict[int, list[int]] = {}
        for place in self.places:
            found.setdefault(place.example, []).append(place.micro_batch)
        return {example: numbers for example, numbers in found.items() if len(numbers) > 1}

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
        for place, layout in zip(self.places, self.layouts, strict=True):
            example = examples[place.example]
            if example.routing_RxW is None:
                continue
            # A column holds its own token as input, so it takes the experts of that one.
            row_N = np.full(len(example.tokens_N), -1)
            known = slice(len(example.routing_RxW)) if example.routed_R is None else example.routed_R
            row_N[known] = np.arange(len(example.routing_RxW))
            row_C = row_N[layout.inputs_C]
            arrays = made[place.micro_batch]
            arrays["routing"][place.where][row_C >= 0] = example.routing_RxW[row_C[row_C >= 0]]
            arrays["routed"][place.where] = row_C >= 0
        return made

    def gather(self, arrays: Sequence[np.ndarray], lengths: Sequence[int]) -> list[np.ndarray]:
        """Inverts `scatter`: returns values [N] of each example's tokens, 0 for tokens without a prediction.

        Args:
          arrays: one [B, T] array per micro-batch.
          lengths: N of each example.
        """
        return self.columns.gathered(arrays, lengths)


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
    if len(parts) == 1:
        return parts[0]
    micro_batches: list[MicroBatch] = []
    places: list[columns_lib.Place] = []
    examples = 0
    for part in parts:
        places += [
            dataclasses.replace(
                place, example=place.example + examples, micro_batch=place.micro_batch + len(micro_batches)
            )
            for place in part.places
        ]
        micro_batches += part.micro_batches
        examples += part.examples
    layouts = tuple(layout for part in parts for layout in part.layouts)
    sizes = [sum(item.tokens.size for item in part.micro_batches) for part in parts]
    padding = sum(part.padding_fraction * size for part, size in zip(parts, sizes, strict=True))
    return Packed(
        tuple(micro_batches),
        tuple(places),
        layouts,
        columns_lib.Columns.of(places, layouts, [item.tokens.shape for item in micro_batches]),
        examples,
        padding / max(1, sum(sizes)),
        sum(part.shared_columns for part in parts),
    )


def pack(examples: Sequence[Example], config: config_lib.TrainerConfig) -> Packed:
    """Packs `examples` into micro-batches of `config.micro_batch_rows` rows; empty rows fill the last.

    A sequence goes into the first row with room. If no row has room, it opens a row of the shortest length that fits.

    Raises:
      ConfigError: a sequence is longer than the longest row.
    """
    sequences = _sequences(examples, config)
    places, segments, shapes, plain = _placed(sequences, config)
    columns = columns_lib.Columns.of(places, sequences.layouts, shapes)
    micro_batches = _filled(examples, columns, places, sequences.layouts, segments, plain)
    total = sum(math.prod(shape) for shape in shapes)
    used = sum(layout.columns for layout in sequences.layouts)
    padding = 1.0 - float(used) / total if total else 0.0
    layouts = tuple(sequences.layouts)
    return Packed(tuple(micro_batches), tuple(places), layouts, columns, len(examples), padding, sequences.saved)


@dataclass(frozen=True)
class _Sequences:
    """What goes into rows: sequences, numbered in the order of their examples.

    Attributes:
      examples: example of each sequence.
      layouts: layout of each sequence.
      beside: number of the sequence that goes right after another one, by the other's number.
      saved: columns that were saved because segments, or the rollouts of a group, share tokens.
    """

    examples: list[int]
    layouts: list[trees.Layout]
    beside: dict[int, int]
    saved: int


def _sequences(examples: Sequence[Example], config: config_lib.TrainerConfig) -> _Sequences:
    """Returns the sequences that the examples become: one, none or, of a tree that fits no row, several each."""
    longest = row_lengths(config)[-1]
    made = _Sequences([], [], {}, 0)
    saved = 0
    bundles: Mapping[int, shared_prompts.Bundled] = {}
    if config.share_prompt:
        prompts, columns = [example.prompt for example in examples], [example.columns for example in examples]
        bundles = shared_prompts.bundles(prompts, columns, longest)
    for index, example in enumerate(examples):
        found = example.layouts(longest)
        if (bundle := bundles.get(index)) is not None:
            found = [bundle.layout]
            saved += bundle.saved
            if bundle.follows:
                made.beside[len(made.layouts) - 1] = len(made.layouts)
        for layout in found:
            if layout.columns > longest:
                raise protocols.ConfigError(
                    f"config.trainer.row_buckets: {example.sequence_id} needs a row of {layout.columns} tokens and the "
                    f"longest row has {longest}; add a longer row or lower rollout.max_context"
                )
        if example.tree is not None:
            saved += trees.shared_columns(example.tree, example.mask_N, found)
        made.examples.extend([index] * len(found))
        made.layouts.extend(found)
    return dataclasses.replace(made, saved=saved)


def _placed(
    sequences: _Sequences, config: config_lib.TrainerConfig
) -> tuple[list[columns_lib.Place], list[int], list[tuple[int, int]], int]:
    """Returns each sequence's place and its number in its row, the shapes of the micro-batches, and how many of these
    are without trees, which come first."""
    layouts, lengths, each = sequences.layouts, row_lengths(config), config.micro_batch_rows
    shapes: list[tuple[int, int]] = []
    plain = 0
    found: dict[int, tuple[columns_lib.Place, int]] = {}  # by number of the sequence
    firsts = set(range(len(layouts))) - set(sequences.beside.values())
    for trees_only in (False, True):
        numbers = [number for number in sorted(firsts) if (layouts[number].until_C is not None) == trees_only]
        together = [_following(number, sequences.beside) for number in numbers]
        needed = np.array([sum(layouts[member].columns for member in members) for members in together], np.int64)
        fit = rows.fit(needed, lengths, config.pack)
        slot: dict[int, tuple[int, int]] = {}  # row -> (micro-batch, row in it)
        # A micro-batch has one shape, so all of its rows have one length.
        for length in sorted(set(fit.length)):
            of_length = [row for row, its_length in enumerate(fit.length) if its_length == length]
            for position, row in enumerate(of_length):
                slot[row] = (len(shapes) + position // each, position % each)
            shapes += [(each, length)] * -(-len(of_length) // each)
        for position, members in enumerate(together):
            start = int(fit.start[position])
            for number in members:
                columns = layouts[number].columns
                place = columns_lib.Place(sequences.examples[number], *slot[int(fit.row[position])], start, columns)
                found[number] = place, int(fit.segment[position])
                start += columns
        plain = plain if trees_only else len(shapes)
    ordered = [found[number] for number in range(len(layouts))]
    return [place for place, _ in ordered], [segment for _, segment in ordered], shapes, plain


def _following(number: int, beside: Mapping[int, int]) -> list[int]:
    """Returns a sequence and those that go right after it, in order."""
    found = [number]
    while found[-1] in beside:
        found.append(beside[found[-1]])
    return found


def _filled(
    examples: Sequence[Example],
    columns: columns_lib.Columns,
    places: Sequence[columns_lib.Place],
    layouts: Sequence[trees.Layout],
    segments: Sequence[int],
    plain: int,
) -> list[MicroBatch]:
    """Returns the micro-batches, of which the first `plain` ones have no trees.

    Args:
      examples: the packed examples.
      columns: columns of all sequences.
      places: place of each sequence.
      layouts: its layout.
      segments: its number in its row, from 1.
      plain: number of micro-batches without trees.
    """
    # A column holds its own token as input, and everything else about the token that it predicts.
    fields = {
        "tokens": columns.of_inputs([example.tokens_N for example in examples]),
        "targets": columns.of_targets([example.tokens_N for example in examples]),
        "positions": columns_lib.end_to_end([layout.positions_C for layout in layouts]),
        "segments": np.repeat(np.array(segments, np.int32), [place.columns for place in places]),
        "mask": columns.of_targets([example.mask_N for example in examples]),
        "behaviour": columns.of_targets([example.behaviour_N for example in examples]),
        "on_version": columns.of_targets([example.on_version_N for example in examples]),
    }
    arrays = {name: columns.laid_out(values_C, DTYPES[name]) for name, values_C in fields.items()}
    made = [MicroBatch(**dict(zip(arrays, each, strict=True))) for each in zip(*arrays.values(), strict=True)]
    if plain == len(made):
        return made
    ends = [
        np.zeros(place.columns, np.int32) if layout.until_C is None else place.start + layout.until_C
        for place, layout in zip(places, layouts, strict=True)
    ]
    until = columns.laid_out(columns_lib.end_to_end(ends), np.int32)
    return made[:plain] + [
        TreeMicroBatch(**vars(item), until=end) for item, end in zip(made[plain:], until[plain:], strict=True)
    ]


def empty(shape: tuple[int, int], trees_only: bool = False) -> MicroBatch:
    """Returns an empty micro-batch of shape [B, T], for trees or for plain sequences."""
    made = MicroBatch(**{name: np.zeros(shape, dtype) for name, dtype in DTYPES.items()})
    return TreeMicroBatch(**vars(made), until=np.zeros(shape, np.int32)) if trees_only else made
