"""The multi-turn loop: what the policy sees, how attempts end, what they are worth, and demonstrations of them."""

import dataclasses
import math

import loop_doubles as doubles
import property_counts
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax import protocols
from libra_jax.chat import tokenizers
from libra_jax.examples import calculator
from libra_jax.rewards import scoring
from libra_jax.rollouts import loop


def test_calling_the_tool_and_copying_its_return_is_rewarded():
    trajectory, sampler = doubles.attempt(["<tool_call>12*34</tool_call>", "408"])
    assert doubles.TOKENIZER.decode(trajectory.token_ids) == (
        "<|user|>12*34<|im_end|><|assistant|><tool_call>12*34</tool_call><|im_end|>"
        "<|tool|>408<|im_end|><|assistant|>408<|im_end|>"
    )
    assert (trajectory.reward, trajectory.finish) == (1.0, "answered")
    assert trajectory.metrics["tool_success"] == trajectory.metrics["rewarded_after_tool"] == 1.0
    assert sampler.events == ["sample", "called", protocols.CausalState("calculator", 6, "success"), "sample", "called"]
    assert [(turn.tool, turn.status) for turn in trajectory.turns] == [("calculator", "success"), (None, None)]
    doubles.check_books(trajectory)


@pytest.mark.parametrize(
    "call",
    [
        "<tool_call>12*34",
        "12*34</tool_call>",
        "<tool_call>12*</tool_call>",
        "<tool_call>1</tool_call><tool_call>2</tool_call>",
        "<tool_call>print(1)</tool_call>",
        "<tool_call></tool_call>",
    ],
)
def test_a_malformed_call_is_a_failure_that_the_policy_sees_and_may_mend(call):
    trajectory, sampler = doubles.attempt([call, "<tool_call>12*34</tool_call>", "408"])
    assert "<|tool|>error: " in doubles.tool_text(trajectory)
    assert [turn.status for turn in trajectory.turns] == ["failure", "success", None]
    assert sampler.events[2].status == "failure"
    assert trajectory.reward == 1.0
    doubles.check_books(trajectory)


def test_a_division_by_zero_fails_and_is_answered_with_the_word_error():
    task = doubles.task_of("982/(96-96)", "error")
    trajectory, _ = doubles.attempt(["<tool_call>982/(96-96)</tool_call>", "error"], task=task)
    assert "error: division by zero" in doubles.tool_text(trajectory)
    assert trajectory.reward == 1.0
    assert trajectory.metrics["tool_success"] == trajectory.metrics["rewarded_after_tool"] == 0.0


def test_an_answer_without_a_call_is_scored_but_not_counted_as_after_a_tool():
    trajectory, _ = doubles.attempt(["408"])
    assert trajectory.reward == 1.0
    assert trajectory.metrics["rewarded_after_tool"] == trajectory.metrics["tool_calls"] == 0.0


def test_a_wrong_answer_after_a_successful_call_is_not_rewarded():
    trajectory, _ = doubles.attempt(["<tool_call>12*34</tool_call>", "409"])
    assert (trajectory.reward, trajectory.finish) == (0.0, "answered")
    assert trajectory.metrics["tool_success"] == 1.0
    assert trajectory.metrics["rewarded_after_tool"] == 0.0


# Limits ---------------------------------------------------------------------------------------------------------------


def test_an_output_without_a_stop_token_ends_the_attempt_with_reward_zero():
    trajectory, sampler = doubles.attempt(["9" * 60])
    assert (trajectory.reward, trajectory.finish) == (0.0, "length")
    assert trajectory.turns[0].generated_tokens == doubles.LIMITS.max_tokens
    assert sampler.events == ["sample", "called"]
    doubles.check_books(trajectory)


def test_calling_the_tool_until_the_turns_are_used_up_has_reward_zero():
    trajectory, _ = doubles.attempt(["<tool_call>1+1</tool_call>"] * 4)
    assert (trajectory.reward, trajectory.finish, len(trajectory.turns)) == (0.0, "max_turns", 4)
    assert trajectory.metrics["answered"] == 0.0
    doubles.check_books(trajectory)


