"""The class that Ray places: it makes the real actor in its process and relays calls to it."""

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
        self._streams = ray_streams.HostStreams(self._host)
        _drop_thread_limit()
        cores = spec.cores
        if spec.gpus and not cores:
            cores = affinity.cores_near(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        if cores:
            _keep_to(cores)
        if os.getpgid(0) != os.getpid():
            os.setpgid(0, 0)
        self._guard = guard.Guard([-os.getpgid(0)])

    async def born(self) -> Birth:
        """Returns as soon as the process runs."""
        _call_this_thread(self._host.spec.name)
        return Birth(ray.get_runtime_context().get_node_id(), os.getpid(), self._guard.pid)

    async def until_death(self) -> None:
        """Never returns: the caller learns of this process's end by the error that Ray puts in its place."""
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
        """Begins a stream method."""
        self._streams.open(number, method, args, kwargs)

    async def news(self) -> ray_streams.News:
        """What has come in on all streams."""
        return await self._streams.news()

    async def read_stream(self, number: int, batches: int) -> None:
        """A stream's reader has taken so many batches."""
        self._streams.read(number, batches)

    async def close_stream(self, number: int) -> None:
        """Closes the actor's generator, and so the stream; nothing happens if it has ended."""
        await self._streams.close(number)

    async def stop(self, seconds: float) -> ray_outcome.Outcome:
        """Stops the actor; the process lives until Ray kills it."""
        try:
            await self._host.stop(seconds)
        except LibraError as error:
            return ray_outcome.Outcome.of_failure(error)
        return ray_outcome.Outcome()


def _call_this_thread(name: str) -> None:
    """For whoever looks for an actor from outside (`ps -L`, `top -H`): Ray calls all processes alike, by the class."""
    with contextlib.suppress(OSError):  # no Linux
        pathlib.Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)


def _keep_to(cores: Sequence[int]) -> None:
    """Pins this process: Ray's threads, which run already, and whatever is started from now on."""
    for thread in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended, or there is no such core
            os.sched_setaffinity(int(thread.name), cores)


def _drop_thread_limit() -> None:
    """Undoes Ray's OMP_NUM_THREADS, which is the CPU reservation: here that only orders placement.

    A value that the process was started with (the user's, or the spec's) stays.
    """
    started_with = pathlib.Path("/proc/self/environ").read_bytes().split(b"\0")
    if not any(variable.startswith(b"OMP_NUM_THREADS=") for variable in started_with):
        os.environ.pop("OMP_NUM_THREADS", None)
