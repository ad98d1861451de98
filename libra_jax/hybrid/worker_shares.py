"""Splits training steps into shares for hybrid workers, and collects the outcomes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from libra_jax import protocols
from libra_jax.hybrid import training_sides
from libra_jax.utils import deadlines

SMOOTHING = 0.5
"""Weight of the last step in the running mean of a worker's speed."""

ANSWER_SECONDS = 0.2
"""Seconds to wait for workers' answers after the trainer's answer."""

LEAST_SPEED, MOST_SPEED = 0.05, 20.0
"""Plausible range of a worker's speed relative to the core. Measurements are clamped to it."""

IDLE_GROWTH = 1.01
"""Factor on a slow worker's speed for each step whose share of it was empty, up to the core's own speed.

An empty share measures nothing. Without growth, a worker that was slow for a while would never be measured again.
"""


@dataclass(frozen=True)
class ShareOutcome:
    """The outcome of a worker's share.

    Attributes:
      worker: name of the hybrid worker.
      counted: True if its sums are in the step.
      error: error of the worker; None if its sums counted or came late.
    """

    worker: str
    counted: bool
    error: BaseException | None = None


@dataclass(eq=False)
class Shares:
    """Shares in progress, and the speed of each worker. Create it inside the event loop that it serves.

    Attributes:
      sides: the workers' training sides.
      speed: speed of each worker relative to the core: an estimate at first, then as measured.
    """

    sides: training_sides.TrainingSides
    speed: dict[str, float]
    # Shares in progress, by worker.
    _work: dict[str, asyncio.Task[Mapping[str, float]]] = field(default_factory=dict, init=False)

    def split(self, training: Mapping[str, int], version: int) -> tuple[protocols.Share, ...]:
        """Splits a step, in proportion to speed, among the workers that hold its parameters. The core takes the rest.

        Args:
          training: the workers in training, with the membership generation of each.
          version: version of the step's parameters.
        """
        ready = {name: generation for name, generation in training.items() if self.sides.holds(name, version)}
        # A worker still busy with an earlier share gets none.
        ready = {name: generation for name, generation in ready.items() if name not in self._work}
        whole = 1.0 + sum(self.speed[name] for name in ready)
        return tuple(protocols.Share(name, generation, self.speed[name] / whole) for name, generation in ready.items())

    def begin(self, batch: protocols.TrainBatch, shares: Sequence[protocols.Share]) -> None:
        """Starts the workers' shares of a step."""
        for share in shares:
            work = asyncio.get_running_loop().create_task(self.sides.contribute(share.worker, batch, shares))
            # Looks at the error, or asyncio would report one that `finish` never asks for.
            work.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._work[share.worker] = work

    async def finish(
        self, shares: Sequence[protocols.Share], metrics: Mapping[str, float], seconds: float
    ) -> list[ShareOutcome]:
        """Returns the outcome of each share of a finished step. Measures speeds if all shares counted.

        Args:
          shares: shares of the step.
          metrics: the trainer's metrics.
          seconds: seconds of the trainer's step.
        """
        work = {share.worker: self._work[share.worker] for share in shares}
        # Sums go straight to the trainer, which may finish before the workers' answers arrive here.
        await asyncio.wait(work.values(), timeout=ANSWER_SECONDS)
        told: dict[str, Mapping[str, float]] = {}
        outcomes = []
        for name, task in work.items():
            # A share is cancelled when the run ends.
            cancelled = task.done() and task.cancelled()
            error = task.exception() if task.done() and not cancelled else None
            counted = error is None and not cancelled and f"shares/late/{name}" not in metrics
            outcomes.append(ShareOutcome(name, counted, error))
            if not counted:
                deadlines.abandon(self._work.pop(name))
            elif task.done():
                told[name] = self._work.pop(name).result()
            else:
                task.add_done_callback(lambda _, name=name: self._work.pop(name, None))  # type: ignore[misc]
        # The core's own micro-batches and seconds: those of the workers are not its work.
        core = metrics.get("shares/of", 0.0) - metrics.get("shares/micro_batches", 0.0)
        taken = seconds - metrics.get("shares/wait_seconds", 0.0)
        # If a share is missing, the core computed it, too, and the step's times compare nothing.
        if len(told) == len(shares) and core > 0 and taken > 0:
            for name, said in told.items():
                if said.get("micro_batches", 0) and said.get("seconds", 0):
                    speed = said["micro_batches"] / said["seconds"] / (core / taken)
                    speed = min(MOST_SPEED, max(LEAST_SPEED, speed))
                    self.speed[name] += SMOOTHING * (speed - self.speed[name])
                elif self.speed[name] < 1.0 and not said.get("micro_batches", 1):
                    self.speed[name] = min(1.0, IDLE_GROWTH * self.speed[name])
        return outcomes

    async def wait(self, name: str) -> None:
        """Waits until the worker computes no share."""
        if (share := self._work.get(name)) is not None:
            await asyncio.wait({share})

    def close(self) -> None:
        """Abandons all shares at the end of the run."""
        for share in self._work.values():
            deadlines.abandon(share)
