"""Sessions that answer by a script, and a gateway that serves them inside a test's own event loop."""

import asyncio
import contextlib
import functools
import hmac
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence

import anthropic
import httpx
import openai

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.harness.gateway import server

SECRET = "secret-of-a-session"
OTHER = "secret-of-another-session"
MODEL = "tiny"

WAIT_SECONDS = 60.0
"""Deadline of a test's waits."""

Item = protocols.MessageDelta | protocols.Reply | Exception | float
"""A part of an output, an error to raise, or seconds to wait."""


def reply(
    text: str = "",
    calls: Sequence[protocols.ToolCall] = (),
    reasoning: str = "",
    finish: str = "",
    stop_text: str = "",
) -> protocols.Reply:
    """The end of an output with 5 tokens after a context of 11."""
    message = protocols.Message("assistant", text, tuple(calls), reasoning=reasoning)
    ids, log_probs = [7, 8, 9, 10, 2], [-0.5, -0.25, 0.0, -1.5, float("-inf")]
    finish = finish or ("tool_calls" if calls else "stop")
    return protocols.Reply(message, finish, 11, 5, ids, log_probs, stop_text)


def said(text: str, **more: str) -> Sequence[Item]:
    """An output that says a text, in two parts."""
    half = len(text) // 2
    return [protocols.ContentDelta(text[:half]), protocols.ContentDelta(text[half:]), reply(text, **more)]


def called(*calls: protocols.ToolCall, text: str = "", reasoning: str = "") -> Sequence[Item]:
    """An output that thinks, speaks and calls tools, each in parts."""
    items: list[Item] = [protocols.ReasoningDelta(part) for part in reasoning]
    items += [protocols.ContentDelta(text)] if text else []
    for number, call in enumerate(calls):
        half = len(call.arguments) // 2
        items.append(protocols.ToolCallDelta(number, call.call_id, call.name, call.arguments[:half]))
        items.append(protocols.ToolCallDelta(number, "", "", call.arguments[half:]))
    return [*items, reply(text, calls, reasoning)]


class Scripted(protocols.Conversation):
    """A session that answers each request with the next script, and the last one from then on."""

    def __init__(self, *scripts: Sequence[Item]) -> None:
        self.scripts = list(scripts) or [said("Hello there.")]
        self.requests: list[protocols.ChatRequest] = []
        self.delivered: list[protocols.Reply] = []
        self.refusals: list[str] = []
        self.running = self.ended = 0

    def note_refusal(self, sentence: str) -> None:
        self.refusals.append(sentence)

    async def reply(
        self, request: protocols.ChatRequest
    ) -> AsyncGenerator[protocols.MessageDelta | protocols.Reply, None]:
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        self.requests.append(request)
        self.running += 1
        try:
            for item in script:
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, float | int):
                    await asyncio.sleep(item)
                    continue
                yield item
                if isinstance(item, protocols.Reply):
                    self.delivered.append(item)
        finally:
            self.running -= 1
            self.ended += 1


async def until(condition: Callable[[], bool]) -> None:
    """Waits until a condition holds."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():  # noqa: ASYNC110 (of tests, on what no event tells)
            await asyncio.sleep(0.005)


class Scripts(protocols.Conversations):
    """Sessions by their secrets."""

    model = MODEL

    def __init__(self, **sessions: protocols.Conversation) -> None:
        self.sessions: Mapping[str, protocols.Conversation] = sessions

    def find(self, secret: str) -> protocols.Conversation | None:
        found = None
        for known, conversation in self.sessions.items():
            if hmac.compare_digest(known.encode(), secret.encode()):
                found = conversation
        return found


@contextlib.asynccontextmanager
async def serving(
    conversation: protocols.Conversation, other: protocols.Conversation | None = None, **limits: object
) -> AsyncIterator[str]:
    """Serves one session, or two; yields the URL."""
    known = {SECRET: conversation} | ({OTHER: other} if other else {})
    gateway = server.GatewayServer(Scripts(**known), config_lib.GatewayConfig(**limits))
    url = await gateway.start()
    try:
        yield url
    finally:
        await gateway.stop()


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs an async test in an event loop of its own, with a deadline."""

    @functools.wraps(test)
    def run(*args: object, **keywords: object) -> None:
        async def limited() -> None:
            async with asyncio.timeout(4 * WAIT_SECONDS):
                await test(*args, **keywords)

        asyncio.run(limited())

    return run


def chat_client(url: str, secret: str = SECRET, retries: int = 0) -> openai.AsyncOpenAI:
    """A client of OpenAI's."""
    return openai.AsyncOpenAI(base_url=url, api_key=secret, max_retries=retries, timeout=WAIT_SECONDS)


def messages_client(url: str, secret: str = SECRET, retries: int = 0) -> anthropic.AsyncAnthropic:
    """A client of Anthropic's."""
    root = url.removesuffix("/v1")
    return anthropic.AsyncAnthropic(base_url=root, api_key=secret, max_retries=retries, timeout=WAIT_SECONDS)


def plain_client(url: str, secret: str = SECRET) -> httpx.AsyncClient:
    """A client that sends what it is given."""
    headers = {"Authorization": f"Bearer {secret}"}
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=WAIT_SECONDS, trust_env=False)


ASK = [{"role": "user", "content": "Hi"}]
"""Messages of a first request."""

CALCULATOR = {
    "name": "calculator",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
}
"""A tool as OpenAI's APIs describe it."""

CALL = protocols.ToolCall("call_1", "calculator", '{"expression": "17 + 4"}')
"""A call of it."""
