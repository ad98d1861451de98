"""A run's state as one screen, for `launch/status.py` and the health page, and parts of it for the live view."""

from __future__ import annotations

import datetime
import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from libra_jax.telemetry import console, escapes

WIDTH = 100

NUMBERS = {
    "reward/mean": ("reward", ".3f"),
    "evaluation/accuracy": ("held-out", ".3f"),
    "tokens_per_second": ("tokens/s", ",.0f"),
    "staleness/max": ("staleness", ".0f"),
    "loss": ("loss", ".4g"),
    "mismatch/kl": ("mismatch KL", ".1e"),
    "step/seconds": ("step", ".1f"),
}
"""Name and format of each metric of the last step that is shown."""


def picture(view: Mapping[str, Any], verdict: str = "") -> RenderableType:
    """Returns a run's state as one screen.

    Args:
      view: View of a `status.RunStatus`, or the content of `status.json`.
      verdict: Sentence that says whether the run is alive. Empty if this is certain.
    """
    dead = verdict.startswith("DEAD")
    ended = dead or bool(view["ended"])
    head = f"   version {view['policy_version']}   start {view['epoch']} of this run"
    lines: list[RenderableType] = [Text.assemble((f"step {view['step']}/{view['steps']}", "bold"), head)]
    lines += map(_text, _age(view, ended=ended))
    if verdict:
        lines.append(_text(verdict, style="bold red" if dead else "bold"))
    lines += [_text(problem, style="bold red") for problem in view["problems"]]
    lines += numbers(view)
    if not view["ended"] or view["ended"]["how"] == "failed":
        lines.append(workers(view["workers"], ended=ended))
    for title, counts in (("workers lost", view["failures"]), ("groups replaced", view["replaced"])):
        if any(counts.values()):
            told = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()) if count)
            lines.append(_text(f"{title}: {told}"))
    for wait in view["waits"]:
        # A deadline of None means no limit.
        limit = "any time" if wait["deadline"] is None else f"{wait['deadline']:g} s"
        lines.append(_text(f"waits: {wait['subject']} {wait['seconds']:.0f} of {limit}", style="dim"))
    lines += notes(view)
    if view["endpoint"] and not view["ended"]:
        lines.append(_text(f"{view['endpoint']}/health and /metrics", style="dim"))
    return framed(lines, view["run"])


def framed(lines: Sequence[RenderableType], run: str) -> RenderableType:
    """Returns the lines in a frame with the run's name."""
    title = _text(f"libra-jax · {run}", style="bold")
    return Panel(Group(*lines), title=title, title_align="left", box=box.ROUNDED, border_style="dim")


def text(view: Mapping[str, Any], verdict: str = "") -> str:
    """Returns the screen as plain text."""
    stream = io.StringIO()
    Console(file=stream, width=WIDTH, color_system=None).print(picture(view, verdict))
    return stream.getvalue()


def _age(view: Mapping[str, Any], *, ended: bool) -> list[str]:
    """Returns when this start of the run began and how long it has run. Adds the total if there were earlier starts."""
    took = console.seconds_text(view["seconds"])
    began = f"began {_moment(view['began'])}, " + (f"ran for {took}" if ended else f"{took} ago")
    lines = [f"process {view['pid']} on {view['host']}, {began}"]
    whole = view.get("run_seconds", view["seconds"])
    if whole > view["seconds"]:
        lines.append(f"the run began {_moment(view['first_began'])} and has run {console.seconds_text(whole)} in all")
    return lines


def _moment(wall: float) -> str:
    return datetime.datetime.fromtimestamp(wall).strftime("%Y-%m-%d %H:%M:%S")


def _text(content: str, **looks: Any) -> Text:
    """Returns text from a run's files, safe to show. A model or a tool may have written it."""
    return Text(escapes.visible(content), **looks)


def numbers(view: Mapping[str, Any]) -> list[RenderableType]:
    """Returns the last step's numbers as a row, with the mean speed of the last steps. Empty before the first step."""
    scalars = dict(view["scalars"])
    # The speed of a single step says little; see `console.Speed`.
    if "tokens_per_second" in scalars:
        scalars["tokens_per_second"] = view.get("tokens_per_second") or None
    cells = [
        f"[dim]{called}[/] [bold]{value:{form}}[/]"
        for name, (called, form) in NUMBERS.items()
        if (value := scalars.get(name)) is not None
    ]
    grid = Table.grid(padding=(0, 3))
    grid.add_row(*cells)
    return [grid] if cells else []


def workers(doing: Mapping[str, Mapping[str, Any]], *, ended: bool = False, fold: bool = True) -> RenderableType:
    """Returns a table of each worker's current or last activity, and its duration.

    Without `fold`, one line per worker.
    """
    table = Table(box=box.SIMPLE_HEAD, expand=True, show_edge=False, header_style="dim", padding=(0, 1))
    table.add_column("worker", no_wrap=True)
    table.add_column(
        "did last" if ended else "doing", ratio=1, no_wrap=not fold, overflow="fold" if fold else "ellipsis"
    )
    table.add_column("" if ended else "for", justify="right", no_wrap=True)
    for name, worker in doing.items():
        table.add_row(_text(name), _text(worker["doing"]), "" if ended else console.seconds_text(worker["seconds"]))
    return table


def notes(view: Mapping[str, Any]) -> list[RenderableType]:
    """Returns the last notes."""
    return [_text(note, style="dim", overflow="fold") for note in view["notes"]]
