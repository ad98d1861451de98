"""The records of a run in its workdir, as the report shows them."""

from __future__ import annotations

import array
import logging
import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from libra_jax import protocols
from libra_jax.protocols import DataError
from libra_jax.scheduling.prediction import prediction_quality
from libra_jax.telemetry import files, metrics, samples, trace
from libra_jax.telemetry.report import timeline
from libra_jax.utils import checksums

CONFIG_FILE = "config.json"

KEPT_SPANS = 20_000
"""Number of spans at the timeline's end that are held in memory."""

KEPT_ROLLOUTS = 20_000
"""Number of trajectories at the trace's end on which predictions from tool returns are judged."""


@dataclass
class Calls:
    """Calls of one tool.

    Attributes:
      outcomes: Number of calls by training step and status.
      seconds: Seconds of each call.
      payload_tokens: Returned tokens of each call.
    """

    outcomes: Counter[tuple[int, str]] = field(default_factory=Counter)
    seconds: array.array[float] = field(default_factory=lambda: array.array("d"))
    payload_tokens: array.array[float] = field(default_factory=lambda: array.array("d"))

    def of_status(self, status: str) -> int:
        """Returns the number of calls with this status."""
        return sum(count for (_, one), count in self.outcomes.items() if one == status)


@dataclass(frozen=True)
class Transition:
    """A worker that switched sides or a mesh that changed its size, or one that tried to.

    Attributes:
      worker: A hybrid worker, or the trainer.
      source: Side or mesh before the transition.
      target: Side or mesh after the transition.
      reason: Why the transition was wanted.
      outcome: "done", "failed" or "cancelled".
      why: Cause of a failure. Empty if it is done.
      start: Start in seconds, on the time axis of the pools. NaN if unknown.
      end: End in seconds on the same axis. NaN if unknown.
      bytes: Number of bytes moved. NaN if unknown.
      step: Training step in which it ended. None if unknown.
      phases: Seconds of each phase, in order.
      stall: Seconds that each side lost.
    """

    worker: str
    source: str
    target: str
    reason: str
    outcome: str
    why: str
    start: float
    end: float
    bytes: float
    step: int | None
    phases: Mapping[str, float]
    stall: Mapping[str, float]

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Transition:
        """Reads a line of `transitions.jsonl`. Missing or invalid values become unknown; no line is refused."""
        text = {name: "" if (value := record.get(name)) is None else str(value) for name in _TEXTS}
        step = record.get("step")
        return cls(
            text["worker"],
            text["from"],
            text["to"],
            text["reason"],
            text["outcome"],
            text["why"],
            start=_number(record.get("start")),
            end=_number(record.get("end")),
            bytes=_number(record.get("bytes")),
            step=step if isinstance(step, int) else None,
            phases=_numbers(record.get("phases")),
            stall=_numbers(record.get("stall")),
        )


_TEXTS = ("worker", "from", "to", "reason", "outcome", "why")


def _number(value: Any, unknown: float = math.nan) -> float:
    return value if isinstance(value, int | float) and math.isfinite(value) else unknown


def _numbers(value: Any) -> dict[str, float]:
    pairs = value.items() if isinstance(value, Mapping) else ()
    return {name: number for name, number in pairs if not math.isnan(_number(number))}


