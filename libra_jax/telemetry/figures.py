"""The report's pictures: matplotlib figures as inline SVG whose colours and font come from the page's style sheet.

A figure is drawn in stand-in colours; `svg` puts CSS variables in their place, so that one picture suits a light and a
dark page. matplotlib is imported where a figure is made: only a run's end needs it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from libra_jax.telemetry import escapes

INK, MUTED, GRID, SURFACE = "#010101", "#020202", "#030303", "#040404"
BLUE, GREEN, ORANGE, PURPLE, TEAL = "#050505", "#060606", "#070707", "#080808", "#090909"
VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    SURFACE: "surface",
    BLUE: "blue",
    GREEN: "green",
    ORANGE: "orange",
    PURPLE: "purple",
    TEAL: "teal",
}

MOST_POINTS = 400
"""Points a drawn curve has at most; longer ones are averaged down."""

PART_COLOURS = {"wait": BLUE, "training": GREEN, "weight update": ORANGE, "checkpoint": PURPLE, "other": MUTED}
"""Parts of a step's time, in the order in which they are stacked."""

FEW_POINTS = 20
"""Points up to which a curve marks each of them. A single one has no line, and would not be seen."""

WIDE = 100.0
"""Ratio of the greatest to the least value beyond which a linear axis hides the small ones."""

LINE_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, TEAL)
LINE_DASHES = ("solid", (0, (4, 3)))
"""Curves of one picture differ in colour, and further ones in their dashes."""

Curve = Mapping[int, float]
"""Value by step."""

FONT = 10.5
"""Points of a picture's text. Half-width pictures are as wide as a phone, where it has about as many pixels."""

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "libra-jax",
    "font.size": FONT,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


def moving_mean(curve: Curve, width: int = 5) -> dict[int, float]:
    """Mean of each value and the up to `width` - 1 before it."""
    steps = list(curve)
    means = {}
    for index, step in enumerate(steps):
        window = [curve[earlier] for earlier in steps[max(0, index - width + 1) : index + 1]]
        means[step] = sum(window) / len(window)
    return means


def thinned(curve: Curve) -> tuple[list[float], list[float]]:
    """Steps and values, averaged over equal runs of steps down to at most `MOST_POINTS`."""
    steps, values = list(curve), list(curve.values())
    size = -(-len(steps) // MOST_POINTS)
    runs = [slice(begin, begin + size) for begin in range(0, len(steps), size or 1)]
    mean = [(sum(steps[r]) / len(steps[r]), sum(values[r]) / len(values[r])) for r in runs]
    return [step for step, _ in mean], [value for _, value in mean]


BROAD, NARROW = 10.0, 5.0
"""Inches of a picture that takes the page's whole width, and of a picture for half of the page or for a phone."""


def for_screens(draw: Callable[[float], str]) -> str:
    """Returns a picture twice: as wide as the page, and for a phone. The style sheet shows one of the two.

    Shrunk to a phone's width, the text of the broad one could not be read.

    Args:
      draw: makes the `<svg>` element of a width in inches, empty if there is nothing to see.
    """
    broad, narrow = draw(BROAD), draw(NARROW)
    # An id counts in the whole page, and what a hidden element defines need not be drawn.
    narrow = re.sub(r'(" id="|\bid="|"#|\(#)(?=[\w-])', r"\1narrow-", narrow)
    parts = (("broad", broad), ("narrow", narrow))
    return "".join(text.replace("<svg ", f'<svg class="{name}" ', 1) for name, text in parts)


def columns(width: float, broad: int, narrow: int) -> int:
    """How many columns a legend has in a picture of so many inches."""
    return broad if width > NARROW else narrow


def canvas(width: float, height: float) -> tuple[Any, Any]:
    """A figure of so many inches, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def styled(draw: Any) -> str:
    """Runs a drawing function under the report's style and returns its figure as SVG."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        return svg(draw())


def svg(figure: Any) -> str:
    """The figure as an `<svg>` element for a page: CSS variables for colours, the page's font, no foreign links."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    for colour, name in VARIABLES.items():
        text = text.replace(colour, f"var(--{name})")
    # Versions of matplotlib write a font in one property or in two.
    font = r"(?:font-size: ([\d.]+)px; font-family: [^;\"]*|font: ([\d.]+)px [^;\"]*)"
    text = re.sub(font, lambda found: f"font: {found[1] or found[2]}px var(--font)", text)
    used = set(re.findall(r"[\"(]#([\w-]+)", text))
    text = re.sub(r' id="([\w-]+)"', lambda match: match.group(0) if match.group(1) in used else "", text)
    text = re.sub(r"<g>\s*</g>\s*", "", text)
    return re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', text, count=1)


def label(text: str) -> str:
    """Text of a run for a picture: safe to show, and no formula, as which matplotlib reads what is between dollars."""
    return escapes.visible(text).replace("$", r"\$")


def line(axes: Any, curve: Curve, **style: Any) -> None:
    """Draws a curve, with a mark at each point where there are few."""
    steps, values = thinned(curve)
    few = {"marker": "o", "markersize": 5, "markeredgewidth": 0} if len(steps) <= FEW_POINTS else {}
    axes.plot(steps, values, clip_on=False, **{**few, **style})  # whole marks at the axes' edge


def step_axis(axes: Any) -> None:
    """Makes the horizontal axis one of training steps: whole numbers, with room beside a single one."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("training step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10], min_n_ticks=1))
    first, last = axes.dataLim.intervalx
    room = max(0.5 if last - first < FEW_POINTS else 0.0, 0.01 * (last - first))
    axes.set_xlim(first - room, last + room)


