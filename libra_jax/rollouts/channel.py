"""The channel between the coordinator and a loop worker: messages over one TCP connection.

A call of Ray costs the coordinator a third of a millisecond, and a message here a tenth of that (docs/results/flow.md).
Ray still makes the worker's process, and tells of its death. Each end proves that it knows a secret that travelled by
Ray. Messages are pickled, and nothing is encrypted: as with Ray itself, keep the network of a cluster private.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import pickle
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from libra_jax import protocols

PROOF_SECONDS = 30.0
"""Seconds in which a program that connects has to prove that it knows the secret."""

STRANGERS = 16
"""Connections that may be without a proof at a time. A further one closes the oldest."""

_LENGTH_BYTES = 8
_PROOF_BYTES = 32


def _proof(secret: bytes, challenge: bytes, end: bytes) -> bytes:
    return hmac.digest(secret, challenge + end, "sha256")


class Connection:
    """One end of a channel. Belongs to one event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        # A machine that has vanished closes nothing: the kernel asks for it, and gives up after a minute and a half.
        connected: socket.socket = writer.get_extra_info("socket")
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4)):
            connected.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, message: Any) -> None:
        """Sends a message, after all earlier ones. Does not wait."""
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._writer.write(len(body).to_bytes(_LENGTH_BYTES, "little") + body)

    @property
    def backlog(self) -> int:
        """Bytes that were sent and that the network has not taken yet."""
        return self._writer.transport.get_write_buffer_size()

    async def drain(self) -> None:
        """Waits until the network has taken most of what was sent. Raises OSError if the connection is broken."""
        await self._writer.drain()

    async def messages(self) -> AsyncIterator[Any]:
        """Yields the messages of the other end, in order. Ends if the connection does."""
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "little")
                yield pickle.loads(await self._reader.readexactly(length))

    def close(self) -> None:
        """Closes the connection. Idempotent."""
        self._writer.close()


async def connect(address: protocols.WorkerAddress) -> Connection:
    """Connects to a listening worker. The caller sets a deadline.

    Raises:
      WorkerLost: nothing listens there, or something else does.
    """
    where = f"the loop worker at {address.host}:{address.port}"
    try:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        theirs, challenge = await reader.readexactly(_PROOF_BYTES), secrets.token_bytes(_PROOF_BYTES)
        writer.write(challenge + _proof(address.secret, theirs, b"coordinator"))
        answer = await reader.readexactly(_PROOF_BYTES)
    except (OSError, asyncio.IncompleteReadError) as error:
        raise protocols.WorkerLost(f"{where} cannot be reached ({error})") from error
    if not hmac.compare_digest(answer, _proof(address.secret, challenge, b"worker")):
        writer.close()
        raise protocols.WorkerLost(f"{where} does not know the run's secret: another program listens there")
    return Connection(reader, writer)


async def listen(
    host: str, serve: Callable[[Connection], Awaitable[None]]
) -> tuple[protocols.WorkerAddress, asyncio.Server]:
    """Listens at a free port of this machine.

    Args:
      host: address at which to listen, as the coordinator reaches it.
      serve: serves a connection whose end knows the secret.

    Returns:
      The address for the other end, and the server to close.

    Raises:
      LibraError: this machine has no such address.
    """
    secret = secrets.token_bytes(_PROOF_BYTES)

    strangers: dict[asyncio.StreamWriter, None] = {}

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        strangers[writer] = None
        if len(strangers) > STRANGERS:
            oldest = next(iter(strangers))
            del strangers[oldest]
            oldest.transport.abort()
        # Python 3.11 prints a traceback for each handler that ends by being cancelled, as all do when the loop closes.
        quiet = contextlib.suppress(asyncio.CancelledError, asyncio.IncompleteReadError, OSError)
        with contextlib.closing(writer), quiet, contextlib.ExitStack() as unknown:
            unknown.callback(strangers.pop, writer, None)
            challenge = secrets.token_bytes(_PROOF_BYTES)
            writer.write(challenge)
            async with asyncio.timeout(PROOF_SECONDS):
                theirs, proof = await reader.readexactly(_PROOF_BYTES), await reader.readexactly(_PROOF_BYTES)
            if hmac.compare_digest(proof, _proof(secret, challenge, b"coordinator")):
                writer.write(_proof(secret, theirs, b"worker"))
                unknown.close()
                await serve(Connection(reader, writer))

    try:
        server = await asyncio.start_server(accepted, host, 0)
    except OSError as error:
        raise protocols.LibraError(f"a loop worker cannot listen at {host} ({error.strerror or error})") from error
    return protocols.WorkerAddress(host, server.sockets[0].getsockname()[1], secret), server
