"""`timeline.json`: what every worker did and when, for ui.perfetto.dev and chrome://tracing.

The file is the JSON array of the Trace Event format, one event per line, written as events happen. Both viewers accept
an array without its closing bracket, so the timeline of a killed run loads. Each track is a process row. Overlapping
spans of one track are put on separate lanes (thread rows). The sizes of the pools are one counter with one series per
pool. chrome://tracing stacks the series, and ui.perfetto.dev draws them one below the other. A resumed run continues
after the last event.

Format: "Trace Event Format" (Google, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU). PyPI's
`perfetto` package is not used: it reads traces through a downloaded binary and writes protobuf, but six fields of JSON
need neither.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from libra_jax import protocols
from libra_jax.telemetry import files
from libra_jax.utils import checksums

TIMELINE_FILE = "timeline.json"

POOLS_TRACK = "pools"

_ROW_ORDER = (POOLS_TRACK, "train", "weight", "sync", "", "tool", "coordinator", "eval", "checkpoint")
"""Prefixes of track names, in the order of their rows. Engines have names of their own and go to the empty prefix."""


def row_order(track: str) -> int:
    """Returns the place of a track among the others, by the prefix of its name."""
    for index, prefix in enumerate(_ROW_ORDER):
        if prefix and track.lower().startswith(prefix):
            return index
    return _ROW_ORDER.index("")


@dataclass(frozen=True)
class PoolSizes:
    """Devices of each pool, by name, from `start` on. A pool that is not named has none.

    `start` is in seconds on the recording clock. In the timeline's file, it is since the start of the run's first
    session.
    """

    start: float
    devices: Mapping[str, float]


@dataclass
class Lanes:
    """Puts spans on lanes so that no two spans on a lane overlap. Times are integers (microseconds).

    A span goes to the lane that became free last before the span begins. Spans come in the order of their ends, as a
    run reports them. Then the number of lanes is the largest number of simultaneously open spans (best-fit interval
    partitioning).
    """

    _free: list[tuple[int, int]] = field(default_factory=list)  # (end, lane), ascending

    def place(self, start: int, end: int) -> int:
        """Returns the lane for a span. The lane is taken until `end`."""
        # The lane with the latest end that is not after `start`; inf sorts behind every lane's number.
        index = bisect.bisect_right(self._free, (start, math.inf)) - 1
        lane = self._free.pop(index)[1] if index >= 0 else len(self._free)
        bisect.insort(self._free, (end, lane))
        return lane


@dataclass
class _Row:
    """A track: its process id in the file, and its lanes."""

    pid: int
    lanes: Lanes = field(default_factory=Lanes)
    named: set[int] = field(default_factory=set)  # lanes that have a thread name in the file


class TimelineFile:
    """Writes `timeline.json`. Needs memory for a few numbers per lane, no matter how long the run is.

    Args:
      clock: Returns the current seconds, on the clock of the spans.
      warn: Called with the warning of a full disk.
      guard: Returns whether this run may still write there.
    """

    def __init__(
        self, workdir: Path, clock: Callable[[], float], warn: files.Warn, guard: files.Guard = files.always
    ) -> None:
        path = workdir / TIMELINE_FILE
        self._clock = clock
        self._origin = clock()
        self._rows: dict[str, _Row] = {}
        self._end = 0  # microseconds: the latest end of any event in the file
        resumed = False
        try:
            if damaged := _repair(path):
                warn(
                    str(path),
                    f"{path.name} was damaged, and {len(damaged)} of its lines are removed, the first of them line "
                    f"{damaged[0]}.",
                )
            good = 0  # byte offset after the last whole event
            for good, event in _whole_events(path):  # noqa: B007  # the last offset is used below
                if event.get("ph") != "M":
                    self._end = max(self._end, event["ts"] + event.get("dur", 0))
                elif event.get("name") == "process_name":
                    self._rows[event["args"]["name"]] = _Row(event["pid"])
            # Cuts off an event that a kill left torn, and the "]" of a session that ended: more events follow.
            if path.exists():
                os.truncate(path, good)
            if good:
                with path.open("ab") as file:
                    file.write(b",\n")
            resumed = good > 0
        except OSError as error:
            warn(str(path), f"{path.name} cannot be read ({error.strerror or error}); a new timeline begins.")
        # The times of this session continue where the earlier ones ended.
        self._offset = self._end
        self._file = files.RecordFile(path, warn, guard)
        if resumed:
            # The scope g draws it over all tracks.
            self._event("session resumed", "i", 0, 0, s="g", ts=self._offset)
        else:
            self._file.write(b"[\n")

    def span(self, track: str, name: str, start: float, end: float, arguments: Mapping[str, Any] | None = None) -> None:
        """Adds a span. A span that began before the session is cut at its start. Not-finite times are dropped."""
        if not (math.isfinite(start) and math.isfinite(end)):
            return
        begin = self._microseconds(start)
        finish = max(self._microseconds(end), begin)
        row = self._row(str(track))
        lane = row.lanes.place(begin, finish)
        if lane not in row.named:
            row.named.add(lane)
            self._event("thread_name", "M", row.pid, lane, args={"name": f"{track} {lane}" if lane else track})
        # One event with a duration, because a kill would tear a pair of B and E events apart.
        optional = {"args": arguments} if arguments else {}
        self._event(name, "X", row.pid, lane, ts=begin, dur=finish - begin, **optional)
        self._end = max(self._end, finish)

    def pools(self, now: float, devices: Mapping[str, int]) -> None:
        """Adds the devices of each pool from `now` on. Each call names all pools, or a viewer keeps a pool's last size.

        A time before the session counts as its start. A call with a not-finite time is dropped.
        """
        if not math.isfinite(now):
            return
        begin = self._microseconds(now)
        self._event(POOLS_TRACK, "C", self._row(POOLS_TRACK).pid, 0, ts=begin, args=devices)
        self._end = max(self._end, begin)

    def seconds(self, moment: float) -> float:
        """Returns a moment of this session's clock as seconds since the start of the run's first session.

        A moment before this session counts as its start. NaN stays NaN.
        """
        return self._microseconds(moment) / 1e6 if math.isfinite(moment) else math.nan

    def flush(self) -> None:
        self._file.flush()

    @property
    def end(self) -> int:
        """Bytes in the file after the last flush."""
        return self._file.end

    def close(self) -> None:
        """Ends the array, so that strict parsers can read the file too."""
        now = max(self._microseconds(self._clock()), self._end)
        event = {"name": "session ended", "ph": "i", "s": "g", "ts": now, "pid": 0, "tid": 0}
        self._file.write(files.json_line(event) + b"]\n")
        self._file.close()

    def _microseconds(self, seconds: float) -> int:
        return self._offset + max(0, round((seconds - self._origin) * 1e6))

    def _row(self, track: str) -> _Row:
        row = self._rows.get(track)
        if row is None:
            row = self._rows[track] = _Row(pid=max((row.pid for row in self._rows.values()), default=0) + 1)
            self._event("process_name", "M", row.pid, 0, args={"name": track})
            # Rows of the same rank keep the order in which they began.
            self._event("process_sort_index", "M", row.pid, 0, args={"sort_index": row_order(track) * 1000 + row.pid})
        return row

    def _event(self, name: str, kind: str, pid: int, tid: int, **fields: Any) -> None:
        """Writes an event. Its kind (`ph`) is M for metadata, X for a span, C for a counter, i for an instant."""
        event = {"name": name, "ph": kind, "pid": pid, "tid": tid, **fields}
        self._file.write(files.json_line(event)[:-1] + b",\n")


def _repair(path: Path) -> list[int]:
    """Removes the damaged lines of a file, but not a torn last line. Returns the numbers of the removed lines."""
    if not path.exists():
        return []
    damaged = []
    partial = path.with_name(path.name + ".partial")
    with checksums.open_file(path) as old, partial.open("wb") as new:
        for number, line in enumerate(old, start=1):
            text = line.rstrip(b"\n,")
            is_intact = text == b"[" if number == 1 else text in (b"]", b"") or not files.damage(text)
            if (is_intact and line.endswith(b"\n")) or (not line.endswith(b"\n") and files.torn(line)):
                new.write(line)
            else:
                damaged.append(number)
                new.write(b"[\n" if number == 1 else b"")
        new.flush()
        # On disk before the rename, or a power failure could leave an empty file behind the name.
        os.fsync(new.fileno())
    if damaged:
        os.replace(partial, path)
    else:
        partial.unlink()
    return damaged


def _whole_events(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields each whole event of a file and the byte offset after it. Stops at a torn end, and names damaged lines."""
    with contextlib.suppress(FileNotFoundError), checksums.open_file(path) as file:
        offset = 0
        for number, line in enumerate(file, start=1):
            text = line.rstrip(b"\r\n,")
            if text not in (b"[", b"]", b""):
                if files.damage(text) or not _is_event(event := json.loads(text)):
                    if not line.endswith(b"\n") and files.torn(line):
                        return
                    logging.getLogger(__name__).warning("%s, line %d is left out: it is damaged.", path, number)
                else:
                    yield offset + len(text), event
            offset += len(line)


