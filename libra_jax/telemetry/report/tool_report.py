"""The report on tools: outcomes and times of calls, turns and ends of rollouts, and what tool returns predict.

A turn with several calls counts as one call of "a+b", with the worst status and the time of the longest call. The trace
records it this way, and the scheduler uses the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from libra_jax.scheduling.prediction import prediction_quality
from libra_jax.telemetry import escapes, trace
from libra_jax.telemetry.report import page, pictures
from libra_jax.telemetry.report.recorded_run import Calls, RecordedRun

CAUSES_HEADS = ("tool", "payload, tokens", "status", "returns", "left, mean", "left, P90")

MOST_TOOLS = 8
"""Number of tools that are drawn, the most called first."""

MOST_STATES = 12
"""Number of causal states that are drawn, the most frequent first."""

MOST_BARS = 24
"""Number of turns up to which each count has its own bar. Higher counts share the last bar."""

QUARTER = 4

STATUS_COLOURS = {"success": pictures.GREEN, "failure": pictures.ORANGE, "timeout": pictures.PURPLE}
"""Colour of each status, in the order of stacking."""

SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Quantiles of a tool's seconds that are drawn."""


def sentence(run: RecordedRun) -> str:
    """Returns a sentence on how the turns of a rollout changed. Empty if no tool was called."""
    early, late = _quarters(run)
    if not run.tools or not late:
        return ""
    means = [sum(count * share for count, share in _shares(run.turns, part).items()) for part in (early, late)]
    return f"A rollout took {means[0]:.1f} turns in the first quarter of the steps and **{means[1]:.1f}** in the last."


def _tools(run: RecordedRun) -> list[tuple[str, Calls]]:
    """Returns the tools and their calls, the most called first."""
    return sorted(run.tools.items(), key=lambda item: (-item[1].outcomes.total(), item[0]))


def _quarters(run: RecordedRun) -> tuple[list[int], list[int]]:
    """Returns the first and the last quarter of the steps, at least one step each.

    A single step has no last quarter.
    """
    steps = sorted({step for step, _ in run.turns})
    # Rounded up, so that a quarter has at least one step.
    size = -(-len(steps) // QUARTER)
    return steps[:size], steps[-size:] if len(steps) > 1 else []


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
    return "steps " + (str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}")


# Parts of sections ----------------------------------------------------------------------------------------------


def calls(run: RecordedRun) -> Iterator[page.Part]:
    """Yields the table of the tools."""
    rows = [
        (
            name,
            f"{calls.outcomes.total():,}",
            *(f"{calls.of_status(status):,}" for status in trace.STATUSES),
            *(
                f"{1e3 * value:,.1f} ms" if value < 1 else f"{value:,.2f} s"
                for value in _quantiles(calls.seconds, (0.5, 0.9, 1.0))
            ),
            *(f"{value:,.0f}" for value in _quantiles(calls.payload_tokens, (0.5, 0.9))),
        )
        for name, calls in _tools(run)
    ]
    heads = ("tool", "calls", *trace.STATUSES, "seconds", "P90", "longest", "payload tokens", "P90")
    yield page.Table(heads, rows)


def outcomes(run: RecordedRun) -> Iterator[page.Part]:
    """Yields the calls per step, stacked by status, with one panel per tool."""
    steps = sorted({step for step, _ in run.turns})
    # Each tool's panel has a row of its own on a phone, so the picture would grow without end.
    tools = _tools(run)[:MOST_TOOLS]

    def draw(panels: Any) -> None:
        for axes, (name, calls) in zip(panels, tools, strict=True):
            counts = calls.outcomes  # includes zeros, because stacked curves need the same steps
            parts = {status: {step: float(counts[step, status]) for step in steps} for status in STATUS_COLOURS}
            pictures.stack(axes, parts, STATUS_COLOURS)
            axes.set_xlabel("")
            pictures.whole_ticks(axes.yaxis)
            axes.set_title(pictures.label(name), loc="left", fontsize=pictures.FONT)
        figure = panels[0].figure
        figure.supxlabel("training step", fontsize=pictures.FONT, color=pictures.MUTED)
        figure.supylabel("calls", fontsize=pictures.FONT, color=pictures.MUTED)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), handlelength=1)

    if tools:
        yield pictures.Picture(draw, 2.1, panels=len(tools))
    if (further := len(run.tools) - MOST_TOOLS) > 0:
        yield f"The {MOST_TOOLS} most called; {further} more are in the table."


