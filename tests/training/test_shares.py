"""The split of a step into shares: against the definition, by brute force, and what every split has to keep."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_jax import protocols
from libra_jax.training import shares


def _shares(fractions):
    return [protocols.Share(f"r{number}", 1, fraction) for number, fraction in enumerate(fractions)]


works = st.lists(st.integers(1, 10_000), min_size=1, max_size=30)
fraction_lists = st.lists(st.floats(0.01, 0.24), max_size=4)


@given(works, fraction_lists)
def test_every_micro_batch_is_in_one_range_in_order_and_the_core_has_the_first(work, fractions):
    own, *others = shares.split(work, _shares(fractions))
    assert len(others) == len(fractions)
    assert [index for part in (own, *others) for index in part] == list(range(len(work)))
    assert own.start == 0
    assert len(own) >= 1
    assert shares.split(work, _shares(fractions)) == (own, *others)


@given(works, st.floats(0.01, 0.99))
def test_one_share_is_as_near_to_its_fraction_as_whole_micro_batches_can_be(work, fraction):
    _, member = shares.split(work, _shares([fraction]))
    wanted = fraction * sum(work)
    off = abs(sum(work[index] for index in member) - wanted)
    nearest = min(abs(sum(work[first:]) - wanted) for first in range(1, len(work) + 1))
    assert off == pytest.approx(nearest, rel=1e-9, abs=1e-9 * sum(work))


@given(works, fraction_lists)
def test_every_border_is_off_by_no_more_than_half_a_micro_batch_except_where_the_core_has_only_one(work, fractions):
    own, *others = shares.split(work, _shares(fractions))
    for number, part in enumerate(others):
        before = sum(work[: part.start])
        wanted = (1 - sum(fractions[number:])) * sum(work)
        if part.start > 1 or wanted >= work[0]:
            assert abs(before - wanted) <= max(work) / 2 + 1e-6 * sum(work)
        else:
            assert part.start == len(own) == 1


def test_of_two_borders_as_near_the_earlier_is_taken():
    assert shares.split([1, 1, 1], _shares([0.5])) == (range(1), range(1, 3))


@pytest.mark.parametrize(
    ("work", "fractions", "sentence"),
    [
        ([], [0.5], "each above zero"),
        ([1, 0], [0.5], "each above zero"),
        ([1, 1], [0.0], "must lie in"),
        ([1, 1], [0.6, 0.4], "leave a part to the core"),
        ([1, 1], [float("nan")], "must lie in"),
    ],
)
def test_what_cannot_be_split_is_refused(work, fractions, sentence):
    with pytest.raises(protocols.ConfigError, match=sentence):
        shares.split(work, _shares(fractions))


def test_two_shares_of_one_member_are_refused():
    twice = [protocols.Share("r", 1, 0.2), protocols.Share("r", 2, 0.2)]
    with pytest.raises(protocols.ConfigError, match="two shares of a step: r, r"):
        shares.split([1, 1], twice)
