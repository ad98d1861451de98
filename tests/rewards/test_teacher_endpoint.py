"""A teacher behind an endpoint: what it is asked, how vLLM's answer is read, servers that cannot teach."""

from __future__ import annotations

import asyncio
import math

import endpoint_doubles
import hypothesis
import pytest
from hypothesis import strategies as st

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.chat.tokenizers import CharacterTokenizer
from libra_jax.rewards import teacher

pytest.importorskip("openai")

URL = "http://127.0.0.1:1/v1"


def log_prob(tokens, at):
    return -1.0 - tokens[at] / 7 - at / 100


class Server(endpoint_doubles.Endpoint):
    """Answers as vLLM 0.32 does (the format was recorded from it); `change` edits what it says of a prompt."""

    models = (("my-teacher", 64),)
    troubles = ()
    seconds = 0.0

    @staticmethod
    def change(scored):
        return scored

    def reply(self, path, body):
        if path == "/v1/models":
            data = [{"id": name, "object": "model", "max_model_len": room} for name, room in self.models]
            return 200, {"object": "list", "data": data}, 0.0
        assert path == "/v1/completions"
        if self.troubles:
            status, *self.troubles = self.troubles
            return status, "not now", 0.0
        tokens, decode = body["prompt"], CharacterTokenizer().decode
        scored = [None]
        for at, token in list(enumerate(tokens))[1:]:
            entry = {"logprob": log_prob(tokens, at), "rank": 3, "decoded_token": decode([token])}
            scored.append({str(token): entry})
        choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}
        choice["prompt_logprobs"] = self.change(scored)
        return 200, {"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": [choice]}, self.seconds


@pytest.fixture
def server():
    with endpoint_doubles.serving() as start:
        yield start(Server())


def run_config(url, longest=63, **arguments):
    return config_lib.RunConfig(
        algorithm=config_lib.AlgorithmConfig(teacher=url, teacher_arguments=arguments, kl_coefficient=0.1),
        rollout=config_lib.RolloutConfig(max_context=longest, max_tokens=8, temperature=1.0),
    )


def scores(url, *rollouts, longest=63, **arguments):
    async def main():
        async with teacher.open_teacher(run_config(url, longest, **arguments), CharacterTokenizer()) as made:
            return await asyncio.gather(*(made.log_probs(tokens) for tokens in rollouts))

    return asyncio.run(main())


def test_the_tokens_of_rollouts_are_scored_by_their_ids(server):
    rollouts = [[7, 7, 40, 3], [5], [], [1, 2]]
    found = scores(server.base_url, *rollouts)
    assert found == [[log_prob(tokens, at) if at else 0.0 for at in range(len(tokens))] for tokens in rollouts]
    asked = next(body for body in server.asked if body["prompt"] == rollouts[0])
    assert (asked["model"], asked["max_tokens"], asked["prompt_logprobs"]) == ("my-teacher", 1, 0)


def test_many_rollouts_are_scored_at_once_as_the_arguments_allow(server):
    server.seconds = 0.1
    scores(server.base_url, *([n, n + 1] for n in range(9)), concurrency=3)
    assert server.most == 3


def test_a_server_that_fails_for_a_while_is_asked_again(server):
    server.troubles = (503, 429)
    assert scores(server.base_url, [1, 2], retries=2) == [[0.0, log_prob([1, 2], 1)]]


