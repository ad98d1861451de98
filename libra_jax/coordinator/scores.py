"""Scores of an evaluation's attempts: pass@k by task, and their means."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TaskScores:
    """The attempts at one task.

    Attributes:
      task: prompt id of the task.
      rewards: reward of each attempt that was scored, in the order of the attempts.
      unscored: number of attempts whose environment kept crashing; they are left out, never scored zero.
    """

    task: str
    rewards: tuple[float, ...]
    unscored: int = 0

    @property
    def mean(self) -> float:
        """Mean reward of the scored attempts; there must be one."""
        return statistics.fmean(self.rewards)

    def solved(self, threshold: float) -> int:
        """Returns the number of attempts whose reward reaches the threshold."""
        return sum(reward >= threshold for reward in self.rewards)

    def pass_at(self, k: int, threshold: float) -> float | None:
        """Returns pass@k of this task; None if fewer than k attempts were scored."""
        if len(self.rewards) < k:
            return None
        return pass_at_k(len(self.rewards), self.solved(threshold), k)


def pass_at_k(attempts: int, solved: int, k: int) -> float:
    """Returns the unbiased estimate of the chance that at least one of k attempts solves a task.

    1 - C(attempts - solved, k) / C(attempts, k): the share of all choices of k of the attempts that hold a solved one
    (Chen et al., arXiv 2107.03374, eq. 1). The binomials are whole numbers, so nothing is rounded before the division.

    Args:
      attempts: number of attempts, at least k.
      solved: number of attempts that solve the task.
      k: number of attempts that one may take.

    Example:
      >>> pass_at_k(4, 1, 2)
      0.5
    """
    if not 1 <= k <= attempts or not 0 <= solved <= attempts:
        raise ValueError(f"pass@{k} of {attempts} attempts with {solved} solved has no estimate")
    return 1.0 - math.comb(attempts - solved, k) / math.comb(attempts, k)


def usual_k(attempts: int) -> tuple[int, ...]:
    """Returns the powers of two up to the number of attempts, and that number."""
    powers = (2**exponent for exponent in range(attempts.bit_length()))
    return tuple(sorted({*powers, attempts}))


def mean_reward(scores: Sequence[TaskScores]) -> float:
    """Returns the mean over tasks of the mean reward of their attempts. Tasks without a scored attempt are left out."""
    return statistics.fmean(one.mean for one in scores if one.rewards)


def mean_pass_at(scores: Sequence[TaskScores], k: int, threshold: float) -> float | None:
    """Returns the mean of pass@k over the tasks with at least k scored attempts; None if there are none."""
    values = [value for one in scores if (value := one.pass_at(k, threshold)) is not None]
    return statistics.fmean(values) if values else None
