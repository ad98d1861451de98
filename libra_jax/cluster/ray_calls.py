"""Calls and streams of an actor, from any process of the Ray cluster. `ray_host` holds the actor's end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.exceptions

from libra_jax.cluster import actors, ray_batches, ray_host
from libra_jax.protocols import WorkerLost

_numbers = itertools.count()


@dataclass
class _StreamReader:
    """The caller's end of a stream.

    Attributes:
      outcomes: batches of items in order; None ends the stream, WorkerLost fails it.
      end_received: True once the end is in `outcomes`, so that the actor's end needs no call to close.
    """

    outcomes: asyncio.Queue[ray_host.CallOutcome | WorkerLost | None] = field(default_factory=asyncio.Queue)
    end_received: bool = False


class Caller:
    """Calls one actor, for one life of its process. Belongs to one event loop.

    Args:
      handle: Ray's handle of its process.
      caller: name of the calling process, unique among those that call the actor.
      birth: facts about the actor's process.
    """

    def __init__(
        self, name: str, handle: Any, *, caller: str, birth: ray_host.Birth, batches: ray_batches.StoredBatches
    ) -> None:
        self.name = name
        self.handle = handle
        self.birth = birth
        self._caller = caller
        self._batches = batches
        self._streams = 0
        self._readers: dict[int, _StreamReader] = {}
        self._receiving: asyncio.Task[None] | None = None

    @property
    def gone(self) -> bool:
        """True if the process is known to have ended, or is about to be ended."""
        return False

    def lost(self, error: BaseException | None = None) -> WorkerLost:
        """Returns the error of every call after the process is gone."""
        if not self.birth.pid:
            why = actors.summary(error) if error else "Ray gives no reason"
            return actors.lost(self.name, f"is lost: its process did not start ({why})")
        why = "cannot be reached" if isinstance(error, ray.exceptions.ActorUnavailableError) else "died"
        return actors.lost(self.name, f"is lost: its process {self.birth.pid} {why}")

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of a sync or async method. Raises the errors of `actors.Handle.call`."""
        if self.gone:
            raise self.lost()
        async with self._batches.replacing(args) as sent:
            return await self.remote(self.handle.call, method, sent, kwargs)

    async def remote(self, host_method: Any, *args: Any) -> Any:
        """Calls a method of the host process. If the caller cancels the call, cancels it there too.

        Raises:
          WorkerLost: the process is gone.
          LibraError: the method failed.
        """
        reference = host_method.remote(*args)
        try:
            outcome = await reference
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        except ray.exceptions.RayError as error:
            raise self.lost(error) from error
        return outcome.unwrap() if isinstance(outcome, ray_host.CallOutcome) else outcome

    async def stream(self, method: str, /, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """Yields the items of a stream method. Closing the generator closes the actor's generator.

        Raises:
          WorkerLost: the actor is gone.
          LibraError: the method raised an error.
        """
        if self.gone:
            raise self.lost()
        number, reader = self._streams, _StreamReader()
        self._streams += 1
        self._readers[number] = reader
        if self._receiving is None:
            self._receiving = asyncio.get_running_loop().create_task(self._receive())
        opening = asyncio.ensure_future(self.handle.open_stream.remote(self._caller, number, method, args, kwargs))

        def fail_reader(_: asyncio.Future[Any]) -> None:
            # A stream that could not be opened sends no news.
            if not opening.cancelled() and (error := opening.exception()) is not None:
                reader.outcomes.put_nowait(self.lost(error))
                reader.end_received = True

        opening.add_done_callback(fail_reader)
        batches = 0
        try:
            while (outcome := await reader.outcomes.get()) is not None:
                if isinstance(outcome, WorkerLost):
                    raise outcome
                batches += 1
                # Acknowledged at half of UNREAD, so that the actor's end rarely has to wait for the acknowledgement.
                if batches % (ray_host.UNREAD // 2) == 0:
                    self.handle.read_stream.remote(self._caller, number, ray_host.UNREAD // 2)
                for item in outcome.unwrap():
                    yield item
        finally:
            del self._readers[number]
            if not reader.end_received:
                with contextlib.suppress(ray.exceptions.RayError):  # the process is gone, and its streams with it
                    await self.handle.close_stream.remote(self._caller, number)

    async def _receive(self) -> None:
        """Asks for news of all streams while the actor lives."""
        while True:
            try:
                news: ray_host.News = await self.handle.news.remote(self._caller)
            except ray.exceptions.RayError as error:
                self._receiving = None
                for reader in self._readers.values():
                    reader.outcomes.put_nowait(self.lost(error))
                    reader.end_received = True
                return
            for number, outcomes in news.items():
                # The stream may have been closed here while its last news were on the way.
                if number in self._readers:
                    for outcome in outcomes:
                        self._readers[number].outcomes.put_nowait(outcome)
                    self._readers[number].end_received |= outcomes[-1] is None

    async def end_receiving(self, seconds: float) -> None:
        """Ends the call for news of an actor whose process has ended."""
        if self._receiving is not None:
            # The call fails by itself when Ray has noticed the end of the process.
            await asyncio.wait({self._receiving}, timeout=seconds)
        if self._receiving is not None:
            self._receiving.cancel()


@dataclass(frozen=True)
class Address:
    """`protocols.ActorAddress` of an actor of this Ray cluster. It can be pickled.

    Attributes:
      process: Ray's handle of its process.
      birth: facts about the process.
    """

    name: str
    methods: Mapping[str, actors.MethodKind]
    # Compared by `birth`: Ray's handles of one process differ.
    process: Any = dataclasses.field(compare=False)
    birth: ray_host.Birth

    def handle(self) -> actors.Handle:
        """Returns a handle of the actor. Call in a process of the cluster that is an actor itself."""
        caller = Caller(
            self.name,
            self.process,
            # News go to one reader each, so two handles of one process need two names.
            caller=f"{ray.get_runtime_context().get_actor_id()}/{next(_numbers)}",
            birth=self.birth,
            batches=ray_batches.StoredBatches(),
        )
        return actors.Handle(self.name, self.methods, caller.call, caller.stream, self)
