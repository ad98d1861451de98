"""The class that Ray places: it makes the real actor in its process, and forwards calls and streams to it.

A stream of Ray's own costs about a millisecond in each process, and the same again to close. Here, one call opens a
stream. From then on, one call is always pending (`RayHost.news`); its answer carries the new items of all streams of
the actor for one caller. `ray_calls` holds the caller's end.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import importlib
import os
import pathlib
import sys
import threading
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from libra_jax.cluster import actors, guard, ray_batches
from libra_jax.protocols import ActorSpec, LibraError, portable
from libra_jax.utils import deadlines

GATHER_SECONDS = 0.001
"""Seconds that news wait for more news, so that they travel together."""

UNREAD = 16
"""Maximum unread batches of a stream before the actor's end of the stream is held back."""

_WORD_BITS = 64


class RemoteTraceback(Exception):
    """The traceback of an error in the actor's process, as text. It is the `__cause__` of the error here."""


@dataclass(frozen=True)
class CallOutcome:
    """The outcome of a call in another process: a value, or a LibraError with its traceback as text.

    A value, because Ray would wrap a raised error into its own error, whose message holds the whole traceback.
    """

    value: Any = None
    error: LibraError | None = None
    trace: str = ""

    @classmethod
    async def of(cls, work: Awaitable[Any]) -> CallOutcome:
        """Awaits the work. Errors other than LibraError pass."""
        try:
            return cls(await work)
        except LibraError as error:
            return cls.of_failure(error)

    @classmethod
    def of_failure(cls, error: LibraError) -> CallOutcome:
        """Wraps a LibraError, which the driver raises again."""
        return cls(error=portable(error), trace="".join(traceback.format_exception(error)))

    def unwrap(self) -> Any:
        """Returns the value, or raises the error if there is one."""
        if self.error is not None:
            raise self.error from RemoteTraceback(f"\n{self.trace}")
        return self.value


News = Mapping[int, list[CallOutcome | None]]
"""New batches of items by stream number, in order; None after the end of a stream."""


@dataclass(frozen=True)
class Birth:
    """Facts about a new actor process, for the driver.

    Attributes:
      node: Ray's id of the node.
      pid: id of the process; 0 before its birth.
      guard_pid: id of the shell that guards the process (`guard.Guard`).
    """

    node: str = ""
    pid: int = 0
    guard_pid: int = 0


@dataclass
class _ServedStream:
    """A stream in the actor's process."""

    unread: int = 0
    room: asyncio.Event = field(default_factory=asyncio.Event)
    relay: asyncio.Task[None] | None = None


@dataclass
class _Reader:
    """A process that reads streams of the actor.

    Attributes:
      streams: its streams, by its own numbers.
      news: items that it has not got yet.
      has_news: set while there are any.
    """

    streams: dict[int, _ServedStream] = field(default_factory=dict)
    news: collections.defaultdict[int, list[CallOutcome | None]] = field(
        default_factory=lambda: collections.defaultdict(list)
    )
    has_news: asyncio.Event = field(default_factory=asyncio.Event)


