"""Batches in Ray's object store: each group is written once, however many processes train on it.

An argument of a call would be written once for each call. Groups are put one by one, so that the event loop answers
others between them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.exceptions

from libra_jax import protocols
from libra_jax.cluster import actors


@dataclass(frozen=True)
class Sent:
    """A `protocols.TrainBatch` whose groups lie in the object store, on its way to an actor."""

    policy_version: int
    begun: tuple[int, ...]
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
        return protocols.TrainBatch(self.policy_version, tuple(groups), self.begun)


@dataclass(eq=False)
class _Placed:
    """Groups in the store, while calls use them."""

    batch: protocols.TrainBatch
    sent: asyncio.Task[Sent]
    calls: int = 0


@dataclass(eq=False)
class Batches:
    """The driver's batches in the store. A batch leaves it after the last call that takes it."""

    _placed: dict[int, _Placed] = field(default_factory=dict)

    @contextlib.asynccontextmanager
    async def replacing(self, args: Sequence[Any]) -> AsyncIterator[tuple[Any, ...]]:
        """Yields the arguments of a call with each batch replaced by a `Sent`. The caller sets a deadline.

        Raises:
          LibraError: the store has no room for a batch, in memory or on disk.
        """
        batches = [arg for arg in args if isinstance(arg, protocols.TrainBatch)]
        placed = [self._place(batch) for batch in batches]
        try:
            sent = {id(one.batch): await asyncio.shield(one.sent) for one in placed}
            yield tuple(sent.get(id(arg), arg) for arg in args)
        finally:
            for one in placed:
                one.calls -= 1
                if not one.calls:
                    del self._placed[id(one.batch)]
                    one.sent.cancel()

    def _place(self, batch: protocols.TrainBatch) -> _Placed:
        placed = self._placed.get(id(batch))
        if placed is None:
            placed = self._placed[id(batch)] = _Placed(batch, asyncio.ensure_future(_put(batch)))
        placed.calls += 1
        return placed


async def _put(batch: protocols.TrainBatch) -> Sent:
    references = []
    for group in batch.groups:
        try:
            references.append(ray.put(group))
        except ray.exceptions.RayError as error:
            raise protocols.LibraError(
                f"Ray's object store has no room for the batch for version {batch.policy_version} "
                f"({actors.summary(error)}); give it more memory, or room on its disk"
            ) from error
        await asyncio.sleep(0)
    return Sent(batch.policy_version, batch.begun, references)


async def received(args: Sequence[Any]) -> list[Any]:
    """Returns the arguments of a call with each `Sent` replaced by its batch. Call in the actor's process."""
    return [await arg.received() if isinstance(arg, Sent) else arg for arg in args]
