"""The report on tools: outcomes and times of calls, turns and ends of rollouts, and what tool returns predict.

A turn with several calls counts as one call of "a+b", with the worst status and the time of the longest call. The trace
records it this way, and the scheduler uses the same.
"""

from __future__ import annotations

import array
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from libra_jax.scheduling.prediction import prediction_quality
from libra_jax.telemetry import escapes, trace
from libra_jax.telemetry.report import page

NOTE = (
    "Seconds and payload of a call: median, and what nine in ten stay below. Several calls of one output are one row, "
    "named by all of them, with the worst status and the time of the longest. Replaced rollouts are in no trace."
)

ENDS_NOTE = (
    "Share of rollouts that ended in each way, in the first and the last quarter of the steps. task.cut_off masks "
    "those that end at a limit of task.cut_off_limits (max_seconds and max_context by default): they teach nothing. "
    "rollout/masked in metrics.jsonl is their share."
)

SECONDS_NOTE = "Box: the middle half of the calls; line: 5 to 95 in a hundred; mark: the median."

CAUSES_TITLE = "What tool returns predict"

CAUSES_NOTE = (
    "A causal state is a tool, the size of its return and the outcome of the call: C-MLFQ goes by it. Left: tokens "
    "that the rollout went on to generate."
)

CAUSES_HEADS = ("tool", "payload, tokens", "status", "returns", "left, mean", "left, P90")

MOST_TOOLS = 8
"""Number of tools that are drawn, the most called first."""

MOST_STATES = 12
"""Number of causal states that are drawn, the most frequent first."""

MOST_BARS = 24
"""Number of turns up to which each count has its own bar. Higher counts share the last bar."""

QUARTER = 4

STATUS_COLOURS = {"success": page.GREEN, "failure": page.ORANGE, "timeout": page.PURPLE}
"""Colour of each status, in the order of stacking."""

SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Quantiles of a tool's seconds that are drawn."""


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


@dataclass
class Tally:
    """Counts of the tool use in a trace's trajectories.

    Attributes:
      tools: Calls by tool name.
      turns: Number of trajectories by training step and number of turns.
      ends: Number of trajectories by training step and finish reason.
    """

    tools: dict[str, Calls] = field(default_factory=dict)
    turns: Counter[tuple[int, int]] = field(default_factory=Counter)
    ends: Counter[tuple[int, str]] = field(default_factory=Counter)

    def add(self, record: Mapping[str, Any]) -> None:
        """Counts a record of the trace. Missing values, or values damaged by a kill, are left out."""
        turns = [turn for turn in record.get("turns") or [] if isinstance(turn, dict)]
        step = record["step"] if isinstance(record.get("step"), int) else 0
        self.turns[step, len(turns)] += 1
        self.ends[step, str(record.get("finish") or "unknown")] += 1
        for turn in turns:
            tool, status = turn.get("tool"), turn.get("status")
            if not (isinstance(tool, str) and tool and status in trace.STATUSES):
                continue
            calls = self.tools.setdefault(tool, Calls())
            calls.outcomes[step, status] += 1
            # Both get a value for each call, so that their quantiles are over the same calls.
            for name, values in (("tool_seconds", calls.seconds), ("payload_tokens", calls.payload_tokens)):
                value = turn.get(name)
                values.append(float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0)


def sections(tally: Tally) -> list[page.Section]:
    """Returns tables and pictures. If no tool was called, returns only how rollouts ended."""
    if not tally.ends:
        return []
    steps = sorted({step for step, _ in tally.turns})
    early, late = _quarters(steps)
    first, last = _shares(tally.ends, early), _shares(tally.ends, late or early)
    finishes = sorted({*first, *last}, key=lambda name: (-last.get(name, 0.0), -first.get(name, 0.0), str(name)))
    finish_rows = [(str(name), f"{first.get(name, 0.0):.1%}", f"{last.get(name, 0.0):.1%}") for name in finishes]
    finished = page.Table(("how", f"steps {_range(early)}", f"steps {_range(late or early)}"), finish_rows)
    ends = page.Section("How rollouts ended", table=finished, note=ENDS_NOTE, wide=True)
    if not tally.tools:
        return [ends]
    # The most called first.
    by_calls = sorted(tally.tools.items(), key=lambda item: (-item[1].outcomes.total(), item[0]))
    pictured = by_calls[:MOST_TOOLS]
    # Each tool's panel has a row of its own on a phone, so the picture would grow without end.
    further = len(tally.tools) - MOST_TOOLS
    left_out = f"The {MOST_TOOLS} most called; {further} more are in the table." if further > 0 else ""
    heads = ("tool", "calls", *trace.STATUSES, "seconds", "P90", "longest", "payload tokens", "P90")
    rows = []
    for name, calls in by_calls:
        counts = calls.outcomes.total(), *(calls.of_status(status) for status in trace.STATUSES)
        spread = _quantiles(calls.seconds, (0.5, 0.9, 1.0))
        row = (
            name,
            *(f"{count:,}" for count in counts),
            *(f"{1e3 * value:,.1f} ms" if value < 1 else f"{value:,.2f} s" for value in spread),
            *(f"{value:,.0f}" for value in _quantiles(calls.payload_tokens, (0.5, 0.9))),
        )
        rows.append(row)
    spans = {name: _quantiles(calls.seconds, SHARES) for name, calls in pictured}
    shares = {f"steps {_range(part)}": _shares(tally.turns, part) for part in ((early, late) if late else (early,))}
    return [
        page.Section("Tools", table=page.Table(heads, rows), note=NOTE, wide=True),
        page.Section("Tool outcomes by step", draw_outcomes(dict(pictured), steps), note=left_out, wide=True),
        page.Section("Seconds of a call", draw_seconds(spans), note=SECONDS_NOTE),
        page.Section("Turns of a rollout", draw_turns(shares)),
        ends,
    ]


