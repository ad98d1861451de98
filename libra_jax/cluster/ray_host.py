"""The class that Ray places: it makes the real actor in its process and forwards calls to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from libra_jax.cluster import actors, affinity, guard, ray_outcome, ray_streams
from libra_jax.protocols import ActorSpec, LibraError


@dataclass(frozen=True)
class Birth:
    """Facts about a new actor process, for the driver."""

    node: str
    pid: int
    guard_pid: int


class RayHost:
    """An async Ray actor. Its methods interleave on one event loop; the real actor's sync methods have a thread."""

    def __init__(self, spec: ActorSpec, import_path: Sequence[str]) -> None:
        """Prepares the process. `import_path`: the driver's `sys.path`, so that its factories are found here too."""
        sys.path.extend(path for path in import_path if path not in sys.path)
        self._host = actors.ActorHost(spec)
        self._streams = ray_streams.HostStreams(self._host)
        _drop_thread_limit()
        cores = spec.cores
        if spec.gpus and not cores:
            cores = affinity.cores_near(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        if cores:
            _keep_to(cores)
        # A process group of its own, so that the guard can kill everything that the actor starts.
        if os.getpgid(0) != os.getpid():
            os.setpgid(0, 0)
        self._guard = guard.Guard([-os.getpgid(0)])

    async def born(self) -> Birth:
        """Returns as soon as the process runs."""
        _call_this_thread(self._host.spec.name)
        return Birth(ray.get_runtime_context().get_node_id(), os.getpid(), self._guard.pid)

    async def until_death(self) -> None:
        """Never returns. The caller learns of this process's end by Ray's error for this call."""
        await asyncio.Event().wait()

    async def make(self) -> ray_outcome.Outcome:
        """Makes the actor; the value is its methods."""
        try:
            return ray_outcome.Outcome(await self._host.make())
        except LibraError as error:
            return ray_outcome.Outcome.of_failure(error)

    async def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ray_outcome.Outcome:
        """Runs a sync or async method."""
        try:
            return ray_outcome.Outcome(await self._host.call(method, args, kwargs))
        except LibraError as error:
            return ray_outcome.Outcome.of_failure(error)

    async def open_stream(self, number: int, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Starts a stream method."""
        self._streams.open(number, method, args, kwargs)

    async def news(self) -> ray_streams.News:
        """Returns the news of all streams."""
        return await self._streams.news()

    async def read_stream(self, number: int, batches: int) -> None:
        """Records that a stream's reader has taken `batches` batches."""
        self._streams.read(number, batches)

    async def close_stream(self, number: int) -> None:
        """Closes the actor's generator and so the stream. Does nothing if the stream has ended."""
        await self._streams.close(number)

    async def stop(self, seconds: float) -> ray_outcome.Outcome:
        """Stops the actor; the process lives until Ray kills it."""
        try:
            await self._host.stop(seconds)
        except LibraError as error:
            return ray_outcome.Outcome.of_failure(error)
        return ray_outcome.Outcome()


def _call_this_thread(name: str) -> None:
    """Names this thread after the actor, for `ps -L` and `top -H`: Ray names all processes alike, after the class."""
    with contextlib.suppress(OSError):  # /proc exists only on Linux
        pathlib.Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)


def _keep_to(cores: Sequence[int]) -> None:
    """Pins this process: Ray's running threads, and every thread or process started from now on."""
    for thread in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended, or the core does not exist
            os.sched_setaffinity(int(thread.name), cores)


def _drop_thread_limit() -> None:
    """Undoes Ray's OMP_NUM_THREADS, which equals the CPU reservation: in our use, a reservation only orders placement.

    A value in the process's initial environment (from the user or the spec) stays.
    """
    started_with = pathlib.Path("/proc/self/environ").read_bytes().split(b"\0")
    if not any(variable.startswith(b"OMP_NUM_THREADS=") for variable in started_with):
        os.environ.pop("OMP_NUM_THREADS", None)
