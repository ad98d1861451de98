"""A cut attempt goes on where it stood, and a cancelled one leaves nothing behind."""

import asyncio
import copy

import loop_doubles as doubles
import property_counts
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax import protocols
from libra_jax.rollouts import loop

OUTPUTS = ["<tool_call>12*</tool_call>", "<tool_call>12*34</tool_call>", "408"]
WHOLE, _ = doubles.attempt(OUTPUTS)


def cut(trajectory, count):
    """What a kill leaves: the first `count` tokens, and the turns that had been recorded by then."""
    left = copy.deepcopy(trajectory)
    for name in ("token_ids", "sources", "loss_mask", "log_probs", "policy_versions"):
        setattr(left, name, getattr(left, name)[:count])
    left.reward = left.finish = None
    left.metrics = {}
    ends, seen = [], 0
    for place, (token, source) in enumerate(zip(left.token_ids, left.sources, strict=True)):
        if source == protocols.TokenSource.MODEL and token == doubles.STOP:
            seen += 1
            ends.append(place)
    left.turns = left.turns[:seen]
    return left


def same(one, two):
    for name in ("token_ids", "sources", "loss_mask", "log_probs", "policy_versions", "reward", "finish", "metrics"):
        assert getattr(one, name) == getattr(two, name), name
    for ours, theirs in zip(one.turns, two.turns, strict=True):
        assert (ours.generated_tokens, ours.tool, ours.status, ours.payload_tokens) == (
            theirs.generated_tokens,
            theirs.tool,
            theirs.status,
            theirs.payload_tokens,
        )


@given(st.integers(0, len(WHOLE.token_ids)))
@settings(max_examples=property_counts.examples(50, 150))
def test_an_attempt_cut_anywhere_goes_on_to_the_same_end(count):
    left = cut(WHOLE, count)
    resumed, sampler = doubles.attempt(OUTPUTS, trajectory=left)
    same(resumed, WHOLE)
    doubles.check_books(resumed)
    assert resumed.metrics["replay_differs"] == 0.0
    kept = sum(WHOLE.loss_mask[:count])
    assert sum(sampling.max_tokens for sampling in sampler.requests[:1]) <= doubles.LIMITS.max_tokens
    assert sampler.events.count("sample") == sum(
        turn_end > kept for turn_end in [sum(turn.generated_tokens for turn in WHOLE.turns[: k + 1]) for k in range(3)]
    )


@given(st.integers(1, 60), st.integers(1, 60))
@settings(max_examples=property_counts.examples(25, 60))
def test_retained_tokens_count_against_the_turns_limit(count, max_tokens):
    limits = loop.Limits(max_turns=4, max_tokens=max_tokens, max_context=200, tool_seconds=5.0, temperature=1.0)
    whole, _ = doubles.attempt(["9" * 100], limits=limits)
    resumed, _ = doubles.attempt(["9" * 100], limits=limits, trajectory=cut(whole, min(count, len(whole.token_ids))))
    same(resumed, whole)
    assert resumed.turns[0].generated_tokens == max_tokens


def test_a_finished_attempt_is_left_as_it_is():
    done = copy.deepcopy(WHOLE)
    resumed, sampler = doubles.attempt([], trajectory=done)
    assert resumed == WHOLE
    assert sampler.events == []


def test_a_replay_that_differs_starts_over_and_says_so():
    left = cut(WHOLE, len(WHOLE.token_ids) - 3)
    place = left.sources.index(protocols.TokenSource.TOOL)
    left.token_ids[place + 2] += 1
    resumed, sampler = doubles.attempt(OUTPUTS, trajectory=left)
    assert resumed.metrics.pop("replay_differs") == 1.0
    assert resumed.token_ids == WHOLE.token_ids
    assert resumed.reward == 1.0
    assert sampler.events.count("sample") == 3
    doubles.check_books(resumed)


def test_retained_tokens_past_the_end_of_the_replayed_attempt_start_it_over():
    async def step(output):
        return protocols.StepResult(done=True, reward=1.0)

    environment = doubles.Probe(step)
    limits = loop.Limits(max_turns=4, max_tokens=40, max_context=200, tool_seconds=5.0, temperature=1.0)
    left = protocols.Trajectory("t/0", "t")
    left.append_text(doubles.TOKENIZER.render([protocols.Message("user", "q")], first=True, generation_prompt=True), 0)
    left.append_sampled(protocols.TokenDelta((65, doubles.STOP), (0.0, 0.0), (1, 1), "stop"))
    left.append_text([5, 66, 1, 4], protocols.TokenSource.TOOL)
    resumed, _ = doubles.attempt(["A"], environment=environment, limits=limits, trajectory=left)
    assert resumed.metrics["replay_differs"] == 1.0
    assert environment.resets == 2
    assert doubles.TOKENIZER.decode(resumed.token_ids) == "<|user|>q<|im_end|><|assistant|>A<|im_end|>"


def test_the_sampler_is_told_of_calls_only_for_outputs_it_sampled():
    first_end = WHOLE.token_ids.index(doubles.STOP, WHOLE.sources.index(protocols.TokenSource.MODEL)) + 1
    _, sampler = doubles.attempt(OUTPUTS, trajectory=cut(WHOLE, first_end))
    assert sampler.events[0] == "sample"
    assert sampler.events.count("called") == 2
    assert sum(isinstance(event, protocols.CausalState) for event in sampler.events) == 1


def test_cancelling_an_attempt_closes_its_environment_and_ends_its_step():
    environment = doubles.Probe(doubles.forever)

    async def main():
        running = asyncio.create_task(
            loop.run_rollout(
                loop.RolloutSetup(
                    trajectory=protocols.Trajectory("t/0", "t"),
                    task=doubles.task_of(),
                    tokenizer=doubles.TOKENIZER,
                    sampler=doubles.ScriptedSampler(["x"]),
                    limits=doubles.LIMITS,
                ),
                environment,
            )
        )
        for _ in range(20):
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return len(asyncio.all_tasks())

    assert asyncio.run(main()) == 1
    assert (environment.cancelled, environment.closed) == (1, 1)
