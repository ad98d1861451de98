"""Connections to MCP servers: reads a server's entry in the config's standard form, and makes a client for it.

Only this file imports the `mcp` package, and only when a server is used.
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
from pathlib import Path
from typing import Any

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.tools import schemas
from libra_jax.utils import parent_death

_REFERENCE = re.compile(r"\$\{(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
"""Pattern of references: `${NAME}` and `${NAME:-default}` as in Claude Code, `${env:NAME}` as in VS Code."""

LONGEST_ANSWER = 64 * 2**20
"""Largest answer over HTTP in bytes, after decompression. Answers over a pipe have no limit."""

_STDERR_TAIL_BYTES = 4096

_CONNECT_SECONDS = 10.0
"""Seconds to connect to a server's address, and to write a request to it."""


@dataclass(frozen=True)
class Entry:
    """A server's entry, as a config or a file holds it.

    Attributes:
      values: The entry's object under `mcpServers`.
      where: Name of the entry's place, for errors.
      in_config: Whether the entry is written out with the config. If so, it must hold no secret.
    """

    values: object
    where: str
    in_config: bool = True


@dataclass(frozen=True)
class Spec:
    """A server's entry, and our own settings for it. Texts of the entry may refer to environment variables.

    Attributes:
      command: Program that talks over standard input and output. It is searched beside this Python, then in PATH.
      args: Arguments of the program.
      env: Environment variables of the program. It also gets HOME, LOGNAME, PATH, SHELL, TERM and USER, and no others.
      cwd: Folder that the program starts in. Empty means this process's folder.
      url: Address of a running server that speaks streamable HTTP.
      headers: HTTP headers of requests to the address.
      seconds: Deadline of a call in seconds; a later answer is a timeout. Must be less than `task.tool_seconds`, or the
        agent loop's own deadline comes first.
      start_seconds: Seconds that the server may take to start and to list its tools.
      only: Names of the tools to offer. Empty means all.
      prefix: Whether to put the server's name and "_" before its tools' names. Needed if two servers share a tool name.
    """

    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 8.0
    start_seconds: float = 60.0
    only: tuple[str, ...] = ()
    prefix: bool = False


_Kinds = Mapping[str, tuple[str, type | tuple[type, ...]]]

_STANDARD: _Kinds = {
    "type": ("'stdio' or 'http'", str),
    "command": ("a text, as 'mcp-server-time'", str),
    "args": ("a list of texts", (list, tuple)),
    "env": ("a mapping of texts", Mapping),
    "cwd": ("a text", str),
    "url": ("a text", str),
    "headers": ("a mapping of texts", Mapping),
}
_OUR_KEYS: _Kinds = {
    "seconds": ("a number", (int, float)),
    "start_seconds": ("a number", (int, float)),
    "only": ("a list of texts", (list, tuple)),
    "prefix": ("True or False", bool),
}
_FOREIGN_KEYS = ("alwaysAllow", "autoApprove", "description", "dev", "disabled", "gallery", "version")
"""Settings of other programs in the same files. They are ignored here."""

_TYPES = {"stdio": "command", "http": "url", "streamable-http": "url", "streamableHttp": "url"}
_FORM = '{"mcpServers": {"time": {"command": "mcp-server-time", "args": []}}}'
_FORMER_KEYS = {
    "env_from": "write {'env': {'KEY': '${MY_VARIABLE}'}}, which takes the value from the environment variable",
    "headers_from": "write {'headers': {'Authorization': 'Bearer ${MY_VARIABLE}'}}, which takes the value from the "
    "environment variable",
    "timeout": "write tools.arguments = {NAME: {'seconds': ...}}",
    **{key: f"write tools.arguments = {{NAME: {{'{key}': ...}}}}" for key in _OUR_KEYS},
}
"""Keys of other or older forms of an entry, and what to write instead."""


