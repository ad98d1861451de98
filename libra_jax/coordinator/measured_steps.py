"""What training steps took while no worker changed sides: by this, workers are borrowed and released."""

from __future__ import annotations

import collections
import statistics
from typing import NamedTuple

from libra_jax.coordinator import reports


class Taken(NamedTuple):
    """Seconds of a step: in all, of training, of waiting for its batch, and that rollout needs on the present slots."""

    step: float
    train: float
    wait: float
    rollout: float


class MeasuredSteps:
    """The last steps under the present arrangement.

    Args:
      staleness: eta. Groups that were begun before a change are trained for as many steps after it, in which the
        trainer need not wait for what rollout makes now; and long steps and short ones take turns.
    """

    def __init__(self, staleness: int) -> None:
        self._synchronous = staleness == 0
        self._taken: collections.deque[Taken] = collections.deque(maxlen=staleness + 1)

    @property
    def enough(self) -> bool:
        """There have been enough of them to go by: one whose groups were all begun under the arrangement, at least."""
        return len(self._taken) == self._taken.maxlen

    @property
    def train_seconds(self) -> float | None:
        """That the last one trained; None where there was none."""
        return self._taken[-1].train if self._taken else None

    def forget(self) -> None:
        """The arrangement is another."""
        self._taken.clear()

    def add(self, report: reports.StepReport, slots: int) -> None:
        """A step ran undisturbed.

        Args:
          report: of the step.
          slots: of all instances that served.
        """
        times = report.times
        step = times.step - report.evaluation.get("evaluation/seconds", 0.0)
        if self._synchronous:  # one stage waits for the other
            self._taken.append(Taken(step, times.train, times.rollout, times.rollout))
            return
        busy = report.counts.stream_seconds / slots if slots else times.rollout
        self._taken.append(Taken(step, times.train, times.wait, busy))

    def mean(self) -> Taken:
        """Of the last ones; nothing where there was none."""
        if not self._taken:
            return Taken(0.0, 0.0, 0.0, 0.0)
        return Taken(*map(statistics.fmean, zip(*self._taken, strict=True)))
