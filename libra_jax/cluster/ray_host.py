"""The class that Ray places: it makes the real actor in its process and relays calls to it.

Errors travel as values, because Ray would wrap whatever is raised into an error of its own, traceback and all.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
import pickle
import sys
import traceback
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from libra_jax.cluster import actors, guard
from libra_jax.protocols import ActorSpec, LibraError


class RemoteTraceback(Exception):
    """The traceback of an error in the actor's process, as text: the `__cause__` of that error here."""


@dataclass(frozen=True)
class Outcome:
    """What a call came to: a value, or one of our errors with its traceback."""

    value: Any = None
    error: LibraError | None = None
    trace: str = ""

    def unwrap(self) -> Any:
        """The value; raises the error if there is one."""
        if self.error is not None:
            raise self.error from RemoteTraceback(f"\n{self.trace}")
        return self.value


def _failure(error: LibraError) -> Outcome:
    trace = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # a subclass with a constructor of its own: its sentence is what counts
        error = LibraError(str(error))
    return Outcome(error=error, trace=trace)


@dataclass(frozen=True)
class Birth:
    """What the driver learns of a new actor process."""

    node: str
    pid: int
    guard_pid: int


class RayHost:
    """An async Ray actor: its methods interleave on one event loop, the real actor's sync methods have their thread."""

    def __init__(self, spec: ActorSpec, import_path: Sequence[str]) -> None:
        """`import_path`: the driver's `sys.path`, so that a factory is found here if it is found there."""
        sys.path.extend(path for path in import_path if path not in sys.path)
        self._host = actors.ActorHost(spec)
        self._streams: dict[int, actors.Pump] = {}
        _drop_thread_limit()
        if os.getpgid(0) != os.getpid():
            os.setpgid(0, 0)
        self._guard = guard.Guard([-os.getpgid(0)])

    async def born(self) -> Birth:
        """Returns as soon as the process runs."""
        return Birth(ray.get_runtime_context().get_node_id(), os.getpid(), self._guard.pid)

    async def until_death(self) -> None:
        """Never returns: the caller learns of this process's end by the error that Ray puts in its place."""
        await asyncio.Event().wait()

    async def make(self) -> Outcome:
        """Makes the actor; the value is its methods."""
        try:
            return Outcome(await self._host.make())
        except LibraError as error:
            return _failure(error)

    async def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outcome:
        """Runs a sync or async method."""
        try:
            return Outcome(await self._host.call(method, args, kwargs))
        except LibraError as error:
            return _failure(error)

    async def stream(
        self, stream_id: int, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> AsyncIterator[Outcome]:
        """Runs a stream method; each value is a list of the items that had come in."""
        try:
            pump = self._streams[stream_id] = self._host.open(method, args, kwargs)
            try:
                while items := await self._host.take(pump, method):
                    yield Outcome(items)
            finally:
                await pump.close()
                del self._streams[stream_id]
        except LibraError as error:
            yield _failure(error)

    async def close_stream(self, stream_id: int) -> None:
        """Closes the actor's generator, and so the stream; nothing happens if it has ended."""
        if stream_id in self._streams:
            await self._streams[stream_id].close()

    async def stop(self, seconds: float) -> Outcome:
        """Stops the actor; the process lives until Ray kills it."""
        try:
            await self._host.stop(seconds)
        except LibraError as error:
            return _failure(error)
        return Outcome()


def _drop_thread_limit() -> None:
    """Undoes Ray's OMP_NUM_THREADS, which is the CPU reservation: here that only orders placement.

    A value that the process was started with (the user's, or the spec's) stays.
    """
    started_with = pathlib.Path("/proc/self/environ").read_bytes().split(b"\0")
    if not any(variable.startswith(b"OMP_NUM_THREADS=") for variable in started_with):
        os.environ.pop("OMP_NUM_THREADS", None)
