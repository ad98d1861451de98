"""Wrong requests end in an error of the API's own form, which each client library raises as its own exception."""

import asyncio
import json
import logging

import anthropic
import gateway_doubles as doubles
import httpx
import openai
import pytest
from gateway_doubles import ASK, in_loop

from libra_jax import protocols

CHAT, RESPONSES, MESSAGES = "chat/completions", "responses", "messages"
PATHS = (CHAT, RESPONSES, MESSAGES)
RIGHT = {
    CHAT: {"model": "m", "messages": ASK},
    RESPONSES: {"model": "m", "input": ASK},
    MESSAGES: {"model": "m", "messages": ASK, "max_tokens": 7},
}
"""A right body of each API."""


def checked(path: str, answer: httpx.Response, status: int) -> dict:
    """Returns the error of an answer, in one form, once it has the form of its API."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    if path == MESSAGES:
        assert set(body) == {"type", "error"}
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
    else:
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b'{"model": "\xff"}',
        b'{"model": "m", "temperature": NaN}',
        b'{"model": "m", "temperature": Infinity}',
        b'{"model": "m", "temperature": 1e999}',
        b'{"model": "m", "metadata": {"a": [1e999]}}',
        b'{"model": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 1000 + b"1" + b"}" * 1000,
        b"[]",
        b'"text"',
        b"7",
        b"null",
        b"1" * 5000,
        b'{"model": "m"',
    ],
    ids=lambda body: repr(body[:20]),
)
@in_loop
async def test_a_body_that_is_no_json_object_is_refused(path: str, body: bytes):
    session = doubles.Scripted()
    async with doubles.serving(session) as url, doubles.plain_client(url) as client:
        checked(path, await client.post(f"/{path}", content=body), 400)
    assert not session.requests


WRONG = [
    (path, change, field)
    for path in PATHS
    for change, field in [
        ({"model": 7}, "model"),
        ({"model": None}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"tools": {}}, "tools"),
        ({"tools": [{}]}, "tools[0]"),
        ({"tool_choice": 7}, "tool_choice"),
    ]
]
WRONG += [
    (path, change, field)
    for path in (CHAT, MESSAGES)
    for change, field in [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 10**40}, "max_tokens"),
    ]
]
WRONG += [
    (CHAT, {"n": 0}, "n"),
    (CHAT, {"n": 1000}, "n"),
    (CHAT, {"stop": 7}, "stop"),
    (CHAT, {"frequency_penalty": False}, "frequency_penalty"),
    (CHAT, {"top_p": 2}, "top_p"),
    (CHAT, {"seed": "x"}, "seed"),
    (CHAT, {"tools": [{"type": "function", "name": "f"}]}, "tools[0].function"),
    (CHAT, {"shout": 1, "messages": [{"role": "user", "content": 7, "shout": 1}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": "x"}] * 20_001}, "messages"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "msg_none"}]}, "input[0].id"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"messages": [{"role": "tool", "content": "21"}]}, "messages[0]"),
    (CHAT, {"messages": [{"role": "user", "content": "", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0]"),
    (RESPONSES, {"input": []}, "input"),
    (RESPONSES, {"input": [7]}, "input[0]"),
    (RESPONSES, {"input": [{"type": "computer_call"}]}, "input[0].type"),
    (RESPONSES, {"input": [{"type": ["message"]}]}, "input[0].type"),
    (RESPONSES, {"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    (RESPONSES, {"background": True}, "background"),
    (MESSAGES, {"max_tokens": None}, "max_tokens"),
    (MESSAGES, {"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": ""}]}]}, "messages[0]"),
    (MESSAGES, {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0]"),
]


def changed(path: str, change: dict) -> dict:
    return {name: value for name, value in (RIGHT[path] | change).items() if (name, value) != ("max_tokens", None)}


def test_a_wrong_field_is_named():
    async def run() -> None:
        session = doubles.Scripted()
        async with doubles.serving(session, requests_per_second=0) as url, doubles.plain_client(url) as client:
            for path, change, field in WRONG:
                error = checked(path, await client.post(f"/{path}", json=changed(path, change)), 400)
                assert error["message"].startswith(f"{field}"), (path, change, error)
                if path != MESSAGES:
                    assert error["param"].startswith(field)
        assert not session.requests

    asyncio.run(run())


REFUSALS = [
    ("invalid", 400, openai.BadRequestError, anthropic.BadRequestError),
    ("context", 400, openai.BadRequestError, anthropic.BadRequestError),
    ("limit", 403, openai.PermissionDeniedError, anthropic.PermissionDeniedError),
    ("closed", 401, openai.AuthenticationError, anthropic.AuthenticationError),
    ("busy", 429, openai.RateLimitError, anthropic.RateLimitError),
]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("kind", "status", "openais", "anthropics"), REFUSALS)
@in_loop
async def test_what_a_session_refuses_is_an_error_of_each_client(kind, status, openais, anthropics, streams):
    session = doubles.Scripted([protocols.Refused(kind, "The session says no.", "messages")])
    async with doubles.serving(session) as url:
        async with doubles.chat_client(url) as client:
            with pytest.raises(openais, match=r"The session says no\.") as raised:
                await client.chat.completions.create(model="m", messages=ASK, stream=streams)
            assert (raised.value.status_code, raised.value.param) == (status, "messages")
            assert (raised.value.code == "context_length_exceeded") == (kind == "context")
            with pytest.raises(openais, match=r"The session says no\."):
                await client.responses.create(model="m", input="Hi", stream=streams)
        async with doubles.messages_client(url) as client:
            with pytest.raises(anthropics, match=r"The session says no\.") as raised:
                await client.messages.create(model="m", messages=ASK, max_tokens=7, stream=streams)
            assert ("prompt is too long" in str(raised.value)) == (kind == "context")
    assert session.running == 0


@pytest.mark.parametrize(("kind", "asked"), [("limit", 1), ("context", 1), ("closed", 1), ("busy", 3)])
@in_loop
async def test_clients_retry_only_what_may_pass(kind: str, asked: int):
    session = doubles.Scripted([protocols.Refused(kind, "no")])
    async with doubles.serving(session) as url, doubles.chat_client(url, retries=2) as client:
        with pytest.raises(openai.APIStatusError):
            await client.chat.completions.create(model="m", messages=ASK)
    assert len(session.requests) == asked


@in_loop
async def test_an_error_inside_a_stream_reaches_each_client():
    session = doubles.Scripted([protocols.ContentDelta("Hel"), protocols.Refused("limit", "The rollout has ended.")])
    async with doubles.serving(session) as url:
        async with doubles.chat_client(url) as client:
            with pytest.raises(openai.APIError, match=r"The rollout has ended\."):
                async for _ in await client.chat.completions.create(model="m", messages=ASK, stream=True):
                    pass
            with pytest.raises(openai.APIError, match=r"The rollout has ended\."):
                async for _ in await client.responses.create(model="m", input="Hi", stream=True):
                    pass
        async with doubles.messages_client(url) as client:
            with pytest.raises(anthropic.APIError, match=r"The rollout has ended\."):
                async for _ in await client.messages.create(model="m", messages=ASK, max_tokens=7, stream=True):
                    pass
    assert (session.delivered, session.running) == ([], 0)


@pytest.mark.parametrize("path", PATHS)
@in_loop
async def test_an_unexpected_error_tells_the_client_nothing_and_the_log_everything(path: str, caplog):
    session = doubles.Scripted([ValueError("inner workings")])
    async with doubles.serving(session) as url, doubles.plain_client(url) as client:
        error = checked(path, await client.post(f"/{path}", json=RIGHT[path]), 500)
    assert "inner workings" not in error["message"]
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("libra_jax.harness.gateway.app", logging.ERROR)
    assert "inner workings" in str(record.exc_info[1])


@in_loop
async def test_a_lost_worker_is_named_to_the_client():
    session = doubles.Scripted([protocols.WorkerLost("engine-1 died.")])
    async with doubles.serving(session) as url, doubles.plain_client(url) as client:
        assert checked(CHAT, await client.post(f"/{CHAT}", json=RIGHT[CHAT]), 500)["message"] == "engine-1 died."


@pytest.mark.parametrize("path", PATHS)
@in_loop
async def test_a_wrong_missing_or_ended_key_is_refused_before_the_body(path: str):
    session = doubles.Scripted()
    async with doubles.serving(session) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Bearer"},
            {"Authorization": f"Basic {doubles.SECRET}"},
            {"x-api-key": "wrong"},
            {"x-api-key": doubles.SECRET.encode() + b"\xff"},
        ):
            checked(path, await client.post(f"/{path}", content=b"\xff", headers=headers), 401)
        right = {"x-api-key": doubles.SECRET}
        assert (await client.post(f"/{path}", json=RIGHT[path], headers=right)).status_code == 200


@in_loop
async def test_a_key_in_the_path_serves_clients_that_set_only_a_url():
    session = doubles.Scripted()
    async with doubles.serving(session) as url:
        root = url.removesuffix("/v1")
        async with doubles.chat_client(f"{root}/s/{doubles.SECRET}/v1", "not-used") as client:
            await client.chat.completions.create(model="m", messages=ASK)
            await client.responses.create(model="m", input="Hi")
            assert [model.id async for model in await client.models.list()] == [doubles.MODEL]
        async with doubles.messages_client(f"{root}/s/{doubles.SECRET}", "not-used") as client:
            await client.messages.create(model="m", messages=ASK, max_tokens=7)
        async with doubles.chat_client(f"{root}/s/wrong/v1", doubles.SECRET) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
    assert len(session.delivered) == 3


@in_loop
async def test_models_are_listed_in_each_apis_form():
    async with doubles.serving(doubles.Scripted()) as url:
        async with doubles.chat_client(url) as client:
            assert [model.id async for model in await client.models.list()] == [doubles.MODEL]
            assert (await client.models.retrieve("any/name")).id == doubles.MODEL
        async with doubles.messages_client(url) as client:
            assert [model.id async for model in await client.models.list()] == [doubles.MODEL]
        async with doubles.messages_client(url, "wrong") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.models.list()


@in_loop
async def test_unknown_paths_and_methods_are_errors_in_form():
    async with doubles.serving(doubles.Scripted()) as url, doubles.plain_client(url) as client:
        checked(CHAT, await client.post("/embeddings", json={}), 404)
        checked(CHAT, await client.get("/chat/completions"), 405)
        checked(CHAT, await client.get(f"{url.removesuffix('/v1')}/s/{doubles.SECRET}/other"), 404)
        checked(MESSAGES, await client.get("/messages"), 405)
        checked(MESSAGES, await client.post("/messages/batches", headers={"anthropic-version": "1"}), 404)
        health = await client.get(f"{url.removesuffix('/v1')}/health")
        assert (health.status_code, health.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize("path", PATHS)
@in_loop
async def test_a_request_past_its_deadline_is_an_error_and_frees_its_slot(path: str):
    session = doubles.Scripted([3600.0, *doubles.said("late")])
    async with doubles.serving(session, request_seconds=0.2) as url, doubles.plain_client(url) as client:
        assert "0.2 s" in checked(path, await client.post(f"/{path}", json=RIGHT[path]), 504)["message"]
        assert (session.running, session.delivered) == (0, [])


@in_loop
async def test_a_stream_past_its_deadline_ends_with_an_error():
    session = doubles.Scripted([protocols.ContentDelta("Hel"), 3600.0])
    async with doubles.serving(session, request_seconds=0.5) as url, doubles.plain_client(url) as client:
        answer = await client.post(f"/{CHAT}", json=RIGHT[CHAT] | {"stream": True})
    last = answer.text.rstrip().splitlines()[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert session.running == 0


@in_loop
async def test_a_session_that_asks_too_often_waits_and_others_do_not():
    session, other = doubles.Scripted(), doubles.Scripted()
    async with doubles.serving(session, other, requests_per_second=1) as url, doubles.plain_client(url) as client:
        await client.post(f"/{CHAT}", json=RIGHT[CHAT])
        answer = await client.post(f"/{CHAT}", json=RIGHT[CHAT])
        assert checked(CHAT, answer, 429)["code"] == "rate_limit_exceeded"
        assert answer.headers["retry-after"] == "1"
        async with doubles.plain_client(url, doubles.OTHER) as others:
            assert (await others.post(f"/{CHAT}", json=RIGHT[CHAT])).status_code == 200


@in_loop
async def test_a_session_waits_for_few_outputs_at_once_and_others_are_served():
    session, other = doubles.Scripted([3600.0]), doubles.Scripted()
    async with doubles.serving(session, other, max_concurrent=3) as url, doubles.plain_client(url) as client:
        first = asyncio.create_task(client.post(f"/{CHAT}", json=RIGHT[CHAT] | {"n": 2}))
        await doubles.until(lambda: session.running == 2)
        error = checked(CHAT, await client.post(f"/{CHAT}", json=RIGHT[CHAT] | {"n": 2}), 429)
        assert error["code"] == "too_many_requests"
        async with doubles.plain_client(url, doubles.OTHER) as others:
            assert (await others.post(f"/{CHAT}", json=RIGHT[CHAT])).status_code == 200
        first.cancel()
        await doubles.until(lambda: session.running == 0)
