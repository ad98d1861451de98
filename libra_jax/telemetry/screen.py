"""A run's state as one screen: for `launch/status.py`, for the health page, and live on a terminal."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import errno
import io
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from rich import box
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from libra_jax.telemetry import console, escapes, files, status

WIDTH = 100

REFRESH_SECONDS = 0.5
SPARK_STEPS = 40


def picture(view: Mapping[str, Any], verdict: str = "") -> RenderableType:
    """Returns a run's state as one screen.

    Args:
      view: View of a `status.RunStatus`, or the content of `status.json`.
      verdict: Sentence that says whether the run is alive. Empty if this is certain.
    """
    dead = verdict.startswith("DEAD")
    has_ended = dead or bool(view["ended"])
    head = f"   version {view['policy_version']}   start {view['fencing_token']} of this run"
    lines: list[RenderableType] = [Text.assemble((f"step {view['step']}/{view['steps']}", "bold"), head)]
    # In the time zone of the machine that shows the screen, which may not be the run's.
    started, first = (
        datetime.datetime.fromtimestamp(view.get(name, view["began"])).strftime("%Y-%m-%d %H:%M:%S")
        for name in ("began", "first_began")
    )
    took = console.seconds_text(view["seconds"])
    start_text = f"began {started}, " + (f"ran for {took}" if has_ended else f"{took} ago")
    lines.append(_text(f"process {view['pid']} on {view['host']}, {start_text}"))
    run_seconds = view.get("run_seconds", view["seconds"])  # all starts together; missing in files of older versions
    if run_seconds > view["seconds"]:
        lines.append(_text(f"the run began {first} and has run {console.seconds_text(run_seconds)} in all"))
    if verdict:
        lines.append(_text(verdict, style="bold red" if dead else "bold"))
    lines += [_text(problem, style="bold red") for problem in view["problems"]]
    lines += numbers(view)
    # After a good end no one works any more. After a failure, the table shows where the run stopped.
    if not view["ended"] or view["ended"]["how"] == "failed":
        lines.append(workers(view["workers"], has_ended=has_ended))
    for title, counts in (("workers lost", view["failures"]), ("groups replaced", view["replaced"])):
        if any(counts.values()):
            counts_text = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()) if count)
            lines.append(_text(f"{title}: {counts_text}"))
    for wait in view["waits"]:
        # A deadline of None means no limit.
        limit = "any time" if wait["deadline"] is None else f"{wait['deadline']:g} s"
        lines.append(_text(f"waits: {wait['subject']} {wait['seconds']:.0f} of {limit}", style="dim"))
    lines += [_text(note, style="dim", overflow="fold") for note in view["notes"]]
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
    # Without colours: readers of the health page get plain text.
    Console(file=stream, width=WIDTH, color_system=None).print(picture(view, verdict))
    return stream.getvalue()


def _text(content: str, **looks: Any) -> Text:
    """Returns text from a run's files, safe to show. A model or a tool may have written it."""
    return Text(escapes.visible(content), **looks)


def numbers(view: Mapping[str, Any]) -> list[RenderableType]:
    """Returns the last step's numbers, with the mean speed of the last steps, in as many rows as the width takes.

    Empty before the first step.
    """
    scalars = dict(view["scalars"])
    # The speed of a single step says little; see `console.TokenRate`.
    if "tokens_per_second" in scalars:
        scalars["tokens_per_second"] = view.get("tokens_per_second") or None
    cells = [
        Text.assemble((name, "dim"), " ", (f"{value:{form}}", "bold"))
        for metric, (_, name, form) in console.NUMBERS.items()
        if (value := scalars.get(metric)) is not None
    ]
    return [Columns(cells, padding=(0, 3))] if cells else []


def workers(doing: Mapping[str, Mapping[str, Any]], *, has_ended: bool = False, fold: bool = True) -> RenderableType:
    """Returns a table of each worker's current or last activity, and its duration.

    Without `fold`, one line per worker.
    """
    table = Table(box=box.SIMPLE_HEAD, expand=True, show_edge=False, header_style="dim", padding=(0, 1))
    table.add_column("worker", no_wrap=True)
    table.add_column(
        "did last" if has_ended else "doing", ratio=1, no_wrap=not fold, overflow="fold" if fold else "ellipsis"
    )
    table.add_column("" if has_ended else "for", justify="right", no_wrap=True)
    for name, worker in doing.items():
        table.add_row(_text(name), _text(worker["doing"]), "" if has_ended else console.seconds_text(worker["seconds"]))
    return table