def seconds(run: RecordedRun) -> Iterator[page.Part]:
    """Yields one box per tool, from the quantiles of its calls' seconds at `SHARES`."""
    boxes = {name: _quantiles(calls.seconds, SHARES) for name, calls in _tools(run)[:MOST_TOOLS]}
    positive = [value for values in boxes.values() for value in values if value > 0]
    min_seconds = min(positive, default=0.0)

    def draw(axes: Any) -> None:
        for place, values in enumerate(boxes.values()):
            # A logarithmic axis has no place for 0.
            low, first, median, third, high = (max(value, min_seconds) for value in values)
            style = {"color": pictures.BLUE, "solid_capstyle": "butt"}
            axes.plot([low, high], [place, place], linewidth=1.4, **style)
            axes.plot([first, third], [place, place], linewidth=9, alpha=0.45, **style)
            axes.plot([median], [place], color=pictures.INK, marker="|", markersize=11, markeredgewidth=2.4)
        if positive and max(positive) > pictures.FAR * min_seconds:
            axes.set_xscale("log")
        else:
            axes.set_xlim(left=0)
        pictures.name_rows(axes, list(boxes))
        axes.set_xlabel("seconds")

    if boxes:
        yield pictures.Picture(draw, 0.9 + 0.34 * max(4, len(boxes)))


def turns(run: RecordedRun) -> Iterator[page.Part]:
    """Yields histograms of the turns of a rollout in the first and the last quarter of the steps, side by side."""
    shares = {_range(steps): _shares(run.turns, steps) for steps in _quarters(run) if steps}
    width = 0.8 / max(1, len(shares))

    def draw(axes: Any) -> None:
        for place, (name, counted) in enumerate(shares.items()):
            bars: dict[int, float] = {}
            for count, share in counted.items():
                bars[min(count, MOST_BARS)] = bars.get(min(count, MOST_BARS), 0.0) + share
            # The bars of the histograms stand side by side around the whole number.
            at = [count + (place - (len(shares) - 1) / 2) * width for count in bars]
            colour = (pictures.MUTED, pictures.BLUE)[place]
            axes.bar(at, list(bars.values()), width=width, color=colour, alpha=0.85, label=name)
        pictures.whole_ticks(axes.xaxis)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        further = any(count > MOST_BARS for counted in shares.values() for count in counted)
        axes.set_xlabel("turns" + (f" ({MOST_BARS}: or more)" if further else ""))
        axes.set_ylabel("rollouts")
        pictures.legend_above(axes, 2)

    if run.tools:
        yield pictures.Picture(draw)


def ends(run: RecordedRun) -> Iterator[page.Part]:
    """Yields the table of how rollouts ended."""
    if not run.finishes:
        return
    early, late = _quarters(run)
    late = late or early
    first, last = _shares(run.finishes, early), _shares(run.finishes, late)
    finishes = sorted({*first, *last}, key=lambda name: (-last.get(name, 0.0), -first.get(name, 0.0), str(name)))
    rows = [(name, f"{first.get(name, 0.0):.1%}", f"{last.get(name, 0.0):.1%}") for name in finishes]
    yield page.Table(("how", _range(early), _range(late)), rows)


# Causal states --------------------------------------------------------------------------------------------------


def predictions(run: RecordedRun) -> Iterator[page.Part]:
    """Yields the tokens left to generate after causal states."""
    if run.prediction_quality:
        yield picture(run.prediction_quality.states)


def causal_states(run: RecordedRun) -> Iterator[page.Part]:
    """Yields the table of the causal states."""
    if run.prediction_quality:
        yield page.Table(CAUSES_HEADS, states(run.prediction_quality))


def picture(states: Sequence[prediction_quality.LabelledState]) -> pictures.Picture:
    """Draws the tokens left to generate after the first `MOST_STATES` causal states: mean as a bar, P90 as a dot."""
    states = states[:MOST_STATES]

    def draw(axes: Any) -> None:
        places = range(len(states))
        means = [state.mean for state in states]
        axes.barh(places, means, color=pictures.PURPLE, alpha=0.7, height=0.6, label="mean")
        dots = {"color": pictures.INK, "marker": "o", "markersize": 4, "linestyle": "", "label": "P90"}
        axes.plot([state.p90 for state in states], places, **dots)
        named = [f"{state.tool}, {state.status}, {prediction_quality.told(state.size_class)}" for state in states]
        pictures.name_rows(axes, named)
        axes.set_xlim(left=0)
        axes.set_xlabel("tokens still generated")
        pictures.legend_above(axes, 2)

    return pictures.Picture(draw, 0.9 + 0.3 * max(3, len(states)))


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
