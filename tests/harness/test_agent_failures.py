"""Ends of agents told apart: their own errors, the machine's, and requests that the endpoint refused."""

from __future__ import annotations

import asyncio
import errno
import http.client
import sys
import traceback

import aiohttp
import harness_gateway
import httpx
import openai
import pytest

from libra_jax import harness, protocols
from libra_jax.harness import jobs

TASK = protocols.Task("task", {"answer": "7"})
BEFORE, REFUSED = "before", "refused"


class MaxTokensReached(Exception):
    """As agents raise it at an output of finish `length`."""


async def agent(task, endpoint, kind: str = "", error: str = "", **_: object) -> float:
    """Asks once, unless it fails before, and raises an error."""
    async with openai.AsyncOpenAI(
        base_url=endpoint.url,
        api_key=endpoint.secret,
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(verify=False),
    ) as client:
        if kind == "polite":
            return 1.0
        say = [{"role": "user", "content": "x"}]
        if kind != BEFORE and kind != "only refused":
            await client.chat.completions.create(model="m", messages=say, extra_body={"seed": 7})
        if kind in (REFUSED, "only refused"):
            await client.chat.completions.create(model="m", messages=say, extra_body={"functions": [{"name": "f"}]})
    if error == "hidden":
        return float(task.payload.get("answer", "") == "")
    raise {
        "exit": SystemExit(1),
        "length": MaxTokensReached("cut off"),
        "connection": ConnectionError("reset"),
        "memory": MemoryError(),
        "stream": openai.APIError("engine lost", httpx.Request("POST", "http://x"), body=None),
        "protocol": httpx.RemoteProtocolError("peer closed connection"),
        "disk": OSError(errno.ENOSPC, "No space left on device"),
    }[error]


def play(**arguments: object) -> tuple[protocols.Trajectory, dict[str, int]]:
    async def main():
        async with harness_gateway.serving() as host:
            made = harness.environment(**arguments)
            trajectory = await harness_gateway.play(made, TASK, host, lambda context: "seven")
            return trajectory, dict(host.remarks)

    return asyncio.run(main())


def failing(kind: str = "", error: str = "length", **more: object):
    return play(callable=f"{__name__}:agent", arguments={"kind": kind, "error": error}, **more)


def test_an_agents_own_error_after_an_output_is_scored_and_counted():
    trajectory, remarks = failing()
    assert (trajectory.reward, trajectory.finish) == (0.0, "answered")
    assert trajectory.metrics["agent_failed"] == 1.0
    assert sum(trajectory.loss_mask) == len("seven") + 1
    assert any("MaxTokensReached" in remark for remark in remarks)


def test_an_agents_exit_is_counted_by_its_own_name():
    _, remarks = failing(error="exit")
    assert "agents that end by SystemExit after an output (reward 0)" in remarks


@pytest.mark.parametrize(
    ("kind", "error", "says"),
    [
        (BEFORE, "length", "MaxTokensReached"),
        ("", "connection", "ConnectionError"),
        ("", "memory", "MemoryError"),
        ("", "stream", "APIError: engine lost"),
        ("", "protocol", "RemoteProtocolError"),
        ("", "disk", "No space left on device"),
        ("", "hidden", "does not see the task's field 'answer'"),
        (REFUSED, "length", "the endpoint refused 1 of its requests .functions: deprecated"),
        ("only refused", "length", "the endpoint refused 1 of its requests .functions: deprecated"),
        ("polite", "length", "ended without a request to its endpoint"),
    ],
)
def test_failures_of_the_machine_and_of_the_set_up_are_crashes_by_name(kind, error, says):
    with pytest.raises(protocols.EnvironmentCrashed, match=says):
        failing(kind, error)


ASK = """
import json, os, sys, urllib.request
asked = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(asked).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
urllib.request.urlopen(request, timeout=30).read()
"""


@pytest.mark.parametrize(
    ("end", "scored"),
    [
        ("raise ValueError('no code block')", True),
        ("sys.exit(3)", True),
        ("sys.exit('HiddenFieldError: x')", True),  # what a program prints proves no fault of the config
        ("raise ConnectionResetError('gone')", False),
        ("os.kill(os.getpid(), 9)", False),
    ],
)
def test_an_exit_status_after_an_output_is_scored_unless_the_machine_failed(end, scored):
    command = [sys.executable, "-S", "-c", ASK + end]
    if not scored:
        with pytest.raises(protocols.EnvironmentCrashed, match="exited with status"):
            play(command=command, score="harness_doubles:judge")
        return
    trajectory, _ = play(command=command, score="harness_doubles:judge")
    assert (trajectory.reward, trajectory.metrics["agent_failed"]) == (0.0, 1.0)


MACHINE = [
    openai.APIError("engine lost", httpx.Request("POST", "http://x"), body=None),
    httpx.RemoteProtocolError("peer closed connection"),
    httpx.ReadError("gone"),
    httpx.ReadTimeout("late"),
    aiohttp.ServerDisconnectedError(),
    http.client.RemoteDisconnected("Remote end closed connection without response"),
    BrokenPipeError(errno.EPIPE, "Broken pipe"),
    OSError(errno.ENOSPC, "No space left on device"),
    ExceptionGroup("tasks", [httpx.ConnectError("refused")]),
]
OWN = [
    ValueError("openai.APIError: the ConnectionError and the OSError that I should explain"),
    FileNotFoundError(errno.ENOENT, "No such file or directory", "answer.txt"),
    KeyError("Timeout"),
    MaxTokensReached("APIConnectionError"),
]


@pytest.mark.parametrize("error", [*MACHINE, *OWN], ids=lambda error: type(error).__name__)
def test_the_last_error_of_a_traceback_tells_whose_failure_it_is(error):
    context = TimeoutError() if error in OWN else ValueError("first")
    try:
        try:
            raise context
        except Exception:
            raise error  # noqa: B904
    except Exception as caught:
        printed = "ConnectionError?\n" * (error in OWN) + "".join(traceback.format_exception(caught)).strip()
    failure = jobs.failure("it exited with status 1", printed)
    assert isinstance(failure, protocols.AgentFailed) == (error in OWN), printed


def test_hints_and_refusals_are_metrics():
    trajectory, remarks = failing()
    assert (trajectory.metrics["hints"], trajectory.metrics["hint/seed"]) == (1.0, 1.0)
    assert trajectory.metrics["refused_requests"] == 0.0
    assert remarks["requests with seed"] == 1


def test_a_failure_keeps_its_reason_between_processes():
    import pickle

    failure = pickle.loads(pickle.dumps(protocols.AgentFailed("it raised ValueError", "ValueError")))
    assert (str(failure), failure.reason) == ("it raised ValueError", "ValueError")