class _Terminal(Console):
    """A rich console that raises on a broken pipe. rich's own console would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class LiveConsole(status.RunStatus):
    """Shows progress, reward, throughput, staleness, each worker's activity and the last notes. Redraws twice a second.

    Calls only change the data for the next redraw, so they cost microseconds. Output through `print` or `logging`
    scrolls above the picture. The cursor is never hidden, so a killed run leaves the terminal usable. If the terminal
    goes away, only the drawing ends, not the run.

    Args:
      steps: Number of training steps of the whole run.
      clock: Returns the current seconds on the event loop's clock.
      warn: Called once with a warning if the terminal is lost.
    """

    def __init__(self, name: str, steps: int, stream: TextIO, clock: Callable[[], float], warn: files.Warn) -> None:
        super().__init__(name, steps, 0, clock)
        self._stream = stream
        self._lost_warn = warn
        self._pace = console.RunPace(steps, clock())
        self._rewards: deque[float] = deque(maxlen=SPARK_STEPS)
        self._evaluation: tuple[int, float] | None = None
        self._console = _Terminal(file=stream)
        # Without auto_refresh: `_redraw` catches the loss of the terminal, and a thread of rich would not.
        self._live = Live(
            get_renderable=self._picture, console=self._console, auto_refresh=False, vertical_overflow="crop"
        )
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._redraw, name="libra-console", daemon=True)
        self._drawing = False
        try:
            self._live.start()
            self._drawing = True
            # rich hides the cursor, and a killed run could not show it again.
            self._console.show_cursor(True)
        except (OSError, ValueError) as error:
            self._lost(error)
        self._thread.start()
        # A process that ends without `close` would leave standard output redirected.
        atexit.register(self.close)

    def metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        super().metrics(step, scalars)
        self._pace.step_ended(step, self._clock())
        if "reward/mean" in scalars:
            self._rewards.append(scalars["reward/mean"])
        if "evaluation/accuracy" in scalars:
            self._evaluation = (step, scalars["evaluation/accuracy"])

    def close(self) -> None:
        """Draws the picture a last time and leaves it on the terminal. Idempotent."""
        atexit.unregister(self.close)
        self._over.set()
        self._thread.join()
        try:
            self._stop()
        except (OSError, ValueError) as error:
            self._lost(error)

    def _stop(self) -> None:
        if self._drawing:
            self._drawing = False
            self._live.stop()

    def _redraw(self) -> None:
        while not self._over.wait(REFRESH_SECONDS):
            try:
                self._live.refresh()
            except (OSError, ValueError) as error:
                self._lost(error)

    def _lost(self, error: Exception) -> None:
        self._over.set()
        console.quiet(self._stream)
        with contextlib.suppress(OSError, ValueError):
            self._stop()  # restores sys.stdout and sys.stderr
        self._lost_warn(console.LOST, f"No one reads the console any more ({error}); the run goes on.")

    def _picture(self) -> RenderableType:
        view = self.view()
        if self._evaluation is not None:  # the last evaluation stays visible in steps without one
            view["scalars"]["evaluation/accuracy"] = self._evaluation[1]
        pace = self._pace
        text = f" step {pace.done}/{pace.steps}   {console.seconds_text(self._clock() - pace.started)}"
        if pace.remaining_seconds and pace.done < pace.steps:
            text += f", {console.seconds_text(pace.remaining_seconds)} left"
        row = Table.grid(expand=True)
        row.add_column(ratio=1)
        row.add_column(justify="right", no_wrap=True)
        row.add_row(ProgressBar(total=pace.steps, completed=min(pace.done, pace.steps)), text)
        lines: list[RenderableType] = [row, *numbers(view)]
        if self._evaluation is not None:
            lines.append(Text(f"held-out of step {self._evaluation[0]}", style="dim"))
        if len(self._rewards) > 1:
            spark = Text(console.sparkline(list(self._rewards)), style="green")
            lines.append(Text.assemble(("reward, last steps ", "dim"), spark))
        if view["workers"]:
            lines.append(workers(view["workers"], fold=False))
        lines += [_text(note, style="dim", overflow="fold") for note in view["notes"]]
        return framed(lines, view["run"])
