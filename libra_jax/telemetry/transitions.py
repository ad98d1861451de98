"""Changes of sides and of meshes, as the report reads the lines of `transitions.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SIDES = ("rollout", "training")
"""Between which hybrid workers change."""

MESH = "another mesh"
"""The way of whatever is no change of sides."""

DONE = "done"
"""Outcome of a transition that was carried out; the others are "failed" and "cancelled"."""


@dataclass(frozen=True)
class Transition:
    """A worker that changed sides or a mesh that changed its size, or what came of the attempt.

    Attributes:
      worker: a hybrid worker, or the trainer.
      source: the side it left, or the mesh.
      target: the side it went to, or the mesh.
      reason: why it was to change.
      start: seconds, on the axis of the pools it is shown with; NaN where unknown.
      end: likewise.
      step: the training step in which it ended; None where unknown.
      outcome: "done", "failed" or "cancelled".
      why: what it failed of; empty where it is done.
      phases: seconds of each, in their order.
      bytes: that were moved; NaN where unknown.
      stall: seconds that each side lost.
    """

    worker: str
    source: str
    target: str
    reason: str
    start: float
    end: float
    step: int | None
    outcome: str
    why: str
    phases: Mapping[str, float]
    bytes: float
    stall: Mapping[str, float]

    @property
    def way(self) -> str:
        """What kind of change it is: "rollout to training", or one of the trainer's mesh."""
        if self.source in SIDES and self.target in SIDES:
            return f"{self.source} to {self.target}"
        return MESH

    @property
    def seconds(self) -> float:
        """It took; NaN where unknown."""
        return self.end - self.start


def parse(record: Mapping[str, Any]) -> Transition:
    """A line as `protocols.Recorder.transition` gets it: what is missing or no number is left open, never refused."""
    step = record.get("step")
    return Transition(
        worker=_text(record.get("worker")),
        source=_text(record.get("from")),
        target=_text(record.get("to")),
        reason=_text(record.get("reason")),
        start=_number(record.get("start")),
        end=_number(record.get("end")),
        step=step if isinstance(step, int) else None,
        outcome=_text(record.get("outcome")),
        why=_text(record.get("why")),
        phases=_numbers(record.get("phases")),
        bytes=_number(record.get("bytes")),
        stall=_numbers(record.get("stall")),
    )


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) and math.isfinite(value) else math.nan


def _numbers(value: Any) -> dict[str, float]:
    pairs = value.items() if isinstance(value, Mapping) else ()
    return {name: number for name, number in pairs if not math.isnan(_number(number))}
