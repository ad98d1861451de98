"""Measures training steps during which no worker switched. `switching` decides by these measurements."""

from __future__ import annotations

import collections
import statistics
from typing import NamedTuple

from libra_jax.coordinator import reports


class Taken(NamedTuple):
    """Seconds of a step: in total, of training, of waiting for its batch, and of rollout on the present slots."""

    step: float
    train: float
    wait: float
    rollout: float


class MeasuredSteps:
    """The last steps under the present arrangement of workers.

    Args:
      staleness: the max staleness. After a change, the trainer still trains for this many steps on groups begun before
        it, and does not wait for present rollout. Long and short steps also alternate.
    """

    def __init__(self, staleness: int) -> None:
        self._synchronous = staleness == 0
        self._taken: collections.deque[Taken] = collections.deque(maxlen=staleness + 1)

    @property
    def enough(self) -> bool:
        """True if enough steps were measured: the newest trained only on groups begun under the present arrangement."""
        return len(self._taken) == self._taken.maxlen

    @property
    def train_seconds(self) -> float | None:
        """Training seconds of the last measured step; None if no step was measured."""
        return self._taken[-1].train if self._taken else None

    def forget(self) -> None:
        """Drops all measurements, because the arrangement has changed."""
        # Steps under the former arrangement would distort the mean.
        self._taken.clear()

    def add(self, report: reports.StepReport, slots: int) -> None:
        """Adds an undisturbed step.

        Args:
          report: report of the step.
          slots: slots of all instances that served.
        """
        times = report.times
        step = times.step - report.evaluation.get("evaluation/seconds", 0.0)
        if self._synchronous:  # synchronous: training and rollout wait for each other
            self._taken.append(Taken(step, times.train, times.rollout, times.rollout))
            return
        # Slot seconds over slots: the seconds that rollout needs if every slot is always in use.
        busy = report.counts.stream_seconds / slots if slots else times.rollout
        self._taken.append(Taken(step, times.train, times.wait, busy))

    def mean(self) -> Taken:
        """Returns the mean of the measured steps; all zero if none was measured."""
        if not self._taken:
            return Taken(0.0, 0.0, 0.0, 0.0)
        return Taken(*map(statistics.fmean, zip(*self._taken, strict=True)))
