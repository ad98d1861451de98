"""Where the sequences of a batch go: their rows and micro-batches, by their numbers of columns alone.

Every process of a trainer computes the same places. So does the trainer's client, which gives each process the tokens
that lie in its rows (`dividing`). `models/rows.py` assigns sequences to rows, because step-time predictions use the
same assignment. Numpy only, deterministic.

Letters: C columns of a sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.data import sequences as sequences_lib
from libra_jax.data import shared_prompts, trees
from libra_jax.models import rows

Layout = sequences_lib.ColumnLayout | sequences_lib.Path
"""The columns of a sequence: written out for a tree, or known from their number for a path."""


def row_lengths(config: config_lib.TrainerConfig) -> tuple[int, ...]:
    """Returns the row lengths that programs are compiled for, ascending."""
    return (config.row_tokens, *config.row_buckets)


def minibatch_sizes(config: config_lib.RunConfig, groups: Sequence[protocols.Group]) -> list[int]:
    """Returns the number of rollouts of each mini-batch, which takes whole groups in order; some may be 0."""
    counts = np.array([len(group.trajectories) for group in groups], np.int64)
    return [int(part.sum()) for part in np.array_split(counts, config.algorithm.minibatches)]


@dataclass(frozen=True)
class RowPlace:
    """Place of a sequence: its example; micro-batch, row, first column, number of columns; its number in the row,
    from 1."""

    example: int
    micro_batch: int
    row: int
    start: int
    columns: int
    segment: int

    @property
    def where(self) -> tuple[int, slice]:
        """Index of the sequence in an array [B, T] of its micro-batch."""
        return self.row, slice(self.start, self.start + self.columns)


@dataclass
class Placement:
    """The places of a batch's sequences, numbered in the order of their examples.

    Attributes:
      places: place of each sequence.
      layouts: its layout.
      shapes: shape of each micro-batch.
      of_trees: True for each micro-batch of trees.
      minibatches: micro-batches of each mini-batch, at least one.
      saved: columns that were saved because segments, or the rollouts of a group, share tokens.
    """

    places: list[RowPlace]
    layouts: list[Layout]
    shapes: list[tuple[int, int]]
    of_trees: list[bool]
    minibatches: list[range]
    saved: int


def place(
    examples: Sequence[sequences_lib.Example],
    config: config_lib.TrainerConfig,
    batch_rows: int,
    minibatches: Sequence[int] = (),
) -> Placement:
    """Places sequences in micro-batches of `batch_rows` rows; empty rows fill the last.

    A sequence goes into the first row with room. If no row has room, it opens a row of the shortest length that fits.
    A mini-batch without a trained token has one empty micro-batch.

    Args:
      minibatches: number of examples of each mini-batch; default: all examples are one.

    Raises:
      ConfigError: a sequence is longer than the longest row.
    """
    placement, start = Placement([], [], [], [], [], 0), 0
    for size in minibatches or [len(examples)]:
        sequences = _sequences(examples, range(start, start + size), config)
        first, start = len(placement.shapes), start + size
        _place(sequences, config, batch_rows, placement)
        if len(placement.shapes) == first:
            # The step still happens: its number is the policy version, and hybrid workers split its micro-batches.
            placement.shapes.append((batch_rows, config.row_tokens))
            placement.of_trees.append(False)
        placement.minibatches.append(range(first, len(placement.shapes)))
        placement.saved += sequences.saved
    return placement


def example_layouts(example: sequences_lib.Example, longest: int) -> Sequence[Layout]:
    """Returns the sequences that hold an example's trained predictions: one, the parts of a tree, or none.

    Args:
      longest: columns of the longest row; only a path may need more.
    """
    if example.tree is not None:
        return trees.lay_out(example.tree, example.mask_N, longest)
    return [sequences_lib.Path(columns)] if (columns := example.columns) else []


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
    layouts: list[Layout]
    beside: dict[int, int]
    saved: int


def _sequences(
    examples: Sequence[sequences_lib.Example], members: range, config: config_lib.TrainerConfig
) -> _Sequences:
    """Returns the sequences that some examples become: one, none or, of a tree that fits no row, several each."""
    longest = row_lengths(config)[-1]
    sequences = _Sequences([], [], {}, 0)
    saved, bundled = 0, -1  # the last bundled sequence: others may lie between it and the next of its bundle
    bundles: Mapping[int, shared_prompts.Bundled] = {}
    if config.share_prompt:
        bundles = shared_prompts.bundles([examples[index] for index in members], longest)
    for index in members:
        example = examples[index]
        layouts = example_layouts(example, longest)
        if (bundle := bundles.get(index - members.start)) is not None:
            layouts = [bundle.layout]
            saved += bundle.saved
            if bundle.follows:
                sequences.beside[bundled] = len(sequences.layouts)
            bundled = len(sequences.layouts)
        for layout in layouts:
            if layout.columns > longest:
                raise protocols.ConfigError(
                    f"config.trainer.row_buckets: {example.sequence_id} needs a row of {layout.columns} tokens and the "
                    f"longest row has {longest}; add a longer row or lower rollout.max_context"
                )
        if example.tree is not None:
            saved += trees.shared_columns(example.tree, example.mask_N, layouts)
        sequences.examples.extend([index] * len(layouts))
        sequences.layouts.extend(layouts)
    return dataclasses.replace(sequences, saved=saved)


def _place(sequences: _Sequences, config: config_lib.TrainerConfig, batch_rows: int, placement: Placement) -> None:
    """Appends the places of a mini-batch's sequences to the placement, and micro-batches for them: trees last."""
    lengths, shapes = row_lengths(config), placement.shapes
    places: dict[int, RowPlace] = {}  # by number of the sequence
    firsts = set(range(len(sequences.layouts))) - set(sequences.beside.values())
    for of_trees in (False, True):
        numbers = [number for number in sorted(firsts) if (sequences.layouts[number].until_C is not None) == of_trees]
        together = [_following(number, sequences.beside) for number in numbers]
        needed = np.array([sum(sequences.layouts[member].columns for member in members) for members in together], int)
        fit = rows.fit(needed, lengths, config.pack)
        slot: dict[int, tuple[int, int]] = {}  # row -> (micro-batch, row in it)
        # A micro-batch has one shape, so all of its rows have one length.
        for length in sorted(set(fit.length)):
            of_length = [row for row, its_length in enumerate(fit.length) if its_length == length]
            for position, row in enumerate(of_length):
                slot[row] = (len(shapes) + position // batch_rows, position % batch_rows)
            shapes += [(batch_rows, length)] * -(-len(of_length) // batch_rows)
        placement.of_trees.extend([of_trees] * (len(shapes) - len(placement.of_trees)))
        for position, members in enumerate(together):
            start = int(fit.start[position])
            for number in members:
                columns = sequences.layouts[number].columns
                where, segment = slot[int(fit.row[position])], int(fit.segment[position])
                places[number] = RowPlace(sequences.examples[number], *where, start, columns, segment)
                start += columns
    placement.places.extend(places[number] for number in range(len(places)))
    placement.layouts.extend(sequences.layouts)


def _following(number: int, beside: Mapping[int, int]) -> list[int]:
    """Returns a sequence and those that go right after it, in order."""
    chain = [number]
    while chain[-1] in beside:
        chain.append(beside[chain[-1]])
    return chain
