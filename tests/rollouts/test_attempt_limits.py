"""Limits of a whole attempt: tokens, seconds, and room for what tools return."""

import asyncio
import dataclasses

import dialogue_doubles
import loop_doubles as doubles
import property_counts
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_resumed_attempts import cut, same

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.rollouts import factories
from libra_jax.simulator import clock

CALL = "<tool_call>12*34</tool_call>"


def limits(**changes):
    return dataclasses.replace(doubles.LIMITS, **changes)


# Tokens ---------------------------------------------------------------------------------------------------------------


def test_an_attempt_ends_where_its_tokens_are_used_up():
    trajectory, sampler = doubles.attempt([CALL, "9" * 30], limits=limits(rollout_tokens=12))
    assert (trajectory.finish, trajectory.reward, trajectory.generated_tokens) == ("max_tokens", 0.0, 12)
    assert [sampling.max_tokens for sampling in sampler.requests] == [12, 4]
    doubles.check_books(trajectory)


def test_tokens_used_up_with_an_output_ask_for_no_further_place():
    trajectory, sampler = doubles.attempt([CALL, "408"], limits=limits(rollout_tokens=8))
    assert (trajectory.finish, len(trajectory.turns)) == ("max_tokens", 1)
    assert sampler.events == ["sample", "called"]
    assert "408" in doubles.tool_text(trajectory)
    doubles.check_books(trajectory)


def test_an_answer_with_the_last_token_counts():
    trajectory, _ = doubles.attempt([CALL, "408"], limits=limits(rollout_tokens=12))
    assert (trajectory.finish, trajectory.reward, trajectory.generated_tokens) == ("answered", 1.0, 12)


@given(st.integers(1, 19), st.data())
@settings(max_examples=property_counts.examples(30, 80))
def test_an_attempt_cut_anywhere_ends_at_the_same_token(most, data):
    outputs = ["<tool_call>12*</tool_call>", CALL, "408"]
    allowed = limits(rollout_tokens=most)
    whole, _ = doubles.attempt(outputs, limits=allowed)
    assert whole.generated_tokens == min(most, 18)
    left = cut(whole, data.draw(st.integers(0, len(whole.token_ids))))
    resumed, _ = doubles.attempt(outputs, limits=allowed, trajectory=left)
    same(resumed, whole)
    assert resumed.metrics["replay_differs"] == 0.0
    doubles.check_books(resumed)


# Seconds --------------------------------------------------------------------------------------------------------------


def timed(outputs, *tools, seconds=0.1, most=2.0, wait=0.0, score=dialogue_doubles.score, **arguments):
    """An attempt that may take `most` seconds; a place comes after `wait`."""

    class Waits(doubles.ScriptedSampler):
        async def sample(self, trajectory, sampling, on_tokens=None):
            await asyncio.sleep(wait)
            return await super().sample(trajectory, sampling, on_tokens)

    sampler = Waits(outputs, delta=1, seconds=seconds)
    environment = dialogue_doubles.make(*tools, score=score)
    allowed = limits(rollout_seconds=most, max_tokens=100, max_context=400)
    return dialogue_doubles.attempt([], environment, limits=allowed, sampler=sampler, **arguments)


def test_an_output_is_cut_off_when_the_time_is_up_and_its_tokens_stay():
    trajectory, sampler = timed(["." * 50])
    assert (trajectory.finish, trajectory.reward, trajectory.generated_tokens) == ("max_seconds", 0.0, 20)
    assert trajectory.seconds == pytest.approx(1.9)
    assert sampler.events == ["sample", "called"], "it holds no place while it is scored and closed"
    doubles.check_books(trajectory)


def test_waiting_for_the_first_token_does_not_count():
    trajectory, _ = timed(["done"], wait=100.0)
    assert (trajectory.finish, trajectory.reward) == ("answered", 1.0)


