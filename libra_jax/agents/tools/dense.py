"""A dense index: ranks passages by the inner product of their vectors with the query's.

Reads vectors from a .npy file.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy

from libra_jax import protocols
from libra_jax.agents.tools import bm25

Embed = Callable[[Sequence[str]], Any]
"""Function from n texts to an array of shape (n, width), on any device. One thread at a time calls it."""

_BLOCK_BYTES = 64 << 20
"""Bytes of vectors that are multiplied at once. A search checks the clock between two blocks."""


class Vectors:
    """The vectors of a corpus, memory-mapped from a file. Any thread may search them.

    Args:
      path: A .npy file with an array of shape (passages, width), float32 or float16, in the corpus's order.
      embed: Function that makes vectors of queries.
      passages: Number of passages in the corpus.

    Raises:
      DataError: The file cannot be read, or its vectors do not fit the corpus or `embed`.
    """

    def __init__(self, path: Path, embed: Embed, passages: int) -> None:
        try:
            self._vectors = numpy.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise protocols.DataError(f"{path}: no vectors can be read ({error})") from error
        shape: tuple[int, ...] = getattr(self._vectors, "shape", ())
        kind = getattr(self._vectors, "dtype", None)
        if len(shape) != 2 or shape[0] != passages or kind not in (numpy.float32, numpy.float16):
            raise protocols.DataError(
                f"{path}: has the shape {shape} and type {kind}; one vector for each of the {passages:,} "
                "passages is expected, as float32 or float16"
            )
        self._path, self._embed, self._one_at_a_time = path, embed, threading.Lock()
        self._block = max(1, _BLOCK_BYTES // max(1, 4 * shape[1]))
        # Embed once now, so that a model that does not fit the file fails at the start and not at the first search.
        self._vector("a query")

    def best(self, query: str, most: int, due: float) -> list[int]:
        """Returns the rows (from 0) of the passages with the largest inner products, largest first.

        Args:
          query: Any text.
          most: Largest number of rows.
          due: Deadline as a time of `time.monotonic()`.

        Raises:
          bm25.Overdue: The search missed the deadline.
        """
        if not self._one_at_a_time.acquire(timeout=max(0.0, due - time.monotonic())):
            raise bm25.Overdue
        try:
            vector = self._vector(query)
        finally:
            self._one_at_a_time.release()
        scores, rows = numpy.empty(0, numpy.float32), numpy.empty(0, numpy.int64)
        for start in range(0, len(self._vectors), self._block):
            if time.monotonic() > due:
                raise bm25.Overdue
            block = numpy.asarray(self._vectors[start : start + self._block], numpy.float32) @ vector
            scores = numpy.concatenate([scores, block])
            rows = numpy.concatenate([rows, numpy.arange(start, start + len(block))])
            # Keep only the best so far: memory stays bounded by one block.
            if len(scores) > most:
                kept = numpy.argpartition(-scores, most - 1)[:most]
                scores, rows = scores[kept], rows[kept]
        # lexsort takes its last key first: it sorts by score, and by row if scores are equal.
        return [int(row) for row in rows[numpy.lexsort((rows, -scores))]]

    def _vector(self, query: str) -> Any:
        """Returns the query's vector, of shape (width,)."""
        made = numpy.asarray(self._embed([query]), numpy.float32)
        if made.shape != (1, self._vectors.shape[1]):
            raise protocols.DataError(
                f"{self._path}: its vectors have {self._vectors.shape[1]} numbers, but of one query an array of shape "
                f"{made.shape} was made; use the model that made the file"
            )
        return made[0]
