"""The picture of the pools: how many devices each had when, stacked, and the transitions that changed it.

It takes plain data, so a simulated run, whose recorder keeps lists and writes no files, is drawn like a real one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from libra_jax import protocols
from libra_jax.telemetry import figures, timeline, transitions

_LOOKS = dict(
    zip(
        protocols.POOLS,
        ((figures.GREEN, 0.9), (figures.GREEN, 0.45), (figures.MUTED, 0.3), (figures.BLUE, 0.45), (figures.BLUE, 0.9)),
        strict=True,
    )
)
"""Colour and opacity of each pool: that of the side where it works, paler where workers change sides."""

_FURTHER = (figures.TEAL, figures.ORANGE, figures.PURPLE)
"""Colours of pools that have other names."""

_MARKS = {
    "to training": ("^", figures.GREEN),
    "to rollout": ("v", figures.BLUE),
    transitions.MESH: ("D", figures.PURPLE),
    "failed": ("X", figures.ORANGE),
    "cancelled": ("X", figures.MUTED),
}
"""Symbol and colour at the end of a transition."""

_UNITS = ((3 * 3600.0, 3600.0, "hours"), (600.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
"""From so many seconds on, the time axis is in units of so many seconds, named so."""


def stacked(sizes: Sequence[timeline.PoolSizes], end: float) -> tuple[list[float], dict[str, list[float]]]:
    """The data of the picture: times, and the devices that each pool has from each of them on.

    Pools are in the order in which they are stacked; those that never had a device are left out. The last time is the
    end. Changes whose time is no number are dropped; where there are more than `figures.MOST_POINTS`, the last one in
    each of so many stretches of time is kept.

    Args:
      sizes: in any order.
      end: seconds at which the picture ends, if the last change was not later.
    """
    changes = _thinned(sorted((size for size in sizes if math.isfinite(size.start)), key=lambda size: size.start))
    if not changes:
        return [], {}
    named = dict.fromkeys(itertools.chain.from_iterable(change.devices for change in changes))
    order = [*protocols.POOLS, *(name for name in named if name not in protocols.POOLS)]
    times = [change.start for change in changes]
    times.append(max(end, times[-1]))
    columns = {name: [change.devices.get(name, 0) for change in (*changes, changes[-1])] for name in order}
    return times, {name: column for name, column in columns.items() if any(column)}


def _thinned(changes: list[timeline.PoolSizes]) -> list[timeline.PoolSizes]:
    if len(changes) <= figures.MOST_POINTS:
        return changes
    begin = changes[0].start
    stretch = (changes[-1].start - begin) / figures.MOST_POINTS or 1.0
    return list({int((change.start - begin) / stretch): change for change in changes}.values())


def marks(changes: Sequence[transitions.Transition]) -> dict[str, list[tuple[float, float]]]:
    """Start and end of the transitions of each kind, in the order of the legend; those that end at no time are dropped.

    A transition whose start is unknown starts at its end.
    """
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in _MARKS}
    for change in changes:
        name = change.outcome
        if name == transitions.DONE:
            name = change.way if change.way == transitions.MESH else f"to {change.target}"
        if name in found and math.isfinite(change.end):
            start = change.start if math.isfinite(change.start) else change.end
            found[name].append((start, change.end))
    return {name: times for name, times in found.items() if times}


def draw(
    sizes: Sequence[timeline.PoolSizes],
    changes: Sequence[transitions.Transition] = (),
    end: float = 0.0,
    width: float = figures.BROAD,
) -> str:
    """Devices by pool over time, with a mark above them where a transition ended; an `<svg>` element for a page.

    Empty where there is nothing to see: the pools were never told, or no time went by. `page.standalone` makes a file
    of it.

    Args:
      sizes: of the pools, when they changed.
      changes: transitions, on the same clock.
      end: seconds at which the picture ends, if the last change was not later.
      width: inches.
    """
    shown = marks(changes)
    times, columns = stacked(sizes, max((end, *(time for pairs in shown.values() for _, time in pairs))))
    if not columns or times[-1] <= times[0]:
        return ""
    _, unit_seconds, unit = next(row for row in _UNITS if times[-1] - times[0] >= row[0])

    def picture() -> Any:
        figure, axes = figures.canvas(width, 3.4)
        moments = [time / unit_seconds for time in times]
        top = _draw_areas(axes, moments, columns)
        _draw_marks(axes, {name: [(a / unit_seconds, b / unit_seconds) for a, b in shown[name]] for name in shown}, top)
        axes.set(xlim=(moments[0], moments[-1]), ylim=(0, 1.14 * top), xlabel=unit, ylabel="devices")
        figures.whole_ticks(axes.yaxis)
        figures.legend_above(axes, figures.columns(width, 5, 2))
        return figure

    return figures.styled(picture)


def _draw_areas(axes: Any, moments: list[float], columns: dict[str, list[float]]) -> float:
    """Draws the pools on top of each other and returns how high they reach at most."""
    further = itertools.cycle(_FURTHER)
    low = [0.0] * len(moments)
    for name, column in columns.items():
        colour, opacity = _LOOKS.get(name) or (next(further), 0.7)
        high = [below + size for below, size in zip(low, column, strict=True)]
        axes.fill_between(moments, low, high, step="post", color=colour, alpha=opacity, lw=0, label=name)
        low = high
    return max(low)


def _draw_marks(axes: Any, shown: dict[str, list[tuple[float, float]]], top: float) -> None:
    """Draws a symbol where a transition ended and a line since it began, above the pools."""
    for name, pairs in shown.items():
        symbol, colour = _MARKS[name]
        lines = [time for start, end in pairs for time in (start, end, math.nan)]
        axes.plot(lines, [1.07 * top] * len(lines), color=colour, linewidth=1.4)
        ends = [end for _, end in pairs]
        axes.plot(ends, [1.07 * top] * len(ends), color=colour, marker=symbol, markersize=6, linestyle="", label=name)
