"""Stream methods over Ray: the items of all streams of an actor travel together.

A stream of Ray's own costs about a millisecond in each process, and the same again to close. Here, one call opens a
stream. From then on, one call is always pending (`HostStreams.news`); its answer carries the new items of all streams
of the actor.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray.exceptions

from libra_jax.cluster import actors, ray_outcome
from libra_jax.protocols import LibraError, WorkerLost

GATHER_SECONDS = 0.001
"""Seconds that news wait for more news, so that they travel together."""

UNREAD = 16
"""Maximum unread batches of a stream before the actor's end of the stream is held back."""

News = Mapping[int, list[ray_outcome.Outcome | None]]
"""New batches of items by stream number, in order; None after the end of a stream."""


@dataclass
class _Opened:
    """A stream in the actor's process."""

    unread: int = 0
    room: asyncio.Event = field(default_factory=asyncio.Event)
    relay: asyncio.Task[None] | None = None


class HostStreams:
    """The streams of an actor, in its process. Belongs to that process's event loop."""

    def __init__(self, host: actors.ActorHost) -> None:
        self._host = host
        self._opened: dict[int, _Opened] = {}
        self._news: collections.defaultdict[int, list[ray_outcome.Outcome | None]] = collections.defaultdict(list)
        self._told = asyncio.Event()

    def open(self, number: int, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Starts a stream method. All its results, including an error, arrive in `news`."""
        opened = self._opened[number] = _Opened()
        opened.relay = asyncio.get_running_loop().create_task(self._relay(opened, number, method, args, kwargs))

    async def news(self) -> News:
        """Waits for items since the last call and returns them."""
        await self._told.wait()
        await asyncio.sleep(GATHER_SECONDS)
        self._told.clear()
        news, self._news = self._news, collections.defaultdict(list)
        return dict(news)

    def read(self, number: int, batches: int) -> None:
        """Records that the reader has taken `batches` batches."""
        if (opened := self._opened.get(number)) is not None:
            opened.unread -= batches
            opened.room.set()

    async def close(self, number: int) -> None:
        """Closes the actor's generator and so the stream. Does nothing if the stream has ended."""
        opened = self._opened.get(number)
        if opened is not None and opened.relay is not None:
            # The relay's `finally` closes the actor's generator and sends the end of the stream.
            opened.relay.cancel()
            await asyncio.wait({opened.relay})

    async def _relay(
        self, opened: _Opened, number: int, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        try:
            pump = self._host.open(method, args, kwargs)
            try:
                while items := await self._host.take(pump, method):
                    self._tell(number, ray_outcome.Outcome(items))
                    opened.unread += 1
                    while opened.unread >= UNREAD:
                        opened.room.clear()
                        await opened.room.wait()
            finally:
                await pump.close()
        except LibraError as error:
            self._tell(number, ray_outcome.Outcome.of_failure(error))
        finally:
            del self._opened[number]
            self._tell(number, None)

    def _tell(self, number: int, outcome: ray_outcome.Outcome | None) -> None:
        self._news[number].append(outcome)
        self._told.set()


class _Reader:
    """A stream in the driver."""

    def __init__(self) -> None:
        self.waiting: collections.deque[ray_outcome.Outcome | None] = collections.deque()
        self.came = asyncio.Event()
        self.lost: WorkerLost | None = None
        self.ended = False

    def put(self, outcomes: list[ray_outcome.Outcome | None]) -> None:
        self.waiting.extend(outcomes)
        self.ended = self.ended or outcomes[-1] is None
        self.came.set()

    def fail(self, error: WorkerLost) -> None:
        self.lost = error
        self.came.set()

    async def take(self) -> ray_outcome.Outcome | None:
        while not self.waiting:
            if self.lost is not None:
                raise self.lost
            self.came.clear()
            await self.came.wait()
        return self.waiting.popleft()


class DriverStreams:
    """The streams of an actor, in the process that reads them.

    Args:
      handle: Ray's handle of an actor with the methods `open_stream`, `news`, `read_stream` and `close_stream`.
      check: raises an error if the actor is known to be gone.
      lost: returns the error of a stream whose actor is gone.
    """

    def __init__(self, handle: Any, *, check: Callable[[], None], lost: Callable[[BaseException], WorkerLost]) -> None:
        self._handle = handle
        self._check = check
        self._lost = lost
        self._opened = 0
        self._readers: dict[int, _Reader] = {}
        self._receiving: asyncio.Task[None] | None = None

    async def stream(self, method: str, /, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """Yields the items of a stream method. Closing the generator closes the actor's generator.

        Raises:
          WorkerLost: the actor is gone.
          LibraError: the method raised an error.
        """
        self._check()
        number, reader = self._opened, _Reader()
        self._opened += 1
        self._readers[number] = reader
        opening = asyncio.ensure_future(self._handle.open_stream.remote(number, method, args, kwargs))
        opening.add_done_callback(lambda _: self._look_at(opening, reader))
        if self._receiving is None:
            self._receiving = asyncio.get_running_loop().create_task(self._receive())
        taken = 0
        try:
            while (outcome := await reader.take()) is not None:
                taken += 1
                # Acknowledged at half of UNREAD, so that the actor's end rarely has to wait for the acknowledgement.
                if taken % (UNREAD // 2) == 0:
                    self._handle.read_stream.remote(number, UNREAD // 2)
                for item in outcome.unwrap():
                    yield item
        finally:
            del self._readers[number]
            if not reader.ended and reader.lost is None:
                await self._close(number)

    def _look_at(self, opening: asyncio.Future[Any], reader: _Reader) -> None:
        """Fails the reader of a stream that could not be opened, because such a stream sends no news."""
        if not opening.cancelled() and (error := opening.exception()) is not None:
            reader.fail(self._lost(error))

    async def _receive(self) -> None:
        """Asks for news while the actor lives."""
        while True:
            try:
                news: News = await self._handle.news.remote()
            except ray.exceptions.RayError as error:
                self._receiving = None
                for reader in self._readers.values():
                    reader.fail(self._lost(error))
                return
            for number, outcomes in news.items():
                if number in self._readers:
                    self._readers[number].put(outcomes)

    async def _close(self, number: int) -> None:
        try:
            await self._handle.close_stream.remote(number)
        except ray.exceptions.RayError:
            return  # the process is gone, and its streams with it

    async def end(self, seconds: float) -> None:
        """Stops waiting for news, because the actor's process is gone."""
        if self._receiving is not None:
            await asyncio.wait({self._receiving}, timeout=seconds)
        if self._receiving is not None:
            self._receiving.cancel()
