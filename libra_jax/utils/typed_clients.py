"""The base of the typed actor clients: starts and ends the actor, and gives each call a deadline."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.utils import deadlines

P = ParamSpec("P")
T = TypeVar("T")


class Asks(Protocol):
    """A client that can ask its actors for something."""

    async def _ask(
        self,
        limit: deadlines.Limit,
        what: str,
        method: Callable[Concatenate[Any, P], Awaitable[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Calls a method of the actor's protocol within `config.deadlines.<limit>`."""
        ...


class ClientMethod(Generic[P, T]):
    """A method of a client that passes a call on to its actor: arguments and result are those of the actor's method.

    Args:
      limit: Name of the deadline under `config.deadlines`.
      what: What the actor is asked to do, for errors: completes "asked to". Names positional arguments of the call as
        `str.format` does, for example "load chunk {0.index}".
      method: Method of the actor's protocol.
    """

    def __init__(self, limit: deadlines.Limit, what: str, method: Callable[Concatenate[Any, P], Awaitable[T]]) -> None:
        self._limit: deadlines.Limit = limit
        self._what = what
        self._method = method

    def __get__(self, client: Asks, owner: type) -> Callable[P, Coroutine[Any, Any, T]]:
        return functools.partial(client._ask, self._limit, self._what, self._method)


class ActorClient:
    """Calls one actor, for one lifetime of its process. Restarting the actor needs a new client.

    Args:
      cluster: Cluster that makes and ends the actor.
      spec: How the actor is made.
      limits: Deadlines of the calls.
      kind: Kind of the actor, which errors put before its name. Empty if the name says it already.
    """

    _start_limit: deadlines.Limit = "engine_start"
    """Deadline for making the actor."""

    def __init__(
        self,
        cluster: protocols.Cluster,
        spec: protocols.ActorSpec,
        limits: config_lib.DeadlineConfig,
        *,
        kind: str = "",
    ) -> None:
        self._cluster = cluster
        self._spec = spec
        self._limits = limits
        self._label = f"{kind} {spec.name}" if kind else spec.name
        self._subject = f"{kind.capitalize()} {spec.name}" if kind else spec.name
        self._handle: protocols.ActorHandle | None = None

    @property
    def name(self) -> str:
        """Name of the actor."""
        return self._spec.name

    @property
    def address(self) -> protocols.ActorAddress:
        """Place of the actor, for other processes. Raises WorkerLost if it has not been made."""
        return self._actor.address

    def reach(self, address: protocols.ActorAddress) -> None:
        """Calls an actor that another process has made, from now on."""
        self._handle = address.handle()

    async def make(self) -> None:
        """Makes the actor.

        Raises:
          DeadlineMissed: Making it took too long.
          LibraError: The actor cannot be made (`protocols.Cluster.spawn`).
        """
        making = self._cluster.spawn(self._spec)
        self._handle = await deadlines.limited(self._limits, self._start_limit, making, f"The making of {self._label}")

    async def stop(self) -> None:
        """Ends and reaps the actor with this name. Another client may have made it. Idempotent.

        Raises:
          LibraError: The actor did not end properly.
        """
        stopping = self._cluster.stop(self.name)
        await deadlines.limited(self._limits, "shutdown", stopping, f"The end of {self._label}")

    @property
    def _actor(self) -> protocols.ActorHandle:
        if self._handle is None:
            raise protocols.WorkerLost(f"{self._subject} has no process: make it first")
        return self._handle

    async def _ask(
        self,
        limit: deadlines.Limit,
        what: str,
        method: Callable[Concatenate[Any, P], Awaitable[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Calls a method of the actor's protocol within `config.deadlines.<limit>`. See `ClientMethod` for `what`."""
        work = self._actor.call(method, *args, **kwargs)
        subject = f"{self._subject}, asked to {what.format(*args, **kwargs)},"
        return await deadlines.limited(self._limits, limit, work, subject)