def test_the_last_tool_return_is_kept_but_asks_for_no_place():
    limits = dataclasses.replace(doubles.LIMITS, max_turns=2)
    trajectory, sampler = doubles.attempt(["<tool_call>1+1</tool_call>"] * 2, limits=limits)
    returned = protocols.CausalState("calculator", 4, "success")
    assert sampler.events == ["sample", "called", returned, "sample", "called"]
    assert [(turn.tool, turn.status, turn.payload_tokens) for turn in trajectory.turns] == [
        ("calculator", "success", 4)
    ] * 2
    assert doubles.tool_text(trajectory).count("<|tool|>2<|im_end|>") == 2


@pytest.mark.parametrize("max_context", [200, 30])
def test_an_attempt_that_was_cut_off_holds_no_place_while_it_is_scored_and_closed(max_context):
    sampler = doubles.ScriptedSampler(["9" * 60])

    async def score(task, transcript):
        sampler.events.append("scored")
        return scoring.Score(0.0)

    async def close():
        sampler.events.append("closed")

    trajectory, _ = doubles.attempt(
        [],
        sampler=sampler,
        environment=doubles.Probe(close=close),
        limits=dataclasses.replace(doubles.LIMITS, max_context=max_context),
        reward=score,
    )
    assert trajectory.finish == ("length" if max_context == 200 else "max_context")
    assert sampler.events == ["sample", "called", "scored", "closed"]


@given(st.integers(9, 60))
@settings(max_examples=property_counts.examples(25, 60))
def test_no_context_outgrows_its_limit(max_context):
    limits = loop.Limits(max_turns=4, max_tokens=40, max_context=max_context, tool_seconds=5.0, temperature=1.0)
    trajectory, sampler = doubles.attempt(["<tool_call>12*34</tool_call>", "408"], limits=limits)
    assert len(trajectory.token_ids) <= max_context
    assert all(sampling.max_tokens >= 1 for sampling in sampler.requests)
    whole, _ = doubles.attempt(["<tool_call>12*34</tool_call>", "408"])
    assert trajectory.token_ids == whole.token_ids[: len(trajectory.token_ids)]
    fits = max_context >= len(whole.token_ids)
    assert (trajectory.finish, trajectory.reward) == (("answered", 1.0) if fits else ("max_context", 0.0))


def test_a_prompt_that_leaves_no_room_is_never_scored():
    limits = loop.Limits(max_turns=4, max_tokens=40, max_context=8, tool_seconds=5.0, temperature=1.0)
    with pytest.raises(protocols.EnvironmentCrashed, match=r"task t: its prompt of 8 tokens .*max_context = 8"):
        doubles.attempt(["x"], limits=limits)


def test_an_engine_that_stops_on_a_foreign_token_is_named():
    class Foreign(doubles.ScriptedSampler):
        async def sample(self, trajectory, sampling, on_tokens=None):
            trajectory.append_sampled(protocols.TokenDelta((99,), (-1.0,), (0,), "stop"))
            return "stop"

    with pytest.raises(protocols.LibraError, match="token 99, which is no stop token"):
        doubles.attempt([], sampler=Foreign([]))


# Scorers --------------------------------------------------------------------------------------------------------------


def scored(outputs, reward=0.25, **arguments):
    """An attempt, and the transcript that its scorer was given."""
    seen = []

    async def score(task, transcript):
        assert task.prompt_id == "t"
        seen.append(transcript)
        return scoring.Score(reward, {"reward/mine": 3.0})

    trajectory, _ = doubles.attempt(outputs, reward=score, **arguments)
    return trajectory, *seen


def test_a_scorer_decides_the_reward_and_sees_what_the_policy_wrote():
    trajectory, transcript = scored(["<tool_call>12*34</tool_call>", "408"])
    assert (trajectory.reward, trajectory.metrics["reward/mine"]) == (0.25, 3.0)
    assert transcript.text == "<tool_call>12*34</tool_call>\n408"
    assert transcript.dialogue == doubles.TOKENIZER.decode(trajectory.token_ids)
    assert [(message.role, message.content) for message in transcript.messages] == [
        ("user", "12*34"),
        ("assistant", "<tool_call>12*34</tool_call>"),
        ("tool", "408"),
        ("assistant", "408"),
    ]
    assert (transcript.answer, transcript.finish, transcript.environment_reward) == ("408", "answered", 1.0)
    assert transcript.tools == (protocols.CausalState("calculator", 6, "success"),)


