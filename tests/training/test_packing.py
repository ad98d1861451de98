"""Packing loses nothing, duplicates nothing and mixes nothing."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.data import packing, row_places
from libra_jax.data import sequences as sequences_lib
from libra_jax.models import rows


def _example(index: int, length: int, trained: list[bool]) -> sequences_lib.Example:
    tokens_N = np.arange(length, dtype=np.int32) + 1000 * (index + 1)  # every token names its sequence and place
    return sequences_lib.Example(
        sequence_id=f"s{index}",
        tokens_N=tokens_N,
        mask_N=np.array(trained[:length], bool),
        behaviour_N=-tokens_N.astype(np.float32),
        on_version_N=tokens_N % 2 == 0,
    )


@st.composite
def cases(draw):
    row_tokens = draw(st.integers(1, 40))
    buckets = sorted(draw(st.sets(st.integers(row_tokens + 1, 120), max_size=2)))
    config = config_lib.TrainerConfig(
        row_tokens=row_tokens,
        row_buckets=tuple(buckets),
        rows_per_micro_batch=draw(st.integers(1, 4)),
        pack=draw(st.booleans()),
    )
    longest = row_places.row_lengths(config)[-1] + 1
    lengths = draw(st.lists(st.integers(0, longest), max_size=25))
    masks = [draw(st.lists(st.booleans(), min_size=length, max_size=length)) for length in lengths]
    return config, [
        _example(index, length, mask) for index, (length, mask) in enumerate(zip(lengths, masks, strict=True))
    ]


@settings(max_examples=150)
@given(cases())
def test_every_trained_prediction_appears_once_with_all_that_precedes_it(case):
    config, examples = case
    packed = packing.pack(examples, config)
    seen = []
    for micro_batch in packed.micro_batches:
        assert micro_batch.tokens.shape[0] == config.rows_per_micro_batch
        assert micro_batch.tokens.shape[1] in row_places.row_lengths(config)
        for row in range(config.rows_per_micro_batch):
            segments_T = micro_batch.segments[row]
            used = int((segments_T > 0).sum())
            assert (np.diff(segments_T[:used]) >= 0).all()
            assert (segments_T[used:] == 0).all()
            assert not micro_batch.mask[row, used:].any()
            assert segments_T.max() <= rows.max_segments(len(segments_T), config.pack)
            for segment in range(1, segments_T.max() + 1):
                columns = segments_T == segment
                tokens = micro_batch.tokens[row, columns]
                index = tokens[0] // 1000 - 1
                count = len(tokens)
                example = examples[index]
                seen.append(index)
                assert (micro_batch.positions[row, columns] == np.arange(count)).all()
                assert (tokens == example.tokens_N[:count]).all()
                assert (micro_batch.targets[row, columns] == example.tokens_N[1 : count + 1]).all()
                assert (micro_batch.mask[row, columns] == example.mask_N[1 : count + 1]).all()
                assert (micro_batch.behaviour[row, columns] == example.behaviour_N[1 : count + 1]).all()
                assert (micro_batch.on_version[row, columns] == example.on_version_N[1 : count + 1]).all()
                assert not example.mask_N[count + 1 :].any()
    assert sorted(seen) == [index for index, example in enumerate(examples) if example.mask_N[1:].any()]


@settings(max_examples=60)
@given(cases())
def test_gather_undoes_scatter_and_packing_repeats_exactly(case):
    config, examples = case
    packed = packing.pack(examples, config)
    again = packing.pack(examples, config)
    assert packed.places == again.places
    values = [np.arange(1, len(example.tokens_N) + 1, dtype=np.float32) for example in examples]
    back = packed.gather(packed.scatter(values), [len(value) for value in values])
    for value, got, example in zip(values, back, examples, strict=True):
        expected = np.where(np.arange(len(value)) <= example.columns, value, 0)
        expected[:1] = 0
        np.testing.assert_array_equal(got, expected)


@settings(max_examples=60)
@given(cases(), st.sampled_from([2, 64]))
def test_lengths_of_sequences_say_where_the_columns_are_used(case, few):
    config, examples = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "FEW_SEGMENTS", few)
        packed = packing.pack(examples, config)
        for number, micro_batch in enumerate(packed.micro_batches):
            lengths_BxM, segments_BxT = packed.sequence_lengths(number), micro_batch.segments
            bounds = rows.segment_bounds(segments_BxT.shape[1], packed=True)
            assert lengths_BxM.shape[1] == min(bound for bound in bounds if bound >= segments_BxT.max())
            for lengths_M, segments_T in zip(lengths_BxM, segments_BxT, strict=True):
                numbers = np.repeat(np.arange(1, len(lengths_M) + 1), lengths_M)
                np.testing.assert_array_equal(segments_T, np.pad(numbers, (0, len(segments_T) - len(numbers))))


def test_an_array_shorter_than_its_sequence_does_not_read_the_next_ones_values():
    config = config_lib.TrainerConfig(row_tokens=32, rows_per_micro_batch=1)
    packed = packing.pack([_example(0, 9, [True] * 9), _example(1, 9, [True] * 9)], config)
    with pytest.raises(AssertionError):
        packed.scatter([np.ones(5, np.float32), np.ones(9, np.float32)])
    with pytest.raises(AssertionError):
        packed.gather([np.ones((1, 32))], [5, 13])
    with pytest.raises(AssertionError):
        packed.gather([np.ones((2, 16))], [9, 9])


def test_a_step_fills_its_last_micro_batch_with_empty_rows_and_reports_padding():
    config = config_lib.TrainerConfig(row_tokens=32, rows_per_micro_batch=4)
    packed = packing.pack([_example(index, 25, [True] * 25) for index in range(5)], config)
    assert [micro_batch.tokens.shape for micro_batch in packed.micro_batches] == [(4, 32), (4, 32)]
    assert sum(place.columns for place in packed.places) == 5 * 24
    assert packed.size == 2 * 4 * 32
    assert not packed.micro_batches[1].segments[1:].any()


def test_short_sequences_share_rows_and_long_ones_take_a_longer_row():
    config = config_lib.TrainerConfig(row_tokens=64, row_buckets=(128,), rows_per_micro_batch=1)
    lengths = [101, 21, 21, 21, 21, 21]
    packed = packing.pack([_example(index, n, [True] * n) for index, n in enumerate(lengths)], config)
    assert [micro_batch.tokens.shape for micro_batch in packed.micro_batches] == [(1, 64), (1, 64), (1, 128)]
    unpacked = packing.pack(
        [_example(index, n, [True] * n) for index, n in enumerate(lengths)], dataclasses.replace(config, pack=False)
    )
    assert [micro_batch.segments.max() for micro_batch in unpacked.micro_batches] == [1] * 6


def test_a_sequence_longer_than_every_row_is_refused_by_name():
    config = config_lib.TrainerConfig(row_tokens=16)
    with pytest.raises(protocols.ConfigError, match=r"s0 needs a row of 20 tokens and the longest row has 16"):
        packing.pack([_example(0, 21, [True] * 21)], config)
