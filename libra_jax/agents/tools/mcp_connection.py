"""How an MCP server of the config is reached: what its `tools.servers` entry may say, and a client of it.

The only file that imports the `mcp` package, and that only when a server is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import json
import math
import os
import re
import shutil
import sys
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from libra_jax import config, parent_death, protocols
from libra_jax.agents.tools import schemas

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

LONGEST_ANSWER = 64 * 2**20
"""Bytes of one answer over HTTP, once it is decompressed; over a pipe there is no limit."""

_KEPT_OF_STDERR = 4096

_CONNECT_SECONDS = 10.0
"""For a connection to a server's address, and for a request to be written to it."""


@dataclass(frozen=True)
class Spec:
    """What an entry of `tools.servers` says: a command or a URL, and what else.

    Attributes:
      command: starts the server, which then talks over its standard input and output. Programs are searched where this
        Python is, then in PATH.
      env: variables for it. It is given these, HOME, LOGNAME, PATH, SHELL, TERM and USER, and no others. They are
        written out with the config, so secrets belong in `env_from`.
      env_from: variables for it, too: the name of each, with the name of the variable here that holds its value.
      cwd: the folder it starts in; empty: this process's.
      url: of a server that runs already and talks streamable HTTP.
      headers: of requests to it. They are written out with the config, so secrets belong in `headers_from`.
      headers_from: of requests to it, too: the name of each, with the name of the variable here that holds all of its
        value, as {"Authorization": "MY_SERVER"} where MY_SERVER is "Bearer ...". It is read when the server is reached,
        and never written.
      seconds: of a call; past them its return is a time-out. Fewer than `task.tool_seconds`, or the agent loop's own
        deadline comes first.
      start_seconds: how long it may take to start and to list its tools.
      only: names of the tools to offer; empty: all.
      prefix: put the server's name and "_" before those of its tools, for servers whose tools have the same names.
    """

    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    env_from: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    headers_from: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 8.0
    start_seconds: float = 60.0
    only: tuple[str, ...] = ()
    prefix: bool = False


_KINDS: Mapping[str, tuple[str, type | tuple[type, ...]]] = {
    "command": ("a list of texts, as ['mcp-server-time']", (list, tuple)),
    "env": ("a mapping of texts", Mapping),
    "env_from": ("a mapping of names to names of environment variables", Mapping),
    "cwd": ("a text", str),
    "url": ("a text", str),
    "headers": ("a mapping of texts", Mapping),
    "headers_from": ("a mapping of names to names of environment variables", Mapping),
    "seconds": ("a number", (int, float)),
    "start_seconds": ("a number", (int, float)),
    "only": ("a list of texts", (list, tuple)),
    "prefix": ("True or False", bool),
}


def read(name: str, entry: object) -> Spec:
    """The entry of the server `name`.

    Raises:
      ConfigError: it cannot be used; the message names `tools.servers.NAME` and what in it.
    """
    where = f"tools.servers.{name}"
    config.check(
        isinstance(entry, Mapping),
        where,
        "must be a mapping, as {'command': ['mcp-server-time']} or {'url': 'http://'}",
    )
    assert isinstance(entry, Mapping)
    for key, value in entry.items():
        _check_value(where, key, value)
    sequences = {key: tuple(entry[key]) for key in ("command", "only") if key in entry}
    mappings = {key: dict(entry[key]) for key in ("env", "env_from", "headers", "headers_from") if key in entry}
    spec = Spec(**{**entry, **sequences, **mappings})
    config.check(bool(spec.command) != bool(spec.url), where, "needs either a command or a url")
    for key in ("seconds", "start_seconds"):
        value = getattr(spec, key)
        config.check(0 < value < math.inf, f"{where}.{key}", f"must be positive and finite, not {value}")
    for key in ("env", "headers"):
        _check_secrets(where, key, getattr(spec, key), getattr(spec, f"{key}_from"))
    if spec.url:
        parts = urllib.parse.urlsplit(spec.url)
        good = parts.scheme in ("http", "https") and bool(parts.netloc)
        config.check(good, f"{where}.url", f"{spec.url!r} must be of the form http://HOST:PORT/PATH")
        config.check(
            not (spec.env or spec.env_from or spec.cwd),
            where,
            "env, env_from and cwd are for a server that command starts, not for a url",
        )
        return spec
    for key in ("headers", "headers_from"):
        config.check(not getattr(spec, key), f"{where}.{key}", "are for a url, not for a command")
    folder = spec.cwd or "."
    config.check(os.path.isdir(folder), f"{where}.cwd", f"there is no folder {folder}")
    program = shutil.which(spec.command[0], path=_environment(spec)["PATH"])
    config.check(
        program is not None, f"{where}.command", f"there is no program {spec.command[0]!r}; install it or give its path"
    )
    return spec