def whole_ticks(axis: Any) -> None:
    """Keeps an axis of counts to whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))


def legend_above(axes: Any, columns: int) -> None:
    """Puts the legend above the axes, where it covers nothing."""
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        handlelength=1.4,
        columnspacing=1.4,
        borderaxespad=0.2,
        borderpad=0.2,
    )


def reward(rewards: Curve, evaluations: Curve, width: float = BROAD) -> str:
    """Training reward, its mean over five steps, and the held-out score where it was measured."""

    def draw() -> Any:
        figure, axes = canvas(width, 3.6)
        if len(rewards) > FEW_POINTS:
            axes.plot(*thinned(rewards), color=BLUE, alpha=0.3, linewidth=1.2, label="reward of the step")
            axes.plot(*thinned(moving_mean(rewards)), color=BLUE, linewidth=2.4, label="mean of 5 steps")
        elif rewards:
            line(axes, rewards, color=BLUE, linewidth=1.8, label="reward of the step")
        if evaluations:
            marker = {"marker": "D", "markersize": 6, "markeredgecolor": SURFACE, "markeredgewidth": 1.2}
            dashed = {"color": ORANGE, "linewidth": 1.2, "linestyle": (0, (4, 3)), "label": "held-out tasks"}
            axes.plot(list(evaluations), list(evaluations.values()), **dashed, **marker)
        values = [*rewards.values(), *evaluations.values()]
        if min(values) >= 0 and max(values) <= 1:
            axes.set_ylim(0, 1.03)
        step_axis(axes)
        legend_above(axes, columns(width, 3, 2))
        return figure

    return styled(draw)


def curve(
    values: Curve,
    *,
    colour: str = BLUE,
    log: bool = False,
    zero: bool = True,
    stairs: bool = False,
    whole: bool = False,
    smooth: bool = False,
) -> str:
    """One number over the steps.

    Args:
      values: by step.
      colour: of the line.
      log: a logarithmic axis, if all values are positive and some are ten times others.
      zero: the axis includes zero.
      stairs: horizontal pieces instead of slopes, for whole numbers.
      whole: the values are counts.
      smooth: a pale line of the values under their mean of five steps, if there are many.
    """

    def draw() -> Any:
        figure, axes = canvas(5, 2.6)
        style = {"drawstyle": "steps-mid"} if stairs else {}
        if smooth and len(values) > FEW_POINTS:
            axes.plot(*thinned(values), color=colour, alpha=0.3, linewidth=1.0, label="step")
            axes.plot(*thinned(moving_mean(values)), color=colour, linewidth=2.0, label="mean of 5 steps")
            legend_above(axes, 2)
        else:
            line(axes, values, color=colour, linewidth=1.8, **style)
        if log and 0 < 10 * min(values.values()) < max(values.values()):
            axes.set_yscale("log")
        elif zero:
            axes.set_ylim(bottom=min(0.0, *values.values()), top=max(values.values()) * 1.08 or 1.0)
        if stairs or whole:
            whole_ticks(axes.yaxis)
        elif axes.get_yscale() != "log":
            axes.yaxis.set_major_formatter(_thousands)
        step_axis(axes)
        return figure

    return styled(draw)


def curves(
    values: Mapping[str, Curve],
    *,
    width: float = BROAD,
    height: float = 3.0,
    percent: bool = False,
    log: bool = False,
    zero: bool = False,
) -> str:
    """Several numbers over the steps, by name.

    Args:
      values: by step, by name.
      width: inches.
      height: inches.
      percent: the values are shares.
      log: a logarithmic axis, if all values are positive and some are far larger than others.
      zero: another axis begins at zero, if no value is negative.
    """

    def draw() -> Any:
        figure, axes = canvas(width, height)
        for index, (name, curve) in enumerate(values.items()):
            colour, dashes = LINE_COLOURS[index % len(LINE_COLOURS)], LINE_DASHES[index // len(LINE_COLOURS) % 2]
            line(axes, curve, color=colour, linestyle=dashes, linewidth=1.8, label=label(name))
        axes.yaxis.set_major_formatter(_share if percent else _thousands)
        found = [value for curve in values.values() for value in curve.values()]
        if log and min(found) > 0 and max(found) > WIDE * min(found):
            axes.set_yscale("log")
        elif zero and min(found) >= 0:
            axes.set_ylim(bottom=0, top=max(found) * 1.08 or 1.0)
        step_axis(axes)
        if len(values) > 1:
            legend_above(axes, columns(width, 4, 2))
        else:
            axes.set_ylabel(label(next(iter(values))))
        return figure

    return styled(draw)


def _thousands(value: float, _: Any) -> str:
    return f"{value:z,.0f}" if abs(value) >= 1000 else f"{value:zg}"


def _share(value: float, _: Any) -> str:
    return f"{100 * value:z.3g}%"


def step_times(parts: Mapping[str, Curve]) -> str:
    """Seconds of each part of a step, stacked; `parts` are named in `PART_COLOURS` and share their steps."""

    def draw() -> Any:
        figure, axes = canvas(5, 2.6)
        stack(axes, parts, PART_COLOURS)
        axes.set_ylabel("seconds")
        step_axis(axes)
        legend_above(axes, 3)
        return figure

    return styled(draw)


def stack(axes: Any, parts: Mapping[str, Curve], colours: Mapping[str, str]) -> None:
    """Stacks curves that share their steps: areas, or bars of a few steps.

    Args:
      axes: drawn on.
      parts: value by step, by name.
      colours: by name.
    """
    columns = {name: thinned(part) for name, part in parts.items()}
    steps = next(iter(columns.values()))[0]
    heights = [values for _, values in columns.values()]
    shades = [colours[name] for name in columns]
    if len(steps) > FEW_POINTS:
        axes.stackplot(steps, *heights, labels=list(columns), colors=shades, alpha=0.85, lw=0)
    else:
        low = [0.0] * len(steps)
        for name, values, shade in zip(columns, heights, shades, strict=True):
            axes.bar(steps, values, bottom=low, color=shade, alpha=0.85, width=0.7, label=name)
            low = [below + value for below, value in zip(low, values, strict=True)]
    axes.set_ylim(bottom=0)


def predicted(measured: Curve, steps: Curve, training: Curve, moves: Sequence[int], width: float = BROAD) -> str:
    """Step times as they were and as they had been predicted, the training in them, and moves between plans."""

    def draw() -> Any:
        figure, axes = canvas(width, 3.0)
        dashes = (0, (4, 3))
        line(axes, measured, color=BLUE, linewidth=1.8, label="step, measured")
        line(axes, steps, color=ORANGE, linewidth=1.6, linestyle=dashes, label="step, predicted")
        line(axes, training, color=GREEN, linewidth=1.4, linestyle=dashes, label="training, predicted")
        for index, step in enumerate(moves):
            axes.axvline(step, color=TEAL, linewidth=1.2, linestyle=":", label="move" if index == 0 else None)
        axes.set_ylabel("seconds")
        axes.set_ylim(bottom=0)
        step_axis(axes)
        legend_above(axes, columns(width, 4, 2))
        return figure

    return styled(draw)


def lengths(generated_tokens: Sequence[int]) -> str:
    """Histogram of generated tokens a trajectory, with a logarithmic axis where the tail is long."""
    import numpy

    values = numpy.maximum(1, numpy.asarray(generated_tokens))
    long_tail = values.max() > 20 * numpy.median(values)

    def draw() -> Any:
        figure, axes = canvas(5, 2.6)
        low, high = values.min(), values.max()
        if long_tail:
            bins = numpy.geomspace(low, high + 1, 31)
            axes.set_xscale("log")
        else:
            width = max(1, -(-int(high - low + 1) // 30))
            bins = numpy.arange(low, high + width + 1, width)
        axes.hist(values, bins=bins, color=PURPLE, alpha=0.85)
        places = {name: numpy.percentile(values, part) for name, part in (("median", 50), ("P90", 90))}
        for place in places.values():
            axes.axvline(place, color=INK, linewidth=1, linestyle=(0, (2, 2)))
        text = " · ".join(f"{name} {place:,.0f}" for name, place in {**places, "longest": high}.items())
        axes.set_title(text, loc="left", fontsize=FONT)
        axes.set_xlabel("generated tokens")
        axes.set_ylabel("trajectories")
        whole_ticks(axes.yaxis)
        axes.xaxis.set_major_formatter(_thousands)
        return figure

    return styled(draw)
