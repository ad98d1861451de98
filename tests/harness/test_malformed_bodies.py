"""Any body is answered: with an output, or with an error that blames the client. Never with one that blames the run."""

import asyncio
import json

import gateway_doubles as doubles
import httpx
import hypothesis
import property_counts
import pytest
from gateway_doubles import ASK, CALCULATOR
from hypothesis import strategies

from libra_jax import config as config_lib
from libra_jax.harness.gateway import anthropic_messages as anthropic_api
from libra_jax.harness.gateway import app, openai_chat, openai_responses

NAMES = {
    "chat/completions": openai_chat.Completion,
    "responses": openai_responses.ResponsesBody,
    "messages": anthropic_api.MessagesBody,
}
RIGHT = {
    "chat/completions": {
        "model": "m",
        "messages": [*ASK, {"role": "assistant", "content": "a"}],
        "tools": [{"type": "function", "function": CALCULATOR}],
        "stop": ["a"],
    },
    "responses": {
        "model": "m",
        "input": [*ASK, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}],
        "tools": [{"type": "function", **CALCULATOR}],
        "text": {"format": {"type": "text"}},
    },
    "messages": {
        "model": "m",
        "max_tokens": 7,
        "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "a"}]}],
        "tools": [{"name": "calculator", "input_schema": {}}],
    },
}
"""Right bodies, of which parts are replaced."""

scalars = strategies.none() | strategies.booleans() | strategies.integers() | strategies.floats() | strategies.text()
anything = strategies.recursive(
    scalars | strategies.just("text") | strategies.just("function"),
    lambda inner: (
        strategies.lists(inner, max_size=3)
        | strategies.dictionaries(
            strategies.sampled_from(["type", "text", "content", "role", "name", "function", "id", "input"])
            | strategies.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@strategies.composite
def bodies(draw: strategies.DrawFn, path: str) -> bytes:
    """Bytes, JSON, or a right body in which something is replaced."""
    if draw(strategies.integers(0, 9)) == 0:
        return draw(strategies.binary(max_size=40))
    body = json.loads(json.dumps(RIGHT[path]))
    fields = sorted({*NAMES[path].model_fields, *NAMES[path].neutral, *NAMES[path].ignored})
    for _ in range(draw(strategies.integers(1, 3))):
        at, place = body, draw(strategies.sampled_from(fields))
        # Goes down into what is there, and replaces a part of it.
        while isinstance(at.get(place) if isinstance(at, dict) else at[place], dict | list) and draw(
            strategies.booleans()
        ):
            inner = at[place]
            if not inner:
                break
            at, place = (
                inner,
                draw(strategies.sampled_from(sorted(inner) if isinstance(inner, dict) else range(len(inner)))),
            )
        at[place] = draw(anything)
    return json.dumps(body).encode("utf-8", "surrogatepass")


@pytest.mark.parametrize("path", RIGHT)
@hypothesis.settings(max_examples=property_counts.examples(100, 300))
@hypothesis.given(data=strategies.data())
def test_no_body_makes_the_gateway_fail(path: str, data: strategies.DataObject):
    body = data.draw(bodies(path))

    async def ask() -> httpx.Response:
        session = doubles.Scripted(doubles.said("a"))
        limits = config_lib.GatewayConfig()
        # Without a socket: the properties are the application's, and a port for each example would take minutes.
        transport = httpx.ASGITransport(app.application(doubles.Scripts(key=session), limits))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway/v1") as client:
            return await client.post(f"/{path}", content=body, headers={"x-api-key": "key"})

    answer = asyncio.run(ask())
    assert answer.status_code in (200, 400, 429), (body, answer.text)
    if answer.status_code == 400:
        assert answer.json()["error"]["message"]
