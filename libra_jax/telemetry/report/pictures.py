"""Pictures as inline SVG, in the colours and the font of the page that shows them.

A matplotlib figure is drawn in stand-in colours. `Picture.svg` replaces them by CSS variables, so that one picture
suits light and dark pages. matplotlib is imported only where a figure is made, because only the end of a run needs it.
"""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import markupsafe

from libra_jax.telemetry import escapes
from libra_jax.telemetry.report.recorded_run import RecordedRun

_NAMES = ("page", "surface", "ink", "muted", "grid", "blue", "green", "orange", "purple", "teal")
_LIGHT = "#f6f7f9 #ffffff #1c2430 #667085 #e4e7ec #2f6fed #159a62 #e2720c #8457d8 #0e93a8"
_DARK = "#0f1319 #171d26 #e6eaf0 #93a0b2 #2a3341 #6ea0ff #4cc38a #f5a04b #b394f4 #4fc3d6"
LIGHT, DARK = (dict(zip(_NAMES, colours.split(), strict=True)) for colours in (_LIGHT, _DARK))
"""Colours of the page's CSS variables on light and on dark screens."""

_STAND_INS = {name: "#" + 3 * f"0{number:x}" for number, name in enumerate(_NAMES, start=1)}
SURFACE, INK, MUTED, GRID = (_STAND_INS[name] for name in ("surface", "ink", "muted", "grid"))
BLUE, GREEN, ORANGE, PURPLE, TEAL = (_STAND_INS[name] for name in ("blue", "green", "orange", "purple", "teal"))

COLOURS = (BLUE, ORANGE, GREEN, PURPLE, TEAL)
DASHED = (0, (4, 3))
"""Dash pattern of a curve. Curves of one picture have different colours; further curves are dashed."""

MOST_POINTS = 400
"""Largest number of points of a drawn curve. Longer curves are averaged."""

FEW_POINTS = 20
"""Number of points up to which a curve marks each point. A curve of one point has no line and would be invisible."""

FAR = 20.0
"""Ratio of the largest to the smallest value beyond which a linear axis hides the small values."""

FONT = 10.5
"""Font size of a picture in points. Narrow pictures are as wide as a phone, where a point is about one pixel."""

BROAD, NARROW = 10.0, 5.0
"""Widths in inches of a picture for the whole page, and of a picture for half a page or a phone."""

HEIGHT = 2.6
"""Height of a narrow picture in inches."""

Curve = Mapping[int, float]
"""Values by step."""

Scale = Literal["zero", "free", "log", "share"]
"""Vertical axis: from zero on, around the values, logarithmic if they are far apart, or from 0 to 1 if they fit."""

_STYLE = {
    # Text stays text instead of becoming outlines, and takes the page's font.
    "svg.fonttype": "none",
    # A fixed salt makes the same ids each time, so that the same data gives the same file.
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
    **{f"{axis}tick.{size}.size": 0 for axis in "xy" for size in ("major", "minor")},
    "legend.frameon": False,
    **{f"{part}.facecolor": "none" for part in ("figure", "axes", "savefig")},
}


@dataclass(frozen=True)
class Line:
    """A curve of a picture.

    Attributes:
      values: Values by step, or the name of a metric. A line without values is left out.
      label: Label in the legend, or beside the axis if the picture has one line.
      colour: A colour of this module.
      dashed: Whether the line is dashed.
      width: Width in points.
      marker: Symbol at each point. A curve of few points gets dots in any case.
      smooth: Whether to draw the mean of five steps over a pale line of the values, if there are many values.
      stairs: Whether to draw horizontal pieces instead of slopes, for whole numbers.
    """

    values: Curve | str
    label: str = ""
    colour: str = BLUE
    dashed: bool = False
    width: float = 1.8
    marker: str = ""
    smooth: bool = False
    stairs: bool = False

    def draw(self, axes: Any, curve: Curve) -> None:
        """Draws the line with the values of `curve`."""
        steps, values = thinned(curve)
        style: dict[str, Any] = {"color": self.colour, "linewidth": self.width}
        style["linestyle"] = DASHED if self.dashed else "solid"
        if self.smooth and len(curve) > FEW_POINTS:
            axes.plot(steps, values, color=self.colour, alpha=0.3, linewidth=1.0, label=label(self.label or "step"))
            axes.plot(*thinned(moving_mean(curve)), **style, label="mean of 5 steps")
            return
        if self.marker:
            style |= {"marker": self.marker, "markersize": 6, "markeredgecolor": SURFACE, "markeredgewidth": 1.2}
        elif len(steps) <= FEW_POINTS:
            style |= {"marker": "o", "markersize": 5, "markeredgewidth": 0}
        if self.stairs:
            style["drawstyle"] = "steps-mid"
        # Not clipped, so that marks at the edge of the axes stay whole. matplotlib leaves labels that begin with "_"
        # out of legends.
        axes.plot(steps, values, clip_on=False, label=label(self.label) or "_", **style)


