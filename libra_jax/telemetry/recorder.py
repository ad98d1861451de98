"""The run's recorder: one object that passes events to every sink that the config enables."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from libra_jax import config as config_lib
from libra_jax.protocols import ConfigError
from libra_jax.telemetry import console, files, live, metric_names, metrics, samples, sinks, timeline, trace

FLUSH_SECONDS = 1.0
"""Longest time in seconds that a record waits in memory, if further records arrive."""

LINE_FILES = (trace.TRACE_FILE, samples.SAMPLES_FILE, files.PLANS_FILE, files.TRANSITIONS_FILE)
"""Files of the workdir with one JSON object per record."""


class _Warnings:
    """Shows each warning once: in the console if there is one, otherwise as a log message."""

    def __init__(self) -> None:
        self.console: sinks.Sink | None = None
        self._shown: set[str] = set()

    def __call__(self, key: str, sentence: str) -> None:
        if key in self._shown:
            return
        self._shown.add(key)
        if self.console is None or key == console.LOST:
            logging.getLogger(__name__).warning("%s", sentence)
        else:
            self.console.note(f"warning: {sentence}")


class RunRecorder:
    """A `protocols.Recorder` over files, viewers and the console. Call it from the event-loop thread only.

    Calls append to buffers and cost microseconds. Files are written at each step, and after a second or 64 KiB while
    records arrive. A full disk or a lost viewer raises nothing; each causes one warning. After `close`, calls do
    nothing.

    Args:
      clock: Returns the current seconds, on the clock of the spans.
      timeline_file: File for spans and pools.
      lines: File for the records of each of `LINE_FILES`, by its name.
      taking: All other sinks that record or show the run, called in this order.
      strict: Whether to refuse names of metrics that are not registered (`metric_names`).
    """

    def __init__(
        self,
        clock: Callable[[], float],
        timeline_file: timeline.TimelineFile,
        lines: Mapping[str, files.LineFile],
        taking: Sequence[sinks.Sink],
        *,
        strict: bool = False,
    ) -> None:
        self._clock = clock
        self._timeline = timeline_file
        self._lines = lines
        self._sinks = taking
        self._all: list[files.LineFile | timeline.TimelineFile | sinks.Sink] = [*lines.values(), timeline_file, *taking]
        self._strict = strict
        self._flushed_at = clock()
        self._closed = False

    def metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        """Records one training step's numbers, named as in `metrics.jsonl`, and writes all pending records to disk."""
        if self._closed:
            return
        numbers = metrics.plain(scalars)
        if self._strict:
            metric_names.check(numbers)
        for sink in self._sinks:
            sink.metrics(step, numbers)
        self.flush()

    def span(self, track: str, name: str, start: float, end: float, arguments: Mapping[str, Any] | None = None) -> None:
        """Records an activity from `start` to `end` (event-loop seconds) on a named track of the timeline."""
        if not self._closed:
            self._timeline.span(track, name, start, end, arguments)
            self._flush_if_due()

    def trajectory(self, record: Mapping[str, Any]) -> None:
        """Records a line of `trace.jsonl`."""
        self._append(trace.TRACE_FILE, record)

    def sample(self, record: Mapping[str, Any]) -> None:
        """Records a line of `samples.jsonl`: a rollout as text. Viewers get it with the step's numbers."""
        self._append(samples.SAMPLES_FILE, record)
        sample = samples.parse(record)
        for sink in () if self._closed else self._sinks:
            sink.sample(sample)

    def decision(self, record: Mapping[str, Any]) -> None:
        """Records a line of `plans.jsonl`."""
        self._append(files.PLANS_FILE, record)

    def transition(self, record: Mapping[str, Any]) -> None:
        """Records a line of `transitions.jsonl`. Its `start` and `end` become seconds on the timeline's axis."""
        times = {name: self._timeline.seconds(record[name]) for name in ("start", "end") if name in record}
        self._append(files.TRANSITIONS_FILE, {**record, **times})

    def pools(self, now: float, devices: Mapping[str, int]) -> None:
        """Records the devices of each pool from `now` on (event-loop seconds), as a counter of the timeline."""
        if not self._closed:
            self._timeline.pools(now, devices)
            self._flush_if_due()

    def status(self, worker: str, text: str) -> None:
        """Shows what a worker is doing now."""
        for sink in () if self._closed else self._sinks:
            sink.status(worker, text)

    def note(self, text: str) -> None:
        """Shows a sentence to the person who watches the run."""
        for sink in () if self._closed else self._sinks:
            sink.note(text)

    def flush(self) -> None:
        """Passes everything recorded so far to the operating system. Its cache survives if this process is killed."""
        self._flushed_at = self._clock()
        for item in self._all:
            item.flush()

    def close(self) -> None:
        """Flushes and closes everything, and restores the terminal. Idempotent."""
        if not self._closed:
            self._closed = True
            for item in self._all:
                item.close()

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        if not self._closed:
            self._lines[name].append(record)
            self._flush_if_due()

    def _flush_if_due(self) -> None:
        if self._clock() - self._flushed_at >= FLUSH_SECONDS:
            self.flush()


def create(
    config: config_lib.RunConfig,
    workdir: Path,
    clock: Callable[[], float],
    *,
    guard: files.Guard = files.always,
    watcher: sinks.Sink | None = None,
) -> RunRecorder:
    """Makes the recorder of a new or resumed run. A resumed run calls `resume.cut_back` before it records a step.

    Args:
      config: Config of the run. `telemetry` selects the sinks.
      workdir: Folder of the run. It is created if it is missing.
      clock: Returns the current seconds, on the clock of the spans (the event loop's).
      guard: Returns whether this run may still write there.
      watcher: A further viewer, which gets everything that the console gets.

    Raises:
      ConfigError: The folder cannot be created, or W&B is enabled and cannot start.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--workdir: {workdir} cannot be made ({error.strerror or error})") from error
    # Made before the console, because the files may already warn while they are opened.
    warn = _Warnings()
    taking: list[sinks.Sink] = [metrics.MetricsFile(workdir, warn, guard)]
    if config.telemetry.tensorboard:
        taking.append(metrics.TensorBoardSink(workdir, warn, guard))
    if config.telemetry.wandb_project:
        taking.append(metrics.WandbSink(config, workdir, warn))
    timeline_file = timeline.TimelineFile(workdir, clock, warn, guard)
    lines = {name: files.LineFile(workdir / name, warn, guard) for name in LINE_FILES}
    if config.telemetry.console:
        make = live.LiveConsole if sys.stdout.isatty() else console.PlainConsole
        warn.console = make(config.name, config.steps, sys.stdout, clock, warn)
    taking += [item for item in (watcher, warn.console) if item is not None]
    return RunRecorder(clock, timeline_file, lines, taking, strict=metric_names.strict())
