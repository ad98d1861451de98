"""Counted tokens behave as lists of tokens do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_jax import protocols
from libra_jax.simulator import scripts, trajectory

RUN_LISTS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), max_size=12)


def plain(runs):
    return [value for value, count in runs for _ in range(count)]


@given(RUN_LISTS, RUN_LISTS, st.integers(-40, 40), st.integers(-40, 40))
def test_runs_are_a_sequence(first, second, start, stop):
    runs, reference = trajectory.Runs(first, name="7/3"), plain(first)
    runs.extend(trajectory.Runs(second))
    runs.extend([2, 2])
    reference += [*plain(second), 2, 2]
    assert len(runs) == len(reference)
    assert list(runs) == reference
    assert runs == reference
    assert runs != [*reference, 0]
    assert runs[start:stop] == reference[start:stop]
    assert runs[start:stop].name == "7/3"
    assert [runs[at] for at in range(-len(reference), len(reference))] == reference + reference
    assert sum(count for _, count in runs.runs()) == len(reference)
    runs.clear()
    assert runs == []


def test_an_index_beyond_the_end_is_refused():
    with pytest.raises(IndexError):
        trajectory.Runs([(1, 3)])[3]
    with pytest.raises(ValueError, match="step 1"):
        trajectory.Runs([(1, 3)])[::2]


def delta(count: int, version: int, stops: bool) -> protocols.TokenDelta:
    last = trajectory.STOP if stops else trajectory.SAMPLED
    tokens = (trajectory.SAMPLED,) * (count - 1) + (last,)
    return protocols.TokenDelta(tokens, (-1.0,) * count, (version,) * count, "stop" if stops else None)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("text"), st.integers(0, 5)),
        st.tuples(st.just("sampled"), st.integers(1, 5), st.integers(0, 2), st.booleans()),
    ),
    max_size=12,
)


@given(st.integers(1, 9), EVENTS)
def test_a_counted_trajectory_equals_a_real_one(prompt, events):
    counted = trajectory.CountedTrajectory("7/3", "7", script=scripts.Script(prompt, (protocols.Turn(1),)))
    real = protocols.Trajectory("7/3", "7")
    for made in (counted, real):
        made.append_text([trajectory.TEXT] * prompt, protocols.TokenSource.PROMPT)
        for event in events:
            if event[0] == "text":
                made.append_text([trajectory.TEXT] * event[1], protocols.TokenSource.TOOL)
            else:
                made.append_sampled(delta(*event[1:]))
    for name in ("token_ids", "sources", "loss_mask", "log_probs", "policy_versions"):
        assert getattr(counted, name) == getattr(real, name), name
    assert counted.generated_tokens == real.generated_tokens
    assert counted.prompt_tokens == real.prompt_tokens == prompt
    context = counted.context()
    assert list(context[:]) == list(real.context())
    counted.append_text([0, 0], protocols.TokenSource.TOOL)
    assert len(context) == len(real.token_ids), "a context does not change with its trajectory"
    outputs = [event for event in events if event[0] == "sampled"]
    assert context.turn == sum(event[3] for event in outputs)
    counted.clear()
    assert len(counted.token_ids) == len(counted.policy_versions) == counted.generated_tokens == 0
    assert counted.context().turn == counted.context().fresh == 0


def test_the_tokenizer_counts():
    text = trajectory.CountedText()
    shown = [protocols.Message("tool", "120"), protocols.Message("tool", "timeout")]
    assert len(text.render(shown, first=False, generation_prompt=True)) == 122
    assert text.decode(trajectory.Runs([(1, 3)], name="7/3")[0:2]) == "7/3"
