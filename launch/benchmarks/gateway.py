"""Measures the gateway: live sessions that ask by turns, their latency, and the memory that each costs.

The gateway runs in a process of its own. Twice: with scripted sessions, whose outputs are 16 pieces of text, made in no
time. Their figures are those of HTTP, of the three APIs' forms and of the limits. And with real sessions, over a double
of an engine (`sessions.py`).
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import random
import statistics
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from multiprocessing import connection
from typing import Any

import aiohttp
import psutil

from benchmarks import sessions, workload
from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.harness.gateway import server
from libra_jax.utils import processes

SESSIONS = 1000
REQUESTS = 5
"""Requests of a session, one after another; each sends the whole dialogue so far, with a tool's result of 1 kB."""

PACED = 150.0
"""Requests a second at which latency is measured beside the flood, in which all sessions ask at once."""

PIECES = 16
DEADLINE_SECONDS = 120.0

TOOL = {
    "type": "function",
    "function": {"name": "shell", "description": "Runs a command.", "parameters": {"type": "object"}},
}


def measure(rounds: int) -> workload.Figures:
    """Runs all sessions in rounds, each with fresh ones: a flood, a flood of streams, and paced requests.

    Args:
      rounds: number of rounds.
    """
    scripted = _measured(_serve, (), rounds)
    real = _measured(sessions.serve, ([_secret(number) for number in range(SESSIONS)],), rounds)
    same = ("sessions", "requests_a_session", "rounds")
    return {**scripted, **{f"real_{name}": figure for name, figure in real.items() if name not in same}}


def _measured(serve: Callable[..., None], arguments: tuple[Any, ...], rounds: int) -> workload.Figures:
    # Spawned: a fork would count this process's memory as the gateway's.
    gateway = processes.Peer(serve, *arguments, name="the gateway's process")
    try:
        return _figures(gateway.receive(DEADLINE_SECONDS), gateway, rounds)
    finally:
        gateway.end()


def _figures(url: str, gateway: processes.Peer, rounds: int) -> workload.Figures:
    kinds = {"flood": (False, 0.0), "streams": (True, 0.0), "paced": (False, PACED)}
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    latencies: dict[str, list[float]] = {kind: [] for kind in kinds}
    cpu: dict[str, list[float]] = {kind: [] for kind in kinds}
    grown, live = [], []
    _ask(gateway, "open")  # a round to warm up does not count
    asyncio.run(_agents(url, gateway, streams=True, rate=0.0))
    first = _ask(gateway, "close")
    for _ in range(rounds):
        for kind, (streams, rate) in kinds.items():
            before = _ask(gateway, "open")
            seconds, found, during = asyncio.run(_agents(url, gateway, streams=streams, rate=rate))
            after = _ask(gateway, "close")
            rates[kind].append(SESSIONS * REQUESTS / seconds)
            latencies[kind] += found
            cpu[kind].append((during["cpu"] - before["cpu"]) / (SESSIONS * REQUESTS))
            live.append((during["rss"] - before["rss"]) / SESSIONS)
        grown.append(f"{(after['rss'] - first['rss']) / 1e6:.1f}")
    figures: dict[str, float | str] = {"sessions": SESSIONS, "requests_a_session": REQUESTS, "rounds": rounds}
    for kind in kinds:
        ordered = statistics.quantiles(latencies[kind], n=100)
        figures |= {
            f"{kind}_requests_per_second": statistics.median(rates[kind]),
            f"{kind}_p50_milliseconds": 1e3 * ordered[49],
            f"{kind}_p99_milliseconds": 1e3 * ordered[98],
            f"{kind}_cpu_milliseconds_a_request": 1e3 * statistics.median(cpu[kind]),
        }
    figures["kilobytes_a_live_session"] = max(live) / 1e3
    figures["megabytes_grown_after_each_round"] = ", ".join(grown)
    return figures


def _ask(gateway: processes.Peer, command: str) -> dict[str, float]:
    """Opens or closes the sessions, or does nothing; returns the gateway's memory in bytes and CPU time in seconds."""
    found: dict[str, float] = gateway.ask(command, DEADLINE_SECONDS)
    return found


