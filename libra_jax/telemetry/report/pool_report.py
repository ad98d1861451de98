"""The report on pools: the devices of each pool over time, and the cost of each transition of a worker or mesh.

It takes plain data. So a simulated run, whose recorder keeps lists and writes no files, is drawn like a real run.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libra_jax import protocols
from libra_jax.telemetry.report import page, timeline

SIDES = ("rollout", "training")
"""Sides between which hybrid workers switch."""

MESH = "another mesh"
"""Way of every other transition."""

DONE = "done"
"""Outcome of a completed transition. The other outcomes are "failed" and "cancelled"."""

NOTE = (
    "Devices of each pool over the time that the run ran. A symbol stands where a transition ended, its line where it "
    "began. The trainer's core keeps its program: a hybrid worker helps it as a whole data-parallel replica."
)

COST_NOTE = (
    "Medians of the transitions that were done. A stall is what the side lost, over all of them, those that failed or "
    "were cancelled included."
)

MOST_REASONS = 3
"""Number of reasons that a row names, the commonest first."""

MOST_ROWS = 500
"""Number of transitions that are listed one by one, the last ones."""

_STALLS = {"training stalled": "training", "rollout stalled": "rollout"}
"""Side of each column of stalls, by the column's heading."""

_LOOKS = dict(
    zip(
        protocols.POOLS,
        ((page.GREEN, 0.9), (page.GREEN, 0.45), (page.MUTED, 0.3), (page.BLUE, 0.45), (page.BLUE, 0.9)),
        strict=True,
    )
)
"""Colour and opacity of each pool: the colour of the side where it works, paler if its workers switch sides."""

_FURTHER = (page.TEAL, page.ORANGE, page.PURPLE)
"""Colours of pools with other names."""

_MARKS = {
    "to training": ("^", page.GREEN),
    "to rollout": ("v", page.BLUE),
    MESH: ("D", page.PURPLE),
    "failed": ("X", page.ORANGE),
    "cancelled": ("X", page.MUTED),
}
"""Symbol and colour at the end of a transition."""

