"""Samples: which rollouts of a step are written out, and how their tokens become text."""

from __future__ import annotations

import pytest

from libra_jax import protocols
from libra_jax.chat import tokenizers
from libra_jax.rollouts import samples


def rollout(name: str, reward: float | None = 0.0) -> protocols.Trajectory:
    return protocols.Trajectory(name, name.split("/")[0], reward=reward, finish="answered")


def spoken(tokenizer: protocols.Tokenizer) -> protocols.Trajectory:
    """A rollout of two outputs with a tool call between them."""
    trajectory = rollout("task-7/0", 0.5)
    asked = tokenizer.render([protocols.Message("user", "2 + 2?")], first=True, generation_prompt=True)
    trajectory.append_text(asked, protocols.TokenSource.PROMPT)
    for text, answer in (("<tool_call>2+2</tool_call>", "4\x1b"), ("It is 4", None)):
        tokens = [*tokenizer.encode(text), tokenizer.stop_token_ids[0]]
        count = len(tokens)
        trajectory.append_sampled(
            protocols.TokenDelta(tuple(tokens), (-1.0,) * count, (4 if text == "It is 4" else 3,) * count)
        )
        trajectory.turns.append(protocols.Turn(count))
        if answer is not None:
            trajectory.turns[-1].tool, trajectory.turns[-1].status = "calculator", "success"
            trajectory.turns[-1].tool_seconds = 0.25
            said = tokenizer.render([protocols.Message("tool", answer)], first=False, generation_prompt=True)
            trajectory.append_text(said, protocols.TokenSource.TOOL)
    trajectory.metrics = {"reward/length": -0.5, "reward_seconds/length": 0.1, "turns": 2.0}
    return trajectory


def test_best_worst_and_rollouts_evenly_between_are_chosen():
    rollouts = [rollout(f"p/{index}", float(index)) for index in range(9)]
    chosen = samples.choose(rollouts, 3, seed=0)
    assert [(rank, one.trajectory_id) for rank, one in chosen] == [(1, "p/8"), (5, "p/4"), (9, "p/0")]
    assert [one.reward for _, one in samples.choose(rollouts, 1, seed=0)] == [8.0]
    assert len(samples.choose(rollouts, 50, seed=0)) == 9
    assert samples.choose(rollouts, 0, seed=0) == []


def test_equal_rewards_are_ordered_by_seed_and_name_alone():
    rollouts = [rollout(f"p/{index}", 1.0) for index in range(20)]
    first = [one.trajectory_id for _, one in samples.choose(rollouts, 4, seed=1)]
    assert first == [one.trajectory_id for _, one in samples.choose(rollouts[::-1], 4, seed=1)]
    assert first != [one.trajectory_id for _, one in samples.choose(rollouts, 4, seed=2)]


def test_a_rollout_without_a_reward_ranks_last():
    assert samples.choose([rollout("p/0", None), rollout("p/1", -9.0)], 1, seed=0)[0][1].trajectory_id == "p/1"


def test_a_record_holds_the_text_of_each_turn_and_special_tokens():
    tokenizer = tokenizers.CharacterTokenizer()
    trajectory = spoken(tokenizer)
    before = list(trajectory.token_ids)
    group = protocols.Group(11, protocols.Task("task-7", {}), 3, [trajectory])
    [record] = samples.Samples(8, 0, tokenizer).of_step(5, [group])
    assert record["prompt"] == "<|user|>2 + 2?<|im_end|><|assistant|>"
    first, last = record["turns"]
    assert (first["text"], first["tool"], first["status"]) == (
        "<tool_call>2+2</tool_call><|im_end|>",
        "calculator",
        "success",
    )
    assert first["returned"] == "<|tool|>4\ufffd<|im_end|><|assistant|>"
    assert first["tool_seconds"] == 0.25
    assert (last["text"], last["returned"], last["tool"]) == ("It is 4<|im_end|>", "", None)
    assert (record["reward"], record["reward_parts"]) == (0.5, {"length": -0.5})
    kept = ("step", "evaluation", "policy_version", "group_id", "rank", "of", "trajectory_id", "prompt_id", "finish")
    assert [record[name] for name in kept] == [5, False, 3, 11, 1, 1, "task-7/0", "task-7", "answered"]
    assert record["token_versions"] == [3, 4]
    assert list(trajectory.token_ids) == before


@pytest.mark.parametrize("length", [10, 11])
def test_a_very_long_text_is_cut_in_its_middle_and_says_so(monkeypatch, length):
    monkeypatch.setattr(samples, "MOST_TOKENS", 10)
    tokenizer = tokenizers.CharacterTokenizer()
    trajectory = rollout("p/0")
    trajectory.append_text(tokenizer.encode("abcdefghijk"[:length]), protocols.TokenSource.PROMPT)
    [record] = samples.Samples(1, 0, tokenizer).of_evaluation(2, [trajectory])
    assert record["prompt"] == ("abcdefghij" if length == 10 else "abcde\n[... 1 tokens left out ...]\nghijk")
    assert (record["evaluation"], record["step"], record["policy_version"]) == (True, 2, 2)
