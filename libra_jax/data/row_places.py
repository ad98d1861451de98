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
from libra_jax.data import columns as columns_lib
from libra_jax.data import sequences as sequences_lib
from libra_jax.data import shared_prompts, trees
from libra_jax.models import rows

Layout = trees.Layout | trees.Path
"""The columns of a sequence: written out for a tree, or known from their number for a path."""


def row_lengths(config: config_lib.TrainerConfig) -> tuple[int, ...]:
    """Returns the row lengths that programs are compiled for, ascending."""
    return (config.row_tokens, *config.row_buckets)


@dataclass(frozen=True)
class Placed:
    """The places of a batch's sequences, numbered in the order of their examples.

    Attributes:
      places: place of each sequence.
      layouts: its layout.
      shapes: shape of each micro-batch.
      plain: number of micro-batches without trees, which come first.
      saved: columns that were saved because segments, or the rollouts of a group, share tokens.
    """

    places: Sequence[columns_lib.Place]
    layouts: Sequence[Layout]
    shapes: Sequence[tuple[int, int]]
    plain: int
    saved: int


def place(examples: Sequence[sequences_lib.Example], config: config_lib.TrainerConfig, batch_rows: int) -> Placed:
    """Places sequences in micro-batches of `batch_rows` rows; empty rows fill the last.

    A sequence goes into the first row with room. If no row has room, it opens a row of the shortest length that fits.

    Raises:
      ConfigError: a sequence is longer than the longest row.
    """
    sequences = _sequences(examples, config)
    places, shapes, plain = _placed(sequences, config, batch_rows)
    return Placed(places, sequences.layouts, shapes, plain, sequences.saved)


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


def _sequences(examples: Sequence[sequences_lib.Example], config: config_lib.TrainerConfig) -> _Sequences:
    """Returns the sequences that the examples become: one, none or, of a tree that fits no row, several each."""
    longest = row_lengths(config)[-1]
    sequences = _Sequences([], [], {}, 0)
    saved, bundled = 0, -1  # the last bundled sequence: others may lie between it and the next of its bundle
    bundles: Mapping[int, shared_prompts.Bundled] = {}
    if config.share_prompt:
        prompts, columns = [example.prompt for example in examples], [example.columns for example in examples]
        bundles = shared_prompts.bundles(prompts, [example.routing_RxW for example in examples], columns, longest)
    for index, example in enumerate(examples):
        layouts = example.layouts(longest)
        if (bundle := bundles.get(index)) is not None:
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


def _placed(
    sequences: _Sequences, config: config_lib.TrainerConfig, batch_rows: int
) -> tuple[list[columns_lib.Place], list[tuple[int, int]], int]:
    """Returns each sequence's place, the shapes of the micro-batches, and how many of these are without trees."""
    layouts, lengths = sequences.layouts, row_lengths(config)
    shapes: list[tuple[int, int]] = []
    plain = 0
    places: dict[int, columns_lib.Place] = {}  # by number of the sequence
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
                slot[row] = (len(shapes) + position // batch_rows, position % batch_rows)
            shapes += [(batch_rows, length)] * -(-len(of_length) // batch_rows)
        for position, members in enumerate(together):
            start = int(fit.start[position])
            for number in members:
                columns = layouts[number].columns
                where, segment = slot[int(fit.row[position])], int(fit.segment[position])
                places[number] = columns_lib.Place(sequences.examples[number], *where, start, columns, segment)
                start += columns
        plain = plain if trees_only else len(shapes)
    return [places[number] for number in range(len(layouts))], shapes, plain


def _following(number: int, beside: Mapping[int, int]) -> list[int]:
    """Returns a sequence and those that go right after it, in order."""
    chain = [number]
    while chain[-1] in beside:
        chain.append(beside[chain[-1]])
    return chain
