"""Telemetry: where a run writes what happened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

POOLS = ("core training", "hybrid in training", "hybrid in transition", "hybrid in rollout", "core rollout")
"""Names of the pools of devices, in the order in which pictures stack them."""

LOST = "lost"
"""The status of a worker that has failed and is out of service."""


class Recorder(Protocol):
    """Where a run writes what happened. Never raises for a full disk or a lost viewer: it warns once and goes on."""

    def metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        """One training step's numbers; keys as in `metrics.jsonl`."""
        ...

    def span(self, track: str, name: str, start: float, end: float, arguments: Mapping[str, Any] | None = None) -> None:
        """Something that took from `start` to `end` (event-loop seconds) on a named track of the timeline."""
        ...

    def trajectory(self, record: Mapping[str, Any]) -> None:
        """One line of `trace.jsonl`."""
        ...

    def sample(self, record: Mapping[str, Any]) -> None:
        """One line of `samples.jsonl`: a rollout as text."""
        ...

    def decision(self, record: Mapping[str, Any]) -> None:
        """One line of `plans.jsonl`: a look for a better plan."""
        ...

    def transition(self, record: Mapping[str, Any]) -> None:
        """One line of `transitions.jsonl`: a worker that changed sides, or a mesh that changed its size.

        Its `start` and `end` are event-loop seconds; in the file they are seconds since the run's first session began.
        """
        ...

    def pools(self, now: float, devices: Mapping[str, int]) -> None:
        """From `now` on (event-loop seconds) each pool has so many devices; names are those of `POOLS`, all of them."""
        ...

    def status(self, worker: str, text: str) -> None:
        """What a worker is doing now, for the console."""
        ...

    def note(self, text: str) -> None:
        """A sentence for the person watching."""
        ...