def _check_value(where: str, key: object, value: object) -> None:
    if key not in _KINDS:
        near = difflib.get_close_matches(str(key), _KINDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(_KINDS)}"
        raise protocols.ConfigError(f"config.{where}: there is no {key!r}; {hint}")
    told, kind = _KINDS[str(key)]
    good = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
    if isinstance(value, Mapping):
        good = good and all(isinstance(item, str) for pair in value.items() for item in pair)
    elif isinstance(value, list | tuple):
        good = good and all(isinstance(item, str) and item for item in value)
    config.check(good, f"{where}.{key}", f"must be {told}, not {value!r}")


def _check_secrets(where: str, key: str, plain: Mapping[str, str], kept: Mapping[str, str]) -> None:
    """Of `env` or `headers`, and what is read from variables beside it. No error repeats what may be a secret."""
    secret = next((name for name in plain if key == "headers" and name.lower() == "authorization"), "")
    config.check(
        not secret,
        f"{where}.headers",
        f"must not hold {secret!r}, which would be written out with the config; put it in an environment variable and "
        f"name that one: 'headers_from': {{{secret!r}: 'MY_VARIABLE'}}",
    )
    for name, variable in kept.items():
        config.check(name not in plain, f"{where}.{key}_from", f"has {name!r}, which {key} has, too")
        config.check(
            _VARIABLE.fullmatch(variable) is not None,
            f"{where}.{key}_from",
            f"{name!r} must be the name of an environment variable that holds the value, never the value itself",
        )
        config.check(
            bool(os.environ.get(variable)),
            f"{where}.{key}_from",
            f"{name!r} names {variable}, which is not set where the server is started",
        )


def _held(names: Mapping[str, str]) -> dict[str, str]:
    """The values that environment variables hold, without the line break that a file of a secret often ends with."""
    return {name: os.environ.get(variable, "").strip() for name, variable in names.items()}


def _environment(spec: Spec) -> dict[str, str]:
    """The variables that a server is given beside those that the package hands on itself."""
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
    return {"PATH": path, **spec.env, **_held(spec.env_from)}


def package() -> Any:
    """The `mcp` package.

    Raises:
      ConfigError: it is not installed, too old, or too new.
    """
    try:
        import mcp  # here: it is optional, and takes a second to import
    except ModuleNotFoundError as error:
        raise protocols.ConfigError(
            "config.tools.servers: MCP servers need the package mcp; install it with pip install 'mcp>=2.3'"
        ) from error
    if not hasattr(mcp, "Client"):
        raise protocols.ConfigError("config.tools.servers: the installed mcp is too old; pip install 'mcp>=2.3'")
    if not hasattr(mcp.ClientSession, "validate_tool_result"):  # `_check_results` takes its place
        raise protocols.ConfigError(
            "config.tools.servers: the installed mcp has no ClientSession.validate_tool_result, in whose place results "
            "are checked in bounded time; pip install 'mcp==2.3.0'"
        )
    return mcp


class _Tail(asyncio.Protocol):
    """The end of what a server writes to its standard error, which is read all the time, so that it never blocks."""

    def __init__(self) -> None:
        self.kept = b""

    def data_received(self, data: bytes) -> None:
        self.kept = (self.kept + data)[-_KEPT_OF_STDERR:]

    def __str__(self) -> str:
        lines = self.kept.decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""


