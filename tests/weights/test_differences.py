"""Differences of chunks: who holds the old bytes gets the new ones, bit for bit, from fewer bytes."""

from concurrent import futures

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from libra_jax.weights import differences, memfd

THREADS = futures.ThreadPoolExecutor(2)


@st.composite
def versions(draw):
    """Two versions of a chunk, of which a share between none and all of the elements differs."""
    size = draw(st.integers(0, 3_000))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    old = random.integers(0, 2**16, size, np.uint16)
    changed = random.random(size) < draw(st.sampled_from([0.0, 0.0005, 0.01, 0.2, 0.3, 1.0]))
    return old.view(np.uint8), np.where(changed, old ^ random.integers(1, 2**16, size, np.uint16), old).view(np.uint8)


@hypothesis.given(versions(), st.sampled_from([1, 7, 256, 2**19]))
def test_a_difference_turns_the_old_bytes_into_the_new_ones(pair, block):
    old, new = pair
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(differences, "BLOCK_ELEMENTS", block)
        made = differences.encode(old, new, THREADS)
    changed = np.count_nonzero(old.view(np.uint16) != new.view(np.uint16))
    bound = differences.COUNT_BYTES + len(old) // 2 / 255 + 3 * changed
    if made is None:
        assert bound >= len(new) or changed > differences.DENSE_SHARE * len(old) // 2
        return
    assert len(made) < len(new)
    assert len(made) <= bound
    target = old.copy()
    differences.apply(target, made)
    assert memfd.digest(target.data) == memfd.digest(new.data)


@hypothesis.given(versions(), st.integers(0, 2**32))
def test_damaged_differences_are_refused_or_change_known_places_only(pair, seed):
    old, new = pair
    made = differences.encode(old, new, THREADS)
    hypothesis.assume(made is not None)
    random = np.random.default_rng(seed)
    made[random.integers(len(made))] ^= random.integers(1, 256, dtype=np.uint8)
    target = old.copy()
    try:
        differences.apply(target, made)
    except ValueError:
        np.testing.assert_array_equal(target, old)
    assert len(target) == len(old)


@pytest.mark.parametrize("length", range(12))
@pytest.mark.parametrize("fill", [0, 1, 255])
def test_garbage_of_any_length_is_no_difference(length, fill):
    target = np.zeros(4, np.uint8)
    if (length, fill) in [(8, 0)]:  # no change
        differences.apply(target, np.zeros(length, np.uint8))
    else:
        with pytest.raises(ValueError, match="a difference"):
            differences.apply(target, np.full(length, fill, np.uint8))
    assert not target.any()


def test_one_percent_of_bfloat16_weights_takes_two_percent_of_the_bytes():
    random = np.random.default_rng(0)
    old = random.integers(0, 2**16, 10**6, np.uint16)
    new = old ^ (random.random(10**6) < 0.01)
    made = differences.encode(old.view(np.uint8), new.astype(np.uint16).view(np.uint8), THREADS)
    assert len(made) / (2 * len(old)) < 0.0175
