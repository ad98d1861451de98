"""Environments served by OpenEnv. The server here speaks the protocol of openenv-core 0.3, as its own documents it."""

import asyncio
import contextlib
import dataclasses
import json
import sys

import loop_doubles
import pytest

from libra_jax import protocols
from libra_jax.environments import episodes, openenv
from libra_jax.rollouts import loop

websockets = pytest.importorskip("websockets.asyncio.server")

WIDE = loop.Limits(max_turns=6, max_tokens=60, max_context=900, tool_seconds=5.0, temperature=1.0)


class Echo:
    """The package's echo environment, a reward of 0.1 a letter, behind its protocol; and some words that break it."""

    def __init__(self, capacity=8):
        self.capacity, self.open, self.most, self.resets, self.closed = capacity, 0, 0, [], 0

    @contextlib.asynccontextmanager
    async def serving(self):
        async with websockets.serve(self.session, "127.0.0.1", 0) as server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def session(self, socket):
        if self.open == self.capacity:
            await socket.send(self.error("CAPACITY_REACHED", "Server at capacity"))
            return
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            async for text in socket:
                message = json.loads(text)
                if message["type"] == "close":
                    self.closed += 1
                    return
                answer = await self.answer(message["type"], message.get("data", {}))
                if answer is None:
                    await socket.close(1011)
                    return
                await socket.send(answer)
        finally:
            self.open -= 1

    async def answer(self, kind, data):
        if kind == "reset":
            self.resets.append(data)
            return self.observation("ready!")
        word = data.get("message")
        if word is None:
            return self.error("VALIDATION_ERROR", "Invalid message", errors=[{"msg": "Field required"}])
        if word == "raise":
            return self.error("EXECUTION_ERROR", "division by zero")
        if word == "hang":
            await asyncio.sleep(1)
        if word == "nonsense":
            return "<html>"
        return None if word == "die" else self.observation(word, done=word == "end")

    @staticmethod
    def observation(text, done=False):
        seen = {"echoed_message": text, "message_length": len(text)}
        return json.dumps(
            {"type": "observation", "data": {"observation": seen, "reward": 0.1 * len(text), "done": done}}
        )

    @staticmethod
    def error(code, message, **more):
        return json.dumps({"type": "error", "data": {"message": message, "code": code, **more}})


def attempt(outputs, server=None, limits=WIDE, count=1, **arguments):
    """What the loop makes of these outputs, `count` times side by side."""
    server = server or Echo()

    async def one(url, number):
        trajectory = protocols.Trajectory(f"t/{number}", "t")
        return await loop.run_rollout(
            loop.RolloutSetup(
                trajectory=trajectory,
                task=protocols.Task("t", {"seed": 6}),
                tokenizer=loop_doubles.TOKENIZER,
                sampler=loop_doubles.ScriptedSampler(outputs),
                limits=limits,
            ),
            openenv.environment(url=url, **arguments),
        )

    async def body():
        async with server.serving() as url:
            return await asyncio.gather(*(one(url, number) for number in range(count)))

    trajectories = asyncio.run(body())
    return trajectories[0] if count == 1 else trajectories


def shown(trajectory):
    texts = loop_doubles.tool_text(trajectory).split("<|tool|>")[1:]
    return [text.partition("<|im_end|>")[0] for text in texts]


def test_an_episode_is_played_until_the_server_ends_it():
    server = Echo()
    trajectory = attempt(["I say <answer>hello</answer>", "end"], server, observe="echoed_message")
    prompt = loop_doubles.TOKENIZER.decode(trajectory.token_ids[: trajectory.prompt_tokens])
    assert prompt == "<|user|>ready!<|im_end|><|assistant|>"
    assert shown(trajectory) == ["hello"]
    assert trajectory.reward == pytest.approx(0.8)
    assert [(turn.tool, turn.status) for turn in trajectory.turns] == [("openenv", "success")] * 2
    assert (server.resets, server.open, server.closed) == ([{"seed": 6}], 0, 1)
    loop_doubles.check_books(trajectory)