def test_a_server_that_stays_broken_fails_the_rollout_without_the_key(server, monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", "top-secret")

    async def main():
        made = teacher.create(server.base_url, "my-teacher", api_key_env="TEACHER_KEY", retries=1)
        server.troubles = [500] * 9
        await made.log_probs([1, 2])

    with pytest.raises(
        protocols.TeacherFailed, match=r"teacher my-teacher at http.* failed: InternalServ.*not now"
    ) as caught:
        asyncio.run(main())
    assert "top-secret" not in str(caught.value)
    assert server.keys == ["Bearer top-secret"] * 2


def test_a_server_that_hangs_fails_the_rollout_at_the_deadline(server):
    server.seconds = 0.5

    async def main():
        await teacher.create(server.base_url, "my-teacher", seconds=0.1, retries=0).log_probs([1, 2])

    with pytest.raises(protocols.TeacherFailed, match=r"failed: (no answer within 0.1 s|APITimeoutError)"):
        asyncio.run(main())


def each(change):
    """Changes the entry of each token but the first."""
    return lambda scored: [None, *({key: change(value) for key, value in one.items()} for one in scored[1:])]


@pytest.mark.parametrize(
    ("changes", "arguments", "sentence"),
    [
        ({}, {"model": "other"}, r"teacher_arguments: .* has no model 'other': name one of its models \(my-teacher\)"),
        ({"models": (("a", 64), ("b", 64))}, {}, r"teacher_arguments: .*serves not just one model: .*\(a, b\)"),
        ({"models": ()}, {}, r"serves not just one model: name one of its models \(none\)"),
        ({"models": (("my-teacher", 63),)}, {}, r"takes 63 tokens, .* may have 64 .*max-model-len"),
        ({"change": lambda scored: None}, {}, r"without prompt_logprobs; .* vLLM"),
        ({"change": lambda scored: scored[:5]}, {}, r"answers 5 log-probabilities for \d+ tokens"),
        ({"change": lambda scored: [None, *scored[:0:-1]]}, {}, r"no log-probability of token \d+ at position 1"),
        (
            {"change": each(lambda entry: {**entry, "logprob": 3.5})},
            {},
            r"answers 3.5 at position 1, which is no log-probability; .*raw_logprobs",
        ),
        ({"change": each(lambda entry: {"rank": 3})}, {}, r"answers None at position 1, which is no log-probability"),
        ({"change": each(lambda entry: entry["logprob"])}, {}, r"answers None at position 1"),
        (
            {"change": each(lambda entry: {**entry, "decoded_token": "ß"})},
            {},
            r"another vocabulary: it reads the policy's tokens of '.*' as 'ßß",
        ),
        ({"troubles": (400,)}, {}, r"refuses \d+ tokens \(BadRequestError.*not now.*\); it must have the policy's voc"),
    ],
)
def test_a_server_that_cannot_teach_is_refused_before_the_first_rollout(server, changes, arguments, sentence):
    for name, value in changes.items():
        setattr(server, name, value)
    with pytest.raises(protocols.ConfigError, match=sentence):
        scores(server.base_url, **arguments)


def test_a_server_that_is_not_there_is_refused_by_its_address():
    with pytest.raises(
        protocols.ConfigError, match=r"algorithm\.teacher: no model server answers at http://127.0.0.1:1/v1"
    ):
        scores(URL, retries=0)


def test_a_url_without_its_path_is_told_from_a_server_that_is_not_there(server, monkeypatch):
    monkeypatch.setattr(server, "reply", lambda path, body: (404, "Not Found", 0.0))
    with pytest.raises(protocols.ConfigError, match=r"answers, but has no .*/models; the URL .* ends with /v1"):
        scores(server.base_url)


@pytest.mark.parametrize("url", ["http://", "htp://host:8000/v1", "https:///v1"])
def test_what_is_no_url_of_a_server_is_refused(url):
    with pytest.raises(protocols.ConfigError, match=r"algorithm\.teacher: .* is no URL .* http://host:port/v1"):
        run_config(url)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"seconds": 0.0}, r"teacher_arguments: the teacher's seconds must be positive"),
        ({"concurrency": 0}, r"teacher_arguments: concurrency must be positive"),
        ({"modle": "m"}, r"teacher_arguments: .*did you mean 'model'"),
        ({"api_key_env": "NOT_SET_ANYWHERE"}, r"api_key_env names NOT_SET_ANYWHERE, which is not set"),
    ],
)
def test_arguments_that_make_no_teacher_are_refused_by_name(arguments, problem):
    algorithm = run_config(URL, **arguments).algorithm
    with pytest.raises(protocols.ConfigError, match=problem):
        teacher.from_config(algorithm)
    if "modle" in arguments:
        with pytest.raises(protocols.ConfigError, match=problem):
            teacher.check(algorithm)
    else:  # another machine may have the key
        teacher.check(algorithm)


def test_a_teacher_behind_an_endpoint_needs_its_temperature_and_its_url():
    with pytest.raises(
        protocols.ConfigError, match=r"rollout\.temperature: 0\.7 cannot be compared .* at temperature 1"
    ):
        config_lib.RunConfig(
            algorithm=config_lib.AlgorithmConfig(teacher=URL, kl_coefficient=0.1),
            rollout=config_lib.RolloutConfig(temperature=0.7),
        )
    with pytest.raises(protocols.ConfigError, match=r"teacher_arguments: are those of a teacher behind a URL"):
        run_config("a/directory", model="m")


@hypothesis.given(st.lists(st.integers(0, 96), min_size=2, max_size=30), st.data())
def test_no_reply_cut_anywhere_passes_as_scores(tokens, data):
    said = b'{"choices": [{"prompt_logprobs": [null, %s]}]}' % b", ".join(
        b'{"%d": {"logprob": %f}}' % (token, log_prob(tokens, at)) for at, token in list(enumerate(tokens))[1:]
    )
    found, _ = teacher._read(said, tokens)
    assert all(math.isclose(a, log_prob(tokens, at), abs_tol=1e-6) for at, a in enumerate(found, 1))
    with pytest.raises(ValueError, match="answers"):
        teacher._read(said[: data.draw(st.integers(0, len(said) - 1))], tokens)
