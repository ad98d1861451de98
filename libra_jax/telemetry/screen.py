"""One screen of what a run is doing: launch/status.py, and the health page."""

from __future__ import annotations

import datetime
import io
from collections.abc import Mapping
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
    "step/seconds": ("step", ".1f"),
}
"""The scalars of the last step that are shown, how they are called, and how they are written."""


def picture(view: Mapping[str, Any], verdict: str = "") -> RenderableType:
    """A run's view as one screen.

    Args:
      view: of `status.RunStatus`, or read from `status.json`.
      verdict: whether it lives, a sentence; empty where that is out of question.
    """
    dead = verdict.startswith("DEAD")
    ended = dead or bool(view["ended"])
    lines: list[RenderableType] = [
        Text.assemble(
            (f"step {view['step']}/{view['steps']}", "bold"),
            f"   version {view['policy_version']}   start {view['epoch']} of this run",
        ),
        *map(_text, _age(view, ended=ended)),
    ]
    if verdict:
        lines.append(_text(verdict, style="bold red" if dead else "bold"))
    lines += [_text(problem, style="bold red") for problem in view["problems"]]
    speed = {"tokens_per_second": view.get("tokens_per_second") or None}
    if shown := _numbers({**view["scalars"], **(speed if "tokens_per_second" in view["scalars"] else {})}):
        lines.append(shown)
    if not view["ended"] or view["ended"]["how"] == "failed":
        lines.append(_workers(view["workers"], ended=ended))
    for title, counts in (("workers lost", view["failures"]), ("groups replaced", view["replaced"])):
        if any(counts.values()):
            told = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()) if count)
            lines.append(_text(f"{title}: {told}"))
    lines += [
        _text(f"waits: {wait['subject']} {wait['seconds']:.0f} of {_limit(wait['deadline'])}", style="dim")
        for wait in view["waits"]
    ]
    lines += [_text(note, style="dim", overflow="fold") for note in view["notes"]]
    if view["endpoint"] and not view["ended"]:
        lines.append(_text(f"{view['endpoint']}/health and /metrics", style="dim"))
    return Panel(Group(*lines), title=_text(f"libra-jax · {view['run']}"), title_align="left", box=box.ROUNDED)


def _limit(seconds: float | None) -> str:
    """A deadline in words; None is infinite."""
    return "any time" if seconds is None else f"{seconds:g} s"


def text(view: Mapping[str, Any], verdict: str = "") -> str:
    """The same as plain text."""
    stream = io.StringIO()
    Console(file=stream, width=WIDTH, color_system=None).print(picture(view, verdict))
    return stream.getvalue()


def _age(view: Mapping[str, Any], *, ended: bool) -> list[str]:
    """When this start of the run began and how long it has run; the same of all its starts, if there were others."""
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
    """Text from a run's files, which a model or a tool may have written."""
    return Text(escapes.visible(content), **looks)


def _numbers(scalars: Mapping[str, float | None]) -> RenderableType | None:
    cells = [
        f"[dim]{called}[/] [bold]{value:{form}}[/]"
        for name, (called, form) in NUMBERS.items()
        if (value := scalars.get(name)) is not None
    ]
    if not cells:
        return None
    grid = Table.grid(padding=(0, 3))
    grid.add_row(*cells)
    return grid


def _workers(workers: Mapping[str, Mapping[str, Any]], *, ended: bool) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, expand=True, show_edge=False, header_style="dim", padding=(0, 1))
    table.add_column("worker", no_wrap=True)
    table.add_column("did last" if ended else "doing", ratio=1, overflow="fold")
    table.add_column("" if ended else "for", justify="right", no_wrap=True)
    for name, worker in workers.items():
        table.add_row(_text(name), _text(worker["doing"]), "" if ended else console.seconds_text(worker["seconds"]))
    return table
