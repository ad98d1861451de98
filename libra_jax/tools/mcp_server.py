"""Tools of an MCP server (Model Context Protocol, modelcontextprotocol.io), through the official `mcp` package.

A server is started or connected once per run. All rollouts share the server and its state. Its tools have the names,
descriptions and schemas that the server lists:

    config.tools.mcp = {"mcpServers": {"time": {"command": "mcp-server-time", "args": ["--local-timezone=UTC"]}}}
    config.tools.use = ("time",)

`tools.mcp_file` names a file in the same form, which Claude and VS Code use too. Secrets stay in environment variables,
and texts refer to them as `${NAME}`. Our own settings of a server, such as `only`, are in `tools.arguments` under the
server's name.

A tool's answer is data for the policy, even if the answer is an error. A server that dies or stops answering is an
infrastructure failure: its open calls raise `WorkerLost`, and the server is restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.tools import mcp_connection, toolbox
from libra_jax.utils import deadlines

RESTARTS = 8
"""Number of starts in a row without an answered call, after which a server is abandoned."""

BACKOFF_SECONDS = 0.25
"""Seconds before a server is restarted. Doubles with each further restart, up to `LONGEST_BACKOFF_SECONDS`."""

LONGEST_BACKOFF_SECONDS = 10.0

PATIENCE_SECONDS = 3.0
"""Seconds that a call waits for a server that is being restarted."""

PROBE_SECONDS = 5.0
"""Seconds that a server has to list its tools, as proof that it is alive, after a call missed its deadline."""

CLOSE_SECONDS = 20.0
"""Seconds for a server to end. It is asked, then gets SIGTERM, then SIGKILL, with two seconds for each."""

_TRANSPORT_ERRORS = ("Connection closed", "SSE stream", "Session terminated", "Server returned an error response")
"""Beginnings of the error messages that the package's transports make themselves, if the server did not answer."""


