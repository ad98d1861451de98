"""The report's picture of the timeline: what each worker did in the last steps, as bands of spans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from libra_jax.telemetry import figures, timeline

_KINDS = (
    ("weight update", figures.ORANGE, ("sync", "weight", "publish", "pause")),
    ("evaluation", figures.TEAL, ("eval",)),
    ("checkpoint", figures.MUTED, ("checkpoint", "save")),
    ("training", figures.GREEN, ("train", "warm", "grad", "step")),
    ("generating", figures.BLUE, ("generate", "decode", "prefill")),
)


def kind(span: timeline.Span) -> tuple[str, str]:
    """Returns the kind of a span, in a word and a colour: by its name, else by its track."""
    if span.track.startswith("tool"):
        return "tool call", figures.PURPLE
    for text in (span.name.lower(), span.track.lower()):
        for name, colour, prefixes in _KINDS:
            if text.startswith(prefixes):
                return name, colour
    return "other", figures.MUTED


def busy_share(spans: Sequence[timeline.Span], start: float, end: float) -> float:
    """Part of [start, end] in which at least one span is open."""
    covered, reached = 0.0, start
    for span in sorted(spans, key=lambda span: span.start):
        covered += max(0.0, min(span.end, end) - max(span.start, reached))
        reached = max(reached, min(span.end, end))
    return covered / (end - start)


def lanes(spans: Sequence[timeline.Span], start: float, end: float, width: float = figures.BROAD) -> str:
    """Every span between `start` and `end` seconds, one band a track and one line a lane."""
    tracks: dict[str, list[timeline.Span]] = {}
    for span in spans:
        tracks.setdefault(span.track, []).append(span)
    order = sorted(tracks, key=lambda track: (timeline.row_order(track), track))

    def draw() -> Any:
        used = {track: sorted({span.lane for span in tracks[track]}) for track in order}
        heights = [min(3.2, 0.8 + 0.08 * len(used[track])) for track in order]
        figure, axes = figures.canvas(width, 0.8 + 0.36 * sum(heights))
        boxes: dict[tuple[str, str], list[tuple[float, float, float, float]]] = {}
        top = 0.0
        for track, height in zip(order, heights, strict=True):
            thick = (height - 0.3) / len(used[track])
            for span in tracks[track]:
                low = top + 0.15 + used[track].index(span.lane) * thick
                box = (max(span.start, start) - start, low, min(span.end, end) - start, low + thick * 0.86)
                boxes.setdefault(kind(span), []).append(box)
            axes.axhline(top, color=figures.GRID, linewidth=0.8)
            named = figures.label(f"{track}  {busy_share(tracks[track], start, end):.0%} busy")
            axes.text(-0.008, top + height / 2, named, transform=axes.get_yaxis_transform(), ha="right", va="center")
            top += height
        for (name, colour), rectangles in boxes.items():
            axes.add_patch(_boxes(rectangles, colour, name))
        axes.set(xlim=(0, end - start), ylim=(top, 0), yticks=[], xlabel="seconds")
        axes.grid(False)
        figures.legend_above(axes, figures.columns(width, len(boxes), 2))
        return figure

    return figures.styled(draw)


def _boxes(rectangles: Sequence[tuple[float, float, float, float]], colour: str, name: str) -> Any:
    """All rectangles (left, low, right, high) of a colour as one path, which is far smaller than one element each."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    corners = [
        corner
        for left, low, right, high in rectangles
        for corner in ((left, low), (right, low), (right, high), (left, high), (left, low))
    ]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(rectangles)
    return PathPatch(Path(corners, codes), facecolor=colour, edgecolor="none", alpha=0.9, label=name)
