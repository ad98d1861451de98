"""The report on pools: the devices of each pool over time, and the cost of each transition of a worker or mesh.

It takes plain data. So a simulated run, whose recorder keeps lists and writes no files, is drawn like a real run.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from libra_jax import protocols
from libra_jax.telemetry.report import page, pictures, timeline
from libra_jax.telemetry.report.recorded_run import RecordedRun, Transition

SIDES = ("training", "rollout")
"""Sides between which hybrid workers switch, in the order of the columns of stalls."""

MESH = "another mesh"
"""Way of every other transition."""

DONE = "done"
"""Outcome of a completed transition. The other outcomes are "failed" and "cancelled"."""

MOST_REASONS = 3
"""Number of reasons that a row names, the commonest first."""

MOST_ROWS = 500
"""Number of transitions that are listed one by one, the last ones."""

_LOOKS = dict(
    zip(
        protocols.POOLS,
        (
            (pictures.GREEN, 0.9),
            (pictures.GREEN, 0.45),
            (pictures.MUTED, 0.3),
            (pictures.BLUE, 0.45),
            (pictures.BLUE, 0.9),
        ),
        strict=True,
    )
)
"""Colour and opacity of each pool: the colour of the side where it works, paler if its workers switch sides."""

_FURTHER = (pictures.TEAL, pictures.ORANGE, pictures.PURPLE)
"""Colours of pools with other names."""

_MARKS = {
    "to training": ("^", pictures.GREEN),
    "to rollout": ("v", pictures.BLUE),
    MESH: ("D", pictures.PURPLE),
    "failed": ("X", pictures.ORANGE),
    "cancelled": ("X", pictures.MUTED),
}
"""Symbol and colour at the end of a transition."""

_UNITS = ((3 * 3600.0, 3600.0, "hours"), (600.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
"""For each unit of the time axis: shortest picture in seconds, seconds per unit, and name."""


def way(change: Transition) -> str:
    """Returns the kind of a transition: for example "rollout to training", or `MESH`."""
    return f"{change.source} to {change.target}" if change.source in SIDES and change.target in SIDES else MESH


# Picture --------------------------------------------------------------------------------------------------------


def stacked(sizes: Sequence[timeline.PoolSizes], end: float) -> tuple[list[float], dict[str, list[float]]]:
    """Returns the data of the picture: times, and the devices of each pool from each time on.

    Pools are in the order of stacking. Pools that never had a device are left out, as are changes whose time is not
    finite. The last time is the end. If there are more than `pictures.MOST_POINTS` changes, time is divided into that
    many intervals, and the last change in each is kept.

    Args:
      sizes: Sizes of the pools, in any order.
      end: End of the picture in seconds, unless the last change is later.
    """
    changes = sorted((size for size in sizes if math.isfinite(size.start)), key=lambda size: size.start)
    if not changes:
        return [], {}
    if len(changes) > pictures.MOST_POINTS:
        begin = changes[0].start
        # All changes may be at the same moment; any positive length will do then.
        stretch = (changes[-1].start - begin) / pictures.MOST_POINTS or 1.0
        changes = list({int((change.start - begin) / stretch): change for change in changes}.values())
    named = dict.fromkeys(itertools.chain.from_iterable(change.devices for change in changes))
    order = [*protocols.POOLS, *(name for name in named if name not in protocols.POOLS)]
    times = [change.start for change in changes]
    times.append(max(end, times[-1]))
    # The last sizes are repeated, because they hold until the end of the picture.
    columns = {name: [change.devices.get(name, 0) for change in (*changes, changes[-1])] for name in order}
    return times, {name: column for name, column in columns.items() if any(column)}


def marks(changes: Sequence[Transition]) -> dict[str, list[tuple[float, float]]]:
    """Returns start and end of the transitions of each kind, in the order of the legend.

    Transitions without a known end are dropped. If the start is unknown, the end is used instead.
    """
    intervals: dict[str, list[tuple[float, float]]] = {name: [] for name in _MARKS}
    for change in changes:
        name = change.outcome
        if name == DONE:
            name = way(change) if way(change) == MESH else f"to {change.target}"
        if name in intervals and math.isfinite(change.end):
            intervals[name].append((change.start if math.isfinite(change.start) else change.end, change.end))
    return {name: times for name, times in intervals.items() if times}


def draw(
    sizes: Sequence[timeline.PoolSizes], changes: Sequence[Transition] = (), end: float = 0.0
) -> list[pictures.Picture]:
    """Draws devices by pool over time, with a mark above at the end of each transition.

    Returns nothing if there is nothing to see: no pool was recorded, or no time has passed.

    Args:
      sizes: Sizes of the pools at each change.
      changes: Transitions, on the same clock.
      end: End of the picture in seconds, unless the last change is later.
    """
    intervals = marks(changes)
    times, columns = stacked(sizes, max((end, *(time for pairs in intervals.values() for _, time in pairs))))
    if not columns or times[-1] <= times[0]:
        return []
    # Never exhausted: the last unit suits any time.
    _, unit_seconds, unit = next(row for row in _UNITS if times[-1] - times[0] >= row[0])
    moments = [time / unit_seconds for time in times]

    def picture(axes: Any) -> None:
        further, low = itertools.cycle(_FURTHER), [0.0] * len(moments)
        for name, column in columns.items():
            colour, opacity = _LOOKS.get(name) or (next(further), 0.7)
            high = [below + size for below, size in zip(low, column, strict=True)]
            axes.fill_between(moments, low, high, step="post", color=colour, alpha=opacity, lw=0, label=name)
            low = high
        top = max(low)
        for name, pairs in intervals.items():
            symbol, colour = _MARKS[name]
            # NaN breaks the line between two transitions.
            spans = [time / unit_seconds for start, end in pairs for time in (start, end, math.nan)]
            axes.plot(spans, [1.07 * top] * len(spans), color=colour, linewidth=1.4)
            ends = spans[1::3]
            style = {"marker": symbol, "markersize": 6, "linestyle": "", "label": name}
            axes.plot(ends, [1.07 * top] * len(ends), color=colour, **style)
        axes.set(xlim=(moments[0], moments[-1]), ylim=(0, 1.14 * top), xlabel=unit, ylabel="devices")
        pictures.whole_ticks(axes.yaxis)
        pictures.legend_above(axes, 5)

    return [pictures.Picture(picture, 3.4)]


# Sections -------------------------------------------------------------------------------------------------------


def pools(run: RecordedRun) -> Iterator[page.Part]:
    """Yields the picture of the pools if they ever changed."""
    # Pools that never changed would make a picture of flat stripes.
    if run.transitions or any(change.devices != run.pools[0].devices for change in run.pools):
        yield from draw(run.pools, run.transitions, run.seconds)


def costs(run: RecordedRun) -> Iterator[page.Part]:
    """Yields the table of the transitions of each way and their costs."""
    rows = []
    for kind in dict.fromkeys(map(way, run.transitions)):
        alike = [change for change in run.transitions if way(change) == kind]
        # Times and bytes are those of done transitions: one that failed ended early, and would look cheap.
        done = [change for change in alike if change.outcome == DONE]
        counts = Counter(change.outcome for change in alike)
        names = dict.fromkeys(name for change in done for name in change.phases)
        reasons = Counter(change.reason for change in alike if change.reason).most_common()
        named = [f"{reason} ({count:,})" for reason, count in reasons[:MOST_REASONS]]
        further = [f"{len(reasons) - MOST_REASONS:,} more"] if len(reasons) > MOST_REASONS else []
        row = (
            kind,
            *(f"{counts[outcome]:,}" for outcome in (DONE, "failed", "cancelled")),
            *_costs(
                _median(change.end - change.start for change in done),
                {name: _median(change.phases.get(name, math.nan) for change in done) for name in names},
                _median(change.bytes for change in done),
                _stalls(alike),
            ),
            "; ".join([*named, *further]),
        )
        rows.append(row)
    yield page.Table(("way", DONE, "failed", "cancelled", *_COST_HEADS, "commonest reasons"), rows)


def failures(run: RecordedRun) -> Iterator[page.Part]:
    """Yields the table of the transitions that came to nothing."""
    return _listed([change for change in run.transitions if change.outcome != DONE])


def transitions(run: RecordedRun) -> Iterator[page.Part]:
    """Yields the table of all transitions."""
    return _listed(run.transitions)


def sentence(changes: Sequence[Transition]) -> str:
    """Returns a sentence on the number of transitions and their cost. Empty if there were none."""
    if not changes:
        return ""
    ways = Counter(way(change) for change in changes if change.outcome == DONE)
    done, lost = ways.total(), len(changes) - ways.total()
    counted = ", ".join(f"{count:,} {kind}" for kind, count in ways.items())
    text = f"**{done:,} transition{'' if done == 1 else 's'}** came about" + (f" ({counted})" if counted else "")
    text += f" and {lost:,} came to nothing" if lost else ""
    stalls = " and ".join(f"{side} for {_seconds(seconds)}" for side, seconds in _stalls(changes).items())
    return f"{text}; together they stalled {stalls}."


def _listed(changes: Sequence[Transition]) -> Iterator[page.Part]:
    rows = [
        (
            "-" if change.step is None else str(change.step),
            change.worker,
            change.source,
            change.target,
            f"{change.outcome}: {change.why}" if change.why else change.outcome,
            change.reason,
            *_costs(change.end - change.start, change.phases, change.bytes, change.stall),
        )
        for change in changes[-MOST_ROWS:]
    ]
    yield page.Table(("step", "worker", "from", "to", "outcome", "reason", *_COST_HEADS), rows)
    if len(changes) > MOST_ROWS:
        yield f"The last {MOST_ROWS:,} of {len(changes):,}."


_COST_HEADS = ("took", "phases", "moved", *(f"{side} stalled" for side in SIDES))


def _costs(seconds: float, phases: Mapping[str, float], size: float, stall: Mapping[str, float]) -> Iterator[str]:
    """Yields the cells below `_COST_HEADS`."""
    yield _seconds(seconds)
    yield ", ".join(f"{name} {_seconds(value)}" for name, value in phases.items())
    yield _size(size)
    yield from (_seconds(stall.get(side, math.nan)) for side in SIDES)


def _stalls(changes: Sequence[Transition]) -> dict[str, float]:
    """Returns the seconds that each side lost in all of the transitions."""
    return {side: sum(change.stall.get(side, 0.0) for change in changes) for side in SIDES}


def _median(values: Iterable[float]) -> float:
    numbers = [value for value in values if not math.isnan(value)]
    return statistics.median(numbers) if numbers else math.nan


def _seconds(seconds: float) -> str:
    """Returns seconds with about three digits, because a phase may take milliseconds or minutes."""
    return "-" if math.isnan(seconds) else f"{seconds:,.2f} s" if seconds < 10 else f"{seconds:,.1f} s"


def _size(count: float) -> str:
    """Returns a number of bytes in the largest decimal unit that keeps the number at 1 or more."""
    if math.isnan(count):
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.3g} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"
