"""The cluster: where actors live."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


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


class Cluster(Protocol):
    """Makes actors. A proxy has the methods of the factory's result: `await proxy.method(...)`, whether the method is
    sync or async there; async generators stay async iterators. A dead actor raises `WorkerLost` from every call."""

    async def spawn(self, spec: ActorSpec) -> Any:
        """Makes the actor and returns its proxy."""
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
