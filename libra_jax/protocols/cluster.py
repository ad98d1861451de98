"""The cluster: the interface for starting, calling and ending actors."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

# Captures the method's parameters, so that a wrong argument of an actor's call is a type-checker error.
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class ActorSpec:
    """Description of an actor to start.

    Attributes:
      name: name, unique in the cluster and used in errors.
      factory: `"package.module:callable"`. The public methods of its result are the actor's methods.
      arguments: keyword arguments of the factory; picklable.
      cpus: number of CPU cores reserved (ray backend).
      gpus: number of accelerators reserved (ray backend).
      environment: environment variables of the actor's process (ray backend; set in place if embedded).
      devices: indices of the run's devices that the actor gets.
      cores: CPU cores that the actor's process is pinned to (ray backend); empty: all. The factory reports cores that
        do not exist.
      host: number of the run's host for the actor (ray backend; `cluster.hosts`); None: any host with room.
    """

    name: str
    factory: str
    arguments: Mapping[str, Any]
    cpus: float = 1.0
    gpus: float = 0.0
    environment: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[int, ...] = ()
    cores: tuple[int, ...] = ()
    host: int | None = None


class ActorAddress(Protocol):
    """Place of an actor that was made. Another process of the run can take it, and calls the actor from there."""

    def handle(self) -> ActorHandle:
        """Returns a handle of the actor, in the process that asks."""
        ...


class ActorHandle(Protocol):
    """Calls an actor. Only actor clients hold a handle; all other code holds a client with typed methods.

    The protocol that the actor implements names the method: `await handle.call(Trainer.restore, path)`. A wrong name,
    keyword or argument is therefore a type-checker error. Every call to a dead actor raises `WorkerLost`.
    """

    @property
    def name(self) -> str:
        """The name of the actor in its cluster."""
        ...

    @property
    def address(self) -> ActorAddress:
        """Place of the actor, for other processes."""
        ...

    async def call(
        self, method: Callable[Concatenate[Any, P], Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Returns the result of the actor's method with that name, sync or async.

        Raises:
          WorkerLost: the actor is gone, or went during the call.
          LibraError: the method failed.
        """
        ...

    def stream(
        self, method: Callable[Concatenate[Any, P], AsyncIterator[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> AsyncGenerator[T, None]:
        """Yields the items of the actor's async generator with that name. Closing the result closes the generator.

        Raises:
          WorkerLost: the actor is gone, or went before the last item.
          LibraError: the generator failed. Its items so far come first.
        """
        ...


class DirectHandle:
    """`ActorHandle` of an object on the caller's own event loop, for a virtual clock or a test double.

    It is its own address, because no other process can call the object.
    """

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self._actor = actor

    @property
    def address(self) -> DirectHandle:
        """The handle itself."""
        return self

    def handle(self) -> DirectHandle:
        """Returns the handle itself."""
        return self

    async def call(
        self, method: Callable[Concatenate[Any, P], Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Awaits the object's own method."""
        # By name, as a real handle does: the object need not be a subclass of the protocol.
        return cast(T, await getattr(self._actor, method.__name__)(*args, **kwargs))

    def stream(
        self, method: Callable[Concatenate[Any, P], AsyncIterator[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> AsyncGenerator[T, None]:
        """Returns the result of the object's own method."""
        return cast(AsyncGenerator[T, None], getattr(self._actor, method.__name__)(*args, **kwargs))


class Cluster(Protocol):
    """Starts actors and ends them."""

    async def spawn(self, spec: ActorSpec) -> ActorHandle:
        """Starts the actor and returns its handle.

        Raises:
          ConfigError: the factory cannot be found, or the cluster can never hold the actor.
          DeadlineMissed: the cluster had no room for the actor in time.
          LibraError: the factory failed, or an actor of that name lives.
          WorkerLost: the actor's process died while it made the actor.
        """
        ...

    async def stop(self, name: str) -> None:
        """Calls the actor's `shutdown` with a deadline, ends the actor and reaps its processes. Idempotent.

        Raises:
          DeadlineMissed: the actor did not stop in time; the message names the call that it was in.
          LibraError: its `shutdown` failed.
        """
        ...

    async def kill(self, name: str) -> None:
        """Ends the actor without calling it, if possible, and reaps its processes. Its state is lost."""
        ...

    async def shutdown(self) -> None:
        """Stops every actor, the last started first. Idempotent.

        Raises:
          LibraError: one or several actors did not stop properly; the message has each reason.
        """
        ...
