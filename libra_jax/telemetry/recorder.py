"""The run's recorder: one object that hands what happens to every sink the config asks for."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from libra_jax import config as config_lib
from libra_jax.protocols import ConfigError
from libra_jax.telemetry import console, files, live, metric_names, metrics, samples, timeline, trace

FLUSH_SECONDS = 1.0
"""Longest time that a record waits in memory, as long as further records come in."""


class Sink(Protocol):
    """Takes records; never raises for a full disk or a lost viewer."""

    def flush(self) -> None: ...

    def close(self) -> None: ...


class MetricsSink(Sink, Protocol):
    """Takes a step's numbers."""

    def metrics(self, step: int, scalars: Mapping[str, float]) -> None: ...


class Console(MetricsSink, Protocol):
    """What a person watches."""

    def status(self, worker: str, text: str) -> None: ...

    def note(self, text: str) -> None: ...


@runtime_checkable
class SampleSink(Protocol):
    """Takes rollouts as text."""

    def sample(self, sample: samples.Sample) -> None: ...


class _Warnings:
    """Shows each warning once: in the console if there is one, else as a log message."""

    def __init__(self) -> None:
        self.console: Console | None = None
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
      trace_file: takes trajectories.
      timeline_file: takes spans.
      samples_file: takes rollouts as text.
      plans_file: takes the planner's decisions.
      transitions_file: takes changes of sides and of meshes.
      metrics_sinks: take steps, in this order.
      watchers: the console, and other viewers of what happens now.
      strict: refuses names of metrics that are not registered (`metric_names`).
    """

    def __init__(
        self,
        clock: Callable[[], float],
        trace_file: trace.TraceFile,
        timeline_file: timeline.TimelineFile,
        samples_file: files.RecordFile,
        plans_file: files.RecordFile,
        transitions_file: files.RecordFile,
        metrics_sinks: list[MetricsSink],
        watchers: Sequence[Console],
        strict: bool = False,
    ) -> None:
        self._clock = clock
        self._strict = strict
        self._trace = trace_file
        self._timeline = timeline_file
        self._samples = samples_file
        self._plans = plans_file
        self._transitions = transitions_file
        self._watchers = watchers
        self._metrics_sinks = [*metrics_sinks, *watchers]
        self._sample_sinks = [sink for sink in metrics_sinks if isinstance(sink, SampleSink)]
        self._sinks: list[Sink] = [
            trace_file,
            timeline_file,
            samples_file,
            plans_file,
            transitions_file,
            *self._metrics_sinks,
        ]
        self._flushed_at = clock()
        self._closed = False

    def metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        """One training step's numbers; keys as in `metrics.jsonl`. Writes everything pending to the files."""
        if self._closed:
            return
        numbers = metrics.plain(scalars)
        if self._strict:
            metric_names.check(numbers)
        for sink in self._metrics_sinks:
            sink.metrics(step, numbers)
        self.flush()

    def span(self, track: str, name: str, start: float, end: float, arguments: Mapping[str, Any] | None = None) -> None:
        """Something that took from `start` to `end` (event-loop seconds) on a named track of the timeline."""
        if not self._closed:
            self._timeline.span(track, name, start, end, arguments)
            self._flush_if_due()

    def trajectory(self, record: Mapping[str, Any]) -> None:
        """One line of `trace.jsonl`."""
        if not self._closed:
            self._trace.trajectory(record)
            self._flush_if_due()

    def sample(self, record: Mapping[str, Any]) -> None:
        """One line of `samples.jsonl`: a rollout as text. Viewers get it with the step's numbers."""
        if not self._closed:
            self._samples.write(files.json_line(record))
            if self._sample_sinks:
                sample = samples.parse(record)
                for sink in self._sample_sinks:
                    sink.sample(sample)
            self._flush_if_due()

    def decision(self, record: Mapping[str, Any]) -> None:
        """One line of `plans.jsonl`."""
        if not self._closed:
            self._plans.write(files.json_line(record))
            self._flush_if_due()

    def transition(self, record: Mapping[str, Any]) -> None:
        """One line of `transitions.jsonl`; its `start` and `end` become seconds on the axis of the timeline."""
        if not self._closed:
            times = {name: self._timeline.seconds(record[name]) for name in ("start", "end") if name in record}
            self._transitions.write(files.json_line({**record, **times}))
            self._flush_if_due()

    def pools(self, now: float, devices: Mapping[str, int]) -> None:
        """From `now` on (event-loop seconds) each pool has so many devices: a counter of the timeline."""
        if not self._closed:
            self._timeline.pools(now, devices)
            self._flush_if_due()

    def status(self, worker: str, text: str) -> None:
        """What a worker is doing now, for whoever watches."""
        if not self._closed:
            for watcher in self._watchers:
                watcher.status(worker, text)

    def note(self, text: str) -> None:
        """A sentence for the person watching."""
        if not self._closed:
            for watcher in self._watchers:
                watcher.note(text)

    def flush(self) -> None:
        """Hands everything recorded so far to the operating system, whose cache outlives a killed process."""
        self._flushed_at = self._clock()
        for sink in self._sinks:
            sink.flush()

    def close(self) -> None:
        """Flushes and closes every sink and gives the terminal back. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for sink in self._sinks:
            sink.close()

    def _flush_if_due(self) -> None:
        if self._clock() - self._flushed_at >= FLUSH_SECONDS:
            self.flush()


def create(
    config: config_lib.RunConfig,
    workdir: Path,
    clock: Callable[[], float],
    *,
    guard: files.Guard = files.always,
    watcher: Console | None = None,
) -> RunRecorder:
    """Makes the recorder of a run or of its resumption (which calls `resume.cut_back` before it records a step).

    Args:
      config: the run's config; `telemetry` says which sinks.
      workdir: the run's folder, made if it is missing.
      clock: seconds now, on the clock that spans are given in (the event loop's).
      guard: whether this run may still write there.
      watcher: told of everything that the console is told of.

    Raises:
      ConfigError: the folder cannot be made, or W&B is asked for and cannot start.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--workdir: {workdir} cannot be made ({error.strerror or error})") from error
    warn = _Warnings()
    sinks: list[MetricsSink] = [metrics.MetricsFile(workdir, warn, guard)]
    if config.telemetry.tensorboard:
        sinks.append(metrics.TensorBoardSink(workdir, warn, guard))
    if config.telemetry.wandb_project:
        sinks.append(metrics.WandbSink(config, workdir, warn))
    trace_file = trace.TraceFile(workdir, warn, guard)
    timeline_file = timeline.TimelineFile(workdir, clock, warn, guard)
    samples_file = files.open_lines(workdir / samples.SAMPLES_FILE, warn, guard)
    plans_file = files.open_lines(workdir / files.PLANS_FILE, warn, guard)
    transitions_file = files.open_lines(workdir / files.TRANSITIONS_FILE, warn, guard)
    if config.telemetry.console:
        make = live.LiveConsole if sys.stdout.isatty() else console.PlainConsole
        warn.console = make(config.name, config.steps, sys.stdout, clock, warn)
    watchers = [item for item in (watcher, warn.console) if item is not None]
    return RunRecorder(
        clock,
        trace_file,
        timeline_file,
        samples_file,
        plans_file,
        transitions_file,
        sinks,
        watchers,
        strict=metric_names.strict(),
    )
