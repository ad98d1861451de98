"""Batches in Ray's object store: each group is written once, however many processes train on it.

An argument of a call would be written once for each call. Groups are put one by one, so that the event loop answers
others between them. Of a divided batch, each process reads the outlines, which are written once, and the rollouts that
it trains.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.exceptions

from libra_jax import protocols
from libra_jax.cluster import actors


@dataclass(frozen=True)
class StoredBatch:
    """A `protocols.TrainBatch` whose groups lie in the object store, on its way to an actor."""

    policy_version: int
    accumulated_groups: tuple[int, ...]
    groups: Sequence[Any]  # references; Ray's type is generic in its stubs alone

    async def received(self) -> protocols.TrainBatch:
        """Returns the batch. Call in the actor's process.

        Raises:
          LibraError: a group's bytes are lost.
        """
        try:
            # In a thread, because the loop has to answer other calls meanwhile.
            groups = await asyncio.to_thread(ray.get, list(self.groups))
        except ray.exceptions.RayError as error:
            raise protocols.LibraError(
                f"the groups of the batch for version {self.policy_version} cannot be read from Ray's object store: "
                f"{actors.summary(error)}"
            ) from error
        return protocols.TrainBatch(self.policy_version, tuple(groups), self.accumulated_groups)


@dataclass(frozen=True)
class SentPart:
    """A `protocols.BatchPart` whose outlines and rollouts lie in the object store, on its way to an actor."""

    outlines: Any  # references, as above
    rollouts: Any

    async def received(self) -> protocols.TrainBatch:
        """Returns the batch (`protocols.BatchPart.joined`). Call in the actor's process.

        Raises:
          WorkerLost: bytes of it are lost. The other processes wait for this one, so all have to be restarted.
        """
        try:
            outlines, rollouts = await asyncio.to_thread(ray.get, [self.outlines, self.rollouts])
        except ray.exceptions.RayError as error:
            raise protocols.WorkerLost(
                f"a part of a batch cannot be read from Ray's object store: {actors.summary(error)}"
            ) from error
        return protocols.BatchPart(outlines, rollouts).joined()


@dataclass(eq=False)
class _Entry:
    """Something in the store, while calls use it: a batch, or outlines or rollouts of a part."""

    what: object
    sent: asyncio.Task[Any]
    calls: int = 0


@dataclass(eq=False)
class StoredBatches:
    """The driver's batches in the store. A batch or part leaves it after the last call that takes it."""

    _entries: dict[int, _Entry] = field(default_factory=dict)

    @contextlib.asynccontextmanager
    async def replacing(self, args: Sequence[Any]) -> AsyncIterator[tuple[Any, ...]]:
        """Yields the arguments of a call with a `StoredBatch` for each batch and a `SentPart` for each part.

        The caller sets a deadline.

        Raises:
          LibraError: the store has no room for a batch, in memory or on disk.
        """
        entries: list[_Entry] = []
        try:
            replaced = []
            for arg in args:
                match arg:
                    case protocols.TrainBatch():
                        replaced.append(await self._put(arg, _groups, entries))
                    case protocols.BatchPart(outlines, rollouts):
                        put = [await self._put(one, _object, entries) for one in (outlines, rollouts)]
                        replaced.append(SentPart(*put))
                    case _:
                        replaced.append(arg)
            yield tuple(replaced)
        finally:
            for one in entries:
                one.calls -= 1
                if not one.calls:
                    del self._entries[id(one.what)]
                    one.sent.cancel()

    async def _put(self, what: Any, put: Callable[[Any], Coroutine[Any, Any, Any]], entries: list[_Entry]) -> Any:
        """Returns what stands for something in the store, put there once. Appends to `entries` what the call uses."""
        one = self._entries.get(id(what))
        if one is None:
            one = self._entries[id(what)] = _Entry(what, asyncio.ensure_future(put(what)))
        one.calls += 1
        entries.append(one)
        return await asyncio.shield(one.sent)


async def _groups(batch: protocols.TrainBatch) -> StoredBatch:
    references = []
    for group in batch.groups:
        with _room():
            references.append(ray.put(group))
        await asyncio.sleep(0)
    return StoredBatch(batch.policy_version, batch.begun, references)


async def _object(what: Any) -> Any:
    with _room():
        # In a thread, because outlines are many small objects.
        return await asyncio.to_thread(ray.put, what)


@contextlib.contextmanager
def _room() -> Iterator[None]:
    try:
        yield
    except ray.exceptions.RayError as error:
        raise protocols.LibraError(
            f"Ray's object store has no room for a batch ({actors.summary(error)}); give it more memory, or room on "
            "its disk"
        ) from error


async def received(args: Sequence[Any]) -> list[Any]:
    """Returns the arguments of a call with the batch instead of each `StoredBatch` and `SentPart`. Call in the actor's
    process.
    """
    return [await arg.received() if isinstance(arg, StoredBatch | SentPart) else arg for arg in args]
