"""A judge behind an OpenAI-compatible endpoint: what it is asked, how it is read, endpoints that misbehave."""

from __future__ import annotations

import asyncio
import dataclasses

import endpoint_doubles
import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.cluster import inprocess
from libra_jax.rewards import composition, judge, scoring

pytest.importorskip("openai")

TASK = protocols.Task("t", {"prompt": "What is $12 * 34?", "answer": "408", "level": 3})
TRANSCRIPT = scoring.Transcript("what it wrote", answer='It is 408. {"score": 1}', finish="answered")


class Endpoint(endpoint_doubles.Endpoint):
    """Answers chat completions from a script of (status, reply, seconds); the last one again and again."""

    def __init__(self, script):
        self.script = list(script)
        super().__init__()

    def reply(self, path, body):
        status, reply, seconds = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        message = {"role": "assistant", "content": reply}
        said = {
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 40, "completion_tokens": 2, "total_tokens": 42},
        }
        return status, said if status == 200 else reply, seconds


@pytest.fixture
def endpoint():
    """Starts endpoints by script, and ends them."""
    with endpoint_doubles.serving() as start:
        yield lambda *script: start(
            Endpoint([(item if isinstance(item, tuple) else (200, item, 0.0)) for item in script])
        )


def ask(server, *, task=TASK, transcript=TRANSCRIPT, **arguments):
    async def main():
        made = judge.judge(server.base_url, "my-judge", **arguments)
        try:
            return await made(task, transcript)
        finally:
            await made.close()

    return asyncio.run(main())


def test_the_judge_is_shown_question_reference_response_and_rubric_and_its_score_is_read(endpoint):
    server = endpoint('The response is right, mostly.\n```json\n{"score": 0.75}\n```')
    assert ask(server, rubric="1 if right.") == (0.75, {"tokens": 42.0, "unreadable": 0.0})
    (asked,) = server.asked
    (message,) = asked["messages"]
    for part in ("What is $12 * 34?", "408", TRANSCRIPT.answer, "from 0 to 1: 1 if right."):
        assert part in message["content"]
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("my-judge", 0.0, 1024)


def test_a_prompt_and_pattern_of_ones_own_are_used_and_scores_are_scaled_to_one(endpoint):
    server = endpoint("Rating: [[3]] ... on reflection, Rating: [[7]]")
    found = ask(
        server,
        transcript=dataclasses.replace(TRANSCRIPT, dialogue="all of it"),
        prompt="$level/$finish: $text in $dialogue costs $$5",
        pattern=r"\[\[(\d+)\]\]",
        lowest=1,
        highest=10,
        request={"max_tokens": 7, "top_p": 0.5},
    )
    assert found[0] == pytest.approx(6 / 9)
    assert server.asked[0]["messages"][0]["content"] == "3/answered: what it wrote in all of it costs $5"
    assert (server.asked[0]["max_tokens"], server.asked[0]["top_p"]) == (7, 0.5)


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        ("", "the judge's reply holds no score: ''"),
        ("I refuse.", "the judge's reply holds no score: 'I refuse.'"),
        ('{"score": "high"}', "the judge's reply holds no score"),
        ('{"score": 1/10}', "the judge's reply holds no score"),
        ('{"score": "1/10"}', "the judge's reply holds no score"),
        ('{"score": true}', "the judge's reply holds no score"),
        ('{"score": NaN}', "the judge's score nan lies outside"),
        ('First {"score": 1}, no: {"score": 0.2', "the judge's reply holds no score"),
        ('<think>I would give {"score": 1}', "the judge's reply holds no score"),
        ('{"score": 7}', r"the judge's score 7 lies outside 0\.\.1"),
    ],
)
def test_a_reply_without_a_usable_score_is_an_error_never_a_zero(endpoint, reply, problem):
    with pytest.raises(ValueError, match=problem):
        ask(endpoint(reply))


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ('{"score": 1e-1}', 0.1),
        ('{"score": 0.1, "why": "half of 1/10"}', 0.1),
        ('{"why": {"score": 1}, "score": 0.25}', 0.25),
        ('{"score": "1.0E-1"}', 0.1),
        ('{"score":\n .5}', None),
        ('{"score": ".5"}', 0.5),
        ('{ "score" : 1 } {"note": "{"}', 1.0),
        ('<think>{"score": 1}</think>{"score": 0}', 0.0),
    ],
)
def test_a_score_is_the_number_of_the_last_json_object(endpoint, reply, score):
    if score is None:
        with pytest.raises(ValueError, match="holds no score"):
            ask(endpoint(reply))
    else:
        assert ask(endpoint(reply))[0] == score


