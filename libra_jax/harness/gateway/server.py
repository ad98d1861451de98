"""The gateway's HTTP server: uvicorn's HTTP protocol on the event loop that runs already."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import resource
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http import httptools_impl
from uvicorn.server import ServerState

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.harness.gateway import answers, app

IDLE_SECONDS = 75.0
"""Seconds that a connection may have no request under way. Also the seconds that a client has for a request's head.

Clients keep a connection for a shorter time, or else they would write requests into connections that close.
"""

MOST_HEAD_BYTES = 65_536
"""Largest head of a request."""

STOP_SECONDS = 5.0
"""Seconds that requests under way have when the server stops, and again once their connections are cut."""

BACKLOG = 2048
"""Connections that wait for the event loop."""

MOST_FILES = 65_536
"""Open files that the process asks for. Each connection is one, and shells often allow 1,024."""

# Not one of `logging`'s tree: a client's broken HTTP is no event of the run, and uvicorn writes a line for each.
_silent = logging.Logger("uvicorn", level=logging.CRITICAL + 1)


def bound(limits: config_lib.GatewayConfig) -> socket.socket:
    """Returns a socket that holds the gateway's address.

    Raises:
      ConfigError: the address is not this host's, or the port is in use.
    """
    family = socket.AF_INET6 if ipaddress.ip_address(limits.host).version == 6 else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        # The port of a gateway that died must not rest for a minute: harnesses have its URL.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((limits.host, limits.port))
    except OSError as error:
        listening.close()
        raise protocols.ConfigError(
            f"config.gateway.port: {limits.port} at {limits.host} cannot be had ({error.strerror or error}); choose "
            "another, or 0 for any that is free"
        ) from error
    return listening


class GatewayServer:
    """Serves the sessions of a run over HTTP. Several may run in one process.

    Args:
      conversations: the sessions.
      limits: address and limits.
    """

    def __init__(self, conversations: protocols.Conversations, limits: config_lib.GatewayConfig) -> None:
        self._limits = limits
        self._app = app.application(conversations, limits)
        self._listener: asyncio.Server | None = None
        self._state = ServerState()

    async def start(self) -> str:
        """Begins to listen (`bound`). Returns the base URL of the OpenAI-compatible API, which ends in "/v1"."""
        _allow_files()
        listening = bound(self._limits)
        settings = uvicorn.Config(
            self._app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=round(IDLE_SECONDS),
        )
        settings.load()
        self._listener = await asyncio.get_running_loop().create_server(
            lambda: _Connection(settings, self._state, {}), sock=listening, backlog=BACKLOG
        )
        address = f"[{self._limits.host}]" if listening.family == socket.AF_INET6 else self._limits.host
        return f"http://{address}:{listening.getsockname()[1]}/v1"

    async def stop(self) -> None:
        """Closes the port and all connections. Requests under way have `STOP_SECONDS` to end, and are then cut off."""
        if self._listener is None:
            return
        self._listener.close()
        self._listener = None
        for connection in list(self._state.connections):
            connection.shutdown()
        await self._requests_end()
        for connection in list(self._state.connections):
            connection.transport.abort()
        await self._requests_end()
        for task in self._state.tasks:
            task.cancel()

    async def _requests_end(self) -> None:
        if self._state.tasks:
            await asyncio.wait(set(self._state.tasks), timeout=STOP_SECONDS)
        await asyncio.sleep(0)  # closed transports report that they are lost


class _Connection(httptools_impl.HttpToolsProtocol):
    """One connection: uvicorn's, with a bound on idle time and on the head of a request, and without log lines."""

    def __init__(self, config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any]) -> None:
        super().__init__(config, server_state, app_state)
        self.logger = self.access_logger = _silent
        self.access_log = False
        self._idle: asyncio.TimerHandle | None = None
        self._in_head = False
        self._head_bytes = 0  # of a head that is not complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._rest()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wake()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self.scope["extensions"] = {answers.TRANSPORT: self.transport}  # type: ignore[dict-item]

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._wake()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        self._rest()
        super().on_response_complete()

    def _rest(self) -> None:
        """Begins to wait for a request. uvicorn's own timer starts after a response only, and any byte stops it."""
        self._wake()
        # Not `close`, which waits until the client has read what is buffered.
        self._idle = self.loop.call_later(IDLE_SECONDS, self.transport.abort)

    def _wake(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None


def _allow_files() -> None:
    """Raises the soft limit of open files as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
