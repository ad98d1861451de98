"""Reports what the tool returns of a trace predict, for `launch/simulate.py --trace`: a table, a JSON file, a
picture."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

from libra_jax.scheduling import prediction_quality
from libra_jax.simulator import report
from libra_jax.telemetry import figures, tool_report, trace

MOST_ROWS = 16
"""Most causal states in the table; the most frequent are shown."""


def read(path: Path) -> prediction_quality.PredictionQuality | None:
    """Measures the prediction quality of a trace; None if no tool returned in it.

    Raises:
      DataError: the trace cannot be used; the message names file and line.
    """
    return prediction_quality.measure([prediction_quality.attempt(record) for record in trace.read(path)])


def table(found: prediction_quality.PredictionQuality) -> str:
    """Returns the causal states, and how well the remaining length was predicted."""
    rows = [tool_report.CAUSES_HEADS, *tool_report.states(found)[:MOST_ROWS]]
    further = len(found.states) - MOST_ROWS
    more = [f"({further} more causal states)"] if further > 0 else []
    return "\n".join([*report.aligned(rows, left=3), *more, *tool_report.verdicts(found)])


def to_json(found: prediction_quality.PredictionQuality) -> str:
    """Returns all measurements as a JSON object; unknown values are null."""
    values = dataclasses.asdict(found)
    plain = {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values.items()}
    return json.dumps(plain, indent=2) + "\n"


def write_picture(found: prediction_quality.PredictionQuality, path: Path) -> None:
    """Draws the tokens left after each of the most frequent causal states, as .svg."""
    path.write_text(figures.standalone(tool_report.draw_left(found.states)))
