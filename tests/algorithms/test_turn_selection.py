"""`algorithm.entropy_share`: which turns of a group stay in the loss."""

import fractions
import math

import hypothesis
import numpy as np
from hypothesis import strategies as st

from libra_jax.algorithms import turn_selection

# Few different values, so that turns tie.
TOKENS = st.lists(st.tuples(st.sampled_from([0.0, -0.5, -1.0, -3.0]), st.booleans()), max_size=12)


def brute_force(trajectories, groups, share):
    """Masks token by token: a turn stays if fewer than the share of its group's turns go before it."""
    turns = []
    for index, tokens in enumerate(trajectories):
        for at, (_, trained) in enumerate(tokens):
            begins = trained and not (at and tokens[at - 1][1])
            if begins:
                turns.append((index, []))
            if trained:
                turns[-1][1].append(at)
    entropies = [math.fsum(-trajectories[index][at][0] for at in places) / len(places) for index, places in turns]
    kept = [[False] * len(tokens) for tokens in trajectories]
    for number, (index, places) in enumerate(turns):
        rivals = [other for other in range(len(turns)) if groups[turns[other][0]] == groups[index]]
        before = [other for other in rivals if (-entropies[other], other) < (-entropies[number], number)]
        if len(before) < math.ceil(share * len(rivals)):
            for at in places:
                kept[index][at] = True
    return kept


@hypothesis.settings(max_examples=50)
@hypothesis.given(
    trajectories=st.lists(TOKENS, min_size=1, max_size=6), share=st.fractions(0, 1).filter(bool), data=st.data()
)
def test_the_turns_of_the_highest_entropy_of_each_group_stay(trajectories, share, data):
    groups = sorted(data.draw(st.integers(0, 2)) for _ in trajectories)
    share = fractions.Fraction(round(share * 100) or 1, 100)
    found = turn_selection.highest_entropy(
        [np.array([value for value, _ in tokens], np.float32) for tokens in trajectories],
        [np.array([trained for _, trained in tokens], bool) for tokens in trajectories],
        groups,
        float(share),
    )
    assert [mask.tolist() for mask in found] == brute_force(trajectories, groups, share)


def test_a_group_of_one_turn_keeps_it_whatever_the_share():
    (kept,) = turn_selection.highest_entropy([np.array([0.0, -1.0])], [np.array([False, True])], [3], 0.01)
    assert kept.tolist() == [False, True]