def sentence(tally: Tally) -> str:
    """Returns a sentence on how the turns of a rollout changed. Empty if no tool was called."""
    early, late = _quarters(sorted({step for step, _ in tally.turns}))
    if not tally.tools or not late:
        return ""
    means = [sum(count * share for count, share in _shares(tally.turns, part).items()) for part in (early, late)]
    return f"A rollout took {means[0]:.1f} turns in the first quarter of the steps and **{means[1]:.1f}** in the last."


def _quarters(steps: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns the first and the last quarter of the steps, at least one step each.

    A single step has no last quarter.
    """
    # Rounded up, so that a quarter has at least one step.
    size = -(-len(steps) // QUARTER)
    return list(steps[:size]), list(steps[-size:]) if len(steps) > 1 else []


def _shares(counts: Mapping[tuple[int, Any], int], steps: Iterable[int]) -> dict[Any, float]:
    """Returns the share of each counted value among the trajectories of these steps."""
    step_set, value_counts = set(steps), Counter[Any]()
    for (step, value), count in counts.items():
        if step in step_set:
            value_counts[value] += count
    return {value: count / value_counts.total() for value, count in sorted(value_counts.items())}


def _quantiles(values: Iterable[float], shares: Iterable[float]) -> list[float]:
    """Returns quantiles by the nearest-rank method."""
    ordered = sorted(values)
    return [ordered[max(0, math.ceil(share * len(ordered)) - 1)] for share in shares]


def _range(steps: Sequence[int]) -> str:
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"


# Pictures -------------------------------------------------------------------------------------------------------


def draw_outcomes(by_tool: Mapping[str, Calls], steps: Sequence[int]) -> str:
    """Draws the calls per step, stacked by status, with one panel per tool."""

    def draw(panels: Any) -> None:
        # A single panel comes without a list.
        panels = panels if isinstance(panels, list) else [panels]
        for axes, (name, calls) in zip(panels, by_tool.items(), strict=True):
            counts = calls.outcomes  # includes zeros, because stacked curves need the same steps
            parts = {status: {step: float(counts[step, status]) for step in steps} for status in STATUS_COLOURS}
            page.stack(axes, parts, STATUS_COLOURS)
            axes.set_xlabel("")
            page.whole_ticks(axes.yaxis)
            axes.set_title(page.label(name), loc="left", fontsize=page.FONT)
        figure = panels[0].figure
        figure.supxlabel("training step", fontsize=page.FONT, color=page.MUTED)
        figure.supylabel("calls", fontsize=page.FONT, color=page.MUTED)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), handlelength=1)

    return page.figure(draw, 2.1, wide=True, panels=len(by_tool))


def draw_seconds(by_tool: Mapping[str, Sequence[float]]) -> str:
    """Draws one box per tool, from the quantiles of its calls' seconds at `SHARES`."""
    positive = [value for values in by_tool.values() for value in values if value > 0]
    min_seconds = min(positive, default=0.0)

    def draw(axes: Any) -> None:
        for place, values in enumerate(by_tool.values()):
            # A logarithmic axis has no place for 0.
            low, first, median, third, high = (max(value, min_seconds) for value in values)
            style = {"color": page.BLUE, "solid_capstyle": "butt"}
            axes.plot([low, high], [place, place], linewidth=1.4, **style)
            axes.plot([first, third], [place, place], linewidth=9, alpha=0.45, **style)
            axes.plot([median], [place], color=page.INK, marker="|", markersize=11, markeredgewidth=2.4)
        if positive and max(positive) > page.FAR * min_seconds:
            axes.set_xscale("log")
        else:
            axes.set_xlim(left=0)
        page.name_rows(axes, list(by_tool))
        axes.set_xlabel("seconds")

    return page.figure(draw, 0.9 + 0.34 * max(4, len(by_tool)))


def draw_turns(shares: Mapping[str, Mapping[int, float]]) -> str:
    """Draws histograms of the turns of a rollout, side by side.

    Args:
      shares: Share of rollouts by number of turns, by name of the histogram.
    """

    def draw(axes: Any) -> None:
        width, colours = 0.8 / len(shares), (page.MUTED, page.BLUE)
        for place, (name, counted) in enumerate(shares.items()):
            bars: dict[int, float] = {}
            for count, share in counted.items():
                bars[min(count, MOST_BARS)] = bars.get(min(count, MOST_BARS), 0.0) + share
            # The bars of the histograms stand side by side around the whole number.
            at = [count + (place - (len(shares) - 1) / 2) * width for count in bars]
            axes.bar(at, list(bars.values()), width=width, color=colours[place % 2], alpha=0.85, label=name)
        page.whole_ticks(axes.xaxis)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        further = any(count > MOST_BARS for counted in shares.values() for count in counted)
        axes.set_xlabel("turns" + (f" ({MOST_BARS}: or more)" if further else ""))
        axes.set_ylabel("rollouts")
        page.legend_above(axes, 2)

    return page.figure(draw)


def draw_left(states: Sequence[prediction_quality.State]) -> str:
    """Draws the tokens left to generate after the first `MOST_STATES` causal states: mean as a bar, P90 as a dot."""
    states = states[:MOST_STATES]

    def draw(axes: Any) -> None:
        places = range(len(states))
        means = [state.mean for state in states]
        axes.barh(places, means, color=page.PURPLE, alpha=0.7, height=0.6, label="mean")
        dots = {"color": page.INK, "marker": "o", "markersize": 4, "linestyle": "", "label": "P90"}
        axes.plot([state.p90 for state in states], places, **dots)
        named = [f"{state.tool}, {state.status}, {prediction_quality.told(state.size_class)}" for state in states]
        page.name_rows(axes, named)
        axes.set_xlim(left=0)
        axes.set_xlabel("tokens still generated")
        page.legend_above(axes, 2)

    return page.figure(draw, 0.9 + 0.3 * max(3, len(states)), wide=True)


# Causal states --------------------------------------------------------------------------------------------------


def causes(quality: prediction_quality.PredictionQuality | None) -> list[page.Section]:
    """Returns the picture with the verdict below, and the table of all states. Empty if no tool returned."""
    if quality is None:
        return []
    note = f"{CAUSES_NOTE} {' '.join(verdicts(quality))}"
    return [
        page.Section(CAUSES_TITLE, draw_left(quality.states), note=note, wide=True),
        page.Section("Causal states", table=page.Table(CAUSES_HEADS, states(quality)), wide=True, folded=True),
    ]


def states(quality: prediction_quality.PredictionQuality) -> list[tuple[str, ...]]:
    """Returns one row of texts per state, in the columns of `CAUSES_HEADS`. Safe to print."""
    return [
        (
            escapes.visible(state.tool),
            prediction_quality.told(state.size_class),
            state.status,
            f"{state.count:,}",
            f"{state.mean:,.1f}",
            f"{state.p90:,}",
        )
        for state in quality.states
    ]


def verdicts(quality: prediction_quality.PredictionQuality) -> list[str]:
    """Returns sentences on how well the remaining length was predicted."""
    count = sum(state.count for state in quality.states)
    out = [
        f"Causal states alone account for {explained(quality.explained)} of the variance of what is left after "
        f"{count:,} returns."
    ]
    if not quality.judged:
        return [*out, "There is no second step to judge predictions on."]
    limits = " and ".join(f"{bound:,}" for bound in quality.bounds)
    buckets = f"the right one of {len(quality.bounds) + 1} buckets (up to {limits} tokens left, or more)"
    out.append(
        f"By what had been seen before, the state alone named {buckets} for {_share(quality.by_state)} of "
        f"{quality.judged:,} returns, all that C-MLFQ knows for {_share(quality.by_path)}; naming the fullest bucket "
        f"each time is right for {_share(quality.majority)}."
        if quality.bounds
        else "What is left is always the same: there is nothing to predict."
    )
    if quality.bounds and not math.isnan(quality.bits):
        error = "" if math.isnan(quality.bits_error) else f" (standard error {quality.bits_error:.2f})"
        out.append(
            f"A prediction by C-MLFQ is {quality.bits:+z.2f} bits{error} better than one by the tokens so far alone. "
            f"{_share(quality.covered)} of the true lengths lie in a range that should hold "
            f"{_share(prediction_quality.COVERED)}."
        )
    if not math.isnan(quality.path_explained):
        out.append(f"C-MLFQ's mean prediction accounts for {explained(quality.path_explained)} of the variance.")
    return out


def explained(value: float) -> str:
    """Returns a share of variance in words. Predictions worse than the mean explain "none" of it."""
    return _share(value) if math.isnan(value) or value > 0 else "none"


def _share(value: float) -> str:
    return "an unknown share" if math.isnan(value) else f"{value:z.0%}"
