"""The columns of packed sequences, all at once: from the tokens of examples to arrays of micro-batches, and back.

One indexing operation a field takes all sequences, because most are short. Letters: C columns of all sequences, N
tokens of an example, B rows of a micro-batch, T columns of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from libra_jax.data import trees


@dataclass(frozen=True)
class Place:
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


@dataclass(frozen=True)
class Columns:
    """The columns of the sequences whose tokens this process has, one sequence after the other. C is their number.

    Attributes:
      shapes: shape of each micro-batch.
      place_C: index of the column in the micro-batches, each flattened, one after the other.
      example_C: example that the column is of.
      inputs_C: index of its input token in the example.
      targets_C: index of the token that it predicts; `trees.NONE` without one.
    """

    shapes: Sequence[tuple[int, ...]]
    place_C: np.ndarray
    example_C: np.ndarray
    inputs_C: np.ndarray
    targets_C: np.ndarray

    @classmethod
    def of(
        cls,
        places: Sequence[Place],
        layouts: Sequence[trees.Layout | trees.Path],
        shapes: Sequence[tuple[int, ...]],
    ) -> Columns:
        """Joins the columns of placed sequences."""
        assert len(places) == len(layouts)
        counts = np.array([place.columns for place in places], np.int64)
        begins = np.cumsum([0, *(rows * width for rows, width in shapes)])
        starts = [begins[at.micro_batch] + at.row * shapes[at.micro_batch][1] + at.start for at in places]
        within_C = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return cls(
            shapes,
            np.repeat(np.array(starts, np.int64), counts) + within_C,
            np.repeat(np.array([place.example for place in places], np.int64), counts),
            end_to_end([layout.inputs_C for layout in layouts]),
            end_to_end([layout.targets_C for layout in layouts]),
        )

    @classmethod
    def joined(cls, parts: Sequence[Columns], examples: Sequence[int]) -> Columns:
        """Returns the columns of several batches as one.

        Args:
          parts: columns of each batch.
          examples: number of examples of each.
        """
        sizes = [sum(rows * width for rows, width in part.shapes) for part in parts]
        return cls(
            [shape for part in parts for shape in part.shapes],
            end_to_end([part.place_C + before for part, before in zip(parts, _before(sizes), strict=True)]),
            end_to_end([part.example_C + before for part, before in zip(parts, _before(examples), strict=True)]),
            end_to_end([part.inputs_C for part in parts]),
            end_to_end([part.targets_C for part in parts]),
        )

    def of_inputs(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the value of each column's input token, [C], of one array [N] an example."""
        return end_to_end(values)[self._tokens([len(value) for value in values], self.inputs_C)]

    def of_targets(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the value of each column's target, [C], of one array [N] an example; 0 for columns without one."""
        found_C = end_to_end(values)[self._tokens([len(value) for value in values], np.maximum(self.targets_C, 0))]
        return np.where(self.targets_C == trees.NONE, found_C.dtype.type(0), found_C)

    def _tokens(self, lengths: Sequence[int], index_C: np.ndarray) -> np.ndarray:
        """Returns the index in all examples' tokens, [C], of a token of each column's example."""
        counts = np.array(lengths, np.int64)
        # Past the end of its example, an index would read the next one's.
        assert (index_C < counts[self.example_C]).all()
        return (np.cumsum(counts) - counts)[self.example_C] + index_C

    def gathered(self, arrays: Sequence[np.ndarray], lengths: Sequence[int]) -> list[np.ndarray]:
        """Returns float32 values [N] of each example's tokens from the columns that predict them, 0 without one.

        Args:
          arrays: one [B, T] array a micro-batch.
          lengths: N of each example.
        """
        assert [array.shape for array in arrays] == list(self.shapes)
        has_target = self.targets_C != trees.NONE
        token_C = self._tokens(lengths, self.targets_C)
        values_C = end_to_end([np.ravel(array) for array in arrays])[self.place_C]
        flat = np.zeros(sum(lengths), np.float32)
        flat[token_C[has_target]] = values_C[has_target]
        return np.split(flat, np.cumsum(lengths)[:-1]) if lengths else []

    def laid_out(self, values_C: np.ndarray, dtype: npt.DTypeLike) -> list[np.ndarray]:
        """Returns one array [B, T] a micro-batch with the columns' values, 0 elsewhere."""
        sizes = [rows * width for rows, width in self.shapes]
        flat = np.zeros(sum(sizes), dtype)
        flat[self.place_C] = values_C
        parts = np.split(flat, np.cumsum(sizes)[:-1])  # one empty part if there is no micro-batch
        return [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=False)]


def _before(counts: Sequence[int]) -> list[int]:
    """Returns the sum of all counts before each."""
    return (np.cumsum(counts) - np.array(counts)).tolist()


def end_to_end(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the arrays as one; an empty one if there are none."""
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int32)
