"""Records of a simulated engine about its requests, and its counters."""

from __future__ import annotations

import asyncio
import collections
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
      preempted: requests that lost their place for lack of cache.
      busy_seconds: seconds spent in steps.
      alive_seconds: seconds from its starts to its ends, without sleep.
    """

    generated: int = 0
    prefilled: int = 0
    prefilled_again: int = 0
    preempted: int = 0
    busy_seconds: float = 0.0
    alive_seconds: float = 0.0


@dataclass(eq=False)
class Request:
    """A request from its arrival to its departure; it has `length` tokens of context at step `since`."""

    name: str
    trajectory: trajectory.Trajectory
    number: int
    length: int
    fresh: int
    left: int
    reason: protocols.FinishReason
    spans: list[tuple[int, int]]
    state: Literal["waiting", "prefilling", "decoding", "gone"] = "waiting"
    since: int = 0
    due: int = -1
    deltas: collections.deque[protocols.TokenDelta] = field(default_factory=collections.deque)
    wake: asyncio.Future[None] | None = None
    error: BaseException | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.trajectory.trajectory_id, self.trajectory.life

    @property
    def unstreamed(self) -> int:
        return sum(count for _, count in self.spans)

    def rouse(self) -> None:
        if self.wake is not None and not self.wake.done():
            self.wake.set_result(None)


@dataclass
class Prefill:
    """Requests prefilled together in `steps` more steps; each step takes `seconds` of attention on top."""

    requests: list[Request]
    steps: int
    tokens: float
    seconds: float
