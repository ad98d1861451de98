"""Draws the live reward curve of a notebook; draws nothing elsewhere."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

from libra_jax.telemetry import metrics
from libra_jax.telemetry.report import pictures


class Curve:
    """Draws a run's mean reward by step below the notebook's cell, and redraws it after each step."""

    def __init__(self) -> None:
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython is not None else None
        # The shell of a notebook's kernel. A terminal's IPython has another one, and shows no figures.
        self._draws = shell is not None and type(shell).__name__ == "ZMQInteractiveShell"
        self._handle: Any = None
        self._steps = 0

    def look(self, workdir: Path) -> None:
        """Reads the run's metrics and draws them if there are new metrics."""
        if not self._draws:
            return
        rows = metrics.read(workdir / metrics.METRICS_FILE)
        rewards = {step: row["reward/mean"] for step, row in rows.items() if "reward/mean" in row}
        if len(rewards) == self._steps:
            return
        self._steps = len(rewards)
        from IPython import display  # imported here, because only a notebook surely has it
        from matplotlib.figure import Figure  # not pyplot, which would choose a backend for the whole notebook

        figure = Figure(figsize=(6, 2.5), layout="constrained")
        axes = figure.add_subplot(xlabel="training step", ylabel="mean reward")
        axes.plot(list(rewards), list(rewards.values()), marker=".")
        pictures.step_axis(axes)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=100)
        image = display.Image(data=buffer.getvalue())  # a bare figure shows as text unless pyplot is set up
        if self._handle is None:
            self._handle = display.display(image, display_id=True)
        else:
            self._handle.update(image)
