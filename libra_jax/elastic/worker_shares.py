"""The shares of training steps that hybrid workers compute: their sizes, and their outcomes."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libra_jax import deadlines, protocols
from libra_jax.elastic import training_sides

SMOOTHING = 0.5
"""Weight of the last step in the running mean of a worker's speed."""

ANSWER_SECONDS = 0.2
"""Seconds to wait for workers' answers after the trainer's answer."""

LEAST_SPEED, MOST_SPEED = 0.05, 20.0
"""Plausible range of a worker's speed relative to the core. Measurements are clamped to it."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a worker's share.

    Attributes:
      member: the worker's name.
      counted: its sums are in the step.
      error: the worker's error; None if its sums counted, or were late.
    """

    member: str
    counted: bool
    error: BaseException | None = None


class Shares:
    """Shares under way, and the speed of each worker. Made inside the event loop it serves.

    Args:
      members: the workers' replicas.
      speed: of each worker, as a multiple of the core's, until it is measured.

    Attributes:
      speed: as measured.
    """

    def __init__(self, members: training_sides.TrainingSides, speed: Mapping[str, float]) -> None:
        self.speed = dict(speed)
        self._members = members
        self._work: dict[str, asyncio.Task[Mapping[str, float]]] = {}  # shares that are being computed

    def split(self, training: Mapping[str, int], version: int) -> tuple[protocols.Share, ...]:
        """Splits a step, by speed, among the workers that hold its parameters; the core takes the rest.

        Args:
          training: the workers that train, and the epoch of each.
          version: of the step's parameters.
        """
        ready = {name: epoch for name, epoch in training.items() if self._members.holds(name, version)}
        ready = {name: epoch for name, epoch in ready.items() if name not in self._work}  # one still answers
        whole = 1.0 + sum(self.speed[name] for name in ready)
        return tuple(protocols.Share(name, epoch, self.speed[name] / whole) for name, epoch in ready.items())

    def begin(self, batch: protocols.TrainBatch, shares: Sequence[protocols.Share]) -> None:
        """Lets the workers begin to compute."""
        for share in shares:
            work = asyncio.get_running_loop().create_task(self._members.contribute(share.member, batch, shares))
            work.add_done_callback(_looked_at)
            self._work[share.member] = work

    async def finish(
        self, shares: Sequence[protocols.Share], metrics: Mapping[str, float], seconds: float
    ) -> list[Outcome]:
        """Returns the outcome of each share of a step that is over; measures speeds if all shares counted.

        Args:
          shares: of the step.
          metrics: the trainer's.
          seconds: that the trainer took.
        """
        work = {share.member: self._work[share.member] for share in shares}
        # Sums go straight to the trainer, which may be done before the members' answers come here.
        await asyncio.wait(work.values(), timeout=ANSWER_SECONDS)
        told: dict[str, Mapping[str, float]] = {}
        outcomes = []
        for name, task in work.items():
            cancelled = task.done() and task.cancelled()  # the run ends
            error = task.exception() if task.done() and not cancelled else None
            counted = error is None and not cancelled and f"shares/late/{name}" not in metrics
            outcomes.append(Outcome(name, counted, error))
            if not counted:
                deadlines.abandon(self._work.pop(name))
            elif task.done():
                told[name] = self._work.pop(name).result()
            else:
                task.add_done_callback(functools.partial(self._answered, name))
        if len(told) == len(shares):
            self._measure(told, metrics, seconds)
        return outcomes

    async def wait(self, name: str) -> None:
        """Returns when the worker computes no share."""
        if (share := self._work.get(name)) is not None:
            await asyncio.wait({share})

    def close(self) -> None:
        """Abandons all shares, because the run ends."""
        for share in self._work.values():
            deadlines.abandon(share)

    def _answered(self, name: str, _: asyncio.Task[Mapping[str, float]]) -> None:
        self._work.pop(name, None)

    def _measure(self, told: Mapping[str, Mapping[str, float]], metrics: Mapping[str, float], seconds: float) -> None:
        """Updates the speeds: micro-batches a second of each worker, over those of the core in the same step."""
        core = metrics.get("micro_batches", 0.0) - metrics.get("shares/micro_batches", 0.0)
        taken = seconds - metrics.get("shares/wait_seconds", 0.0)
        for name, said in told.items():
            if said.get("micro_batches", 0) and said.get("seconds", 0) and core > 0 and taken > 0:
                speed = said["micro_batches"] / said["seconds"] / (core / taken)
                speed = min(MOST_SPEED, max(LEAST_SPEED, speed))
                self.speed[name] += SMOOTHING * (speed - self.speed[name])


def _looked_at(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
