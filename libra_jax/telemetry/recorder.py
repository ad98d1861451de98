"""The run's recorder: one object that hands what happens to every sink the config asks for."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from libra_jax import config as config_lib
from libra_jax.protocols import ConfigError
from libra_jax.telemetry import console, metrics, trace

FLUSH_SECONDS = 1.0
"""Longest time that a record waits in memory, as long as further records come in."""


class RunRecorder:
    """`protocols.Recorder` over files, viewers and the console. Call it from the event-loop thread only.

    Calls append to buffers and cost microseconds; files are written out at each step, and at least every second or
    64 KiB. Nothing here raises for a full disk or a lost viewer: each is warned about once.

    Made by `create`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._warned: set[str] = set()
        self._flushed_at = clock()
        self._closed = False
        self._metrics: list[Any] = []
        self._console: Any = None
        self._trace: Any = None
        self._sinks: list[Any] = []

    def warn(self, key: str, sentence: str) -> None:
        """Shows a warning, once for each key: in the console if there is one, else as a log message."""
        if key in self._warned:
            return
        self._warned.add(key)
        if self._console is None or key == "console":
            logging.getLogger(__name__).warning("%s", sentence)
        else:
            self._console.note(f"warning: {sentence}")

    def metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        """One training step's numbers; keys as in `metrics.jsonl`. Writes everything pending to the files."""
        if self._closed:
            return
        numbers = metrics.plain(scalars)
        for sink in self._metrics:
            sink.metrics(step, numbers)
        self.flush()

    def span(self, track: str, name: str, start: float, end: float, arguments: Mapping[str, Any] | None = None) -> None:
        """Something that took from `start` to `end` (event-loop seconds) on a named track of the timeline."""

    def trajectory(self, record: Mapping[str, Any]) -> None:
        """One line of `trace.jsonl`."""
        if not self._closed:
            self._trace.trajectory(record)
            self._flush_if_due()

    def status(self, worker: str, text: str) -> None:
        """What a worker is doing now, for the console."""
        if not self._closed and self._console is not None:
            self._console.status(worker, text)

    def note(self, text: str) -> None:
        """A sentence for the person watching."""
        if not self._closed and self._console is not None:
            self._console.note(text)

    def flush(self) -> None:
        """Hands everything recorded so far to the operating system; a checkpoint calls it before it counts on it."""
        self._flushed_at = self._clock()
        for sink in self._sinks:
            sink.flush()

    def close(self, summary: str | None = None) -> None:
        """Flushes and closes every sink and gives the terminal back. Idempotent.

        Args:
          summary: a last sentence for the person watching.
        """
        if self._closed:
            return
        if self._console is not None and summary:
            self._console.note(summary)
        self._closed = True
        for sink in self._sinks:
            sink.close()

    def _flush_if_due(self) -> None:
        if self._clock() - self._flushed_at >= FLUSH_SECONDS:
            self.flush()


def create(config: config_lib.RunConfig, workdir: Path, clock: Callable[[], float]) -> RunRecorder:
    """Makes the recorder of a run or of its resumption (call `resume.cut_back` first).

    Args:
      config: the run's config; `telemetry` says which sinks.
      workdir: the run's folder, made if it is missing.
      clock: seconds now, on the clock that spans are given in (the event loop's).

    Raises:
      ConfigError: the folder cannot be made, or W&B is asked for and not installed.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--workdir: {workdir} cannot be made ({error.strerror or error})") from error
    recorder = RunRecorder(clock)
    wandb = metrics.WandbSink(config, workdir, recorder.warn) if config.telemetry.wandb_project else None
    recorder._trace = trace.TraceFile(workdir, recorder.warn)
    recorder._metrics.append(metrics.MetricsFile(workdir, recorder.warn))
    if config.telemetry.tensorboard:
        last = metrics.last_step(workdir / metrics.METRICS_FILE)
        recorder._metrics.append(metrics.TensorBoardSink(workdir, 0 if last is None else last + 1, recorder.warn))
    if wandb is not None:
        recorder._metrics.append(wandb)
    if config.telemetry.console:
        recorder._console = console.PlainConsole(config.name, config.steps, sys.stdout, clock, recorder.warn)
        recorder._metrics.append(recorder._console)
    recorder._sinks = [recorder._trace, *recorder._metrics]
    return recorder
