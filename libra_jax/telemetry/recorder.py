"""The run's recorder: passes events to every sink that the config enables, and cuts a resumed run's records back."""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.protocols import ConfigError
from libra_jax.telemetry import console, files, metrics, samples, screen, sinks, trace
from libra_jax.telemetry.report import timeline
from libra_jax.utils import checksums

FLUSH_SECONDS = 1.0
"""Longest time in seconds that a record waits in memory, if further records arrive."""

LINE_FILES = (
    metrics.METRICS_FILE,
    trace.TRACE_FILE,
    samples.SAMPLES_FILE,
    files.PLANS_FILE,
    files.TRANSITIONS_FILE,
)
"""Files of the workdir with one JSON object per record."""


PARTIAL_SUFFIX = ".partial"

TOLD = 3
"""Number of damaged lines of a file that are named. Further ones are counted."""


@dataclass
class _Warnings:
    """Shows each warning once: in the console if there is one, otherwise as a log message."""

    console: sinks.Sink | None = None
    shown_keys: set[str] = field(default_factory=set)

    def __call__(self, key: str, sentence: str) -> None:
        if key in self.shown_keys:
            return
        self.shown_keys.add(key)
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
      strict: Whether to refuse names of metrics that are not registered (`metrics`).
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
        # Files come before viewers, so that a viewer that fails costs no record.
        self._all: list[files.LineFile | timeline.TimelineFile | sinks.Sink] = [*lines.values(), timeline_file, *taking]
        self._strict = strict
        self._flushed_at = clock()
        self._closed = False
        self._records: protocols.Records | None = None

    def metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        """Records one training step's numbers, named as in `metrics.jsonl`, and writes all pending records to disk."""
        if self._closed:
            return
        numbers = metrics.plain(scalars)
        if self._strict:
            metrics.check(numbers)
        self._lines[metrics.METRICS_FILE].append(metrics.encode(step, numbers))
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
        # Parsed once for all viewers, which need it as text.
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
        counts = {name: line.flushed for name, line in self._lines.items()}
        counts[timeline.TIMELINE_FILE] = self._timeline.end
        self._records = {"run": self._lines[metrics.METRICS_FILE].run, "counts": counts}

    def records(self) -> protocols.Records | None:
        """Returns the run's id and the number of records in each file after the last flush. Any thread may call it.

        Of the timeline, it is the number of bytes.
        """
        return self._records

    def close(self) -> None:
        """Flushes and closes everything, and restores the terminal. Idempotent."""
        if not self._closed:
            # Set first: after an error of one item, a second close must not close the others twice.
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
    records: protocols.Records | None = None,
) -> RunRecorder:
    """Makes the recorder of a new or resumed run. A resumed run calls `cut_back` before it records a step.

    Args:
      config: Config of the run. `telemetry` selects the sinks.
      workdir: Folder of the run. It is created if it is missing.
      clock: Returns the current seconds, on the clock of the spans (the event loop's).
      guard: Returns whether this run may still write there.
      watcher: A further viewer, which gets everything that the console gets.
      records: The run and its records at the checkpoint. If None, the files name them, and else a new run begins.

    Raises:
      ConfigError: The folder cannot be created, or W&B is enabled and cannot start.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--workdir: {workdir} cannot be made ({error.strerror or error})") from error
    # Made before the console, because the files may already warn while they are opened.
    warn = _Warnings()
    lines = {name: files.LineFile(workdir / name, warn, guard) for name in (*LINE_FILES, files.CONFIG_HISTORY_FILE)}
    run = records["run"] if records else next((line.run for line in lines.values() if line.run), secrets.token_hex(4))
    for name, line in lines.items():
        # If the last records are gone, the numbers go on after them, so that every reader sees the gap.
        line.run, line.number = run, max(line.number, records["counts"].get(name, 0) if records else 0)
        line.flushed = line.number
    taking: list[sinks.Sink] = []
    if config.telemetry.tensorboard:
        taking.append(sinks.TensorBoardSink(workdir, warn, guard))
    if config.telemetry.wandb_project:
        taking.append(sinks.WandbSink(config, workdir, warn))
    timeline_file = timeline.TimelineFile(workdir, clock, warn, guard)
    if config.telemetry.console:
        make = screen.LiveConsole if sys.stdout.isatty() else console.PlainConsole
        warn.console = make(config.name, config.steps, sys.stdout, clock, warn)
    taking += [item for item in (watcher, warn.console) if item is not None]
    return RunRecorder(clock, timeline_file, lines, taking, strict=bool(os.environ.get(metrics.STRICT_VARIABLE)))


def cut_back(workdir: Path, step: int, records: protocols.Records | None = None, *, look: bool = False) -> list[str]:
    """Cuts the records of a run back to a checkpoint, before the resumed run records its first step.

    Records whose `step` is at most `step`, and those that the checkpoint counted, are kept, in the numbering of
    `Recorder.metrics` (-1 keeps none). A record of `trace.jsonl` without a step goes with the record before it. Torn
    lines are removed. Damaged lines are removed and named, because their numbers are not the recorded ones. Missing
    records are named. Of the changed settings, only damaged lines are removed.

    A new file is written beside each old one and renamed over it. So a kill in between loses nothing, and cutting twice
    changes nothing. TensorBoard needs no cut, because the session's first step voids later events. The timeline is
    kept, because it shows what the machines did, including repeated work.

    Args:
      workdir: Folder of the run. Missing files are not errors.
      step: Last step whose records stay.
      records: The run and its records at the checkpoint, if it has them.
      look: Change nothing.

    Returns:
      Sentences about what is damaged or missing.

    Raises:
      LibraError: A file cannot be read or replaced.
    """
    problems = []
    for name in (*LINE_FILES, files.CONFIG_HISTORY_FILE):
        # The history is kept whole: it tells about starts of the run and not about steps that are taken again.
        last = step if name in LINE_FILES else sys.maxsize
        try:
            damaged, gaps = _cut(workdir / name, last, files.Review(workdir / name, records, step), records, look)
        except OSError as error:
            raise protocols.LibraError(
                f"{workdir / name} cannot be cut back to step {step} ({error.strerror or error}): see to the disk, and "
                "give the same command again."
            ) from error
        if damaged:
            further = f", and {len(damaged) - TOLD} further lines" if len(damaged) > TOLD else ""
            lines = ", ".join(f"line {number} ({why})" for number, why in damaged[:TOLD])
            fate = "do not count" if look else "are removed"
            problems.append(f"{workdir / name} was damaged, and these lines {fate}: {lines}{further}.")
        problems += gaps
    file, size = workdir / timeline.TIMELINE_FILE, records["counts"].get(timeline.TIMELINE_FILE, 0) if records else 0
    if (current_size := file.stat().st_size if file.exists() else 0) < size:
        problems.append(f"{file} lacks events: it has {current_size} bytes, and had {size} at step {step}.")
    return problems


def _cut(
    path: Path, step: int, review: files.Review, records: protocols.Records | None, look: bool
) -> tuple[list[tuple[int, str]], list[str]]:
    """Cuts one file. Returns its damaged lines with what is wrong with each, and sentences about missing records."""
    if not path.exists():
        return [], review.gaps()
    partial = Path(os.devnull) if look else path.with_name(path.name + PARTIAL_SUFFIX)
    counted = records["counts"].get(path.name, 0) if records else 0
    keep, damaged = True, []
    with checksums.open_file(path) as old, partial.open("wb") as new:
        for number, line in enumerate(old, start=1):
            if not line.endswith(b"\n"):
                if not files.torn(line):
                    damaged.append((number, "its end is damaged"))
                break
            if why := review.problem(line):
                damaged.append((number, why))
                continue
            # A record without a step goes with the record before it.
            recorded = json.loads(line).get("step")
            if isinstance(recorded, int):
                keep = recorded <= step
            if keep or 0 < review.number <= counted:
                new.write(line)
        if not look:
            new.flush()
            # On disk before the rename, or a power failure could leave an empty file behind the name.
            os.fsync(new.fileno())
            os.replace(partial, path)
    return damaged, review.gaps()
