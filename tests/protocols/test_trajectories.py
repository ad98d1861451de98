"""Rollouts as typed columns: how they cross processes, and what they take in."""

from __future__ import annotations

import copy
import pickle
from array import array

import pytest

from libra_jax import protocols


def rollout() -> protocols.Trajectory:
    """A rollout of two segments."""
    made = protocols.Trajectory("a/0", "a", reward=1.0)
    made.append_text([1, 2, 3], protocols.TokenSource.PROMPT)
    made.append_sampled(protocols.TokenDelta((4, 5), (-0.5, -0.25), (7, 7)))
    made.turns.append(protocols.Turn(2))
    branch = made.branch(made, 4)
    branch.append_text([6], protocols.TokenSource.TOOL)
    branch.teacher_log_probs.append(-0.125)
    return made


def out_of_band(value):
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])


@pytest.mark.parametrize(
    "copied",
    [
        *(lambda value, number=number: pickle.loads(pickle.dumps(value, number)) for number in (2, 4, 5)),
        out_of_band,
        copy.deepcopy,
    ],
)
def test_a_copy_holds_the_same_and_grows_by_itself(copied):
    made = rollout()
    other = copied(made)
    assert other == made
    assert other.branches[0].parent is other
    assert other.branches[0].teacher_log_probs == array("f", [-0.125])
    other.append_text([8], protocols.TokenSource.TOOL)
    other.branches[0].append_text([9], protocols.TokenSource.TOOL)
    assert other.token_ids.tolist() == [1, 2, 3, 4, 5, 8]
    assert other.branches[0].context().tolist() == [1, 2, 3, 4, 6, 9]
    assert made.token_ids.tolist() == [1, 2, 3, 4, 5]


def test_columns_leave_a_pickle_as_buffers():
    buffers: list[pickle.PickleBuffer] = []
    made = protocols.Trajectory("a/0", "a", token_ids=list(range(10_000)))
    data = pickle.dumps(made, protocol=5, buffer_callback=buffers.append)
    assert len(data) < 1_000
    assert sum(buffer.raw().nbytes for buffer in buffers) == 40_000


def test_other_sequences_are_converted_and_numbers_that_fit_no_column_are_refused():
    made = protocols.Segment("a/0", "a", token_ids=(1, 2), loss_mask=[False, True], log_probs=[0, -0.5])
    assert made.token_ids == array("i", [1, 2])
    assert made.loss_mask == array("b", [0, 1])
    assert made.generated_tokens == 1
    with pytest.raises(OverflowError):
        protocols.Segment("a/0", "a", token_ids=[2**31])
