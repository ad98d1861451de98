"""Gymnasium-style text environments: public ones, and games with faults."""

import asyncio
import random
import threading

import gym_games
import loop_doubles
import pytest

from configs import environments_cpu
from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.chat import tokenizers
from libra_jax.environments import episodes, gym_text
from libra_jax.rollouts import factories, loop

LAKE = {
    "name": "FrozenLake-v1",
    "arguments": {"render_mode": "ansi", "is_slippery": False},
    "actions": ["left", "down", "right", "up"],
}
GAME = {"name": "Countdown", "make": "gym_games:make"}


def attempt(outputs, seed=4, limits=None, **arguments):
    wide = loop.Limits(max_turns=8, max_tokens=40, max_context=900, tool_seconds=5.0, temperature=1.0)
    task = protocols.Task("t", {"seed": seed})
    environment = gym_text.environment(**arguments)
    return loop_doubles.attempt(outputs, task=task, environment=environment, limits=limits or wide)[0]


def prompt(trajectory):
    return loop_doubles.TOKENIZER.decode(trajectory.token_ids[: trajectory.prompt_tokens])


def shown(trajectory):
    texts = loop_doubles.tool_text(trajectory).split("<|tool|>")[1:]
    return [text.partition("<|im_end|>")[0] for text in texts]


def test_a_public_environment_is_played_to_its_end():
    pytest.importorskip("gymnasium")
    outputs = ["down", "Down", "I go <answer>right</answer>", "2", "<think>up?</think>down", "right"]
    trajectory = attempt(outputs, **LAKE)
    assert prompt(trajectory) == "<|user|>[S]FFF\nFHFH\nFFFH\nHFFG<|im_end|><|assistant|>"
    assert shown(trajectory)[0] == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert (trajectory.reward, trajectory.finish) == (1.0, "answered")
    assert {(turn.tool, turn.status) for turn in trajectory.turns} == {("FrozenLake-v1", "success")}
    assert trajectory.metrics["episode_return"] == 1.0
    assert trajectory.metrics["episode_steps"] == 6.0
    assert trajectory.metrics["rewarded_after_tool"] == 1.0
    loop_doubles.check_books(trajectory)


def test_some_random_episodes_of_the_shipped_config_reach_the_goal():
    """Else every advantage is 0, and the run has nothing to learn from."""
    pytest.importorskip("gymnasium")
    arguments, rng = environments_cpu.get_config().task.environment_arguments, random.Random(0)
    rewards = [attempt(rng.choices(arguments["actions"], k=6), **arguments).reward for _ in range(40)]
    assert 4 <= sum(rewards) <= 16


def test_what_is_no_move_is_a_failure_that_the_policy_sees_and_costs_a_step():
    pytest.importorskip("gymnasium")
    trajectory = attempt(["sideways", "4", "-1", "right"], max_steps=4, **LAKE)
    assert [turn.status for turn in trajectory.turns] == ["failure"] * 3 + ["success"]
    assert shown(trajectory)[0] == "error: 'sideways' is no move; answer with one of left, down, right, up"
    assert (trajectory.reward, trajectory.finish) == (0.0, "answered")
    assert trajectory.metrics["episode_cut"] == 1.0
    assert trajectory.metrics["no_moves"] == 3.0


@pytest.mark.parametrize(("reward", "expected"), [("return", 1.5), ("last", 0.5)])
def test_the_reward_is_the_return_or_the_last_one(reward, expected):
    trajectory = attempt(["2", "1", "0"], reward=reward, **GAME)
    assert trajectory.reward == expected
    assert shown(trajectory) == ["3 left", "1 left"]


def test_texts_are_moves_where_an_environment_takes_them():
    outputs = ["<answer>please</answer>"]
    assert attempt(outputs, name="Words", make="gym_games:make").metrics["episode_return"] == 1.0
    trajectory = attempt(["<think>x</think> <b>please</b>"], name="Words", make="gym_games:make", answer="whole")
    assert trajectory.reward == 1.0


def test_a_seed_is_an_episode_and_no_held_out_one_is_trained_on():
    tasks = episodes.task_source(seed=3)
    train = [tasks.task(index).payload["seed"] for index in range(200)]
    held_out = [tasks.evaluation_task(index).payload["seed"] for index in range(200)]
    assert len(set(train)) == 200
    assert not set(train) & set(held_out)
    assert held_out == [episodes.task_source(seed=8).evaluation_task(index).payload["seed"] for index in range(200)]
    assert prompt(attempt(["2", "2", "2"], seed=5, **GAME)).startswith("<|user|>7 left")


