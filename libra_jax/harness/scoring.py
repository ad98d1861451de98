"""Scores a finished rollout: by a callable's own verdict, by a function, or by hidden tests."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from libra_jax import protocols
from libra_jax.harness import jobs
from libra_jax.rewards.repair import grading, snapshots
from libra_jax.utils import deadlines, resolving, user_values

VERDICT, TESTS = "verdict", "tests"
_SERVICES = re.compile(r"Connect|gaierror|InternalServer|RateLimit|Overloaded|Network")
"""In the name of a scorer's error: a service failed, such as a judge. A time-out may be due to what the agent left."""


class RolloutScorer(Protocol):
    """Scores one finished rollout."""

    async def score(self, finished: jobs.Finished) -> protocols.Outcome:
        """Returns the rollout's outcome.

        Raises:
          EnvironmentCrashed: the rollout cannot be scored.
        """
        ...


class OwnVerdict:
    """Takes the verdict that a callable returned."""

    async def score(self, finished: jobs.Finished) -> protocols.Outcome:
        subject = f"the agent of task {finished.task.prompt_id}"
        if finished.verdict is None:
            raise protocols.AttemptVoided(
                f"{subject} gave no verdict. Return one, or name a function that scores it in "
                "environment_arguments.score"
            )
        return jobs.outcome(finished.verdict, subject)


class ByFunction:
    """Scores by a user's function of `jobs.Finished`, plain or async, which returns a verdict."""

    def __init__(self, name: str, function: Callable[..., Any], seconds: float) -> None:
        self._name, self._function, self._seconds = name, function, seconds

    async def score(self, finished: jobs.Finished) -> protocols.Outcome:
        subject = f"the scorer {resolving.shown(self._name)}, task {finished.task.prompt_id}:"
        finished = dataclasses.replace(finished, task=finished.task.copy())  # the function may change it
        try:
            verdict = await deadlines.cancel_after(self._seconds, deadlines.call(self._function, finished))
        except deadlines.Overdue:
            raise protocols.AttemptVoided(
                f"{subject} took more than {self._seconds:g} s (environment_arguments.score_seconds)"
            ) from None
        except (protocols.EnvironmentCrashed, asyncio.CancelledError):
            raise
        except Exception as error:
            # Often because of what the agent left, such as an output that is no JSON.
            kind = protocols.EnvironmentCrashed if _SERVICES.search(type(error).__name__) else protocols.AttemptVoided
            raise kind(f"{subject} {resolving.raised(error)}") from error
        return jobs.outcome(verdict, subject)


@dataclass(frozen=True)
class HiddenTests:
    """Scores by the task's hidden tests, in a sandbox that the agent never saw. See `libra_jax.rewards.repair.suites`.

    Attributes:
      grader: Runs the tests.
      files: Field of the payload with the files that the agent began with.
      most_bytes: Most bytes of these files.
    """

    grader: grading.Grader
    files: str
    most_bytes: int

    async def score(self, finished: jobs.Finished) -> protocols.Outcome:
        before = await deadlines.off_loop(snapshots.of_task, finished.task, self.files, self.most_bytes)
        return await self.grader.grade(finished.task, before, finished.files, finished.refused)


def checked(outcome: protocols.Outcome, subject: str) -> protocols.Outcome:
    """Returns an outcome whose numbers are all finite, and whose metrics have plain names.

    Raises:
      AttemptVoided: it has others.
    """
    for reward in (outcome.reward, *outcome.segment_rewards.values()):
        if not user_values.is_finite(reward):
            shown = user_values.shown(reward)
            raise protocols.AttemptVoided(f"{subject} gave the reward {shown}, which is not a finite number")
    if problem := user_values.metrics_problem(outcome.metrics):
        raise protocols.AttemptVoided(f"{subject} gave {problem}")
    return dataclasses.replace(outcome, metrics={name: float(value) for name, value in outcome.metrics.items()})
