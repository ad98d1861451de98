"""Holds requests in progress: a trajectory that asks for tokens, and the engine's stream that delivers tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from libra_jax import protocols
from libra_jax.coordinator import instances, routing


@dataclass
class Stream:
    """One engine's answer to one request, while the answer streams.

    `broken` ends the stream. It resolves after the pump has ended, or early: with the stream's error, or with None if
    the request was moved or displaced.
    """

    engine: instances.Engine
    life: int
    broken: asyncio.Future[BaseException | None]
    begin: float
    last_delta: float
    answered: bool = False
    closed: bool = False
    finish: protocols.FinishReason | None = None

    def end(self, error: BaseException | None = None) -> None:
        """Ends the stream, if it has not ended."""
        if not self.broken.done():
            self.broken.set_result(error)

    def pumped(self, pump: asyncio.Future[None]) -> None:
        """Ends the stream once its pump is done and every token has arrived."""
        self.end()


@dataclass
class Request:
    """A trajectory between its first and its last token."""

    trajectory: protocols.Trajectory
    group_id: int
    generated: int
    instance: str = ""  # empty while the request waits or its tool runs
    waits: bool = False  # the request asks for tokens and has no instance
    waits_since: float = 0.0  # start of the wait not yet in the counts
    passed_over_since: float | None = None  # start of a wait during which some slot was always free
    placed: asyncio.Event = field(default_factory=asyncio.Event)
    stream: Stream | None = None
    heard: Callable[[], None] | None = None  # callback for new tokens
    route: routing.Route = field(default_factory=routing.Route)
    failures: int = 0
    away_since: float = 0.0

    @property
    def name(self) -> str:
        """Name of the request: the trajectory's id."""
        return self.trajectory.trajectory_id

    def displace(self) -> None:
        """Takes the request off its instance: its stream ends, and the next one waits for a placement."""
        self.instance = ""
        # Cleared before the stream ends: `sample` looks at it next.
        self.placed.clear()
        if self.stream is not None:
            self.stream.end()
