"""The cluster: where actors live."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class ActorSpec:
    """How to make an actor.

    Attributes:
      name: unique in the cluster; errors name it.
      factory: `"package.module:callable"`; the result's public methods are the actor's.
      arguments: keyword arguments of the factory; picklable.
      cpus: CPU cores reserved (ray backend).
      gpus: accelerators reserved (ray backend).
      environment: environment variables the actor's process starts with (ray backend; set in place when embedded).
      devices: of the run's devices, those that the actor has.
      cores: CPU cores that the actor's process keeps to (ray backend); empty: all. Those that are not there are left to
        the factory to complain of.
      host: number of the run's host that the actor is on (ray backend; `cluster.hosts`); None: wherever there is room.
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


class ActorHandle(Protocol):
    """Calls an actor. Only the clients of actors hold one; all other code holds a client with typed methods.

    The method is named by the protocol that the actor implements, so that a wrong name, keyword or argument is an error
    of the type checker: `await handle.call(Trainer.restore, path)`. A dead actor raises `WorkerLost` from every call.
    """

    @property
    def name(self) -> str:
        """The actor's name in its cluster."""
        ...

    async def call(
        self, method: Callable[Concatenate[Any, P], Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Returns the result of the actor's method of that name, whether the method is sync or async there."""
        ...

    def stream(
        self, method: Callable[Concatenate[Any, P], AsyncIterator[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> AsyncGenerator[T, None]:
        """Yields the items of the actor's async generator of that name. Closing the result closes the generator."""
        ...


class DirectHandle:
    """`ActorHandle` of an object on the caller's own event loop, for a virtual clock or a test's double."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self._actor = actor

    async def call(
        self, method: Callable[Concatenate[Any, P], Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Awaits the object's own method."""
        return cast(T, await getattr(self._actor, method.__name__)(*args, **kwargs))

    def stream(
        self, method: Callable[Concatenate[Any, P], AsyncIterator[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> AsyncGenerator[T, None]:
        """Returns what the object's own method returns."""
        return cast(AsyncGenerator[T, None], getattr(self._actor, method.__name__)(*args, **kwargs))


class Cluster(Protocol):
    """Makes actors, and ends them."""

    async def spawn(self, spec: ActorSpec) -> ActorHandle:
        """Makes the actor and returns its handle."""
        ...

    async def stop(self, name: str) -> None:
        """Ends the actor (its `shutdown` is called first, with a deadline) and reaps its processes."""
        ...

    async def kill(self, name: str) -> None:
        """Ends the actor without asking it, where that can be done, and reaps its processes: what it holds is lost."""
        ...

    async def shutdown(self) -> None:
        """Stops every actor, last made first. Idempotent."""
        ...
