"""Outputs heard while they stream: calls of tools that change nothing begin before the output has ended."""

import asyncio
import dataclasses

import dialogue_doubles
import loop_doubles as doubles
import property_counts
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax import protocols
from libra_jax.rollouts import progress

LONG = dataclasses.replace(doubles.LIMITS, max_tokens=100, max_context=400)
CALL = "<look>a</look>"


def test_an_eager_call_runs_while_the_output_goes_on():
    look = dialogue_doubles.Clocked(eager=True, seconds=3.0)
    output = CALL + "." * 50
    trajectory, _ = dialogue_doubles.attempt([output, "done"], dialogue_doubles.make(look), limits=LONG)
    assert look.began == [pytest.approx(0.1 * len(CALL))]
    assert look.ended == ["a"]
    assert (trajectory.turns[0].tool, trajectory.turns[0].status) == ("look", "success")
    assert trajectory.turns[0].tool_seconds < 1e-3
    assert (trajectory.reward, trajectory.metrics["early_calls"]) == (1.0, 1.0)


def test_what_the_attempt_still_waits_for_is_the_tools_seconds():
    look = dialogue_doubles.Clocked(eager=True, seconds=3.0)
    trajectory, _ = dialogue_doubles.attempt([CALL + "." * 9, "done"], dialogue_doubles.make(look), limits=LONG)
    assert trajectory.turns[0].tool_seconds == pytest.approx(2.0)  # nine dots and the stop token took one


def test_a_call_that_may_change_something_waits_for_the_whole_output():
    look = dialogue_doubles.Clocked(seconds=3.0)
    trajectory, _ = dialogue_doubles.attempt([CALL + "." * 50, "done"], dialogue_doubles.make(look), limits=LONG)
    assert look.began == [pytest.approx(0.1 * (len(CALL) + 51))]
    assert trajectory.turns[0].tool_seconds == pytest.approx(3.0)
    assert "early_calls" not in trajectory.metrics


def test_an_early_call_of_an_output_that_is_cut_off_is_cancelled():
    look = dialogue_doubles.Clocked(eager=True, seconds=1000.0)
    trajectory, _ = dialogue_doubles.attempt([CALL + "." * 50], dialogue_doubles.make(look))
    assert (trajectory.finish, look.ended) == ("length", ["cancelled"])


def test_no_more_calls_begin_early_than_may_run():
    look = dialogue_doubles.Clocked(eager=True)
    environment = dialogue_doubles.make(look, parallel=2)
    dialogue_doubles.attempt([CALL * 4, "done"], environment, limits=LONG)
    assert len(look.began) == 2


def test_an_early_call_that_breaks_is_a_crash_only_if_it_is_wanted():
    def broken():
        return dialogue_doubles.make(dialogue_doubles.Clocked(eager=True, error=protocols.WorkerLost("gone")))

    with pytest.raises(protocols.EnvironmentCrashed, match="lost a worker: gone"):
        dialogue_doubles.attempt([CALL], broken())
    trajectory, _ = dialogue_doubles.attempt([CALL + "." * 50], broken())
    assert trajectory.finish == "length"


def test_an_early_call_that_hangs_times_out_at_the_steps_deadline():
    look = dialogue_doubles.Clocked(eager=True, seconds=1000.0)
    trajectory, sampler = dialogue_doubles.attempt([CALL, "done"], dialogue_doubles.make(look))
    assert sampler.events[2] == protocols.CausalState("look", len("timeout") + 3, "timeout")
    assert look.ended == ["cancelled"]
    assert trajectory.reward == 1.0


def test_the_beginning_of_a_resumed_output_is_heard_too():
    look = dialogue_doubles.Clocked(eager=True, seconds=3.0)
    whole, _ = dialogue_doubles.attempt([CALL + "." * 9, "done"], dialogue_doubles.make(dialogue_doubles.Clocked()))
    left = protocols.Trajectory("t/0", "t")
    prompt = whole.prompt_tokens
    left.append_text(whole.token_ids[:prompt], protocols.TokenSource.PROMPT)
    kept = tuple(whole.token_ids[prompt : prompt + len(CALL)])
    left.append_sampled(protocols.TokenDelta(kept, (0.0,) * len(kept), (7,) * len(kept)))
    resumed, _ = dialogue_doubles.attempt([CALL + "." * 9, "done"], dialogue_doubles.make(look), trajectory=left)
    assert look.began == [0.0]
    assert resumed.reward == 1.0


TEXTS = st.lists(
    st.sampled_from([CALL, "<look>b</look>", "<think>", "</think>", "<look>", "</look>", "x"]), min_size=1, max_size=6
).map("".join)


@given(st.lists(TEXTS, min_size=1, max_size=3), st.integers(1, 20))
@settings(max_examples=property_counts.examples(25, 60))
def test_hearing_changes_nothing_but_when_calls_begin(outputs, delta):
    def ended(eager):
        look = dialogue_doubles.Clocked(eager=eager, seconds=0.3)
        environment = dialogue_doubles.make(look)
        made, _ = dialogue_doubles.attempt([*outputs, "done"], environment, delta=delta, limits=LONG)
        return made.token_ids, [(turn.tool, turn.status) for turn in made.turns], made.reward, sorted(look.ended)

    assert ended(eager=True) == ended(eager=False)


def test_an_environment_that_cannot_hear_is_a_crash_that_says_so():
    class Deaf(doubles.Probe):
        def hear(self, text):
            raise ValueError("what?")

    async def step(output):
        return protocols.StepResult(done=True, reward=1.0)

    with pytest.raises(protocols.EnvironmentCrashed, match=r"Deaf, task t: hear raised ValueError: what\?"):
        doubles.attempt(["x"], environment=Deaf(step))


# Text while tokens come -----------------------------------------------------------------------------------------------


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8; 256 stops."""

    stop_token_ids = (256,)

    def decode(self, token_ids):
        return bytes(list(token_ids)).decode(errors="replace")


def heard(tokens, sizes):
    """The pieces of text that an environment is told, tokens coming in groups of these sizes, over and over."""
    pieces = []
    trajectory = protocols.Trajectory("t/0", "t")
    trajectory.append_text([65] * 3, protocols.TokenSource.PROMPT)
    hear = progress.Hearing(pieces.append, Bytes(), trajectory, 3)
    at = 0
    while at < len(tokens):
        for size in sizes:
            new = tokens[at : at + size]
            trajectory.append_sampled(protocols.TokenDelta(tuple(new), (0.0,) * len(new), (0,) * len(new)))
            hear.pass_on()
            at += size
    assert hear.error is None
    return pieces


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@given(st.lists(st.sampled_from([0x41, 0x80, 0xC3, 0xA9, 0xE2, 0x82, 0xF0, 0x9F, 0x98]), max_size=60), SIZES)
@settings(max_examples=property_counts.examples(50, 150))
def test_bytes_are_told_as_the_whole_is_decoded(tokens, sizes):
    text = bytes(tokens).decode(errors="replace")
    assert text.startswith("".join(heard(tokens, sizes)))
    assert "".join(heard([*tokens, 256], sizes)) == text


@pytest.mark.parametrize("eager", [False, True])
def test_a_dialogue_hears_only_where_a_tool_is_eager(eager):
    environment = dialogue_doubles.make(dialogue_doubles.Clocked(), dialogue_doubles.Clocked("find", eager=eager))
    asyncio.run(environment.reset(doubles.task_of()))
    assert callable(environment.hear) is eager