@dataclass
class RecordedRun:
    """The content of a workdir.

    Attributes:
      steps: Numbers of each step, ascending.
      spans: The last ones of the timeline.
      seconds: End of the timeline, in seconds of running time.
      pools: Sizes of the pools, in order.
      lengths: Generated tokens of each trajectory.
      tools: Calls by tool name.
      turns: Number of trajectories by training step and number of turns.
      finishes: Number of trajectories by training step and finish reason.
      moves: Number of moves of the trajectories between instances, by reason.
      prediction_quality: How well tool returns predicted what was left. None if no tool was called.
      config: The resolved config. Empty if there is none.
      decisions: The planner's decisions, in order.
      transitions: Transitions of workers and meshes, in the order of their ends.
      config_history: Settings that changed when the run went on, in order.
      samples: Rollouts of the first and of the last step as text.
    """

    steps: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    spans: deque[protocols.Span] = field(default_factory=lambda: deque(maxlen=KEPT_SPANS))
    seconds: float = 0.0
    pools: list[timeline.PoolSizes] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    tools: dict[str, Calls] = field(default_factory=dict)
    turns: Counter[tuple[int, int]] = field(default_factory=Counter)
    finishes: Counter[tuple[int, str]] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)
    prediction_quality: prediction_quality.PredictionQuality | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    transitions: list[Transition] = field(default_factory=list)
    config_history: list[dict[str, Any]] = field(default_factory=list)
    samples: list[samples.Sample] = field(default_factory=list)

    def curve(self, name: str) -> dict[int, float]:
        """Returns a metric's finite values by step, of the steps that have it."""
        rows = self.steps.items()
        return {step: scalars[name] for step, scalars in rows if name in scalars and math.isfinite(scalars[name])}

    def values(self, name: str) -> list[float]:
        """Returns a metric's finite values in the order of steps."""
        return list(self.curve(name).values())

    def calls(self, status: str) -> int:
        """Returns the number of tool calls with this status."""
        return sum(calls.of_status(status) for calls in self.tools.values())

    def add_trajectory(self, record: Mapping[str, Any]) -> None:
        """Counts a record of the trace. Missing values, or values damaged by a kill, are left out."""
        turns = [turn for turn in record.get("turns") or [] if isinstance(turn, dict)]
        step = record["step"] if isinstance(record.get("step"), int) else 0
        self.lengths.append(sum(turn.get("generated_tokens") or 0 for turn in turns))
        self.moves.update(trace.move_reasons(turns))
        self.turns[step, len(turns)] += 1
        self.finishes[step, str(record.get("finish") or "unknown")] += 1
        for turn in turns:
            tool, status = turn.get("tool"), turn.get("status")
            if isinstance(tool, str) and tool and status in trace.STATUSES:
                calls = self.tools.setdefault(tool, Calls())
                calls.outcomes[step, status] += 1
                # Both get a value for each call, so that their quantiles are over the same calls.
                calls.seconds.append(_number(turn.get("tool_seconds"), 0.0))
                calls.payload_tokens.append(_number(turn.get("payload_tokens"), 0.0))


def load(workdir: Path) -> RecordedRun:
    """Reads a workdir. The run may have been interrupted.

    Raises:
      DataError: No run has recorded anything in it, or it is a file.
    """
    if workdir.exists() and not workdir.is_dir():
        raise DataError(f"{workdir}: is no folder; give the --workdir of a run")
    run = RecordedRun(metrics.read(workdir / metrics.METRICS_FILE))
    for entry in timeline.read_all(workdir / timeline.TIMELINE_FILE):
        if isinstance(entry, protocols.Span):
            run.spans.append(entry)
            run.seconds = max(run.seconds, entry.end)
        else:
            run.pools.append(entry)
            run.seconds = max(run.seconds, entry.start)
    judged: deque[prediction_quality.RecordedRollout] = deque(maxlen=KEPT_ROLLOUTS)
    for record in files.whole_json_lines(workdir / trace.TRACE_FILE):
        run.add_trajectory(record)
        if trace.is_record(record):
            judged.extend(prediction_quality.rollouts(record))
    if not (run.steps or run.spans or run.lengths or run.pools):
        raise DataError(
            f"{workdir}: no run has recorded anything here (no {metrics.METRICS_FILE}, {timeline.TIMELINE_FILE} or "
            f"{trace.TRACE_FILE} with content); give the --workdir of a run"
        )
    run.prediction_quality = prediction_quality.measure(judged) if run.tools else None
    try:
        run.config = checksums.read_object(workdir / CONFIG_FILE)
    except (OSError, ValueError, RecursionError) as error:
        logging.getLogger(__name__).warning("%s is left out (%s).", workdir / CONFIG_FILE, error)
    run.decisions += files.whole_json_lines(workdir / files.PLANS_FILE)
    run.transitions += map(Transition.from_record, files.whole_json_lines(workdir / files.TRANSITIONS_FILE))
    run.config_history += files.whole_json_lines(workdir / files.CONFIG_HISTORY_FILE)
    run.samples += samples.ends(samples.read(workdir / samples.SAMPLES_FILE))
    return run
