"""A model behind an endpoint that answers chat requests as a test says, and what runs harnesses against it."""

from __future__ import annotations

import asyncio
import contextlib
import sys

import endpoint_doubles

from libra_jax import protocols
from libra_jax.agents.environments import harness

SECRET = "the-session's-secret"


class Model(endpoint_doubles.Endpoint):
    """Answers each chat request by `write`, a function of its messages that returns a message."""

    def __init__(self, write):
        super().__init__()
        self.write = write

    def reply(self, path, body):
        if path != "/v1/chat/completions":
            return 404, f"no such path: {path}", 0.0
        said = self.write(body["messages"])
        message = {"role": "assistant", **({"content": said} if isinstance(said, str) else said)}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": body["model"]}
        return 200, {**head, "choices": [choice], "usage": usage}, 0.0


@contextlib.contextmanager
def model(write=lambda messages: "fine"):
    """Yields a running model."""
    with endpoint_doubles.serving() as start:
        yield start(Model(write))


def endpoint(model=None):
    url = model.base_url if model is not None else "http://127.0.0.1:9/v1"
    return protocols.Endpoint(url, SECRET, "policy")


def task(**payload):
    return protocols.Task("task-1", payload)


def run(given=None, model=None, **arguments):
    """Runs a harness of the arguments on a task, and returns its outcome."""

    async def body():
        made = harness.environment(**arguments)
        try:
            return await made.run(given or task(), endpoint(model))
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


def judge(finished):
    """A scorer that tells what it was given."""
    judge.seen = finished
    return 0.25


async def judge_slowly(finished):
    await asyncio.sleep(60)


def judge_badly(finished):
    raise KeyError("gold")


def judge_count(finished):
    judge_count.counts.append(int(finished.output))
    return 0.0
