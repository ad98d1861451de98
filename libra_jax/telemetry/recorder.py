"""The run's recorder: one object that hands what happens to every sink the config asks for."""

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
"""Longest time that a record waits in memory, as long as further records come in."""

LINE_FILES = (trace.TRACE_FILE, samples.SAMPLES_FILE, files.PLANS_FILE, files.TRANSITIONS_FILE)
"""Files of the workdir with one JSON object a record."""


class _Warnings:
    """Shows each warning once: in the console if there is one, else as a log message."""

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
    """`protocols.Recorder` over files, viewers and the console. Call it from the event-loop thread only.

    Calls append to buffers and cost microseconds; files are written out at each step, and at least every second or
    64 KiB while records come in. Nothing here raises for a full disk or a lost viewer: each is warned about once.
    After `close`, calls do nothing.

    Args:
      clock: seconds now, on the clock of the spans.
      timeline_file: takes spans and pools.
      lines: takes the records of each of `LINE_FILES`, by its name.
      taking: everything else that records or shows the run, told in this order.
      strict: refuses names of metrics that are not registered (`metric_names`).
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
        """Records one training step's numbers, named as in `metrics.jsonl`, and writes everything pending to disk."""
        if self._closed:
            return
        numbers = metrics.plain(scalars)
        if self._strict:
            metric_names.check(numbers)
        for sink in self._sinks:
            sink.metrics(step, numbers)
        self.flush()

    def span(self, track: str, name: str, start: float, end: float, arguments: Mapping[str, Any] | None = None) -> None:
        """Records what took from `start` to `end` (event-loop seconds) on a named track of the timeline."""
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
        """Records a line of `transitions.jsonl`; its `start` and `end` become seconds on the axis of the timeline."""
        times = {name: self._timeline.seconds(record[name]) for name in ("start", "end") if name in record}
        self._append(files.TRANSITIONS_FILE, {**record, **times})

    def pools(self, now: float, devices: Mapping[str, int]) -> None:
        """Records the devices of each pool from `now` on (event-loop seconds): a counter of the timeline."""
        if not self._closed:
            self._timeline.pools(now, devices)
            self._flush_if_due()

    def status(self, worker: str, text: str) -> None:
        """Shows what a worker is doing now."""
        for sink in () if self._closed else self._sinks:
            sink.status(worker, text)

    def note(self, text: str) -> None:
        """Shows a sentence to the person who watches."""
        for sink in () if self._closed else self._sinks:
            sink.note(text)

    def flush(self) -> None:
        """Hands everything recorded so far to the operating system, whose cache outlives a killed process."""
        self._flushed_at = self._clock()
        for item in self._all:
            item.flush()

    def close(self) -> None:
        """Flushes and closes everything and gives the terminal back. Idempotent."""
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
    """Makes the recorder of a run or of its resumption (which calls `resume.cut_back` before it records a step).

    Args:
      config: the run's config; `telemetry` says which sinks.
      workdir: the run's folder, made if it is missing.
      clock: seconds now, on the clock that spans are given in (the event loop's).
      guard: whether this run may still write there.
      watcher: a further viewer, told everything that the console is told.

    Raises:
      ConfigError: the folder cannot be made, or W&B is asked for and cannot start.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--workdir: {workdir} cannot be made ({error.strerror or error})") from error
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
