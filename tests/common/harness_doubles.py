"""A gateway whose model answers as a test says, and what runs harnesses against it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading

from libra_jax import config as config_lib
from libra_jax import harness, protocols
from libra_jax.harness.gateway import server
from libra_jax.tools import toolkit

SECRET = "the-session-secret"
WAIT_SECONDS = 60.0


class Model(protocols.Conversation, protocols.Conversations):
    """The only session of a gateway. Answers each request by `write`, a function of its messages.

    Messages are mappings with a role and a content. An answer is a text, or a mapping with `tool_calls`, pairs of a
    tool's name and its arguments.

    Attributes:
      base_url: the gateway's address.
      asked: the messages and the names of tools of each request.
      keys: keys that clients sent.
    """

    model = "policy"

    def __init__(self, write):
        self.write, self.asked, self.keys, self.base_url = write, [], [], ""

    def find(self, secret):
        self.keys.append(secret)
        return self if secret == SECRET else None

    async def reply(self, request):
        messages = [{"role": message.role, "content": message.content} for message in request.messages]
        self.asked.append({"messages": messages, "tools": [tool.name for tool in request.tools]})
        said = self.write(messages)
        if isinstance(said, Exception):
            raise said
        if isinstance(said, str):
            yield protocols.ContentDelta(said)
            yield protocols.Reply(protocols.Message("assistant", said), "stop", 3, 2)
            return
        calls = tuple(
            protocols.ToolCall(f"call{len(self.asked)}{number}", name, json.dumps(arguments))
            for number, (name, arguments) in enumerate(said["tool_calls"])
        )
        for number, call in enumerate(calls):
            yield protocols.ToolCallDelta(number, call.call_id, call.name, call.arguments)
        yield protocols.Reply(protocols.Message("assistant", "", calls), "tool_calls", 3, 2)


@contextlib.contextmanager
def model(write=lambda messages: "fine"):
    """Yields a running model. Its gateway has a thread and an event loop of its own."""
    made = Model(write)
    serving = server.GatewayServer(made, config_lib.GatewayConfig())
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(WAIT_SECONDS)

    try:
        made.base_url = run(serving.start())
        yield made
        run(serving.stop())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT_SECONDS)
        loop.close()


def endpoint(model=None):
    url = model.base_url if model is not None else "http://127.0.0.1:9/v1"
    return protocols.Endpoint(url, SECRET, "policy")


def task(**payload):
    return protocols.Task("task-1", payload)


def run(given=None, model=None, **arguments):
    """Runs a harness of the arguments on a task, and returns its outcome."""
    if "command" in arguments:
        arguments.setdefault("score", f"{__name__}:judge")

    async def body():
        made = harness.environment(**arguments)
        try:
            return await made.run(given or task(), endpoint(model))
        finally:
            await made.close()

    return asyncio.run(body())


def run_with_tools(given, model, **arguments):
    """Runs a harness that uses the run's sandbox, to score what an agent left for example."""

    async def body():
        async with toolkit.Toolkit(config_lib.ToolsConfig(), config_lib.SandboxConfig(warm=1)) as tools:
            made = harness.environment(tools=tools, **arguments)
            try:
                return await made.run(given, endpoint(model))
            finally:
                await made.close()

    return asyncio.run(body())


def python(code):
    """The command that runs Python code."""
    return [sys.executable, "-S", "-c", code]


ASK = """
import json, os, urllib.request
asked = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": "hello"}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(asked).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
answer = json.load(urllib.request.urlopen(request, timeout=30))["choices"][0]["message"]["content"]
"""
"""Code that asks the model once, with the standard library only."""


# Scorers that tests name in their arguments.


def said(finished):
    """A scorer that takes the last line of the output for the verdict, as an agent without tools permits."""
    return json.loads(finished.output.splitlines()[-1])


def judge(finished):
    """A scorer that tells what it was given."""
    judge.seen = finished
    return 0.25


async def judge_slowly(finished):
    await asyncio.sleep(60)


def judge_badly(finished):
    raise KeyError("gold")


def judge_unreachably(finished):
    raise ConnectionRefusedError("the judge's server")


def judge_count(finished):
    judge_count.counts.append(int(finished.output))
    return 0.0
