"""The live picture of a run on a terminal."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from libra_jax.telemetry import console, escapes, files

REFRESH_SECONDS = 0.5
SPARK_STEPS = 40
NOTES = 5


class _Terminal(Console):
    """A rich console that leaves a broken pipe to its caller; rich itself would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class LiveConsole:
    """Progress, reward, throughput, staleness, what each worker is doing, and the last notes; redrawn twice a second.

    Calls only change what the next redrawing shows, so they cost microseconds. Output of the process that goes through
    `print` or `logging` scrolls above the picture. The cursor is never hidden, so that a killed run leaves the terminal
    as it was. A terminal that goes away ends the drawing, not the run.

    Args:
      name: the run's name.
      steps: training steps of the whole run.
      stream: the terminal.
      clock: seconds now, on the clock of the event loop.
      warn: receives the one warning when the terminal is lost.
    """

    def __init__(self, name: str, steps: int, stream: TextIO, clock: Callable[[], float], warn: files.Warn) -> None:
        self._name = name
        self._stream = stream
        self._clock = clock
        self._warn = warn
        self._pace = console.Pace(steps, clock())
        self._speed = console.Speed()
        self._scalars: dict[str, float] = {}
        self._rewards: deque[float] = deque(maxlen=SPARK_STEPS)
        self._evaluation: tuple[int, float] | None = None
        self._workers: dict[str, tuple[str, float]] = {}
        self._notes: deque[str] = deque(maxlen=NOTES)
        self._console = _Terminal(file=stream)
        self._live = Live(
            get_renderable=self._picture, console=self._console, auto_refresh=False, vertical_overflow="crop"
        )
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._redraw, name="libra-console", daemon=True)
        self._drawing = False
        try:
            self._live.start()
            self._drawing = True
            self._console.show_cursor(True)
        except (OSError, ValueError) as error:
            self._lost(error)
        self._thread.start()
        atexit.register(self.close)

    def metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        self._pace.step_ended(step, self._clock())
        self._speed.step_ended(scalars)
        self._scalars = dict(scalars)
        if "reward/mean" in scalars:
            self._rewards.append(scalars["reward/mean"])
        if "evaluation/accuracy" in scalars:
            self._evaluation = (step, scalars["evaluation/accuracy"])

    def status(self, worker: str, text: str) -> None:
        self._workers[worker] = (text, self._clock())

    def note(self, text: str) -> None:
        self._notes.append(text)

    def flush(self) -> None:
        """Nothing to do: the picture is redrawn by itself."""

    def close(self) -> None:
        """Draws the picture a last time and leaves it on the terminal. Idempotent."""
        atexit.unregister(self.close)
        self._ended.set()
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
        while not self._ended.wait(REFRESH_SECONDS):
            try:
                self._live.refresh()
            except (OSError, ValueError) as error:
                self._lost(error)

    def _lost(self, error: Exception) -> None:
        self._ended.set()
        console.quiet(self._stream)
        with contextlib.suppress(OSError, ValueError):
            self._stop()  # gives sys.stdout and sys.stderr back
        self._warn(console.LOST, f"Nobody reads the console any more ({error}); the run goes on.")

    def _picture(self) -> RenderableType:
        parts: list[RenderableType] = [self._progress(), self._numbers()]
        if workers := dict(self._workers):
            parts.append(self._worker_table(workers))
        parts.extend(Text(escapes.visible(note), style="dim", overflow="fold") for note in list(self._notes))
        title = Text(escapes.visible(f"libra-jax · {self._name}"), style="bold")
        return Panel(Group(*parts), title=title, title_align="left", box=box.ROUNDED, border_style="dim")

    def _progress(self) -> RenderableType:
        pace = self._pace
        text = f" step {pace.done}/{pace.steps}   {console.seconds_text(self._clock() - pace.started)}"
        if pace.remaining_seconds and pace.done < pace.steps:
            text += f", {console.seconds_text(pace.remaining_seconds)} left"
        row = Table.grid(expand=True)
        row.add_column(ratio=1)
        row.add_column(justify="right", no_wrap=True)
        row.add_row(ProgressBar(total=pace.steps, completed=min(pace.done, pace.steps)), text)
        return row

    def _numbers(self) -> RenderableType:
        scalars = self._scalars
        shown = {
            "reward": (scalars.get("reward/mean"), ".3f"),
            "tokens/s": (self._speed.tokens_per_second or None, ",.0f"),
            "staleness": (scalars.get("staleness/max"), ".0f"),
            "loss": (scalars.get("loss"), ".4g"),
            "mismatch KL": (scalars.get("mismatch/kl"), ".1e"),
        }
        grid = Table.grid(padding=(0, 3))
        cells = [
            f"[dim]{name}[/] [bold]{value:{form}}[/]" for name, (value, form) in shown.items() if value is not None
        ]
        if self._evaluation is not None:
            cells.append(f"[dim]held-out[/] [bold]{self._evaluation[1]:.3f}[/] [dim](step {self._evaluation[0]})[/]")
        if cells:
            grid.add_row(*cells)
        lines: list[RenderableType] = [grid]
        if len(self._rewards) > 1:
            spark = Text(console.sparkline(list(self._rewards)), style="green")
            lines.append(Text.assemble(("reward, last steps ", "dim"), spark))
        return Group(*lines)

    def _worker_table(self, workers: Mapping[str, tuple[str, float]]) -> RenderableType:
        table = Table(box=box.SIMPLE_HEAD, expand=True, show_edge=False, header_style="dim", padding=(0, 1))
        table.add_column("worker", no_wrap=True)
        table.add_column("doing", ratio=1, no_wrap=True, overflow="ellipsis")
        table.add_column("for", justify="right", no_wrap=True)
        now = self._clock()
        for worker, (text, since) in workers.items():
            table.add_row(
                Text(escapes.visible(worker)), Text(escapes.visible(text)), console.seconds_text(max(0.0, now - since))
            )
        return table
