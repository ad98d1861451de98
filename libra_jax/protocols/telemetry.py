"""Telemetry: the interface through which a run records its events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

POOLS = ("core training", "hybrid in training", "hybrid in transition", "hybrid in rollout", "core rollout")
"""Names of the device pools, in the order in which plots stack them."""

LOST = "lost"
"""Status of a worker that has failed and is out of service."""


@dataclass(frozen=True)
class Span:
    """A span of the timeline. Times are seconds since the start of the run's first session."""

    track: str
    lane: int
    name: str
    start: float
    end: float
    arguments: Mapping[str, Any]


class Records(TypedDict):
    """Id of a run in its records, and the number of records in each file by its name."""

    run: str
    counts: Mapping[str, int]


class Recorder(Protocol):
    """Records the events of a run. Never raises for a full disk or a lost viewer: it warns once and continues."""

    def metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        """Records the metrics of one training step; keys as in `metrics.jsonl`."""
        ...

    def span(self, track: str, name: str, start: float, end: float, arguments: Mapping[str, Any] | None = None) -> None:
        """Records a span from `start` to `end` (event-loop seconds) on a named track of the timeline."""
        ...

    def trajectory(self, record: Mapping[str, Any]) -> None:
        """Records one line of `trace.jsonl`."""
        ...

    def sample(self, record: Mapping[str, Any]) -> None:
        """Records one line of `samples.jsonl`: a rollout as text."""
        ...

    def decision(self, record: Mapping[str, Any]) -> None:
        """Records one line of `plans.jsonl`: a search for a better plan."""
        ...

    def transition(self, record: Mapping[str, Any]) -> None:
        """Records one line of `transitions.jsonl`: a worker that switched roles, or a mesh that was resized.

        `start` and `end` are event-loop seconds. The file has seconds since the run's first session began.
        """
        ...

    def pools(self, now: float, devices: Mapping[str, int]) -> None:
        """Records the number of devices in each pool from `now` on (event-loop seconds). Names all `POOLS`."""
        ...

    def status(self, worker: str, text: str) -> None:
        """Records the current activity of a worker, for the console."""
        ...

    def note(self, text: str) -> None:
        """Shows a sentence to the person who watches."""
        ...

    def records(self) -> Records | None:
        """Returns what the files hold after the last flush. None before it, or without files."""
        ...
