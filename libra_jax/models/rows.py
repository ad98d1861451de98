"""Lays sequences out in rows: the trainer packs by this rule, and predictions of a training step count by it.

Rows are filled longest sequence first, each into the first row with room (first-fit decreasing: at most 11/9 of the
optimum plus 6/9 of a row, Dosa 2007). Numpy only, deterministic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

COLUMNS_PER_SEGMENT = 8
"""Columns of a row for each sequence that it may hold: the objective's per-sequence sums need a fixed bound."""

SEGMENTS_PER_ROW = 64
"""Most sequences that a row of any length holds. cuDNN's attention keeps a float32 statistic for each head, column and
possible sequence, and starts a block of threads for each 128 columns of each possible sequence."""

FEW_SEGMENTS = 16
"""Sequences that a row may hold in the programs of cuDNN's attention that are compiled first. Rows with more take
programs for `max_segments`, which compile beside the first rollouts. The time of attention grows with this number: on
one H200, 8 sequences of 1,024 tokens take 0.57 ms a layer in a program for 8, and 1.19 ms in one for 64 (forward and
backward, 16 query heads of 128)."""


BLOCK = 256
"""Rows that are looked through together for room."""

FULL = np.int64(-1)
"""Room of a row that takes no further sequence, or that is not open."""


@dataclass(frozen=True)
class RowShape:
    """The rows of a trainer.

    Attributes:
      lengths: columns of a row, ascending; a sequence opens a row of the shortest length that holds it.
      rows_per_micro_batch: rows that one program takes; empty rows fill the last micro-batch up.
      packed: several sequences share a row.
    """

    lengths: tuple[int, ...]
    rows_per_micro_batch: int
    packed: bool = True


@dataclass(frozen=True)
class Fit:
    """Places of the sequences, in the order given; -1 everywhere for a sequence without columns.

    Attributes:
      row: row of each sequence.
      start: its first column in the row.
      segment: its number in the row, from 1.
      length: columns of each row.
    """

    row: Integers
    start: Integers
    segment: Integers
    length: list[int]


def max_segments(columns: int, packed: bool) -> int:
    """Returns the most sequences that a row of `columns` holds."""
    return min(SEGMENTS_PER_ROW, max(1, columns // COLUMNS_PER_SEGMENT)) if packed else 1


def segment_bounds(columns: int, packed: bool) -> tuple[int, ...]:
    """Returns the most sequences of a row in each of the programs of cuDNN's attention, ascending."""
    limit = max_segments(columns, packed)
    return (FEW_SEGMENTS, limit) if limit > FEW_SEGMENTS else (limit,)


def fit(columns: Integers, lengths: tuple[int, ...], packed: bool) -> Fit:
    """Packs by first-fit decreasing.

    Args:
      columns: columns that each sequence takes; at most those of the longest row.
      lengths: lengths of rows, ascending.
      packed: several sequences share a row.
    """
    count = len(columns)
    row_of, start_of, segment_of = (np.full(count, -1, np.int64) for _ in range(3))
    blocks = -(-count // BLOCK)
    room = np.full(blocks * BLOCK, FULL)  # columns left in each open row
    # Largest room of each block of rows: a batch may have 100,000 rows to look through.
    largest_rooms = np.full(blocks, FULL)
    used = np.zeros(count, np.int64)  # columns and sequences of each open row
    segments = np.zeros(count, np.int64)
    length_of_row: list[int] = []
    for index in np.argsort(-columns, kind="stable"):
        need = columns[index]
        # Sorted by length, so only sequences without columns follow.
        if need == 0:
            break
        block = int((largest_rooms >= need).argmax())
        if largest_rooms[block] >= need:
            row = block * BLOCK + int((room[block * BLOCK : (block + 1) * BLOCK] >= need).argmax())
        else:
            row, block = len(length_of_row), len(length_of_row) // BLOCK
            length_of_row.append(next(length for length in lengths if length >= need))
        row_of[index], start_of[index] = row, used[row]
        used[row] += need
        segments[row] += 1
        segment_of[index] = segments[row]  # from 1: 0 is padding
        length = length_of_row[row]
        room[row] = length - used[row] if segments[row] < max_segments(length, packed) else FULL
        largest_rooms[block] = room[block * BLOCK : (block + 1) * BLOCK].max()
    return Fit(row_of, start_of, segment_of, length_of_row)


def processed_columns(sequence_lengths: Sequence[int], shape: RowShape) -> int:
    """Returns the columns that a training step computes, padding and empty rows included.

    Args:
      sequence_lengths: tokens of each sequence up to its last trained one; N tokens take N - 1 columns. A sequence
        longer than the longest row counts as filling it.
      shape: shape of the rows.
    """
    columns = np.minimum(np.asarray(sequence_lengths, np.int64) - 1, shape.lengths[-1])
    rows = Counter(fit(columns, shape.lengths, shape.packed).length)
    rows_per_micro_batch = shape.rows_per_micro_batch
    return sum(-(-count // rows_per_micro_batch) * rows_per_micro_batch * length for length, count in rows.items())