def entries(tools: config_lib.ToolsConfig) -> dict[str, Entry]:
    """Returns the servers of `tools.mcp` and of the file `tools.mcp_file`, by name."""
    sources: list[tuple[object, str, bool]] = [(tools.mcp, "tools.mcp", True)] if tools.mcp else []
    if tools.mcp_file:
        path, field = Path(tools.mcp_file).expanduser(), "tools.mcp_file"
        try:
            # The config is written out with the path of this file, but not with its content.
            sources.append((json.loads(path.read_text(encoding="utf-8")), f"{field}: {path}", False))
        except OSError as error:
            raise protocols.ConfigError(f"config.{field}: {path} cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise protocols.ConfigError(f"config.{field}: {path} is no JSON ({error})") from error
    server_entries: dict[str, Entry] = {}
    for content, where, in_config in sources:
        # VS Code's own file names this key `servers`.
        keys = [key for key in ("mcpServers", "servers") if isinstance(content, Mapping) and key in content]
        servers = content[keys[0]] if keys and isinstance(content, Mapping) else None
        if not isinstance(servers, Mapping):
            raise protocols.ConfigError(f"config.{where}: must be of the form {_FORM}")
        for name, values in servers.items():
            twice = f"{tools.mcp_file and path} has the server {name!r}, which tools.mcp has, too"
            config_lib.check(name not in server_entries, "tools.mcp_file", twice)
            server_entries[name] = Entry(values, f"{where}{'.' if in_config else ': '}mcpServers.{name}", in_config)
    return server_entries


def read(name: str, entry: Entry, arguments: Mapping[str, object]) -> Spec:
    """Reads the entry of a server.

    Args:
      name: Name of the server.
      entry: Entry in the standard form.
      arguments: Our own settings of the server, from `tools.arguments`.
    """
    where, values, arguments_field = entry.where, entry.values, f"tools.arguments.{name}"
    if not isinstance(values, Mapping):
        raise protocols.ConfigError(f"config.{where}: must be a mapping, as in {_FORM}")
    for key, value in values.items():
        if key in _FOREIGN_KEYS:
            continue
        config_lib.check(key not in _FORMER_KEYS, where, f"there is no {key!r}; {_FORMER_KEYS.get(key, '')}")
        if key == "command" and isinstance(value, list | tuple) and value:
            correction = {"command": value[0], "args": list(value[1:])}
            raise protocols.ConfigError(
                f"config.{where}.command: must be a text, and its arguments are apart: {correction}"
            )
        _check_value(where, str(key), value, _STANDARD)
    for key, value in arguments.items():
        _check_value(arguments_field, key, value, _OUR_KEYS)
    entry_settings = {key: value for key, value in values.items() if key in _STANDARD and key != "type"}
    tuples = {
        key: tuple(value) for key, value in {**entry_settings, **arguments}.items() if isinstance(value, list | tuple)
    }
    spec = Spec(**{**entry_settings, **arguments, **tuples})
    for key in ("seconds", "start_seconds"):
        seconds = getattr(spec, key)
        config_lib.check(
            0 < seconds < math.inf, f"{arguments_field}.{key}", f"must be positive and finite, not {seconds}"
        )
    config_lib.check(bool(spec.command) != bool(spec.url), where, "needs either a command or a url")
    # The standard form may leave the type out, as it follows from the other keys.
    kind = values.get("type", "stdio" if spec.command else "http")
    config_lib.check(
        bool(getattr(spec, _TYPES.get(kind, ""), "")),
        f"{where}.type",
        f"{kind!r} does not fit; a server of a command is of type 'stdio', one of a url of type 'http' (streamable "
        "HTTP)",
    )
    _check_texts(where, spec, entry.in_config)
    if spec.url:
        return spec
    config_lib.check(not spec.headers, f"{where}.headers", "are for a url, and this server has a command")
    folder = fill_references(spec.cwd) or "."
    config_lib.check(os.path.isdir(folder), f"{where}.cwd", f"there is no folder {folder}")
    program = shutil.which(fill_references(spec.command), path=_environment(spec)["PATH"])
    config_lib.check(
        program is not None, f"{where}.command", f"there is no program {spec.command!r}; install it or give its path"
    )
    return spec


def _check_value(where: str, key: str, value: object, kinds: _Kinds) -> None:
    """Raises ConfigError if a setting does not exist, or its value is of another kind."""
    if key not in kinds:
        near = difflib.get_close_matches(key, kinds, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(kinds)}"
        raise protocols.ConfigError(f"config.{where}: there is no {key!r}; {hint}")
    description, kind = kinds[key]
    # bool is a subclass of int: True would otherwise pass as a number.
    good = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
    if isinstance(value, Mapping):
        good = good and all(isinstance(item, str) for pair in value.items() for item in pair)
    elif isinstance(value, list | tuple):
        good = good and all(isinstance(item, str) for item in value)
    config_lib.check(good, f"{where}.{key}", f"must be {description}, not {value!r}")


def _check_texts(where: str, spec: Spec, in_config: bool) -> None:
    """Raises ConfigError if a text refers to something other than a set environment variable, or a url does not fit.

    A header of a url must not hold a secret that is written out (`in_config`).
    """
    for text in (spec.command, *spec.args, *spec.env.values(), spec.cwd, spec.url, *spec.headers.values()):
        for name, default in _REFERENCE.findall(text):
            config_lib.check(
                bool(os.environ.get(name) or default),
                where,
                f"refers to the environment variable {name}, which is not set where the server is started",
            )
        bad_reference = re.search(r"\$\{[^}]*\}", _REFERENCE.sub("", text))
        problem = (
            f"{bad_reference and bad_reference[0]} cannot be filled in here; write ${{NAME}} of an environment variable"
        )
        config_lib.check(bad_reference is None, where, problem)
    if not spec.url:
        return
    parts = urllib.parse.urlsplit(fill_references(spec.url))
    good = parts.scheme in ("http", "https") and bool(parts.netloc)
    config_lib.check(good, f"{where}.url", f"{spec.url!r} must be of the form http://HOST:PORT/PATH")
    config_lib.check(
        not (spec.args or spec.env or spec.cwd), where, "args, env and cwd are for a command, and this server has a url"
    )
    for name, value in spec.headers.items():
        secret = in_config and name.lower() == "authorization" and not _REFERENCE.search(value)
        config_lib.check(
            not secret,
            f"{where}.headers",
            f"must not hold {name!r} in the clear, which would be written out with the config; put the secret in an "
            f"environment variable and write {{{name!r}: 'Bearer ${{MY_VARIABLE}}'}}",
        )


def fill_references(text: str) -> str:
    """Returns the text with its references replaced."""
    # A secret's file often ends with a line break, which an HTTP header may not contain.
    return _REFERENCE.sub(lambda match: (os.environ.get(match[1]) or match[2] or "").strip(), text)


def _environment(spec: Spec) -> dict[str, str]:
    """Returns the variables that a server gets besides those that the `mcp` package passes on itself."""
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
    return {"PATH": path, **{name: fill_references(value) for name, value in spec.env.items()}}


def package() -> Any:
    """Returns the `mcp` package."""
    try:
        import mcp  # imported here: it is optional and takes a second to import
    except ModuleNotFoundError as error:
        raise protocols.ConfigError(
            "config.tools.use: MCP servers need the package mcp; install it with pip install 'mcp>=2.3'"
        ) from error
    if not hasattr(mcp, "Client"):
        raise protocols.ConfigError("config.tools.use: the installed mcp is too old; pip install 'mcp>=2.3'")
    if not hasattr(mcp.ClientSession, "validate_tool_result"):  # `connect` replaces this method
        raise protocols.ConfigError(
            "config.tools.use: the installed mcp has no ClientSession.validate_tool_result, in whose place results "
            "are checked in bounded time; pip install 'mcp==2.3.0'"
        )
    return mcp


class _Tail(asyncio.Protocol):
    """Keeps the end of a server's standard error. It is read all the time, so that the server never blocks on it."""

    tail = b""

    def data_received(self, data: bytes) -> None:
        self.tail = (self.tail + data)[-_STDERR_TAIL_BYTES:]

    def __str__(self) -> str:
        lines = self.tail.decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""


@dataclass
class McpConnection:
    """A connection: the client of the `mcp` package, the server's tools, and its last line on standard error."""

    client: Any
    tools: Sequence[Any] = ()
    stderr: object = ""


@contextlib.asynccontextmanager
async def connect(spec: Spec, connection: McpConnection) -> AsyncIterator[McpConnection]:
    """Yields a client of the server and the tools that the server lists. One task must enter and leave the context.

    Args:
      spec: How to reach the server.
      connection: Filled in with the connection. Its `stderr` is set even if the connection fails.

    Raises:
      TimeoutError: Connecting took longer than `start_seconds`.
    """
    async with contextlib.AsyncExitStack() as stack:
        client = package().Client(await _transport(spec, connection, stack), cache=None)
        async with asyncio.timeout(spec.start_seconds):
            connection.client = await stack.enter_async_context(client)
            tools: list[Any] = []
            cursor: str | None = None
            while True:  # a server may list its tools in pages
                page = await connection.client.list_tools(cursor=cursor)
                tools, cursor = [*tools, *page.tools], page.next_cursor
                if not cursor:
                    break
            connection.tools = tools
        declared = {tool.name: tool.output_schema for tool in tools if tool.output_schema is not None}
        problems = {name: schemas.problem_of(json.dumps(schema)) for name, schema in declared.items()}

        async def check(name: str, result: Any) -> None:
            if name not in declared:
                return
            if result.structured_content is None:
                raise RuntimeError(f"tool {name} declares structured content and returned none")
            wrong = problems[name] or schemas.mismatch(result.structured_content, declared[name], "content")
            if wrong:
                raise RuntimeError(f"tool {name} returned other structured content than it declares: {wrong}")

        # Instead of the package's own check, which takes unbounded time and could block the event loop.
        connection.client.session.validate_tool_result = check
        yield connection


async def _bound(response: Any) -> None:
    """Refuses an answer that is longer than `LONGEST_ANSWER`. Event streams are bounded elsewhere, event by event."""
    import httpx2

    if response.headers.get("content-type", "").lower().startswith("text/event-stream"):
        return
    decoded = response.aiter_bytes

    async def bounded(chunk_size: int | None = None) -> AsyncGenerator[bytes, None]:
        remaining_bytes = LONGEST_ANSWER
        async with contextlib.aclosing(decoded(chunk_size)) as chunks:
            async for chunk in chunks:
                # Counts decompressed bytes, because a small answer may unpack to a huge one.
                remaining_bytes -= len(chunk)
                if remaining_bytes < 0:
                    raise httpx2.StreamError(f"the answer is longer than {LONGEST_ANSWER} bytes")
                yield chunk

    response.aiter_bytes = bounded


async def _transport(spec: Spec, connection: McpConnection, stack: contextlib.AsyncExitStack) -> Any:
    """Returns the package's transport to a server: over HTTP to a url, or over the pipes of a command."""
    mcp = package()
    if spec.url:
        import httpx2  # the HTTP client that `mcp` uses
        from mcp.client import streamable_http

        # No read deadline: the deadline of an answer is the call's own.
        timeout = httpx2.Timeout(_CONNECT_SECONDS, read=None, pool=None)
        headers = {name: fill_references(value) for name, value in spec.headers.items()}
        session = httpx2.AsyncClient(headers=headers, timeout=timeout, event_hooks={"response": [_bound]})
        client, url = await stack.enter_async_context(session), fill_references(spec.url)
        return streamable_http.streamable_http_client(url, http_client=client, max_sse_event_size=LONGEST_ANSWER)
    # The package takes only an open file for standard error, and its end has to be kept for error messages.
    reading, writing = os.pipe()
    error_file = stack.enter_context(os.fdopen(writing, "w"))
    tail = _Tail()
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: tail, os.fdopen(reading, "rb"))
    stack.callback(pipe.close)
    connection.stderr = tail
    # The server must not outlive this process, even if this process is killed.
    program, *arguments = parent_death.command([fill_references(text) for text in (spec.command, *spec.args)])
    parameters = mcp.StdioServerParameters(
        command=program,
        args=arguments,
        env=_environment(spec),
        cwd=fill_references(spec.cwd) or None,
        # A byte that is no text must not end the connection.
        encoding_error_handler="replace",
    )
    return mcp.stdio_client(parameters, errlog=error_file)
