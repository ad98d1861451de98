"""The table of drills: on the terminal, as JSON and as markdown."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
from collections.abc import Sequence
from pathlib import Path

from rich import table as rich_table

from tests.drills import judging

WIDTH = 200
SENTENCES = 3
"""What a run said, at most so many sentences of it, in the table; all are in the JSON."""

_COLUMNS = ("drill", "hit", "when", "what the log said", "goes on after", "once / lost / twice", "left", "")


def line(outcome: judging.Outcome) -> str:
    """What came of it, for who watches."""
    if outcome.skipped:
        return f"{outcome.drill}: skipped, {outcome.skipped}"
    if outcome.problems:
        return f"{outcome.drill}: FAILED: {'; '.join(outcome.problems)}"
    return f"{outcome.drill}: passed; {_again(outcome)}, {_prompts(outcome)} prompts once / lost / twice"


def table(outcomes: Sequence[judging.Outcome]) -> rich_table.Table:
    """For a terminal."""
    made = rich_table.Table(*_COLUMNS, show_lines=True)
    for outcome in outcomes:
        made.add_row(*_row(outcome))
    return made


def write(folder: Path, engine: str, outcomes: Sequence[judging.Outcome]) -> None:
    """Writes `drills.json` and `drills.md`."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    record = {
        "written": now,
        "engine": engine,
        "cores": os.cpu_count(),
        "drills": [{**dataclasses.asdict(outcome), "passed": outcome.passed} for outcome in outcomes],
    }
    (folder / "drills.json").write_text(json.dumps(record, indent=1) + "\n")
    rows = [_COLUMNS, tuple("---" for _ in _COLUMNS), *map(_row, outcomes)]
    text = "\n".join(
        "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in row) + " |" for row in rows
    )
    (folder / "drills.md").write_text(f"{now}, {os.cpu_count()} cores, engine {engine}\n\n{text}\n")


def _row(outcome: judging.Outcome) -> tuple[str, ...]:
    if outcome.skipped:
        return (outcome.drill, "", "", f"skipped: {outcome.skipped}", "", "", "", "skipped")
    verdict = "; ".join(outcome.problems) or "passed"
    said = " ".join(outcome.said[:SENTENCES])
    left = str(outcome.left.count)
    return (outcome.drill, outcome.hit, outcome.when, said, _again(outcome), _prompts(outcome), left, verdict)


def _again(outcome: judging.Outcome) -> str:
    if outcome.again_seconds is None:
        return "never"
    if outcome.ended_seconds is None:
        return f"{outcome.again_seconds:.1f} s; longest step {outcome.longest_step_seconds:.1f} s"
    return f"{outcome.again_seconds:.1f} s (restarted; it had ended after {outcome.ended_seconds:.1f} s)"


def _prompts(outcome: judging.Outcome) -> str:
    prompts = outcome.prompts
    replaced = f" ({prompts.replaced} replaced)" if prompts.replaced else ""
    return f"{prompts.once} / {prompts.lost} / {prompts.twice}{replaced}"