def test_actions_are_whole_outputs_or_objects_and_episodes_can_be_cut_off():
    trajectory = attempt(["<think>hm</think> a <b>"], answer="whole", max_steps=1, reward="last")
    assert trajectory.reward == pytest.approx(0.5)
    assert trajectory.metrics["episode_cut"] == 1.0
    outputs = ['{"message": "hi"}', "[]", "{", '{"massage": "hi"}', '{"message": "end"}']
    trajectory = attempt(outputs, answer="json")
    assert shown(trajectory) == [
        '{"echoed_message": "hi", "message_length": 2}',
        "error: the action must be a JSON object",
        "error: the action is no JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))",
        "error: Invalid message; Field required",
    ]
    assert [turn.status for turn in trajectory.turns] == ["success", "failure", "failure", "failure", "success"]
    assert trajectory.metrics["no_moves"] == 3.0


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("raise", r"OpenEnv server ws://127\.0\.0\.1:\d+/ws: EXECUTION_ERROR: division by zero"),
        ("die", r"OpenEnv server .*: was lost"),
        ("nonsense", r"OpenEnv server .*: answered what is no JSON"),
        ("hang", r"step took more than 0\.3 s"),
    ],
)
def test_what_breaks_is_a_crash(word, sentence):
    server = Echo()
    short = loop.Limits(max_turns=6, max_tokens=60, max_context=900, tool_seconds=0.3, temperature=1.0)
    with pytest.raises(protocols.EnvironmentCrashed, match=sentence):
        attempt([word], server, short if word == "hang" else WIDE)


def test_a_server_that_is_not_there_is_a_crash():
    environment = openenv.environment(url="http://127.0.0.1:9")
    with pytest.raises(protocols.EnvironmentCrashed, match=r"OpenEnv server ws://127\.0\.0\.1:9/ws: cannot be reached"):
        asyncio.run(environment.reset(protocols.Task("t", {"seed": 0})))


def test_no_more_attempts_are_at_the_server_than_it_may_have():
    server = Echo(capacity=2)
    trajectories = attempt(["hello", "end"], server, count=8, sessions=2)
    assert [trajectory.finish for trajectory in trajectories] == ["answered"] * 8
    assert server.most == 2


def test_a_server_that_is_full_for_the_moment_is_waited_for(monkeypatch):
    server = Echo(capacity=1)
    assert len(attempt(["end"], server, count=3, sessions=3)) == 3
    monkeypatch.setattr(openenv, "CAPACITY_SECONDS", 0.1)
    with pytest.raises(protocols.EnvironmentCrashed, match="Server at capacity"):
        attempt(["end"], Echo(capacity=0))


def test_a_wait_for_a_session_that_takes_too_long_names_its_field():
    short = dataclasses.replace(WIDE, reset_seconds=0.3)
    with pytest.raises(protocols.EnvironmentCrashed, match=r"reset took more than 0\.3 s \(config\.task\.reset_sec"):
        attempt(["hang", "end"], limits=short, count=2, sessions=1)


def test_a_missing_package_is_named_before_a_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "websockets.asyncio.client", None)
    with pytest.raises(protocols.ConfigError, match=r"config\.task\.environment: .* pip install 'websockets>=15'"):
        openenv.environment(url="http://localhost:8000")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"url": "localhost:8000"}, r"url: 'localhost:8000' must be of the form http://HOST:PORT"),
        ({"answer": "all"}, r"answer: 'all' is not one of final, whole, json"),
        ({"reward": "sum"}, r"reward: 'sum' is not one of return, last"),
        ({"max_steps": -1}, r"max_steps: must be 0 \(no limit\) or more, not -1"),
        ({"sessions": 0}, r"sessions: must be positive, not 0"),
    ],
)
def test_nonsense_is_named(arguments, sentence):
    with pytest.raises(protocols.ConfigError, match=r"config\.task\.environment_arguments\." + sentence):
        openenv.environment(**{"url": "http://localhost:8000", **arguments})
    with pytest.raises(protocols.ConfigError, match=r"config\.task\.path: "):
        episodes.task_source(path="x")


def test_an_observation_without_the_field_that_is_to_be_shown_is_named():
    with pytest.raises(
        protocols.ConfigError, match=r"observe: the server's observations have no 'text'; they have echoed"
    ):
        attempt(["end"], observe="text")


def test_no_held_out_episode_is_trained_on():
    tasks = episodes.task_source(seed=1)
    seeds = {tasks.task(index).payload["seed"] % 2 for index in range(50)}
    assert seeds == {0}
    assert tasks.evaluation_task(3).payload == episodes.task_source(seed=2).evaluation_task(3).payload
    assert tasks.evaluation_task(3).payload["seed"] % 2 == 1
