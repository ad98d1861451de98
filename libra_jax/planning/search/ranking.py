"""Ranks the best plans of a run by short simulations, which run in the background while the run goes on.

A queue model predicts plans within some percent (`pipeline`), so its best plans often lie closer together than its
error. The simulator has the scheduler and the coordinator of a real run. It takes minutes, so a look that simulates
begins after one step and decides after a later one.

Simulations take the costs of the hardware sheet, not the measured levels. So each simulated plan corrects its own
prediction: predicted seconds at the measured levels, times simulated seconds over predicted seconds by the sheet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from libra_jax import protocols
from libra_jax.planning.forecast import forecast


@dataclass(frozen=True)
class Outcome:
    """The end of the simulations.

    Attributes:
      seconds: simulated seconds of a step under each plan, in their order; empty if they failed.
      failure: clause that says why they failed; empty otherwise.
    """

    seconds: tuple[float, ...] = ()
    failure: str = ""


class Trials(Protocol):
    """Simulates plans in the background, one list of plans at a time. No call waits for a simulation."""

    def start(self, work: forecast.Work, plans: Sequence[protocols.Plan]) -> None:
        """Begins to simulate steps of such work under each plan."""
        ...

    def outcome(self) -> Outcome | None:
        """Returns the end of the simulations that `start` began; None while they run. They run for a limited time."""
        ...

    def close(self) -> None:
        """Ends the simulations that run, if any."""
        ...


class Ranking:
    """Finds the best plan by predictions, or by simulations of the plans with the best predictions.

    Args:
      count: plans that are simulated, beside the plan in force.
      trials: simulates plans; None ranks by predictions.

    Attributes:
      source: clause that says what ranked the last plans, if not predictions alone.
    """

    def __init__(self, count: int, trials: Trials | None) -> None:
        self._count = count
        self._trials = trials
        self._tried: dict[protocols.Plan, float] = {}  # simulated plans, with their seconds of a step by the sheet
        self._factors: dict[protocols.Plan, float] = {}  # simulated seconds over predicted seconds
        self.source = ""

    def best(
        self, work: forecast.Work, levels: forecast.Levels, present: protocols.Plan, *, wait: bool
    ) -> protocols.Plan | None:
        """Returns the best plan; None while simulations run.

        Args:
          work: the work of the latest steps.
          levels: measured levels.
          wait: allows simulations. False if an instance was lost: they end, and predictions rank the plans.
        """
        self._factors, self.source = {}, ""
        if self._trials is None:
            return work.best(levels)
        if not wait:
            self.close()
            self.source = "ranked by predictions, because an instance was lost"
            return work.best(levels)
        if not self._tried:
            return self._start(self._trials, work, levels, present)
        outcome = self._trials.outcome()
        if outcome is None:
            return None
        tried, self._tried = self._tried, {}
        if outcome.failure or len(outcome.seconds) != len(tried):
            why = outcome.failure or f"simulations of {len(tried)} plans gave {len(outcome.seconds)} times"
            self.source = f"ranked by predictions, because {why}"
            return work.best(levels)
        pairs = zip(tried.items(), outcome.seconds, strict=True)
        self._factors = {plan: simulated / predicted for (plan, predicted), simulated in pairs}
        self.source = f"ranked by simulations of {len(tried)} plans"
        return min(tried, key=lambda plan: self.seconds(work, levels, plan))

    def seconds(self, work: forecast.Work, levels: forecast.Levels, plan: protocols.Plan) -> float:
        """Returns the seconds of a step under a plan, corrected by its simulation if the last look had one."""
        return work.predict(plan, levels).step * self._factors.get(plan, 1.0)

    def close(self) -> None:
        """Ends simulations that run."""
        self._tried = {}
        if self._trials is not None:
            self._trials.close()

    def _start(
        self, trials: Trials, work: forecast.Work, levels: forecast.Levels, present: protocols.Plan
    ) -> protocols.Plan | None:
        """Begins simulations; returns the best plan if there is nothing to rank."""
        candidates = work.ranked(levels, self._count)
        sheet = forecast.Levels()
        # The plan in force, too: a move is judged by the difference of both.
        times = {plan: work.predict(plan, sheet).step for plan in dict.fromkeys([present, *candidates])}
        tried = {plan: seconds for plan, seconds in times.items() if seconds < float("inf")}
        if candidates == [present] or len(tried) < 2:
            return candidates[0]
        trials.start(work, list(tried))
        self._tried = tried
        return None
