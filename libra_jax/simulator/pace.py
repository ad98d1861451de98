"""Closed-form times of an engine's steps between two changes of its batch; a step's time is linear in context.

A batch has n decoding requests, and C tokens of context at the start. The j-th step (from 0) takes `fixed +
per_context * (C + n * j)`. So k steps take `T(k) = k * (fixed + per_context * C) + per_context * n * k * (k - 1) /
2`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """The steps of a batch that does not change.

    Attributes:
      fixed: seconds of each step apart from contexts.
      per_context: seconds that a token of context adds to a step.
      context: tokens of context, over all decoding requests, at the start.
      decoding: requests that get a token each step.
    """

    fixed: float
    per_context: float
    context: int
    decoding: int

    def seconds(self, steps: int) -> float:
        """Returns the seconds of the first `steps` steps."""
        growth = self.decoding * (steps * (steps - 1) // 2)
        return steps * self.fixed + self.per_context * (steps * self.context + growth)

    def steps(self, seconds: float) -> int:
        """Returns the steps that are complete after `seconds`: the largest k with T(k) <= seconds."""
        if seconds <= 0:
            return 0
        half = self.per_context * self.decoding / 2
        first = self.fixed + self.per_context * self.context - half
        # The root of half k^2 + first k = seconds, in the form that loses no digits if `half` is tiny.
        root = 2 * seconds / (first + math.sqrt(first * first + 4 * half * seconds))
        steps = int(root)
        # Rounding may put the root one step off, and the boundary must be exact.
        while self.seconds(steps + 1) <= seconds:
            steps += 1
        while steps and self.seconds(steps) > seconds:
            steps -= 1
        return steps
