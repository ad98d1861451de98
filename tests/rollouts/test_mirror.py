"""Copies of rollouts in another process: whatever happens to a rollout, updates make the copy equal to it."""

from __future__ import annotations

import copy
import pickle

import hypothesis
import pytest
from hypothesis import strategies

from libra_jax import protocols
from libra_jax.rollouts import mirror

CHANGES = ("text", "sampled", "turn", "tool", "cut", "clear", "branch", "disown", "routing", "outcome", "update")


def change(trajectory: protocols.Trajectory, kind: str, number: int) -> None:
    """Does to a rollout what agent loops and sessions do."""
    segment = trajectory.segments[number % len(trajectory.segments)]
    tokens = list(range(number % 5))
    match kind:
        case "text":
            segment.append_text(tokens, protocols.TokenSource.TOOL)
        case "sampled":
            segment.append_sampled(protocols.TokenDelta(tuple(tokens), (-0.5,) * len(tokens), (3,) * len(tokens)))
        case "turn":
            segment.turns.append(protocols.Turn(number, start_seconds=float(number)))
        case "tool" if segment.turns:
            segment.turns[-1].tool, segment.turns[-1].tool_seconds = f"tool {number}", 0.5
            segment.append_text([number], protocols.TokenSource.TOOL)
        case "cut":
            segment.cut(number % (len(segment.token_ids) + 1))
            del segment.turns[number % 3 :]
        case "clear":
            trajectory.clear()
        case "branch":
            trajectory.branch(segment, number % (segment.context_tokens + 1))
        case "disown":
            segment.disown(number % (len(segment.token_ids) + 1), len(segment.token_ids))
        case "routing" if len(segment.routing) < len(segment.token_ids):
            segment.routing.append(bytes([number % 256]))
        case "outcome":
            trajectory.metrics[f"metric {number % 2}"] = float(number)
            trajectory.seconds += number
            trajectory.finish = "answered"
            segment.reward = float(number)


def parents(trajectory: protocols.Trajectory) -> list[int | None]:
    return [None if each.parent is None else each.parent.index for each in trajectory.segments]


@hypothesis.given(strategies.lists(strategies.tuples(strategies.sampled_from(CHANGES), strategies.integers(0, 40))))
def test_after_the_last_update_the_copy_equals_the_rollout(changes):
    trajectory = protocols.Trajectory("task/0", "task")
    trajectory.append_text([1, 2, 3], protocols.TokenSource.PROMPT)
    held = copy.deepcopy(trajectory)
    tracker = mirror.Tracker(trajectory)
    for kind, number in changes:
        if kind == "update":
            # As it travels between processes.
            mirror.apply(held, pickle.loads(pickle.dumps(tracker.update())))
            assert [each.token_ids for each in held.segments] == [each.token_ids for each in trajectory.segments]
        else:
            change(trajectory, kind, number)
    mirror.apply(held, tracker.update(last=True))
    assert held == trajectory
    assert parents(held) == parents(trajectory)


def test_an_update_carries_only_tokens_that_the_copy_lacks():
    trajectory = protocols.Trajectory("task/0", "task")
    tracker = mirror.Tracker(trajectory)
    for count in (5, 7):
        trajectory.append_text(range(count), protocols.TokenSource.PROMPT)
        (update,) = tracker.update().segments
        assert len(update.columns["token_ids"]) == count


def test_times_reach_the_copy_on_its_own_clock():
    trajectory = protocols.Trajectory("task/0", "task", start_seconds=105.0)
    held = copy.deepcopy(trajectory)
    trajectory.shift(-100.0)
    tracker = mirror.Tracker(trajectory, ahead=100.0)
    trajectory.append_text([1], protocols.TokenSource.PROMPT)
    trajectory.turns.append(protocols.Turn(1, start_seconds=6.0))
    mirror.apply(held, tracker.update())
    assert held.start_seconds == pytest.approx(105.0)
    assert held.turns[0].start_seconds == pytest.approx(106.0)
    assert trajectory.turns[0].start_seconds == 6.0
