"""The report's section on pools: who had how many devices when, and what each change of sides cost."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from libra_jax.telemetry import figures, page, pool_picture, timeline, transitions

NOTE = (
    "Devices of each pool over the time that the run ran. A symbol stands where a transition ended, its line where it "
    "began. The trainer's core keeps its program: a hybrid worker helps it as a whole replica."
)

COST_NOTE = (
    "Medians of the transitions that were done. A stall is what the side lost, over all of them, those that failed or "
    "were cancelled included."
)

_STALLS = {"training stalled": "training", "rollout stalled": "rollout"}
"""Heads of columns, and whose stall is under each."""

MOST_REASONS = 3
"""Reasons that a row names, the commonest first."""

MOST_ROWS = 500
"""Transitions that are listed one by one, the last ones."""


def sections(
    sizes: Sequence[timeline.PoolSizes], changes: Sequence[transitions.Transition], end: float
) -> list[page.Section]:
    """Returns the picture if pools ever changed, what transitions cost, those that came to nothing, and all of them.

    Args:
      sizes: of the pools, when they changed.
      changes: transitions, in the order in which they ended.
      end: of the run, in seconds.
    """
    out = []
    moved = bool(changes) or any(change.devices != sizes[0].devices for change in sizes)
    if moved and (picture := figures.for_screens(lambda width: pool_picture.draw(sizes, changes, end, width))):
        out.append(page.Section("Pools", picture, NOTE, wide=True))
    if not changes:
        return out
    heads = ("way", "done", "failed", "cancelled", "took", "phases", "moved", *_STALLS, "commonest reasons")
    rows = [_cost(way, [change for change in changes if change.way == way]) for way in _ways(changes)]
    out.append(page.Section("Transitions", page.table(heads, rows), COST_NOTE, wide=True))
    if lost := [change for change in changes if change.outcome != transitions.DONE]:
        out.append(page.Section("Transitions that came to nothing", _listed(lost), _left_out(lost), wide=True))
    out.append(page.Section("Every transition", _listed(changes), _left_out(changes), wide=True, folded=True))
    return out


def sentence(changes: Sequence[transitions.Transition]) -> str:
    """What the transitions came to; empty where there were none."""
    if not changes:
        return ""
    ways = Counter(change.way for change in changes if change.outcome == transitions.DONE)
    done, lost = ways.total(), len(changes) - ways.total()
    counted = ", ".join(f"{count:,} {way}" for way, count in ways.items())
    text = f"<b>{done:,} transition{'' if done == 1 else 's'}</b> came about" + (f" ({counted})" if counted else "")
    text += f" and {lost:,} came to nothing" if lost else ""
    stalls = " and ".join(f"{side} for {_seconds(_stalled(changes, side))}" for side in _STALLS.values())
    return f"{text}; together they stalled {stalls}."


def _ways(changes: Iterable[transitions.Transition]) -> list[str]:
    return list(dict.fromkeys(change.way for change in changes))


def _cost(way: str, changes: Sequence[transitions.Transition]) -> tuple[str, ...]:
    done = [change for change in changes if change.outcome == transitions.DONE]
    counts = Counter(change.outcome for change in changes)
    phases = {
        name: statistics.median(change.phases[name] for change in done if name in change.phases)
        for name in dict.fromkeys(name for change in done for name in change.phases)
    }
    reasons = Counter(change.reason for change in changes if change.reason).most_common()
    named = [f"{reason} ({count:,})" for reason, count in reasons[:MOST_REASONS]]
    further = len(reasons) - len(named)
    return (
        way,
        *(f"{counts[outcome]:,}" for outcome in (transitions.DONE, "failed", "cancelled")),
        _seconds(_median(change.seconds for change in done)),
        _phases(phases),
        _size(_median(change.bytes for change in done)),
        *(_seconds(_stalled(changes, side)) for side in _STALLS.values()),
        "; ".join(named) + (f"; {further:,} more" if further else ""),
    )


def _listed(changes: Sequence[transitions.Transition]) -> str:
    heads = ("step", "worker", "from", "to", "outcome", "reason", "took", "phases", "moved", *_STALLS)
    return page.table(heads, [_row(change) for change in changes[-MOST_ROWS:]])


def _left_out(changes: Sequence[transitions.Transition]) -> str:
    return f"The last {MOST_ROWS:,} of {len(changes):,}." if len(changes) > MOST_ROWS else ""


def _row(change: transitions.Transition) -> tuple[str, ...]:
    return (
        "-" if change.step is None else str(change.step),
        change.worker,
        change.source,
        change.target,
        f"{change.outcome}: {change.why}" if change.why else change.outcome,
        change.reason,
        _seconds(change.seconds),
        _phases(change.phases),
        _size(change.bytes),
        *(_seconds(change.stall.get(side, math.nan)) for side in _STALLS.values()),
    )


def _median(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan


def _stalled(changes: Iterable[transitions.Transition], side: str) -> float:
    return sum(change.stall.get(side, 0.0) for change in changes)


def _phases(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_seconds(value)}" for name, value in seconds.items())


def _seconds(seconds: float) -> str:
    """Seconds to three digits or so, milliseconds included: what a phase takes may be either."""
    return "-" if math.isnan(seconds) else f"{seconds:,.2f} s" if seconds < 10 else f"{seconds:,.1f} s"


def _size(count: float) -> str:
    """Bytes in the largest decimal unit of which there is one."""
    if math.isnan(count):
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.3g} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"