def test_random_episodes_demonstrate_how_moves_are_written():
    environment = gym_text.environment(**GAME)
    task = protocols.Task("t", {"seed": 4})
    trajectory = tokenizers.demonstration_trajectory(task, environment, loop_doubles.TOKENIZER)
    outputs = [message.content for message in environment.demonstration(task) if message.role == "assistant"]
    assert set(outputs) <= {"0", "1", "2"}
    assert trajectory.token_ids == attempt(outputs, **GAME).token_ids
    assert not hasattr(gym_text.environment(name="Words", make="gym_games:make"), "demonstration")


def test_a_broken_environment_is_a_crash():
    arguments = {"fault": "raise"}
    with pytest.raises(protocols.EnvironmentCrashed, match="step raised ValueError: the board is broken"):
        attempt(["0"], arguments=arguments, **GAME)
    short = loop.Limits(max_turns=8, max_tokens=40, max_context=900, tool_seconds=0.1, temperature=1.0)
    with pytest.raises(protocols.EnvironmentCrashed, match=r"step took more than 0\.1 s"):
        attempt(["0"], limits=short, arguments={"fault": "hang"}, **GAME)


def test_an_episode_that_nobody_waits_for_any_more_is_closed_once_it_is_made(monkeypatch):
    begun, go_on, closed = threading.Event(), threading.Event(), threading.Event()
    environment = gym_text.environment(name="Words", make="gym_games:make")

    class Slow(gym_games.Words):
        def __init__(self):
            begun.set()
            go_on.wait(20)

        def close(self):
            closed.set()

    monkeypatch.setattr(gym_games, "Words", Slow)

    async def body():
        resetting = asyncio.create_task(environment.reset(protocols.Task("t", {"seed": 0})))
        await asyncio.to_thread(begun.wait, 20)
        resetting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await resetting
        await environment.close()
        go_on.set()
        return await asyncio.to_thread(closed.wait, 20)

    assert asyncio.run(body())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("\x1b[41mS\x1b[0mFFF", "[S]FFF"),
        ("|\x1b[34;1mR\x1b[0m: |", "|(blue R): |"),
        ("\x1b[43m \x1b[0m\x1b[35mY\x1b[0m", "[ ](magenta Y)"),
        ("\x1b[41mnever closed", "[never closed]"),
        ("\x1b[1mbold\x1b[0m", "bold"),
    ],
)
def test_colours_of_a_terminal_become_signs(text, expected):
    assert gym_text.plain(text) == expected


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({**LAKE, "name": "FrozenLak-v1"}, r"gymnasium:make cannot make 'FrozenLak-v1' .*FrozenLake"),
        ({**LAKE, "arguments": {"render_mode": "ansi", "depth": 3}}, r"cannot make 'FrozenLake-v1' with"),
        ({**LAKE, "actions": ["left", "right"]}, r"\.actions: has 2 names, and FrozenLake-v1 has 4 choices"),
        ({"name": "FrozenLake-v1"}, r"FrozenLake-v1 shows int, which is no text; give it 'arguments': {'render_mode'"),
        ({"name": "Pendulum-v1"}, r"\.name: Pendulum-v1 takes moves of Box.*; only choices"),
        ({**LAKE, "reward": "sum"}, r"\.reward: 'sum' is not one of return, last"),
        ({**LAKE, "answer": "all"}, r"\.answer: 'all' is not one of final, whole"),
        ({**LAKE, "max_steps": -1}, r"\.max_steps: must be 0 \(no limit\) or more, not -1"),
        ({**LAKE, "make": "gymnasiun:make"}, r"\.make: there is no module 'gymnasiun'; did you mean"),
    ],
)
def test_what_cannot_be_played_is_refused(arguments, sentence):
    pytest.importorskip("gymnasium")
    with pytest.raises(protocols.ConfigError, match=r"config\.task\.environment_arguments.*" + sentence):
        gym_text.environment(**arguments)


def test_an_observation_is_written_by_the_users_function():
    pytest.importorskip("gymnasium")
    arguments = {"name": "FrozenLake-v1", "arguments": {"is_slippery": False}, "observe": "gym_games:spell"}
    trajectory = attempt(["1", "1", "2"], max_steps=3, **arguments)
    assert prompt(trajectory).startswith("<|user|>state 0")
    assert shown(trajectory) == ["state 4", "state 8"]


def test_a_config_names_it_and_reads_no_file():
    task = config_lib.TaskConfig(
        source="libra_jax.environments.episodes:task_source",
        environment="libra_jax.environments.gym_text:environment",
        environment_arguments=GAME,
    )
    assert factories.task_source(task, 1).task(0).prompt_id == "episode-train-0"
    assert factories.environment_factory(task)() is not factories.environment_factory(task)()
    with pytest.raises(protocols.ConfigError, match=r"config\.task\.path: episodes are drawn by seeds"):
        episodes.task_source(path="x.jsonl")