@dataclass
class Opened:
    """A connection: the client of the `mcp` package, the server's tools, and what it last said on standard error."""

    client: Any
    tools: Sequence[Any] = ()
    stderr: object = ""


@contextlib.asynccontextmanager
async def connected(spec: Spec, opened: Opened) -> AsyncIterator[Opened]:
    """A client of the server, and the tools it lists. To be entered and left by one task.

    Args:
      spec: where it is.
      opened: filled in, what is said on standard error even where the connection fails.

    Raises:
      TimeoutError: it took longer than `start_seconds`.
    """
    async with contextlib.AsyncExitStack() as stack:
        transport = await _piped(spec, opened, stack) if spec.command else await _over_http(spec, stack)
        client = package().Client(transport, cache=None)
        async with asyncio.timeout(spec.start_seconds):
            opened.client = await stack.enter_async_context(client)
            opened.tools = await _listed(opened.client)
        _check_results(opened)
        yield opened


def _check_results(opened: Opened) -> None:
    """Has results checked by `schemas`, whose time is bounded, and not by the package's own check on the event loop."""
    declared = {tool.name: tool.output_schema for tool in opened.tools if tool.output_schema is not None}
    problems = {name: schemas.problem_of(json.dumps(schema)) for name, schema in declared.items()}

    async def check(name: str, result: Any) -> None:
        if name not in declared:
            return
        if result.structured_content is None:
            raise RuntimeError(f"tool {name} declares structured content and returned none")
        wrong = problems[name] or schemas.mismatch(result.structured_content, declared[name], "content")
        if wrong:
            raise RuntimeError(f"tool {name} returned other structured content than it declares: {wrong}")

    opened.client.session.validate_tool_result = check


async def _bound(response: Any) -> None:
    """Has a whole answer refused once it is longer than `LONGEST_ANSWER`. Events are bounded one by one elsewhere."""
    import httpx2

    if response.headers.get("content-type", "").lower().startswith("text/event-stream"):
        return
    decoded = response.aiter_bytes

    async def bounded(chunk_size: int | None = None) -> AsyncGenerator[bytes, None]:
        left = LONGEST_ANSWER
        async with contextlib.aclosing(decoded(chunk_size)) as chunks:
            async for chunk in chunks:
                left -= len(chunk)
                if left < 0:
                    raise httpx2.StreamError(f"the answer is longer than {LONGEST_ANSWER} bytes")
                yield chunk

    response.aiter_bytes = bounded


async def _listed(client: Any) -> list[Any]:
    tools: list[Any] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            return tools


async def _piped(spec: Spec, opened: Opened, stack: contextlib.AsyncExitStack) -> Any:
    mcp = package()
    loop = asyncio.get_running_loop()
    reading, writing = os.pipe()
    told = stack.enter_context(os.fdopen(writing, "w"))
    tail = _Tail()
    pipe, _ = await loop.connect_read_pipe(lambda: tail, os.fdopen(reading, "rb"))
    stack.callback(pipe.close)
    opened.stderr = tail
    program, *arguments = parent_death.command(list(spec.command))
    parameters = mcp.StdioServerParameters(
        command=program,
        args=arguments,
        env=_environment(spec),
        cwd=spec.cwd or None,
        encoding_error_handler="replace",
    )
    return mcp.stdio_client(parameters, errlog=told)


async def _over_http(spec: Spec, stack: contextlib.AsyncExitStack) -> Any:
    package()
    import httpx2  # what mcp speaks HTTP with
    from mcp.client import streamable_http

    # Reading has no deadline of its own: an answer's is the call's.
    timeout = httpx2.Timeout(_CONNECT_SECONDS, read=None, pool=None)
    headers = {**spec.headers, **_held(spec.headers_from)}
    hooks = {"response": [_bound]}
    client = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=timeout, event_hooks=hooks))
    return streamable_http.streamable_http_client(spec.url, http_client=client, max_sse_event_size=LONGEST_ANSWER)
