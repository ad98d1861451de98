"""A live picture of a run on a terminal."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from libra_jax.telemetry import console, files, screen, status

REFRESH_SECONDS = 0.5
SPARK_STEPS = 40


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
      name: Name of the run.
      steps: Number of training steps of the whole run.
      stream: The terminal.
      clock: Returns the current seconds on the event loop's clock.
      warn: Called once with a warning if the terminal is lost.
    """

    def __init__(self, name: str, steps: int, stream: TextIO, clock: Callable[[], float], warn: files.Warn) -> None:
        super().__init__(name, steps, 0, clock)
        self._stream = stream
        self._lost_warn = warn
        self._pace = console.Pace(steps, clock())
        self._rewards: deque[float] = deque(maxlen=SPARK_STEPS)
        self._evaluation: tuple[int, float] | None = None
        self._console = _Terminal(file=stream)
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
        self._lost_warn(console.LOST, f"Nobody reads the console any more ({error}); the run goes on.")

    def _picture(self) -> RenderableType:
        view = self.view()
        if self._evaluation is not None:  # the last evaluation stays visible in steps without one
            view["scalars"]["evaluation/accuracy"] = self._evaluation[1]
        lines = [self._progress(), *screen.numbers(view)]
        if self._evaluation is not None:
            lines.append(Text(f"held-out of step {self._evaluation[0]}", style="dim"))
        if len(self._rewards) > 1:
            spark = Text(console.sparkline(list(self._rewards)), style="green")
            lines.append(Text.assemble(("reward, last steps ", "dim"), spark))
        if view["workers"]:
            lines.append(screen.workers(view["workers"], fold=False))
        return screen.framed([*lines, *screen.notes(view)], view["run"])

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