_UNITS = ((3 * 3600.0, 3600.0, "hours"), (600.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
"""For each unit of the time axis: shortest picture in seconds, seconds per unit, and name."""


@dataclass(frozen=True)
class Transition:
    """A worker that switched sides or a mesh that changed its size, or one that tried to.

    Attributes:
      worker: A hybrid worker, or the trainer.
      source: Side or mesh before the transition.
      target: Side or mesh after the transition.
      reason: Why the transition was wanted.
      start: Start in seconds, on the time axis of the pools. NaN if unknown.
      end: End in seconds on the same axis. NaN if unknown.
      step: Training step in which it ended. None if unknown.
      outcome: "done", "failed" or "cancelled".
      why: Cause of a failure. Empty if it is done.
      phases: Seconds of each phase, in order.
      bytes: Number of bytes moved. NaN if unknown.
      stall: Seconds that each side lost.
    """

    worker: str
    source: str
    target: str
    reason: str
    start: float
    end: float
    step: int | None
    outcome: str
    why: str
    phases: Mapping[str, float]
    bytes: float
    stall: Mapping[str, float]

    @property
    def way(self) -> str:
        """Kind of the transition: for example "rollout to training", or `MESH`."""
        return f"{self.source} to {self.target}" if self.source in SIDES and self.target in SIDES else MESH


def parse(record: Mapping[str, Any]) -> Transition:
    """Reads a line of `transitions.jsonl`. Missing or invalid values become unknown; no line is refused."""
    text = {name: "" if record.get(name) is None else str(record[name]) for name in _TEXTS}
    step = record.get("step")
    return Transition(
        worker=text["worker"],
        source=text["from"],
        target=text["to"],
        reason=text["reason"],
        start=_number(record.get("start")),
        end=_number(record.get("end")),
        step=step if isinstance(step, int) else None,
        outcome=text["outcome"],
        why=text["why"],
        phases=_numbers(record.get("phases")),
        bytes=_number(record.get("bytes")),
        stall=_numbers(record.get("stall")),
    )


_TEXTS = ("worker", "from", "to", "reason", "outcome", "why")


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) and math.isfinite(value) else math.nan


def _numbers(value: Any) -> dict[str, float]:
    pairs = value.items() if isinstance(value, Mapping) else ()
    return {name: number for name, number in pairs if not math.isnan(_number(number))}


# Picture --------------------------------------------------------------------------------------------------------


def stacked(sizes: Sequence[timeline.PoolSizes], end: float) -> tuple[list[float], dict[str, list[float]]]:
    """Returns the data of the picture: times, and the devices of each pool from each time on.

    Pools are in the order of stacking. Pools that never had a device are left out, as are changes whose time is not
    finite. The last time is the end. If there are more than `page.MOST_POINTS` changes, time is divided into that
    many intervals, and the last change in each is kept.

    Args:
      sizes: Sizes of the pools, in any order.
      end: End of the picture in seconds, unless the last change is later.
    """
    changes = sorted((size for size in sizes if math.isfinite(size.start)), key=lambda size: size.start)
    if not changes:
        return [], {}
    if len(changes) > page.MOST_POINTS:
        begin = changes[0].start
        # All changes may be at the same moment; any positive length will do then.
        stretch = (changes[-1].start - begin) / page.MOST_POINTS or 1.0
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
            name = change.way if change.way == MESH else f"to {change.target}"
        if name in intervals and math.isfinite(change.end):
            intervals[name].append((change.start if math.isfinite(change.start) else change.end, change.end))
    return {name: times for name, times in intervals.items() if times}


def draw(sizes: Sequence[timeline.PoolSizes], changes: Sequence[Transition] = (), end: float = 0.0) -> str:
    """Draws devices by pool over time, with a mark above at the end of each transition. `page.standalone` saves it.

    Returns an empty text if there is nothing to see: no pool was recorded, or no time has passed.

    Args:
      sizes: Sizes of the pools at each change.
      changes: Transitions, on the same clock.
      end: End of the picture in seconds, unless the last change is later.
    """
    intervals = marks(changes)
    times, columns = stacked(sizes, max((end, *(time for pairs in intervals.values() for _, time in pairs))))
    if not columns or times[-1] <= times[0]:
        return ""
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
        page.whole_ticks(axes.yaxis)
        page.legend_above(axes, 5)

    return page.figure(picture, 3.4, wide=True)


# Section --------------------------------------------------------------------------------------------------------


def sections(sizes: Sequence[timeline.PoolSizes], changes: Sequence[Transition], end: float) -> list[page.Section]:
    """Returns the picture if pools ever changed, and tables of the transitions if there were any.

    Args:
      sizes: Sizes of the pools at each change.
      changes: Transitions, in the order of their ends.
      end: End of the run in seconds.
    """
    out = []
    # Pools that never changed would make a picture of flat stripes.
    moved = bool(changes) or any(change.devices != sizes[0].devices for change in sizes)
    if moved and (picture := draw(sizes, changes, end)):
        out.append(page.Section("Pools", picture, note=NOTE, wide=True))
    if not changes:
        return out
    heads = ("way", "done", "failed", "cancelled", "took", "phases", "moved", *_STALLS, "commonest reasons")
    rows = []
    for way in dict.fromkeys(change.way for change in changes):
        alike = [change for change in changes if change.way == way]
        # Times and bytes are those of done transitions: one that failed ended early, and would look cheap.
        done = [change for change in alike if change.outcome == DONE]
        counts = Counter(change.outcome for change in alike)
        names = dict.fromkeys(name for change in done for name in change.phases)
        phases = {name: _median(change.phases.get(name, math.nan) for change in done) for name in names}
        reasons = Counter(change.reason for change in alike if change.reason).most_common()
        named = [f"{reason} ({count:,})" for reason, count in reasons[:MOST_REASONS]]
        further = len(reasons) - len(named)
        row = (
            way,
            *(f"{counts[outcome]:,}" for outcome in (DONE, "failed", "cancelled")),
            _seconds(_median(change.end - change.start for change in done)),
            ", ".join(f"{name} {_seconds(value)}" for name, value in phases.items()),
            _size(_median(change.bytes for change in done)),
            *(_seconds(sum(change.stall.get(side, 0.0) for change in alike)) for side in _STALLS.values()),
            "; ".join(named) + (f"; {further:,} more" if further else ""),
        )
        rows.append(row)
    out.append(page.Section("Transitions", table=page.Table(heads, rows), note=COST_NOTE, wide=True))
    if lost := [change for change in changes if change.outcome != DONE]:
        out.append(_listed("Transitions that came to nothing", lost))
    return [*out, _listed("Every transition", changes, folded=True)]


def sentence(changes: Sequence[Transition]) -> str:
    """Returns a sentence on the number of transitions and their cost. Empty if there were none."""
    if not changes:
        return ""
    ways = Counter(change.way for change in changes if change.outcome == DONE)
    done, lost = ways.total(), len(changes) - ways.total()
    counted = ", ".join(f"{count:,} {way}" for way, count in ways.items())
    text = f"**{done:,} transition{'' if done == 1 else 's'}** came about" + (f" ({counted})" if counted else "")
    text += f" and {lost:,} came to nothing" if lost else ""
    stalls = {side: sum(change.stall.get(side, 0.0) for change in changes) for side in _STALLS.values()}
    return f"{text}; together they stalled {' and '.join(f'{side} for {_seconds(t)}' for side, t in stalls.items())}."


def _listed(title: str, changes: Sequence[Transition], *, folded: bool = False) -> page.Section:
    heads = ("step", "worker", "from", "to", "outcome", "reason", "took", "phases", "moved", *_STALLS)
    rows = [
        (
            "-" if change.step is None else str(change.step),
            change.worker,
            change.source,
            change.target,
            f"{change.outcome}: {change.why}" if change.why else change.outcome,
            change.reason,
            _seconds(change.end - change.start),
            ", ".join(f"{name} {_seconds(value)}" for name, value in change.phases.items()),
            _size(change.bytes),
            *(_seconds(change.stall.get(side, math.nan)) for side in _STALLS.values()),
        )
        for change in changes[-MOST_ROWS:]
    ]
    table = page.Table(heads, rows)
    note = f"The last {MOST_ROWS:,} of {len(changes):,}." if len(changes) > MOST_ROWS else ""
    return page.Section(title, table=table, note=note, wide=True, folded=folded)


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
