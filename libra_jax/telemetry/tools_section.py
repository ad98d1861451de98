"""The report's section on tools: what came of calls, how long they took, how many turns attempts had, how they ended.

A turn with several calls at once counts as one call of "a+b", with the worst status and the time of the longest: that
is what the trace records, and what the scheduler goes by.
"""

from __future__ import annotations

import array
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from libra_jax.telemetry import figures, page, tools_picture, trace

NOTE = (
    "Seconds and payload of a call: median, and what nine in ten stay below. Several calls of one output are one row, "
    "named by all of them, with the worst status and the time of the longest. Replaced attempts are in no trace."
)

ENDS_NOTE = (
    "Share of attempts that ended in each way, in the first and the last quarter of the steps. task.cut_off masks "
    "those that end at a limit of task.cut_off_limits (max_seconds and max_context by default): they teach nothing. "
    "rollout/masked in metrics.jsonl is their share."
)

MOST_TOOLS = 8
"""Tools that are pictured, the most called first."""

QUARTER = 4


@dataclass
class Calls:
    """A tool's calls.

    Attributes:
      outcomes: calls by training step and status.
      seconds: of each call.
      payload_tokens: of each call.
    """

    outcomes: Counter[tuple[int, str]] = field(default_factory=Counter)
    seconds: array.array[float] = field(default_factory=lambda: array.array("d"))
    payload_tokens: array.array[float] = field(default_factory=lambda: array.array("d"))

    def of_status(self, status: str) -> int:
        """Calls of which that came."""
        return sum(count for (_, one), count in self.outcomes.items() if one == status)


@dataclass
class Tally:
    """What the trajectories of a trace did with tools.

    Attributes:
      tools: calls by the tool's name.
      turns: trajectories by training step and number of turns.
      ends: trajectories by training step and finish reason.
    """

    tools: dict[str, Calls] = field(default_factory=dict)
    turns: Counter[tuple[int, int]] = field(default_factory=Counter)
    ends: Counter[tuple[int, str]] = field(default_factory=Counter)

    def add(self, record: Mapping[str, Any]) -> None:
        """Counts a record of the trace; what it lacks, or what a killed run garbled, is left out."""
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
            calls.seconds.append(_number(turn.get("tool_seconds")))
            calls.payload_tokens.append(_number(turn.get("payload_tokens")))

    @property
    def by_calls(self) -> list[tuple[str, Calls]]:
        """The tools, the most called first."""
        return sorted(self.tools.items(), key=lambda item: (-item[1].outcomes.total(), item[0]))


def sections(tally: Tally) -> list[page.Section]:
    """The tables and pictures; where no tool was called, only how attempts ended."""
    if not tally.ends:
        return []
    steps = sorted({step for step, _ in tally.turns})
    early, late = ends_of(steps)
    ends = page.Section("How attempts ended", _ends_table(tally, early, late or early), ENDS_NOTE, wide=True)
    if not tally.tools:
        return [ends]
    pictured = tally.by_calls[:MOST_TOOLS]
    heads = ("tool", "calls", *trace.STATUSES, "seconds", "P90", "longest", "payload tokens", "P90")
    rows = [_row(name, calls) for name, calls in tally.by_calls]
    out = [page.Section("Tools", page.table(heads, rows), NOTE, wide=True)]
    outcomes = {name: _by_step(calls, steps) for name, calls in pictured}
    out.append(
        page.Section(
            "Tool outcomes by step",
            figures.for_screens(lambda width: tools_picture.outcomes(outcomes, width)),
            _left_out(tally),
            wide=True,
        )
    )
    spans = {name: _quantiles(calls.seconds) for name, calls in pictured}
    note = "Box: the middle half of the calls; line: 5 to 95 in a hundred; mark: the median."
    out.append(page.Section("Seconds of a call", tools_picture.seconds(spans), note))
    shares = {f"steps {_range(part)}": _shares(tally.turns, part) for part in ((early, late) if late else (early,))}
    out.append(page.Section("Turns of an attempt", tools_picture.turns(shares)))
    out.append(ends)
    return out


def sentence(tally: Tally) -> str:
    """How the turns of an attempt changed; empty where no tool was called."""
    early, late = ends_of(sorted({step for step, _ in tally.turns}))
    if not tally.tools or not late:
        return ""
    means = [sum(count * share for count, share in _shares(tally.turns, part).items()) for part in (early, late)]
    return (
        f"An attempt took {means[0]:.1f} turns in the first quarter of the steps and <b>{means[1]:.1f}</b> in the last."
    )


def ends_of(steps: Sequence[int]) -> tuple[list[int], list[int]]:
    """The first and the last quarter of the steps, one each at least; of a single step the last is empty."""
    size = -(-len(steps) // QUARTER)
    return list(steps[:size]), list(steps[-size:]) if len(steps) > 1 else []


def _row(name: str, calls: Calls) -> tuple[str, ...]:
    counts = calls.outcomes.total(), *(calls.of_status(status) for status in trace.STATUSES)
    seconds, payload = sorted(calls.seconds), sorted(calls.payload_tokens)
    return (
        name,
        *(f"{count:,}" for count in counts),
        *(_seconds(_quantile(seconds, share)) for share in (0.5, 0.9, 1.0)),
        *(f"{_quantile(payload, share):,.0f}" for share in (0.5, 0.9)),
    )


def _ends_table(tally: Tally, early: Sequence[int], late: Sequence[int]) -> str:
    first, last = _shares(tally.ends, early), _shares(tally.ends, late)
    names = sorted({*first, *last}, key=lambda name: (-last.get(name, 0.0), -first.get(name, 0.0), str(name)))
    rows = [(str(name), f"{first.get(name, 0.0):.1%}", f"{last.get(name, 0.0):.1%}") for name in names]
    return page.table(("how", f"steps {_range(early)}", f"steps {_range(late)}"), rows)


def _by_step(calls: Calls, steps: Sequence[int]) -> dict[str, dict[int, float]]:
    """Calls of each status by step, zeros included, so that the statuses can be stacked."""
    return {status: {step: float(calls.outcomes[step, status]) for step in steps} for status in trace.STATUSES}


def _shares(counts: Mapping[tuple[int, Any], int], steps: Iterable[int]) -> dict[Any, float]:
    """Share of the trajectories of these steps by what they are counted by."""
    wanted, found = set(steps), Counter[Any]()
    for (step, value), count in counts.items():
        if step in wanted:
            found[value] += count
    return {value: count / found.total() for value, count in sorted(found.items())}


def _left_out(tally: Tally) -> str:
    further = len(tally.tools) - MOST_TOOLS
    return f"The {MOST_TOOLS} most called; {further} more are in the table." if further > 0 else ""


def _quantiles(values: Iterable[float]) -> tuple[float, ...]:
    ordered = sorted(values)
    return tuple(_quantile(ordered, share) for share in tools_picture.SHARES)


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def _range(steps: Sequence[int]) -> str:
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"


def _seconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"
