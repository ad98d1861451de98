"""Objects that the parts of one run share: its scope, its fencing token, and its events."""

from __future__ import annotations

import asyncio
import collections
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from libra_jax.protocols.scheduling import Instance, PlannedBucket
from libra_jax.protocols.training import MeshSizes

E = TypeVar("E")


class Scope(Protocol):
    """The lifetime of a run. Work started in the scope ends with the run."""

    @property
    def called(self) -> bool:
        """True once the run is to end."""
        ...

    def call(self, error: BaseException) -> None:
        """Ends the run with `error`. Later calls have no effect."""
        ...

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Runs `work` in the background; an error that it raises ends the run."""
        ...


class FencingToken(Protocol):
    """A run's right to write into its workdir, until a later start of the same run takes it."""

    @property
    def number(self) -> int:
        """Number of the start in its workdir, from 1."""
        ...

    def may_write(self) -> bool:
        """Returns True if the run still has the right, as far as can be seen."""
        ...

    def check(self) -> None:
        """Raises LibraError if a later start has taken the right, OSError if the workdir cannot be reached."""
        ...


@dataclass(frozen=True)
class CheckpointCommitted:
    """A checkpoint became valid: no step that it contains is trained again.

    Attributes:
      step: number of training steps that the checkpoint contains.
    """

    step: int


@dataclass(frozen=True)
class TrainerResized:
    """The trainer moved to another mesh.

    Attributes:
      sizes: axis sizes of the new mesh.
    """

    sizes: MeshSizes


@dataclass(frozen=True)
class TrainerReplaced:
    """Other processes train, or are about to. After this event, the former processes' channels and memory are not used.

    Attributes:
      lost: True if the former processes died; False if they handed over and still live.
    """

    lost: bool


@dataclass(frozen=True)
class EnginesChanged:
    """Engines began or ceased to serve.

    Attributes:
      serving: the instances on which requests may be placed now.
    """

    serving: Sequence[Instance]


@dataclass(frozen=True)
class EnginesReplanned:
    """A plan's surplus engines have left, and its missing ones are about to start.

    Attributes:
      rollout: the buckets from now on, those of hybrid engines included.
    """

    rollout: Sequence[PlannedBucket]


@dataclass(frozen=True)
class EngineLost:
    """An engine failed and is out of service.

    Attributes:
      name: name of the engine.
    """

    name: str


@dataclass(frozen=True)
class EngineUpdated:
    """Decoding of an engine was frozen for a weight update, or goes on.

    Attributes:
      name: name of the engine.
    """

    name: str


@dataclass(frozen=True)
class EngineLoaded:
    """An engine is up and holds no useful weights. The handlers return once it has the current ones.

    Attributes:
      name: name of the engine.
    """

    name: str


@dataclass(frozen=True)
class PoolsChanged:
    """A hybrid worker moved to another pool of devices."""


@dataclass(frozen=True)
class GroupSettled:
    """A group finished or was replaced.

    Attributes:
      group_id: number of the group.
    """

    group_id: int


class Events:
    """Delivers events to their subscribers. Belongs to one event loop."""

    def __init__(self) -> None:
        self._handlers: collections.defaultdict[type, list[Callable[[Any], Awaitable[None] | None]]]
        self._handlers = collections.defaultdict(list)

    def subscribe(self, kind: type[E], handler: Callable[[E], Awaitable[None] | None]) -> None:
        """Subscribes a handler to each event of that type."""
        self._handlers[kind].append(handler)

    def announce(self, event: object) -> None:
        """Calls the event's handlers, none of which may wait. Raises the first error."""
        for handler in self._handlers[type(event)]:
            waits = inspect.isawaitable(handler(event))
            # A coroutine that no one awaits would silently not run.
            assert not waits, f"a handler of {type(event).__name__} waits: deliver the event instead"

    async def deliver(self, event: object) -> None:
        """Calls and awaits the event's handlers in the order of their subscription. Raises the first error."""
        for handler in self._handlers[type(event)]:
            result = handler(event)
            if inspect.isawaitable(result):
                await result
