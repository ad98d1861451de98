"""A recorder that keeps everything in lists, for simulations, benchmarks and tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from libra_jax import protocols
from libra_jax.telemetry import metrics
from libra_jax.telemetry.report import timeline


@dataclass(eq=False)
class MemoryRecorder:
    """A `protocols.Recorder` in memory. It refuses names of metrics that are not registered (`metrics`).

    Attributes:
      steps: Pairs (step, scalars) of each call.
      spans: Tuples (track, name, start, end, arguments) of each call.
      pool_sizes: Sizes of each call, with `start` in event-loop seconds.
      statuses: Pairs (worker, text) of each call.
    """

    steps: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    spans: list[tuple[str, str, float, float, dict[str, Any]]] = field(default_factory=list)
    trajectories: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    transitions: list[dict[str, Any]] = field(default_factory=list)
    pool_sizes: list[timeline.PoolSizes] = field(default_factory=list)
    statuses: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        metrics.check(scalars)
        self.steps.append((step, dict(scalars)))

    def span(self, track: str, name: str, start: float, end: float, arguments: Mapping[str, Any] | None = None) -> None:
        self.spans.append((track, name, start, end, dict(arguments or {})))

    def trajectory(self, record: Mapping[str, Any]) -> None:
        self.trajectories.append(dict(record))

    def sample(self, record: Mapping[str, Any]) -> None:
        self.samples.append(dict(record))

    def decision(self, record: Mapping[str, Any]) -> None:
        self.decisions.append(dict(record))

    def transition(self, record: Mapping[str, Any]) -> None:
        self.transitions.append(dict(record))

    def pools(self, now: float, devices: Mapping[str, int]) -> None:
        self.pool_sizes.append(timeline.PoolSizes(now, dict(devices)))

    def status(self, worker: str, text: str) -> None:
        self.statuses.append((worker, text))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def records(self) -> protocols.Records | None:
        return None