def test_a_scorer_sees_the_same_of_an_attempt_that_was_resumed():
    whole, expected = scored(["<tool_call>12*34</tool_call>", "408"])
    for cut in range(1, len(whole.token_ids)):
        left = protocols.Trajectory("t/0", "t")
        for name in ("token_ids", "sources", "loss_mask", "log_probs", "policy_versions"):
            setattr(left, name, getattr(whole, name)[:cut])
        _, transcript = scored(["<tool_call>12*34</tool_call>", "408"], trajectory=left)
        assert transcript == expected


def test_a_scorer_scores_attempts_that_never_answered():
    trajectory, transcript = scored(["9" * 60])
    assert (trajectory.reward, trajectory.finish) == (0.25, "length")
    assert (transcript.answer, transcript.finish, transcript.environment_reward) == ("", "length", 0.0)
    assert transcript.messages[-1] == protocols.Message("assistant", "9" * 40)
    assert transcript.text == "9" * 40


@pytest.mark.parametrize(
    ("output", "text", "answer"),
    [
        ("hm 7</think> 408 ", "<think>\nhm 7</think> 408 ", "408"),
        ("maybe 408", "<think>\nmaybe 408", ""),
        ("", "<think>\n", ""),
    ],
)
def test_a_scorer_can_tell_thoughts_that_the_template_opens(output, text, answer):
    _, transcript = scored([output], tokenizer=doubles.OpensThoughts(), environment=doubles.Probe(ends))
    assert (transcript.finish, transcript.text, transcript.answer) == ("answered", text, answer)


async def ends(output):
    return protocols.StepResult(done=True, reward=1.0)


def test_a_reward_of_the_environment_that_is_no_number_is_left_to_the_scorer():
    async def step(output):
        return protocols.StepResult(done=True, reward=math.nan)

    trajectory, transcript = scored(["no"], environment=doubles.Probe(step))
    assert (trajectory.reward, transcript.environment_reward) == (0.25, None)


def test_a_scorer_that_raises_or_gives_nonsense_is_a_crash_that_names_the_task():
    async def raises(task, transcript):
        raise ZeroDivisionError("oops")

    with pytest.raises(protocols.EnvironmentCrashed, match=r"reward, task t: it raised ZeroDivisionError: oops"):
        doubles.attempt(["no"], reward=raises)
    with pytest.raises(protocols.EnvironmentCrashed, match=r"reward, task t: it gave nan, which is not a finite"):
        scored(["no"], reward=math.nan)


# Demonstrations -------------------------------------------------------------------------------------------------------


@given(st.integers(0, 400))
@settings(max_examples=property_counts.examples(25, 60))
def test_a_demonstration_is_token_for_token_a_perfect_policys_attempt(index):
    task = calculator.task_source(seed=3).task(index)
    environment = calculator.environment()
    shown = tokenizers.demonstration_trajectory(task, environment, doubles.TOKENIZER)
    outputs = [message.content for message in environment.demonstration(task) if message.role == "assistant"]
    live, _ = doubles.attempt(outputs, task=task, environment=environment)
    assert (shown.token_ids, shown.sources, shown.loss_mask) == (live.token_ids, live.sources, live.loss_mask)
    assert live.reward == 1.0
    assert len(live.token_ids) <= 100


def test_a_demonstration_that_does_not_end_with_an_answer_is_refused():
    class Mute:
        def demonstration(self, task):
            return [protocols.Message("user", "q"), protocols.Message("assistant", "c"), protocols.Message("tool", "r")]

    with pytest.raises(protocols.EnvironmentCrashed, match="task t: its demonstration must"):
        tokenizers.demonstration_trajectory(doubles.task_of(), Mute(), doubles.TOKENIZER)
