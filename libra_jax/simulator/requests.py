"""Requests of a simulated engine, the pace of the steps that serve them, and the totals of an instance."""

from __future__ import annotations

import asyncio
import collections
import math
from dataclasses import dataclass, field
from typing import Literal

from libra_jax import protocols
from libra_jax.simulator import trajectory


@dataclass
class Counters:
    """Totals of an instance over all its lives.

    Attributes:
      generated: tokens sampled.
      prefilled: tokens prefilled.
      prefilled_again: prefilled tokens whose keys and values some instance had computed before.
      fetched: tokens whose keys and values came from host memory.
      preempted: requests that lost their place for lack of cache.
      busy_seconds: seconds spent in steps.
      alive_seconds: seconds from its starts to its ends, without sleep.
    """

    generated: int = 0
    prefilled: int = 0
    prefilled_again: int = 0
    fetched: int = 0
    preempted: int = 0
    busy_seconds: float = 0.0
    alive_seconds: float = 0.0


@dataclass(eq=False)
class BatchRequest:
    """A request from its arrival to its departure; it has `length` tokens of context at step `since`."""

    name: str
    segment: trajectory.Counted
    number: int
    length: int
    fresh: int
    remaining_tokens: int
    reason: protocols.FinishReason
    spans: list[tuple[int, int]]
    state: Literal["waiting", "fetching", "prefilling", "decoding", "gone"] = "waiting"
    since: int = 0
    due: int = -1
    deltas: collections.deque[protocols.TokenDelta] = field(default_factory=collections.deque)
    wake: asyncio.Future[None] | None = None
    error: BaseException | None = None

    @property
    def key(self) -> tuple[str, int]:
        # With the life: a trajectory that began again shares no prefix with its former self.
        return self.segment.key

    @property
    def unstreamed(self) -> int:
        return sum(count for _, count in self.spans)

    def rouse(self) -> None:
        if self.wake is not None and not self.wake.done():
            self.wake.set_result(None)


@dataclass
class Prefill:
    """Requests prefilled together in `steps` more steps; each step takes `seconds` of attention on top."""

    requests: list[BatchRequest]
    steps: int
    tokens: float
    seconds: float


@dataclass(frozen=True)
class BatchPace:
    """The steps of a batch that does not change; a step's time is linear in the context.

    With n decoding requests and C tokens of context at the start, the j-th step (from 0) takes
    `fixed + per_context * (C + n * j)`. So k steps take
    `T(k) = k * (fixed + per_context * C) + per_context * n * k * (k - 1) / 2`.

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
        # Products of whole numbers first: they are exact, however long a run of steps is.
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