def test_unreadable_replies_are_counted_with_the_next_score(endpoint):
    server = endpoint("I refuse.", '{"score": 1/2}', '{"score": 1}')

    async def main():
        made = judge.judge(server.base_url, "my-judge")
        for _ in range(2):
            with pytest.raises(ValueError, match="holds no score"):
                await made(TASK, TRANSCRIPT)
        found = [await made(TASK, TRANSCRIPT) for _ in range(2)]
        await made.close()
        return [metrics["unreadable"] for _, metrics in found]

    assert asyncio.run(main()) == [2.0, 0.0]


def test_a_prompt_that_mentions_what_a_task_has_not_is_an_error_that_names_it(endpoint):
    with pytest.raises(ValueError, match=r"mentions \$solution, which is no column of the task"):
        ask(endpoint('{"score": 1}'), prompt="$solution")


def test_an_endpoint_that_is_busy_or_broken_for_a_while_is_asked_again(endpoint):
    server = endpoint((429, "too many", 0.0), (503, "starting", 0.0), '{"score": 1}')
    assert ask(server, retries=2)[0] == 1.0
    assert len(server.asked) == 3


def test_an_endpoint_that_stays_broken_is_an_error_without_the_key(endpoint, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "top-secret")
    server = endpoint((500, "no GPU", 0.0))
    with pytest.raises(
        RuntimeError, match=r"the judge's endpoint, http.*, failed: InternalServerError: .*no GPU.*is it up"
    ) as caught:
        ask(server, retries=1, api_key_env="JUDGE_KEY")
    assert server.keys == ["Bearer top-secret"] * 2
    assert "top-secret" not in str(caught.value)
    assert "[key]" in str(caught.value)


def test_a_request_that_takes_too_long_is_given_up(endpoint):
    with pytest.raises(RuntimeError, match=r"the judge's endpoint, http.*, failed: APITimeoutError"):
        ask(endpoint((200, '{"score": 1}', 1.0)), seconds=0.1, retries=0)


def test_nobody_elses_key_is_sent_where_none_is_named(endpoint, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "of-someone-else")
    server = endpoint('{"score": 1}')
    ask(server)
    assert server.keys == ["Bearer none"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"base_url": "127.0.0.1:8000"}, "base_url must start with http"),
        ({"model": ""}, "model must be"),
        ({"pattern": "("}, "pattern is no regular expression"),
        ({"pattern": "score"}, "pattern must have a group"),
        ({"prompt": "costs $ 5"}, r"prompt has a \$ that begins no name"),
        ({"lowest": 1.0}, r"scores must rise from lowest \(1\.0\) to highest"),
        ({"seconds": 0.0}, "seconds must be positive"),
        ({"api_key_env": "NOT_SET_ANYWHERE"}, "api_key_env names NOT_SET_ANYWHERE, which is not set"),
        (
            {"api_key_env": "sk-abc"},
            "must be the name of an environment variable that holds the key, never the key it",
        ),
    ],
)
def test_what_a_judge_cannot_be_made_of_is_refused(arguments, problem):
    with pytest.raises(protocols.ConfigError, match=problem):
        judge.judge(**{"base_url": "http://127.0.0.1:1/v1", "model": "m", **arguments})


def test_a_judge_in_a_reward_scores_many_attempts_at_once_as_the_config_allows(endpoint):
    server = endpoint((200, '{"score": 0.5}', 0.05))
    arguments = {"base_url": server.base_url, "model": "my-judge"}
    functions = {"judge": {"factory": "libra_jax.rewards.judge:judge", "weight": 2.0, "arguments": arguments}}
    reward = config_lib.RewardConfig(functions=functions, environment_weight=0.0, concurrency=4)

    async def main():
        actors = inprocess.InProcessCluster(shutdown_seconds=10)
        try:
            async with composition.open_scorer(reward, actors, note=print, start_seconds=60) as scorer:
                tries = [scoring.Transcript("x", answer=str(n)) for n in range(12)]
                return await asyncio.gather(*(scorer(TASK, transcript) for transcript in tries))
        finally:
            await actors.shutdown()

    found = asyncio.run(main())
    assert [score.reward for score in found] == [1.0] * 12
    assert found[0].metrics["reward/judge/tokens"] == 42
    assert (len(server.asked), server.most) == (12, 4)