def test_waiting_for_later_tokens_counts_and_leaves_no_empty_turn():
    trajectory, sampler = timed(["<look>a</look>", "done"], dialogue_doubles.Clocked(), seconds=0.01, wait=100.0)
    assert (trajectory.finish, len(trajectory.turns)) == ("max_seconds", 1)
    assert sampler.events[-1] == "called"
    doubles.check_books(trajectory)


def test_a_tool_counts_and_is_let_end():
    look = dialogue_doubles.Clocked(seconds=3.0)
    trajectory, sampler = timed(["<look>a</look>", "done"], look, seconds=0.01)
    assert (trajectory.finish, look.ended) == ("max_seconds", ["a"])
    assert trajectory.seconds == pytest.approx(3.14)
    assert sampler.events == ["sample", "called"], "no further place is asked for"


def test_an_answer_is_scored_however_long_that_takes():
    async def score(task, output, box):
        await asyncio.sleep(4.0)
        return await dialogue_doubles.score(task, output, box)

    trajectory, _ = timed(["done"], score=score)
    assert (trajectory.finish, trajectory.reward) == ("answered", 1.0)


def test_seconds_of_a_run_that_was_cut_off_count():
    whole, _ = timed(["." * 9 + "done"], score=dialogue_doubles.score)
    left = cut(whole, len(whole.token_ids) - 4)
    left.seconds = 1.85
    resumed, _ = timed(["." * 9 + "done"], trajectory=left)
    assert resumed.finish == "max_seconds"
    assert resumed.generated_tokens == 12, "two more came, 0.1 s apart, and 0.05 s later the time was up"
    doubles.check_books(resumed)


def test_a_time_out_of_the_engines_own_is_no_end_of_the_attempt():
    class Broken(doubles.ScriptedSampler):
        async def sample(self, trajectory, sampling, on_tokens=None):
            raise TimeoutError("the engine's")

    async def main():
        await doubles.run(sampler=Broken([]), limits=limits(rollout_seconds=1.0))

    with pytest.raises(TimeoutError, match="the engine's"):
        clock.run(main())


# Room for what tools return -------------------------------------------------------------------------------------------


class Talks:
    """An environment whose tools return texts of these lengths."""

    def __init__(self, *lengths):
        self.lengths = lengths

    async def reset(self, task):
        return [protocols.Message("user", "q")]

    async def step(self, output):
        if output == "done":
            return protocols.StepResult(done=True, reward=1.0)
        returns = [protocols.ToolReturn("look", "success", "x" * length) for length in self.lengths]
        return protocols.StepResult(tool_returns=returns)

    async def close(self):
        pass


def test_a_return_that_does_not_fit_ends_the_attempt_by_default():
    trajectory, _ = doubles.attempt(["go", "done"], environment=Talks(500))
    assert (trajectory.finish, doubles.tool_text(trajectory)) == ("max_context", "")


# Config ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        ({"max_tokens": -1}, r"config\.task\.max_tokens: must not be negative, not -1; 0 is no limit"),
        ({"max_seconds": -1.0}, r"config\.task\.max_seconds: must not be negative, not -1\.0; 0 is no limit"),
        ({"max_seconds": float("nan")}, r"config\.task\.max_seconds: must be a finite number"),
        ({"reset_seconds": 0.0}, r"config\.task\.reset_seconds: must be positive, not 0\.0"),
    ],
)
def test_limits_that_cannot_be_are_refused(task, sentence):
    with pytest.raises(protocols.ConfigError, match=sentence):
        config_lib.parse(config_lib.RunConfig, {"task": task})


def test_a_runs_limits_are_its_configs():
    task = {"max_tokens": 300, "max_seconds": 60.0}
    made = factories.limits(config_lib.parse(config_lib.RunConfig, {"task": task}))
    assert (made.rollout_tokens, made.rollout_seconds) == (300, 60.0)
    slow = config_lib.parse(config_lib.RunConfig, {"task": {"reset_seconds": 900.0}})
    assert factories.limits(slow).reset_seconds == 900