@dataclass(frozen=True)
class Picture:
    """A picture of any width.

    Attributes:
      draw: Draws on the axes. Gets a list of axes if there are panels.
      height: Height of a row of panels in inches.
      panels: Number of panels, two in a row if there is room. 0: the picture has axes without panels.
    """

    draw: Callable[[Any], None]
    height: float = HEIGHT
    panels: int = 0

    def figure(self, width: float) -> Any:
        """Returns the picture as a matplotlib figure of this width in inches."""
        import matplotlib
        from matplotlib.figure import Figure

        columns = min(self.panels or 1, 2 if width > NARROW else 1)
        rows = -(-(self.panels or 1) // columns)
        # In a context, because the settings belong to the process and its other pictures.
        with matplotlib.rc_context(_STYLE):
            figure = Figure(figsize=(width, self.height * rows), layout="constrained")
            axes = list(figure.subplots(rows, columns, squeeze=False, sharex=self.panels > 1).flat)
            for empty in axes[self.panels or 1 :]:
                empty.set_visible(False)
            self.draw(axes[: self.panels] if self.panels else axes[0])
        return figure

    def svg(self, width: float) -> str:
        """Returns an `<svg>` element for a page: CSS variables for colours, the page's font, and no links."""
        import matplotlib

        buffer = io.StringIO()
        # Without a date in the metadata, the same data gives the same file.
        metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
        with matplotlib.rc_context(_STYLE):
            self.figure(width).savefig(buffer, format="svg", metadata=metadata)
        text = buffer.getvalue()
        # An element inside of a page has no XML declaration.
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
        for name, colour in _STAND_INS.items():
            text = text.replace(colour, f"var(--{name})")
        # Some versions of matplotlib write a font in one property, others in two.
        font = r"(?:font-size: ([\d.]+)px; font-family: [^;\"]*|font: ([\d.]+)px [^;\"]*)"
        text = re.sub(font, lambda match: f"font: {match[1] or match[2]}px var(--font)", text)
        used = set(re.findall(r"[\"(]#([\w-]+)", text))
        text = re.sub(r' id="([\w-]+)"', lambda match: match.group(0) if match.group(1) in used else "", text)
        text = re.sub(r"<g>\s*</g>\s*", "", text)
        return re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', text, count=1)

    def html(self, *, wide: bool) -> markupsafe.Markup:
        """Returns the picture for a page.

        A wide picture is drawn twice: as wide as the page, and for a phone. Shrunk to a phone's screen, the text of a
        broad picture would not be readable. The style sheet shows one of the two.
        """
        narrow = self.svg(NARROW)
        if not wide:
            return markupsafe.Markup(narrow)
        broad = self.svg(BROAD).replace("<svg ", '<svg class="broad" ', 1)
        # Ids are shared by the whole page, and browsers need not draw definitions inside a hidden element. So each of
        # the two pictures needs its own ids.
        narrow = re.sub(r'(" id="|\bid="|"#|\(#)(?=[\w-])', r"\1narrow-", narrow)
        return markupsafe.Markup(broad + narrow.replace("<svg ", '<svg class="narrow" ', 1))

    def standalone(self) -> str:
        """Returns the broad picture as the text of a separate file, in the colours of a light page."""
        text = self.svg(BROAD)
        # A separate file has no style sheet, so each variable becomes the colour that it stands for.
        for name, colour in LIGHT.items():
            text = text.replace(f"var(--{name})", colour)
        text = text.replace("var(--font)", "sans-serif")
        spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
        return text.replace("<svg ", f'<svg {spaces} style="background: {LIGHT["surface"]}" ', 1)


@dataclass(frozen=True)
class Curves:
    """A picture of curves over the training steps.

    Attributes:
      lines: The curves.
      height: Height in inches.
      scale: Kind of the vertical axis.
      ylabel: Label of the vertical axis. Empty: the label of the only line.
      percent: Whether the values are shares.
      integers: Whether the values are counts.
      moving: Whether to leave the picture out if all values are 0.
      marks: Steps with a dotted vertical line, by the line's label.
    """

    lines: Sequence[Line]
    height: float = HEIGHT
    scale: Scale = "zero"
    ylabel: str = ""
    percent: bool = False
    integers: bool = False
    moving: bool = False
    marks: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def __call__(self, run: RecordedRun) -> list[Picture]:
        """Returns the picture of a run. Empty if there is nothing to draw."""
        named = (run.curve(line.values) if isinstance(line.values, str) else line.values for line in self.lines)
        curves = list(zip(self.lines, named, strict=True))
        curves = [(line, values) for line, values in curves if values]
        if not curves or (self.moving and not any(any(values.values()) for _, values in curves)):
            return []
        return [Picture(functools.partial(self._draw, curves), self.height)]

    def _draw(self, curves: Sequence[tuple[Line, Curve]], axes: Any) -> None:
        for line, values in curves:
            line.draw(axes, values)
        axes.yaxis.set_major_formatter((lambda value, _: f"{100 * value:z.3g}%") if self.percent else thousands)
        if self.integers:
            whole_ticks(axes.yaxis)
        low = min(min(values.values()) for _, values in curves)
        high = max(max(values.values()) for _, values in curves)
        if self.scale == "share" and low >= 0 and high <= 1:
            axes.set_ylim(0, 1.03)
        elif self.scale == "log" and low > 0 and high > FAR * low:
            axes.set_yscale("log")
        elif self.scale in ("zero", "log"):
            # All values may be 0, and axes need a top above their bottom.
            axes.set_ylim(bottom=min(0.0, low), top=1.08 * max(0.0, high) or float(low >= 0))
        for text, steps in self.marks.items():
            for index, step in enumerate(steps):
                axes.axvline(step, color=TEAL, linewidth=1.2, linestyle=":", label=None if index else text)
        axes.set_ylabel(self.ylabel)
        step_axis(axes)
        labels = axes.get_legend_handles_labels()[1]
        if len(labels) > 1:
            legend_above(axes, 4)
        elif labels and not self.ylabel:
            axes.set_ylabel(labels[0])


def stack(axes: Any, parts: Mapping[str, Curve], colours: Mapping[str, str]) -> None:
    """Stacks curves with the same steps on a step axis: as areas, or as bars if there are few steps."""
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
    step_axis(axes)


def moving_mean(curve: Curve, width: int = 5) -> dict[int, float]:
    """Returns the mean of each value and up to `width` - 1 values before it."""
    steps = list(curve)
    means = {}
    for index, step in enumerate(steps):
        window = [curve[earlier] for earlier in steps[max(0, index - width + 1) : index + 1]]
        means[step] = sum(window) / len(window)
    return means


def thinned(curve: Curve) -> tuple[list[float], list[float]]:
    """Returns steps and values, averaged over consecutive steps so that at most `MOST_POINTS` are left."""
    steps, values = list(curve), list(curve.values())
    # Rounded up, so that at most MOST_POINTS runs are left. An empty curve has size 0, which `range` refuses.
    size = -(-len(steps) // MOST_POINTS)
    runs = [slice(begin, begin + size) for begin in range(0, len(steps), size or 1)]
    return [sum(steps[r]) / len(steps[r]) for r in runs], [sum(values[r]) / len(values[r]) for r in runs]


def label(text: str) -> str:
    """Returns a run's text for a picture: safe to show, and without the dollar signs of matplotlib's formulas."""
    return escapes.visible(text).replace("$", r"\$")


def step_axis(axes: Any) -> None:
    """Labels the horizontal axis as training steps: whole numbers, with room around a single step."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("training step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10], min_n_ticks=1))
    first, last = axes.dataLim.intervalx
    # Half a step of room where a few bars stand, which are nearly one step wide.
    room = max(0.5 if last - first < FEW_POINTS else 0.0, 0.01 * (last - first))
    axes.set_xlim(first - room, last + room)


def name_rows(axes: Any, names: Sequence[str]) -> None:
    """Names the rows of a picture, the first at the top."""
    axes.set_yticks(range(len(names)), [label(name) for name in names])
    # Limits from high to low put the first row at the top.
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")


def whole_ticks(axis: Any) -> None:
    """Restricts the ticks of an axis of counts to whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))


def legend_above(axes: Any, columns: int) -> None:
    """Puts the legend above the axes, where it covers nothing. In a narrow picture it has two columns."""
    columns = columns if axes.figure.get_figwidth() > NARROW else min(columns, 2)
    spaces = {"handlelength": 1.4, "columnspacing": 1.4, "borderaxespad": 0.2, "borderpad": 0.2}
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, **spaces)


def thousands(value: float, _: Any = None) -> str:
    """Returns a number for an axis, without a minus sign before zero."""
    return f"{value:z,.0f}" if abs(value) >= 1000 else f"{value:zg}"
