"""The difference between two versions of a chunk: the places of its changed elements, and their new values.

Few weights in bfloat16 change in a step of reinforcement learning: Adam moves a weight by about the learning rate,
which is far below the distance of two neighbours in bfloat16. So a relay sends the difference to a host that holds the
version before (`relay`).

An element has 2 bytes, which serves every dtype of a chunk: a float32 weight is two elements. A difference is one run
of bytes: the number n of changed elements (8 bytes), the gaps, and n new values. A gap is the number of unchanged
elements before a changed one, laced as in Ogg: gap // 255 bytes of 255, then one byte of gap % 255. So the difference
of N elements takes 8 + N / 255 + 3 n bytes at most.
"""

from __future__ import annotations

import functools
from concurrent import futures

import numpy as np

COUNT_BYTES = 8
"""Bytes of the number of changed elements."""

BLOCK_ELEMENTS = 2**19
"""Elements that one thread compares at a time. The block and its intermediate results fit a core's cache."""

DENSE_SHARE = 0.25
"""Share of changed elements from which on a chunk is sent whole: to find them would take longer than to send them."""

SAMPLE = 4096
"""Elements of the sample by which a dense chunk is known, at least."""

_ELEMENT = np.dtype("<u2")
_LACE = 255


def encode(old: np.ndarray, new: np.ndarray, threads: futures.Executor) -> np.ndarray | None:
    """Returns the difference that turns `old` into `new`; None if most elements change, or if it saves nothing.

    Args:
      old: vector of bytes, an even number.
      new: vector of as many bytes.
      threads: compares blocks side by side.
    """
    before, after = old.view(_ELEMENT), new.view(_ELEMENT)
    some = slice(None, None, max(1, len(after) // SAMPLE))
    if np.count_nonzero(before[some] != after[some]) > DENSE_SHARE * len(after[some]):
        return None
    compared = threads.map(functools.partial(_places, before, after), range(0, len(after), BLOCK_ELEMENTS))
    places = np.concatenate([np.zeros(0, np.int64), *compared])
    gaps = np.diff(places, prepend=-1) - 1
    ends = np.cumsum(gaps // _LACE + 1)
    laces = int(ends[-1]) if len(ends) else 0
    size = COUNT_BYTES + laces + len(places) * _ELEMENT.itemsize
    if size >= len(new):
        return None
    message = np.full(size, _LACE, np.uint8)
    message[:COUNT_BYTES] = np.array([len(places)], "<u8").view(np.uint8)
    message[COUNT_BYTES + ends - 1] = gaps % _LACE
    message[COUNT_BYTES + laces :] = after[places].view(np.uint8)
    return message


def apply(target: np.ndarray, difference: np.ndarray) -> None:
    """Turns `target` from the old version into the new one, in place.

    Raises:
      ValueError: this is no difference of such a vector. The vector is then unchanged.
    """
    count = int(difference[:COUNT_BYTES].view("<u8")[0]) if len(difference) >= COUNT_BYTES else -1
    laces = len(difference) - COUNT_BYTES - count * _ELEMENT.itemsize
    if count < 0 or laces < count:
        raise ValueError(f"a difference of {len(difference)} bytes cannot hold {count} values")
    gaps, values = np.split(difference[COUNT_BYTES:], [laces])
    ends = np.flatnonzero(gaps != _LACE)
    if len(ends) != count or (laces and gaps[-1] == _LACE):
        raise ValueError(f"a difference with {len(ends)} gaps for {count} values")
    # The sum of all bytes up to a gap's last one is the sum of all gaps up to this one.
    places = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(count)
    elements = target.view(_ELEMENT)
    if count and places[-1] >= len(elements):
        raise ValueError(f"a difference that changes element {places[-1]} of {len(elements)}")
    # The values may lie at an odd address, so their view is copied.
    elements[places] = values.copy().view(_ELEMENT)


def _places(old: np.ndarray, new: np.ndarray, first: int) -> np.ndarray:
    block = slice(first, first + BLOCK_ELEMENTS)
    return np.flatnonzero(old[block] != new[block]) + first
