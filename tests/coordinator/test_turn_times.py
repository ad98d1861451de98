"""Times of a rollout's turns, which order them across segments."""

from __future__ import annotations

import pytest

from libra_jax import protocols


def rollout() -> protocols.Trajectory:
    """Two segments whose turns take turns, begun at 100 s."""
    made = protocols.Trajectory("t/0", "t", start_seconds=100.0)
    other = made.branch(None, 0)
    made.turns += [protocols.Turn(1, start_seconds=101.0), protocols.Turn(3, start_seconds=105.0)]
    other.turns += [protocols.Turn(2, start_seconds=103.0)]
    return made


def test_a_rollout_that_goes_on_under_a_younger_clock_keeps_the_order_of_its_turns():
    made = rollout()
    made.goes_on_at(7.0)
    made.branches[0].turns.append(protocols.Turn(4, start_seconds=7.5))
    assert [turn.generated_tokens for turn in made.all_turns] == [1, 2, 3, 4]
    assert [turn.start_seconds for turn in made.all_turns] == [3.0, 5.0, 7.0, 7.5]
    assert made.start_seconds == 2.0


@pytest.mark.parametrize("now", [105.0, 300.0])
def test_under_the_same_clock_no_time_changes(now):
    made = rollout()
    made.goes_on_at(now)
    assert made == rollout()
