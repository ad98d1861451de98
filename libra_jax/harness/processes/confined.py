"""Runs an agent's program in the run's sandbox. Its only way out is the session's gateway.

The sandbox's first process reports status and output. The agent's processes cannot reach that. The sandbox is the one
of `config.sandbox`, with its limits and packages: raise `sandbox.cpu_seconds`,
`sandbox.memory_mib` and `sandbox.output_bytes` for an agent. Modules that it imports lie in `sandbox.packages`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from libra_jax import protocols
from libra_jax.harness import jobs
from libra_jax.harness.processes import commands, workspace
from libra_jax.rewards.repair import snapshots
from libra_jax.tools import toolkit
from libra_jax.tools.sandbox import limits as limits_module
from libra_jax.tools.sandbox import pool
from libra_jax.utils import deadlines

_INSIDE = Path(__file__).with_name("inside.py").read_text()
_TASK_PLACE = f"/tmp/libra/{commands.TASK_NAME}"
_PORT = 8080
"""Port of the gateway inside a sandbox. Each has a network of its own, and the gateway may be on another host."""

_NOTE = re.compile(r"\[(?:exit status (?![01]\])|ended by signal )(\d+)\]$")
"""The sandbox's note on a status other than 0 and 1, at the end of the output. A program that fails with status 1 gets
no note, so what it prints may look like one: it must never read as a success."""

_CONNECT_SECONDS = 10.0
_CLOSE_SECONDS = 5.0
_CHUNK = 65536


class GatewaySocket:
    """A socket in the folder that sandboxes see. Hands its connections on to the gateway. See `toolkit.Resource`.

    Args:
      path: where the socket is made.
      host: host of the gateway.
      port: its port.
    """

    def __init__(self, path: Path, host: str, port: int) -> None:
        self._path, self._host, self._port = path, host, port
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Makes the socket."""
        self._server = await asyncio.start_unix_server(self._join, self._path)
        self._path.chmod(0o666)  # the sandbox's user is another one

    async def close(self) -> None:
        """Removes the socket, and ends the connections."""
        if self._server is not None:
            self._server.close()
        await deadlines.cancel_all(self._open, _CLOSE_SECONDS)
        self._path.unlink(missing_ok=True)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        far: asyncio.StreamWriter | None = None
        try:
            source, sink = await asyncio.wait_for(asyncio.open_connection(self._host, self._port), _CONNECT_SECONDS)
            far = sink
            await asyncio.gather(_copy(reader, sink), _copy(source, writer))
        except (OSError, TimeoutError, asyncio.CancelledError):
            pass  # the other side sees its connection end
        finally:
            self._open.discard(task)
            for end in (writer, far):
                if end is not None:
                    end.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(_CHUNK):
            target.write(data)
            await target.drain()
        target.write_eof()


@dataclass(frozen=True)
class Confined:
    """Runs a command, which has placeholders (`jobs.Job.filled`), in the sandbox of the run's tools."""

    command: Sequence[str] | str
    settings: commands.ProgramSettings
    tools: toolkit.Toolkit

    async def run(self, job: jobs.Job) -> jobs.Finished:
        settings, sandbox = self.settings, await self.tools.sandbox()
        door = await self._door(sandbox, job.endpoint)
        loop = asyncio.get_running_loop()
        packed = await deadlines.off_loop(_pack, job.work, settings.most_bytes)
        async with sandbox.session() as session:
            await session.begin(packed)
            await session.ready()
            start = loop.time()
            outcome = await session.run(self._code(job, door), settings.seconds)
            seconds = loop.time() - start
            if outcome.broken:
                raise protocols.WorkerLost(f"the agent's sandbox died: {outcome.text}")
            files: Mapping[str, snapshots.File] = {}
            refused = ""
            if settings.collect:
                saved = await session.save(settings.most_bytes)
                files, refused = await deadlines.off_loop(snapshots.taken_over, saved, settings.most_bytes)
        files = workspace.select(files, settings.collect)
        status, output = _status(outcome)
        output = output.encode(errors="replace")[-settings.output_bytes :].decode(errors="replace")
        return jobs.Finished(job.task, status, output, "", seconds, None, files, refused)

    async def _door(self, sandbox: pool.Sandbox, endpoint: protocols.Endpoint) -> str:
        """Returns where the sandbox finds the gateway's socket. Empty if it has the host's network."""
        parts = urllib.parse.urlsplit(endpoint.url)
        if not sandbox.door_place:
            return ""
        host, port = parts.hostname or "127.0.0.1", parts.port or 80
        name = f"gateway-{port}"
        await self.tools.open_once((GatewaySocket, host, port), lambda: GatewaySocket(sandbox.door / name, host, port))
        return f"{sandbox.door_place}/{name}"

    def _code(self, job: jobs.Job, door: str) -> str:
        """Returns the code of a fresh process, which becomes the program."""
        parts, endpoint = urllib.parse.urlsplit(job.endpoint.url), job.endpoint
        if door:
            near = parts._replace(netloc=f"127.0.0.1:{_PORT}")
            endpoint = dataclasses.replace(endpoint, url=urllib.parse.urlunsplit(near))
        job = dataclasses.replace(job, endpoint=endpoint)
        variables = {"LIBRA_TASK_FILE": _TASK_PLACE, **endpoint.environment(), **self.settings.variables}
        arguments = (job.filled(self.command), variables, {_TASK_PLACE: commands.task_text(job.public)}, _PORT, door)
        return f"{_INSIDE}\nimport json\nstart(*json.loads({json.dumps(arguments)!r}))\n"


def _pack(work: Path, most_bytes: int) -> bytes:
    return snapshots.RepositorySnapshot.read(work, most_bytes).pack()


def _status(outcome: limits_module.SandboxOutcome) -> tuple[int | None, str]:
    """Returns the exit status of a program, as a shell shows it, and its output. None for a missed deadline."""
    if outcome.status == "timeout":
        return None, outcome.text
    if outcome.status == "success":
        return 0, outcome.text
    note = _NOTE.search(outcome.text)
    if note is None:
        return 137 if outcome.text.endswith("]") and "[stopped: " in outcome.text else 1, outcome.text
    signalled = "signal" in note[0]
    return int(note[1]) + 128 * signalled, outcome.text[: note.start()]