def _is_event(event: Any) -> bool:
    """Returns whether this is an event in the form that `TimelineFile` writes."""
    arguments = event.get("args", {}) if isinstance(event, dict) else None
    if not isinstance(arguments, dict):
        return False
    if event.get("ph") == "M":
        return isinstance(arguments.get("name", arguments.get("sort_index")), str | int) and "pid" in event
    return all(isinstance(event.get(name, 0), int) for name in ("ts", "dur")) and {"ts", "pid", "tid"} <= event.keys()


def read(path: Path) -> Iterator[protocols.Span]:
    """Yields the spans of a timeline in the order of writing. A torn end and a missing file are not errors."""
    return (entry for entry in read_all(path) if isinstance(entry, protocols.Span))


def read_all(path: Path) -> Iterator[protocols.Span | PoolSizes]:
    """Yields spans as `read` does, and also the sizes of the pools. Sizes that are not finite numbers are left out.

    Raises DataError if the file cannot be read.
    """
    tracks: dict[int, str] = {}
    records, size = checksums.known_records(path.parent), path.stat().st_size if path.exists() else 0
    if records and size < (count := records["counts"].get(path.name, 0)):
        logging.getLogger(__name__).warning("%s lacks events: it has %d bytes of %d.", path, size, count)
    try:
        for _, event in _whole_events(path):
            if event.get("ph") == "M" and event.get("name") == "process_name":
                tracks[event["pid"]] = event["args"]["name"]
            elif event.get("ph") == "X":
                start = event["ts"] / 1e6
                track = tracks.get(event["pid"], str(event["pid"]))
                end = start + event["dur"] / 1e6
                yield protocols.Span(track, event["tid"], event["name"], start, end, event.get("args", {}))
            elif event.get("ph") == "C" and event.get("name") == POOLS_TRACK:
                sizes = event.get("args", {}).items()
                numbers = {name: size for name, size in sizes if isinstance(size, int | float) and math.isfinite(size)}
                yield PoolSizes(event["ts"] / 1e6, numbers)
    except OSError as error:
        raise protocols.DataError(f"{path} cannot be read ({error.strerror or error})") from error