# Agents ---------------------------------------------------------------------------------------------------------------


async def _agents(
    url: str, gateway: processes.Peer, *, streams: bool, rate: float
) -> tuple[float, Sequence[float], dict[str, float]]:
    """Runs one agent a session; returns the seconds of all, those of each request, and the gateway with all connected.

    Args:
      url: base URL of the gateway.
      gateway: its process.
      streams: True asks for streams.
      rate: requests a second of all agents; 0: as fast as answers come.
    """
    latencies: list[float] = []
    chance, opened = random.Random(0), time.perf_counter()

    async def agent(client: aiohttp.ClientSession, number: int) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Repair it. " * 40}]
        window = SESSIONS * REQUESTS / rate if rate else 0.0
        starts = sorted(chance.uniform(0, window) for _ in range(REQUESTS))
        for turn, start in enumerate(starts):
            await asyncio.sleep(max(0.0, start - (time.perf_counter() - opened)))
            body = {"model": "m", "messages": messages, "tools": [TOOL], "stream": streams}
            began = time.perf_counter()
            headers = {"Authorization": f"Bearer {_secret(number)}"}
            async with client.post(f"{url}/chat/completions", json=body, headers=headers) as answer:
                content = await answer.read()
            latencies.append(time.perf_counter() - began)
            if answer.status != 200:
                raise protocols.LibraError(f"the gateway answered {answer.status}: {content[:200]!r}")
            messages += [
                {"role": "assistant", "content": _said(content, streams)},
                {"role": "tool", "tool_call_id": f"call_{turn}", "content": "y" * 1000},
            ]

    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=DEADLINE_SECONDS)
    timeout = aiohttp.ClientTimeout(total=DEADLINE_SECONDS)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
        await asyncio.gather(*(agent(client, number) for number in range(SESSIONS)))
        seconds = time.perf_counter() - opened
        return seconds, latencies, _ask(gateway, "look")


def _said(content: bytes, streams: bool) -> str:
    """Returns the text of an answer, or of the events of a streamed one."""
    if not streams:
        return str(json.loads(content)["choices"][0]["message"]["content"])
    events = [json.loads(line[6:]) for line in content.split(b"\n") if line.startswith(b"data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])


def _secret(number: int) -> str:
    return f"secret-of-session-{number:06}"


# The gateway's process ------------------------------------------------------------------------------------------------


class _Session:
    """A session that says the same each time (`protocols.Conversation`)."""

    async def reply(
        self, request: protocols.ChatRequest
    ) -> AsyncGenerator[protocols.MessageDelta | protocols.Reply, None]:
        for _ in range(PIECES):
            yield protocols.ContentDelta("x" * 8)
        message = protocols.Message("assistant", "x" * 8 * PIECES)
        yield protocols.Reply(message, "stop", 500, PIECES)

    def note_refusal(self, sentence: str) -> None:
        raise AssertionError(sentence)


class _Sessions:
    """The sessions by their secrets (`protocols.Conversations`)."""

    model = "scripted"

    def __init__(self) -> None:
        self.sessions: dict[str, _Session] = {}

    def find(self, secret: str) -> protocols.Conversation | None:
        return self.sessions.get(secret)


def _serve(pipe: connection.Connection) -> None:
    async def run() -> None:
        served = _Sessions()
        gateway = server.GatewayServer(served, config_lib.GatewayConfig())
        pipe.send(await gateway.start())
        loop, process = asyncio.get_running_loop(), psutil.Process()
        while (command := await loop.run_in_executor(None, pipe.recv)) is not None:
            if command == "open":
                served.sessions = {_secret(number): _Session() for number in range(SESSIONS)}
            elif command == "close":
                served.sessions = {}
                await asyncio.sleep(0.5)  # closed connections are noticed
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # memory that is free, but not yet the kernel's, is no session's
            times = process.cpu_times()
            pipe.send({"rss": process.memory_info().rss, "cpu": times.user + times.system})
        await gateway.stop()

    asyncio.run(run())
