"""Sequences in rows, and the columns that a training step computes for them."""

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax import config as config_lib
from libra_jax.data import packing
from libra_jax.data import sequences as sequences_lib
from libra_jax.models import rows


def example(tokens: int) -> sequences_lib.Example:
    """A sequence whose last token is trained."""
    mask_N = np.zeros(tokens, bool)
    mask_N[-1] = True
    return sequences_lib.Example("s", np.zeros(tokens, np.int32), mask_N, np.zeros(tokens, np.float32), mask_N)


@st.composite
def shapes(draw):
    shortest = draw(st.integers(4, 40))
    longer = draw(st.sets(st.integers(shortest + 1, 120), max_size=2))
    return rows.RowShape((shortest, *sorted(longer)), draw(st.integers(1, 4)), draw(st.booleans()))


@given(shapes(), st.data())
@settings(max_examples=100)
def test_the_columns_counted_are_those_that_the_trainer_computes(shape, data):
    lengths = data.draw(st.lists(st.integers(2, shape.lengths[-1] + 1), min_size=1, max_size=30))
    trainer = config_lib.TrainerConfig(
        row_tokens=shape.lengths[0],
        row_buckets=shape.lengths[1:],
        rows_per_micro_batch=shape.rows_per_micro_batch,
        pack=shape.packed,
    )
    packed = packing.pack([example(length) for length in lengths], trainer)
    computed = sum(micro_batch.tokens.size for micro_batch in packed.micro_batches)
    assert rows.processed_columns(lengths, shape) == computed


def test_what_no_row_holds_fills_the_longest():
    shape = rows.RowShape((8, 16), 2)
    assert rows.processed_columns([1000], shape) == rows.processed_columns([17], shape) == 32
    assert rows.processed_columns([1, 1], shape) == 0
    assert rows.processed_columns([9, 9, 17], dataclasses.replace(shape, packed=False)) == 2 * 8 + 2 * 16
