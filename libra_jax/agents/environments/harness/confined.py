"""Runs an agent's program in the run's sandbox. Its only way out is the session's gateway.

The sandbox is the one of `config.sandbox`, with its limits and packages: raise `sandbox.cpu_seconds`,
`sandbox.memory_mib` and `sandbox.output_bytes` for an agent. Modules that it imports lie in `sandbox.packages`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import secrets
import shlex
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libra_jax import protocols
from libra_jax.agents import deadlines
from libra_jax.agents.environments.harness import commands, jobs, workspace
from libra_jax.agents.repair import snapshots
from libra_jax.agents.sandbox import limits as limits_module
from libra_jax.agents.sandbox import pool
from libra_jax.agents.tools import toolkit

_INSIDE = Path(__file__).with_name("inside.py").read_text()
_FOLDER = "/tmp/libra"
_PORT = 8080
"""Port of the gateway inside a sandbox. Each has a network of its own, and the gateway may be on another host."""

_SHARE = 6
"""The two outputs and a verdict take at most this part of the bytes that a sandbox returns, each. As JSON, bytes that
are no text take up to three times their size."""

_CONNECT_SECONDS = 10.0
_CLOSE_SECONDS = 5.0
_CHUNK = 65536


class Door:
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
        for task in self._open:
            task.cancel()
        if self._open:
            await asyncio.wait(self._open, timeout=_CLOSE_SECONDS)
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
    """Runs a command in a sandbox. See `jobs.Runner`.

    Attributes:
      command: words of the command, or a line for a shell; both with placeholders.
      settings: what all programs share.
      tools: the run's tools, whose sandbox is used.
    """

    command: Sequence[str] | str
    settings: commands.Settings
    tools: toolkit.Toolkit

    async def run(self, job: jobs.Job) -> jobs.Finished:
        """See `jobs.Runner`."""
        settings, sandbox = self.settings, await self.tools.sandbox()
        door = await self._door(sandbox, job.endpoint)
        loop, mark = asyncio.get_running_loop(), secrets.token_hex(16)
        packed = await deadlines.off_loop(_pack, job.work, settings.most_bytes)
        async with sandbox.session() as session:
            await session.begin(packed)
            await session.ready()
            began = loop.time()
            line = self._line(job, sandbox, door, mark)
            outcome = await session.shell(line, settings.seconds)
            seconds = loop.time() - began
            if outcome.broken:
                raise protocols.WorkerLost(f"the agent's sandbox died: {outcome.text}")
            saved = await session.save(settings.most_bytes) if settings.collect else None
        files, refused = await deadlines.off_loop(_taken, saved, settings)
        if outcome.status == "timeout":
            return jobs.Finished(job.task, None, outcome.text, "", seconds, None, files, refused)
        told = _told(outcome.text, mark)
        if told is None:  # its processes or its limits ended it
            return jobs.Finished(job.task, 137, outcome.text, outcome.text, seconds, None, files, refused)
        return jobs.Finished(
            job.task, told["status"], told["output"], told["errors"], seconds, _verdict(told), files, refused
        )

    async def _door(self, sandbox: pool.Sandbox, endpoint: protocols.Endpoint) -> str:
        """Returns where the sandbox finds the gateway's socket. Empty if it has the host's network."""
        parts = urllib.parse.urlsplit(endpoint.url)
        if not sandbox.door_place:
            return ""
        host, port = parts.hostname or "127.0.0.1", parts.port or 80
        name = f"gateway-{port}"
        await self.tools.kept((Door, host, port), lambda: Door(sandbox.door / name, host, port))
        return f"{sandbox.door_place}/{name}"

    def _line(self, job: jobs.Job, sandbox: pool.Sandbox, door: str, mark: str) -> str:
        parts, endpoint = urllib.parse.urlsplit(job.endpoint.url), job.endpoint
        if door:
            near = parts._replace(netloc=f"127.0.0.1:{_PORT}")
            endpoint = dataclasses.replace(endpoint, url=urllib.parse.urlunsplit(near))
        job = dataclasses.replace(job, endpoint=endpoint)
        files = {commands.TASK_FILE: commands.task_text(job, self.settings.fields)}
        places = {"LIBRA_TASK_FILE": f"{_FOLDER}/{commands.TASK_FILE}"}
        places["LIBRA_VERDICT_FILE"] = verdict = f"{_FOLDER}/{commands.VERDICT_FILE}"
        asked = {
            "command": job.filled(self.command),
            "variables": {**places, **job.endpoint.environment(), **self.settings.variables},
            "socket": door,
            "port": _PORT,
            "folder": _FOLDER,
            "files": files,
            "verdict": verdict,
            "most": min(self.settings.output_bytes, sandbox.limits.output_bytes // 2 // _SHARE),
            "mark": mark,
        }
        # Through standard input, because one argument of a command may have 128 KiB at most.
        return f"python3 -c {shlex.quote(_INSIDE)} <<'{mark}'\n{json.dumps(asked)}\n{mark}\n"


def _pack(work: Path, most_bytes: int) -> bytes:
    return snapshots.Snapshot.read(work, most_bytes).pack()


def _taken(saved: limits_module.Outcome | None, settings: commands.Settings) -> tuple[dict[str, snapshots.File], str]:
    if saved is None:
        return {}, ""
    if saved.broken:
        raise protocols.WorkerLost(f"the agent's sandbox died when its files were taken over: {saved.text}")
    try:
        if saved.status != "success":
            raise snapshots.Hostile(saved.text)
        found = snapshots.taken_over(saved.archive, settings.most_bytes)
    except snapshots.Hostile as error:
        return {}, str(error)
    return workspace.wanted(found, settings.collect), ""


def _told(text: str, mark: str) -> dict[str, Any] | None:
    """Returns what `inside.py` reported. None if there is no report: the program can end its reporter."""
    _, found, line = text.rpartition(mark)
    try:
        told: Any = json.loads(line.partition("\n")[0]) if found else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(told, dict) or not isinstance(told.get("status"), int):
        return None
    return told if all(isinstance(told.get(name), str) for name in ("output", "errors")) else None


def _verdict(told: Mapping[str, Any]) -> object:
    text = told.get("verdict")
    if not isinstance(text, str):
        return None
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return found
