"""Pictures of tool calls and of what they foretell; they take plain data and are `<svg>` elements for a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from libra_jax.telemetry import figures

COLOURS = {"success": figures.GREEN, "failure": figures.ORANGE, "timeout": figures.PURPLE}
"""Statuses, in the order in which they are stacked."""

SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Quantiles of a tool's seconds that are drawn."""

WIDE = 20.0
"""Times that the longest time may be of the shortest on a linear axis."""

MOST_BARS = 24
"""Numbers of turns that have a bar of their own; all beyond share the last."""


def outcomes(by_tool: Mapping[str, Mapping[str, figures.Curve]], width: float = figures.BROAD) -> str:
    """Calls a step, stacked by status, with one panel a tool.

    Args:
      by_tool: calls by step, by status, by the tool's name; all have the same steps.
      width: inches.
    """

    def draw() -> Any:
        from matplotlib.figure import Figure

        columns = min(figures.columns(width, 2, 1), len(by_tool))
        rows = -(-len(by_tool) // columns)
        figure = Figure(figsize=(width, 0.5 + 1.9 * rows), layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False, sharex=True).flat
        for axes, (name, statuses) in zip(panels, by_tool.items(), strict=False):
            figures.stack(axes, {status: statuses[status] for status in COLOURS}, COLOURS)
            figures.step_axis(axes)
            axes.set_xlabel("")
            figures.whole_ticks(axes.yaxis)
            axes.set_title(figures.label(name), loc="left", fontsize=figures.FONT)
        for axes in list(panels)[len(by_tool) :]:
            axes.set_visible(False)
        figure.supxlabel("training step", fontsize=figures.FONT, color=figures.MUTED)
        figure.supylabel("calls", fontsize=figures.FONT, color=figures.MUTED)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), handlelength=1)
        return figure

    return figures.styled(draw)


def seconds(by_tool: Mapping[str, Sequence[float]]) -> str:
    """A box a tool: quantiles of its calls' seconds at `SHARES`."""

    def draw() -> Any:
        figure, axes = figures.canvas(5, 0.9 + 0.34 * max(4, len(by_tool)))
        positive = [value for values in by_tool.values() for value in values if value > 0]
        logarithmic = bool(positive) and max(positive) > WIDE * min(positive)
        least = min(positive, default=0.0)
        for place, values in enumerate(by_tool.values()):
            low, first, median, third, high = (max(value, least) for value in values)
            axes.plot([low, high], [place, place], color=figures.BLUE, linewidth=1.4)
            axes.plot(
                [first, third], [place, place], color=figures.BLUE, linewidth=9, alpha=0.45, solid_capstyle="butt"
            )
            axes.plot([median], [place], color=figures.INK, marker="|", markersize=11, markeredgewidth=2.4)
        if logarithmic:
            axes.set_xscale("log")
        else:
            axes.set_xlim(left=0)
        _name_rows(axes, list(by_tool))
        axes.set_xlabel("seconds")
        return figure

    return figures.styled(draw)


def turns(shares: Mapping[str, Mapping[int, float]]) -> str:
    """Histograms of the turns of an attempt, side by side.

    Args:
      shares: of the attempts, by number of turns, by the histogram's name.
    """

    def draw() -> Any:
        figure, axes = figures.canvas(5, 2.6)
        width, colours = 0.8 / len(shares), (figures.MUTED, figures.BLUE)
        for place, (name, counted) in enumerate(shares.items()):
            bars: dict[int, float] = {}
            for count, share in counted.items():
                bars[min(count, MOST_BARS)] = bars.get(min(count, MOST_BARS), 0.0) + share
            at = [count + (place - (len(shares) - 1) / 2) * width for count in bars]
            axes.bar(at, list(bars.values()), width=width, color=colours[place % 2], alpha=0.85, label=name)
        figures.whole_ticks(axes.xaxis)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        further = any(count > MOST_BARS for counted in shares.values() for count in counted)
        axes.set_xlabel("turns" + (f" ({MOST_BARS}: or more)" if further else ""))
        axes.set_ylabel("attempts")
        figures.legend_above(axes, 2)
        return figure

    return figures.styled(draw)


def left(states: Mapping[str, tuple[float, float]], width: float = figures.BROAD) -> str:
    """Tokens left to generate after each causal state: the mean as a bar, P90 as a dot."""

    def draw() -> Any:
        figure, axes = figures.canvas(width, 0.9 + 0.3 * max(3, len(states)))
        places = list(range(len(states)))
        means, p90s = ([pair[part] for pair in states.values()] for part in (0, 1))
        axes.barh(places, means, color=figures.PURPLE, alpha=0.7, height=0.6, label="mean")
        axes.plot(p90s, places, color=figures.INK, marker="o", markersize=4, linestyle="", label="P90")
        _name_rows(axes, list(states))
        axes.set_xlim(left=0)
        axes.set_xlabel("tokens still generated" + (" after the return" if width > figures.NARROW else ""))
        figures.legend_above(axes, 2)
        return figure

    return figures.styled(draw)


def _name_rows(axes: Any, names: list[str]) -> None:
    """The first at the top, each with its name before it."""
    axes.set_yticks(range(len(names)), [figures.label(name) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
