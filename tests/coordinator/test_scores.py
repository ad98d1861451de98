"""pass@k against its definition: the share of all choices of k attempts that hold a solved one."""

import itertools
import statistics

import hypothesis
import pytest
from hypothesis import strategies as st

from libra_jax.coordinator import scores

OUTCOMES = st.lists(st.booleans(), min_size=1, max_size=8)


@hypothesis.given(OUTCOMES, st.data())
def test_pass_at_k_is_the_share_of_choices_with_a_solved_attempt(outcomes, data):
    k = data.draw(st.integers(1, len(outcomes)))
    choices = [any(chosen) for chosen in itertools.combinations(outcomes, k)]
    assert scores.pass_at_k(len(outcomes), sum(outcomes), k) == pytest.approx(statistics.fmean(choices), abs=1e-12)


@hypothesis.given(st.integers(1, 6), st.integers(1, 6), st.fractions(0, 1, max_denominator=50))
def test_pass_at_k_has_no_bias(attempts, k, chance):
    """The mean over all outcomes is the chance that one of k attempts succeeds, 1 - (1 - p)^k."""
    hypothesis.assume(k <= attempts)
    mean = 0.0
    for outcomes in itertools.product((False, True), repeat=attempts):
        solved = sum(outcomes)
        mean += float(chance**solved * (1 - chance) ** (attempts - solved)) * scores.pass_at_k(attempts, solved, k)
    assert mean == pytest.approx(1 - float((1 - chance) ** k), abs=1e-9)


@pytest.mark.parametrize(("attempts", "solved", "k"), [(4, 1, 5), (4, 5, 1), (4, 1, 0), (0, 0, 1)])
def test_pass_at_k_refuses_what_it_cannot_estimate(attempts, solved, k):
    with pytest.raises(ValueError, match="has no estimate"):
        scores.pass_at_k(attempts, solved, k)


def test_means_are_over_tasks_and_leave_out_what_was_not_scored():
    tasks = [
        scores.TaskScores("a", (1.0, 0.0, 0.5, 1.0)),
        scores.TaskScores("b", (0.0,), unscored=3),
        scores.TaskScores("c", (), unscored=4),
    ]
    assert scores.mean_reward(tasks) == pytest.approx((0.625 + 0.0) / 2)
    assert scores.mean_pass_at(tasks, 1, 1.0) == pytest.approx((0.5 + 0.0) / 2)
    assert scores.mean_pass_at(tasks, 1, 0.5) == pytest.approx((0.75 + 0.0) / 2)
    assert scores.mean_pass_at(tasks, 4, 1.0) == 1.0, "only the first task has four scored attempts"
    assert scores.mean_pass_at(tasks[1:], 2, 1.0) is None


def test_usual_k_are_powers_of_two_and_the_attempts():
    assert [scores.usual_k(attempts) for attempts in (1, 4, 6)] == [(1,), (1, 2, 4), (1, 2, 4, 6)]