class McpServer:
    """A server of the config, and its tools. Belongs to one event loop.

    The cancel scopes of the package's client need one task to enter and leave it. This task also restarts the server.

    Args:
      name: Name of the server in the config.
      entry: How the server is reached.
      arguments: Our own settings of the server, such as `seconds`. See `mcp_connection.Spec`.

    Attributes:
      restarts: Number of restarts so far.
      open_seconds: Seconds that `open` may take.
    """

    def __init__(self, name: str, entry: mcp_connection.Entry, arguments: Mapping[str, object]) -> None:
        self.name, self.restarts = name, 0
        self._where = entry.where
        self._spec = mcp_connection.read(name, entry, arguments)
        # If a server does not start, it is ended before the reason is reported. Ending takes time of its own.
        self.open_seconds = self._spec.start_seconds + CLOSE_SECONDS
        mcp_connection.package()
        self._client: Any = None
        self._tools: list[McpTool] = []
        self._changed = asyncio.Event()
        self._broken = asyncio.Event()
        self._end_reason = ""
        self._failures = 0
        self._connecting = False
        self._owner: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[Any]] = set()

    async def open(self) -> None:
        """Starts the server or connects to it, and lists its tools.

        Raises:
          ConfigError: The server does not start, cannot be reached, or lacks a tool that `only` names.
        """
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._keep_alive(ready), name=f"mcp-{self.name}")
        await ready

    def tools(self) -> Sequence[toolbox.Tool]:
        """Returns the server's tools, in the order of its list."""
        return self._tools

    async def close(self) -> None:
        """Ends the server, or disconnects from it."""
        self._end_reason = f"MCP server {self.name} is closed"
        self._changed.set()
        self._broken.set()
        owner, self._owner = self._owner, None
        for task in self._background:
            task.cancel()
        if owner is not None:
            if self._connecting:
                owner.cancel()
            await asyncio.wait({owner, *self._background}, timeout=CLOSE_SECONDS)
            owner.cancel()

    # The owner ------------------------------------------------------------------------------------------------------

    async def _keep_alive(self, ready: asyncio.Future[None]) -> None:
        try:
            while not self._end_reason:
                problem = await self._live(ready)
                if not ready.done():
                    # A failure of the first start is reported as a mistake in the config, and not retried.
                    ready.set_exception(protocols.ConfigError(f"config.{self._where}: {problem}"))
                    ready.exception()  # marks it as retrieved: the opener may be gone, and asyncio would warn
                    return
                if self._end_reason:
                    return
                self._failures += 1
                if self._failures > RESTARTS:
                    times = f"{RESTARTS} times in a row"
                    self._end_reason = (
                        f"MCP server {self.name} was started {times} and never answered a call ({problem})"
                    )
                    return
                await asyncio.sleep(min(LONGEST_BACKOFF_SECONDS, BACKOFF_SECONDS * 2 ** (self._failures - 1)))
                self.restarts += 1
        finally:
            self._end_reason = self._end_reason or f"MCP server {self.name} is gone"
            self._changed.set()  # calls that wait for a connection learn that none will come

    async def _live(self, ready: asyncio.Future[None]) -> str:
        """Connects, and stays until the connection breaks or the server is closed. Returns why the connection ended."""
        connection = mcp_connection.McpConnection(None)
        self._broken.clear()
        self._connecting = True
        try:
            async with mcp_connection.connect(self._spec, connection):
                self._connecting = False
                if not ready.done():
                    # Only the first connection decides: the policy has been told these tools for the whole run.
                    names = [tool.name for tool in connection.tools]
                    unknown = [name for name in self._spec.only if name not in names]
                    lacking = f"the server has no tool {unknown[0] if unknown else ''!r}"
                    only = f"tools.arguments.{self.name}.only"
                    config_lib.check(not unknown, only, f"{lacking}; it has {', '.join(names) or 'none'}")
                    prefix = f"{self.name}_" if self._spec.prefix else ""
                    offered = [tool for tool in connection.tools if tool.name in (self._spec.only or names)]
                    self._tools = [
                        McpTool(
                            self, tool.name, prefix + tool.name, tool.description or tool.title or "", tool.input_schema
                        )
                        for tool in offered
                    ]
                    ready.set_result(None)
                self._client = connection.client
                self._changed.set()
                try:
                    await self._broken.wait()
                finally:
                    # Before the connection is closed, which takes seconds: no further call may begin on it.
                    self._client = None
                    if not self._end_reason:
                        self._changed.clear()
        except Exception as error:  # the transport, the server and the package raise errors of any type
            return f"{self._reason(error)}{': ' * bool(str(connection.stderr))}{connection.stderr}"
        finally:
            self._connecting = False
        return str(connection.stderr) or "it did not answer any more"

    # Calls ----------------------------------------------------------------------------------------------------------

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> tuple[protocols.ToolStatus, str]:
        """Calls a tool of the server.

        Args:
          tool: Name of the tool on the server.
          arguments: Arguments in the form of the tool's schema.

        Returns:
          The status and the text of the answer. The status is "timeout" if the answer takes longer than `Spec.seconds`.

        Raises:
          WorkerLost: The server died before it answered, or its restart took too long.
        """
        loop = asyncio.get_running_loop()
        due = loop.time() + self._spec.seconds
        if self._client is None and not self._end_reason:
            # A call waits for a server that is being restarted, but half of its time is for the answer.
            with contextlib.suppress(deadlines.Overdue):
                await deadlines.cancel_after(min(PATIENCE_SECONDS, self._spec.seconds / 2), self._changed.wait())
        if self._client is None:
            raise protocols.WorkerLost(self._end_reason or f"MCP server {self.name} is being started again")
        client = self._client
        call = self._start(client.call_tool(tool, dict(arguments)))
        try:
            await deadlines.cancel_after(max(0.0, due - loop.time()), asyncio.wait({call}))
        except deadlines.Overdue:
            return "timeout", f"error: no answer within {self._spec.seconds:g} s"
        finally:
            # Also if the caller was cancelled first, by the step's own deadline.
            if not call.done() and not self._end_reason:
                self._start(self._probe(client, max(0.0, due - loop.time()) + PROBE_SECONDS))
            # Not awaited: cancelling also notifies the server, which may take longer than the deadline allows.
            call.cancel()
        error = None if call.cancelled() else call.exception()
        # An answered call proves that the server works, so the count of failed starts begins again.
        if error is None and not call.cancelled():
            self._failures = 0
            result = call.result()
            return "failure" if result.is_error else "success", text_of(result)
        if error is not None and client is self._client:
            # An answer that is an error is data for the policy. An error of the transport means that no answer came.
            if isinstance(error, mcp_connection.package().MCPError):
                answered = not str(error).startswith(_TRANSPORT_ERRORS)
            else:
                origin = type(error).__module__.partition(".")[0]
                answered = origin not in ("anyio", "httpx2") and not isinstance(error, OSError)
            if answered:
                return "failure", f"error: {error}"
            self._broken.set()
        why = "it was closed" if error is None else self._reason(error)
        raise protocols.WorkerLost(f"MCP server {self.name} was lost during a call ({why})") from error

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Starts a background task. The reference in `_background` keeps it alive, as no one may be waiting for it."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        # Marks the error as retrieved, so that asyncio does not warn.
        task.add_done_callback(lambda future: future.cancelled() or future.exception())
        return task

    async def _probe(self, client: Any, seconds: float) -> None:
        """Restarts the server if it cannot even list its tools. If it can, only the tool was slow."""
        with contextlib.suppress(Exception):
            await deadlines.cancel_after(seconds, client.list_tools())
            return
        if client is self._client:
            self._broken.set()

    def _reason(self, error: BaseException) -> str:
        """Returns the first error of a group, in words."""
        # Errors of task groups arrive wrapped in exception groups.
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, TimeoutError):
            return f"it did not start within {self._spec.start_seconds:g} s"
        if isinstance(error, protocols.LibraError):
            return str(error).partition(": ")[2] or str(error)
        message = str(error) or type(error).__name__
        if self._spec.url:
            return f"there is no server at {self._spec.url} ({message})"
        return f"its command, {self._spec.command!r}, ended or speaks no MCP ({message}); try it by hand"


@dataclass
class McpTool:
    """A tool of a server, as a `toolbox.Tool`.

    Attributes:
      server: Server that has the tool.
      own_name: Name by which the server calls the tool.
    """

    server: McpServer
    own_name: str
    name: str
    description: str
    parameters: Mapping[str, Any]

    async def call(self, arguments: Mapping[str, Any]) -> protocols.ToolReturn:
        """See `toolbox.Tool`. Raises WorkerLost if the server is lost."""
        status, text = await self.server.call(self.own_name, arguments)
        return protocols.ToolReturn(self.name, status, text)


def text_of(result: Any) -> str:
    """Returns the text of a call's result. Parts that are not text, such as pictures, are named in brackets."""
    parts = []
    for block in result.content:
        if block.type == "text":
            parts.append(str(block.text))
        elif block.type == "resource_link":
            parts.append(f"[a link to the resource {block.uri}]")
        elif block.type != "resource":
            parts.append(f"[{block.type} of type {getattr(block, 'mime_type', '?')}, which is not shown]")
        elif hasattr(block.resource, "text"):
            parts.append(str(block.resource.text))
        else:
            kind = block.resource.mime_type or "of no known type"
            parts.append(f"[the resource {block.resource.uri} ({kind}), which is not shown]")
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content)]
    return "\n".join(parts)