class RayHost:
    """An async Ray actor. Its methods interleave on one event loop; the real actor's sync methods have a thread."""

    def __init__(self, spec: ActorSpec, import_path: Sequence[str]) -> None:
        """Prepares the process. `import_path`: the driver's `sys.path`, so that its factories are found here too."""
        sys.path.extend(path for path in import_path if path not in sys.path)
        self._host = actors.ActorHost(spec)
        self._readers: collections.defaultdict[str, _Reader] = collections.defaultdict(_Reader)
        # Ray sets OMP_NUM_THREADS to the CPU reservation, but our reservations only order placement. A value in the
        # process's initial environment comes from the user or the spec, and stays.
        started_with = pathlib.Path("/proc/self/environ").read_bytes().split(b"\0")
        if not any(variable.startswith(b"OMP_NUM_THREADS=") for variable in started_with):
            os.environ.pop("OMP_NUM_THREADS", None)
        cores = spec.cores
        if spec.gpus and not cores:
            cores = cores_near(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        # Ray's running threads are pinned one by one; every thread or process started from now on inherits the cores.
        for thread in pathlib.Path("/proc/self/task").iterdir() if cores else ():
            with contextlib.suppress(OSError):  # the thread has ended, or the core does not exist
                os.sched_setaffinity(int(thread.name), cores)
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

    async def make(self) -> CallOutcome:
        """Makes the actor; the value is its methods (`actors.ActorHost.make`)."""
        return await CallOutcome.of(self._host.make())

    async def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallOutcome:
        """Runs a sync or async method; the value is its result."""

        async def work() -> Any:
            return await self._host.call(method, *await ray_batches.received(args), **kwargs)

        return await CallOutcome.of(work())

    async def stop(self, seconds: float) -> CallOutcome:
        """Stops the actor within `seconds`; the process lives until Ray kills it."""
        return await CallOutcome.of(self._host.stop(seconds))

    async def open_stream(
        self, caller: str, number: int, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Starts a stream method. All its results, including an error, arrive in the caller's `news`.

        Args:
          caller: name of the calling process.
          number: number that the caller gives the stream.
        """
        reader = self._readers[caller]
        stream = reader.streams[number] = _ServedStream()
        relay = self._relay(reader, stream, number, method, args, kwargs)
        stream.relay = asyncio.get_running_loop().create_task(relay)

    async def news(self, caller: str) -> News:
        """Waits for items of any stream of the caller since its last call and returns them."""
        reader = self._readers[caller]
        await reader.has_news.wait()
        await asyncio.sleep(GATHER_SECONDS)
        reader.has_news.clear()
        # Emptied in one step, because streams go on telling while the answer travels.
        news, reader.news = reader.news, collections.defaultdict(list)
        return dict(news)

    async def read_stream(self, caller: str, number: int, batches: int) -> None:
        """Records that a stream's reader has taken `batches` batches."""
        if (stream := self._readers[caller].streams.get(number)) is not None:
            stream.unread -= batches
            stream.room.set()

    async def close_stream(self, caller: str, number: int) -> None:
        """Closes the actor's generator and so the stream. Does nothing if the stream has ended."""
        stream = self._readers[caller].streams.get(number)
        if stream is not None and stream.relay is not None:
            # The relay's `finally` closes the actor's generator and sends the end of the stream.
            await deadlines.cancel_all((stream.relay,))

    async def forget(self, caller: str) -> None:
        """Closes all streams of a process that has ended. `caller`: its name, which its handles' names begin with."""
        readers = [self._readers.pop(name) for name in list(self._readers) if name.partition("/")[0] == caller]
        relays = [stream.relay for reader in readers for stream in reader.streams.values() if stream.relay is not None]
        # Its last calls for news, which no one awaits, end too.
        for reader in readers:
            reader.has_news.set()
        await deadlines.cancel_all(relays)

    async def _relay(
        self,
        reader: _Reader,
        stream: _ServedStream,
        number: int,
        method: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        def tell(outcome: CallOutcome | None) -> None:
            reader.news[number].append(outcome)
            reader.has_news.set()

        try:
            pump = self._host.open(method, args, kwargs)
            try:
                while items := await self._host.take(pump, method):
                    tell(CallOutcome(items))
                    stream.unread += 1
                    while stream.unread >= UNREAD:
                        stream.room.clear()
                        await stream.room.wait()
            finally:
                await pump.close()
        except LibraError as error:
            tell(CallOutcome.of_failure(error))
        finally:
            del reader.streams[number]
            tell(None)


def _call_this_thread(name: str) -> None:
    """Names this thread after the actor, for `ps -L` and `top -H`: Ray names all processes alike, after the class."""
    with contextlib.suppress(OSError):  # /proc exists only on Linux
        pathlib.Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)


def cores_near(visible: str) -> tuple[int, ...]:
    """Returns the usable CPU cores of the NUMA nodes that the GPUs are attached to.

    The result is empty if there is no choice (all cores are equally near), no GPU is named, or the library or driver is
    missing. Asks NVIDIA's library through its own Python package (nvidia-ml-py, which installs `pynvml`). Not run on a
    host with a GPU: tested against a stand-in for that library.

    Args:
      visible: GPUs as in CUDA_VISIBLE_DEVICES, by number or UUID. Numbers are read as the library's, in bus order,
        which is CUDA's order too if all GPUs of a host are alike.

    Source: `nvmlDeviceGetCpuAffinityWithinScope` of NVIDIA's NVML reference.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except ImportError:
        return ()
    except nvml.NVMLError:
        return ()
    near: set[int] = set()
    try:
        for name in filter(None, map(str.strip, visible.split(","))):
            by_id = nvml.nvmlDeviceGetHandleByUUID
            gpu = nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else by_id(name)
            # The library gives a bit for each core, 64 to a word.
            words = -(-(os.cpu_count() or 1) // _WORD_BITS)
            masks = nvml.nvmlDeviceGetCpuAffinityWithinScope(gpu, words, nvml.NVML_AFFINITY_SCOPE_NODE)
            for word, mask in enumerate(masks):
                near |= {word * _WORD_BITS + bit for bit in range(_WORD_BITS) if mask >> bit & 1}
    except nvml.NVMLError:  # an older driver lacks this query
        return ()
    finally:
        nvml.nvmlShutdown()
    usable = os.sched_getaffinity(0)
    cores = near & usable
    # If all usable cores are near, or none, there is nothing to pin.
    return () if cores in (set(), usable) else tuple(sorted(cores))
