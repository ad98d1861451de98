"""The embedded backend: actors live in this process; engines may start processes of their own.

Each sync actor gets a thread; async actors share the event loop. If one actor stalls, all stall; the Ray backend
avoids that.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from libra_jax.cluster import actors
from libra_jax.protocols import ActorSpec
from libra_jax.utils import turns

_environment_locks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()


@contextlib.asynccontextmanager
async def _environment(variables: Mapping[str, str]) -> AsyncIterator[None]:
    """Sets environment variables for the block, or until the work inside ends its turn (`turns.ending`).

    One block at a time: all actors share the process's variables.
    """
    if not variables:
        yield
        return
    lock = _environment_locks.setdefault(asyncio.get_running_loop(), asyncio.Lock())
    # Deadlines do not count the wait for this lock.
    with turns.queued():
        await lock.acquire()
    turn = contextlib.ExitStack()
    # Callbacks run in reverse: the variables are restored before the lock is released.
    turn.callback(lock.release)
    for name in variables:
        if (value := os.environ.get(name)) is None:
            turn.callback(os.environ.pop, name, None)
        else:
            turn.callback(os.environ.__setitem__, name, value)
    loop = asyncio.get_running_loop()

    def end() -> None:
        # The variables and the lock belong to the event loop's thread. A closed loop has restored the variables.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(turn.close)

    try:
        os.environ.update(variables)
        with turns.ended_by(end):
            yield
    finally:
        turn.close()


@dataclass(eq=False)
class InProcessCluster:
    """`protocols.Cluster` within this process.

    An actor's environment variables are set while it is made and while its `start` runs, so that the processes it
    starts inherit them. A `start` that has read them ends its turn early (`turns.ending`). Meanwhile, other actors with
    variables wait for their turn; deadlines do not count that wait. An actor without variables does not wait, and sees
    the variables.

    Attributes:
      shutdown_seconds: seconds for an actor to stop.
    """

    shutdown_seconds: float = 60.0
    _hosts: dict[str, actors.ActorHost] = field(default_factory=dict, init=False)

    async def spawn(self, spec: ActorSpec) -> actors.Handle:
        """Makes the actor and returns its handle."""
        actors.check_name_free(spec.name, self._hosts)
        # `start` makes processes, too, which inherit the variables.
        host = actors.ActorHost(spec, functools.partial(_environment, spec.environment))
        self._hosts[spec.name] = host
        try:
            async with _environment(spec.environment):
                methods = await host.make()
        except BaseException:
            del self._hosts[spec.name]
            raise
        return actors.Handle(spec.name, methods, host.call, functools.partial(_stream, host))

    async def stop(self, name: str) -> None:
        """Ends the actor. Does nothing if it was stopped before."""
        host = self._hosts.pop(name, None)
        if host is not None:
            await host.stop(self.shutdown_seconds)

    # A thread cannot be killed.
    kill = stop

    async def shutdown(self) -> None:
        """Stops every actor, the last made first. Raises one LibraError for all failures."""
        await actors.stop_all(self.stop, self._hosts)


async def _stream(host: actors.ActorHost, method: str, /, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
    pump = host.open(method, args, kwargs)
    try:
        while items := await host.take(pump, method):
            for item in items:
                yield item
    finally:
        await pump.close()
