"""Append-only files of whole records. All sinks of a run write through them; this module also reads them back.

A record is on disk as a whole or not at all. A killed process leaves at most one torn record at the end, which the next
opening removes. A full disk leaves none. Not thread-safe: a run records from its event-loop thread.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from libra_jax import protocols
from libra_jax.telemetry import escapes
from libra_jax.utils import checksums

Warn = Callable[[str, str], None]
"""Function `warn(key, sentence)` that shows the sentence, once for each key."""

Guard = Callable[[], bool]
"""Function that returns whether this run may write into its workdir. False after another start of the run took over.

Any thread may call it.
"""


def always() -> bool:
    """Returns True. Used if no other start of the run can be in the workdir."""
    return True


PLANS_FILE = "plans.jsonl"
"""The planner's decisions, one per line: its observations, its findings, and why it moved or did not."""

TRANSITIONS_FILE = "transitions.jsonl"
"""Transitions of workers (sides) and meshes (sizes), one per line, written when the transition ended."""

CONFIG_HISTORY_FILE = "config_history.jsonl"
"""Settings changed by a resumption, one line per start: time, step, and each setting's value before and after."""

FLUSH_BYTES = 64 * 1024
"""Pending bytes that cause a flush between two steps."""

KEEP_BYTES = 1024 * 1024
"""Pending bytes kept while the file cannot be written. Beyond it they are dropped, so that memory stays bounded."""


class RecordFile:
    """Buffers records in memory and appends them as a whole. Never raises for a disk error, but warns once.

    Args:
      path: Path of the file, which the first flush creates. An existing file must end with a whole record.
      warn: Called once with the warning.
      guard: Called before each append. If it returns False, the records are dropped.
    """

    def __init__(self, path: Path, warn: Warn, guard: Guard = always) -> None:
        self.path = path
        self._warn = warn
        self._guard = guard
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._descriptor: int | None = None
        self._end = 0
        self._changes = 0
        self._closed = False

    def write(self, record: bytes) -> None:
        """Adds one whole record. Does nothing after `close`."""
        if self._closed:
            return
        self._pending.append(record)
        self._pending_bytes += len(record)
        if self._pending_bytes >= FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Passes the pending records to the operating system. Its cache survives if this process is killed."""
        if not self._pending:
            return
        try:
            # Asked at each append: another start of the run may have taken the workdir over since the last one.
            if self._guard():
                self._append(b"".join(self._pending))
        except OSError as error:
            self._warn(
                str(self.path),
                f"{self.path.name} cannot be written ({error.strerror or error}); the run goes on without it "
                f"until there is room in {self.path.parent}.",
            )
            # Kept for the next flush, which may find room on the disk again.
            if self._pending_bytes < KEEP_BYTES:
                return
        self._pending.clear()
        self._pending_bytes = 0

    def _append(self, data: bytes) -> None:
        try:
            # A resumed run cuts records back by renaming a new file over this one.
            moved = self._descriptor is not None and os.stat(self.path).st_ino != os.fstat(self._descriptor).st_ino
        except FileNotFoundError:
            moved = True
        if self._descriptor is not None and moved:
            os.close(self._descriptor)
            self._descriptor = None
            removed = not self.path.exists()
            how = "removed while the run writes it: the run goes on in a new file, and" if removed else "replaced:"
            self._changed(f"{how} what it recorded there before is gone.")
        if self._descriptor is None:
            self._descriptor = checksums.open_regular(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            self._end = os.fstat(self._descriptor).st_size
        size = os.fstat(self._descriptor).st_size
        if size != self._end:
            self._changed(f"changed while the run writes it: it has {size} bytes instead of {self._end}.")
            self._end = size
            # The rest of a line must not become the beginning of the next record.
            if data.endswith(b"\n") and size and os.pread(self._descriptor, 1, size - 1) != b"\n":
                data = b"\n" + data
        bytes_written = 0
        try:
            while bytes_written < len(data):
                bytes_written += os.write(self._descriptor, data[bytes_written:])
        except OSError:
            # A partial write would leave a torn record in the middle of the file once later records follow it.
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
            raise
        self._end += bytes_written

    def _changed(self, how: str) -> None:
        self._changes += 1
        self._warn(f"{self.path} changed {self._changes}", f"{self.path} was {how}")

    @property
    def end(self) -> int:
        """Bytes in the file after the last flush."""
        return self._end

    def close(self) -> None:
        """Flushes and closes the file. Idempotent."""
        if self._closed:
            return
        self.flush()
        # What a full disk has kept waiting is lost here, because no later flush comes.
        self._closed = True
        self._pending.clear()
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


class LineFile(RecordFile):
    """A file of JSON lines, opened for appending. Opening removes a last line that a killed process left torn.

    Attributes:
      run: Id of the run, in each record. If it is empty, records have neither an id nor a number.
      number: Number of the last record, from 1.
      flushed: Number of the last record in the file.
    """

    def __init__(self, path: Path, warn: Warn, guard: Guard = always) -> None:
        self.run, self.number, self.flushed = "", 0, 0
        try:
            # Cut before anything is appended, or the next record would continue the torn line. Read backwards in
            # pieces, because a run's file may take gigabytes and its last lines are short.
            with checksums.open_file(path) as file:
                end = size = file.seek(0, os.SEEK_END)
                newline = -1
                while end > 0 and newline < 0:
                    begin = max(0, end - FLUSH_BYTES)
                    file.seek(begin)
                    newline = file.read(end - begin).rfind(b"\n")
                    # Without a newline, `end` becomes `begin`.
                    end = begin + newline + 1
                file.seek(max(0, end - _LONGEST_ORIGIN))
                if origin := _ORIGIN.search(file.read(end - file.tell())):
                    self.run, self.number = origin[2].decode(), int(origin[3])
            if size > end:
                os.truncate(path, end)
        except FileNotFoundError:
            pass
        except OSError as error:
            warn(str(path), f"{path.name} cannot be opened ({error.strerror or error}); the run goes on without it.")
        super().__init__(path, warn, guard)

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a record as a line."""
        self.number += 1
        origin = {"record": f"{self.path.name}/{self.run}/{self.number}"} if self.run else {}
        self.write(json_line({**record, **origin}))

    def flush(self) -> None:
        super().flush()
        if not self._pending:
            self.flushed = self.number


def finite(value: Any) -> Any:
    """Returns the value as strict JSON accepts it: None for not-finite numbers, plain values for 0-d arrays."""
    if getattr(value, "ndim", None) == 0:
        # Arrays of numpy and JAX that hold one number. Neither package is imported here.
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def json_line(record: Mapping[str, Any]) -> bytes:
    """Returns one line of strict JSON. Values unknown to JSON go through `finite`, and otherwise become their `str`.

    A record that is not empty gets `checksum` as its last field. `damage` finds damaged lines with it.
    """
    try:
        # As it is first: `finite` walks the whole record, and few records need it.
        text = json.dumps(record, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError):
        text = json.dumps(finite(record), allow_nan=False, ensure_ascii=False, default=str)
    data = escapes.json_text(text).encode("utf-8", "replace")
    return (checksums.sealed(data) if record else data) + b"\n"


def damage(line: bytes) -> str:
    """Returns what is wrong with a line that `json_line` wrote. Empty if nothing is wrong.

    A line without a checksum, from another program or an earlier version, only has to be a JSON object.
    """
    # All white space: a program that ends lines with CRLF must not hide the checksum.
    line = line.rstrip()
    if (is_intact := checksums.is_whole(line)) is not None:
        return "" if is_intact else "its checksum is not the one it was written with"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return "it is not JSON"
    if not isinstance(record, dict):
        return "it is not a JSON object"
    # A record of a run, or its status. Versions that wrote no checksum wrote no numbers and no counts either.
    if _ORIGIN.search(line[-_LONGEST_ORIGIN:]) or {"beat", "records"} <= record.keys():
        return "its checksum is missing"
    if (match := _SPOILT.search(line)) is None:
        return ""
    # Either the value is damaged, or the name of the field has one wrong byte. A line of another program may also end
    # with a field of 32 hexadecimal digits, so its name has to be ours with one byte changed, removed or added.
    near = difflib.SequenceMatcher(None, match[2] or b"checksum", b"checksum").ratio() > ONE_EDIT
    return "its checksum is damaged" if near else ""


def torn(line: bytes) -> bool:
    """Returns whether a last line without a newline was torn by a kill in the middle of a write, and is not damaged."""
    if line in (b"[", b"]"):
        return True
    return line.startswith(b"{") and b"\0" not in line and not _WHOLE.search(line)


ONE_EDIT = 0.87
"""Similarity to a name of 8 bytes. One edit leaves 0.875 or more of it, and two mostly leave less."""

_SPOILT = re.compile(rb', "(?:(checksum)": ".{32}|([^"]{7,9})": "[0-9a-f]{32})"\}$', re.DOTALL)
"""End of a line whose checksum, or the name of that field, may be damaged."""

_WHOLE = re.compile(rb'"checksum": "[0-9a-f]{32}"\}')


_ORIGIN = re.compile(rb'"record": "([^"/]*)/([^"/]*)/(\d+)"(?:, "checksum": "[0-9a-f]{32}")?\}\s*$')
"""End of a line that names its file, its run and its number in the file."""

_LONGEST_ORIGIN = 256


class Review:
    """Reviews the lines of a file in order: whether they are whole, of this file and run, and complete.

    Args:
      records: The run, and the number of its records. If None, the first record names the run.
      step: Last step of these records.

    Attributes:
      number: Number of the last record that counts, from 1.
    """

    def __init__(self, path: Path, records: protocols.Records | None, step: int | None = None) -> None:
        self._path, self._name = path, path.name
        self._run = records["run"] if records else ""
        self._count = records["counts"].get(self._name, 0) if records else 0
        self._step = step
        self.number = 0
        self._last = b"{}"
        self._gaps: list[str] = []

    def problem(self, line: bytes) -> str:
        """Returns why a line does not count. Empty if it does."""
        if why := damage(line):
            return why
        if (origin := _ORIGIN.search(line[-_LONGEST_ORIGIN:])) is None:
            # Earlier versions wrote no numbers, so such lines can only come first.
            return "the run did not write it" if self.number else ""
        number, self._run = int(origin[3]), self._run or origin[2].decode()
        if why := foreign(line, self._name, {"run": self._run, "counts": {}}):
            return why
        if number <= self.number:
            return f"it is record {number}, after record {self.number}"
        self._skip_to(number, json.loads(line).get("step"))
        self.number, self._last = number, line
        return ""

    def place(self) -> dict[str, str]:
        """Returns the place of the next record, as a field of its line. Empty if no run is known."""
        return {"record": f"{self._name}/{self._run}/{max(self.number, self._count) + 1}"} if self._run else {}

    def gaps(self) -> list[str]:
        """Ends the review. Returns a sentence for each row of missing records."""
        self._skip_to(self._count + 1, None)
        return [f"{self._path} lacks {gap}." for gap in self._gaps]

    def _skip_to(self, number: int, step: int | None) -> None:
        if number <= self.number + 1:
            return
        # In the file of metrics, each record ends a step.
        steps_per_record, before = self._name == "metrics.jsonl", json.loads(self._last).get("step")
        first = "the first step" if before is None else f"step {before + steps_per_record}"
        last = "the last step" if self._step is None else f"step {self._step}"
        last = last if step is None else f"step {step - steps_per_record}"
        self._gaps.append(f"records {self.number + 1} to {number - 1}, of {first} to {last}")


def foreign(line: bytes, name: str, records: protocols.Records | None) -> str:
    """Returns how a line shows that it is of another file than `name`, or of another run. Empty if it does not."""
    origin = _ORIGIN.search(line[-_LONGEST_ORIGIN:])
    if origin is None or not records:
        return ""
    if (of := origin[1].decode()) != name:
        return f"it is a record of {of}"
    run = origin[2].decode()
    return "" if run == records["run"] else f"it is a record of another run ({run} instead of {records['run']})"


def whole_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSON-lines file that a run wrote, in order and without checksum and number.

    A torn last line and a missing file are not errors. Other lines that do not count are skipped with a warning, and
    missing records are named in one. Raises DataError if the file cannot be read.
    """
    log, review = logging.getLogger(__name__), Review(path, checksums.known_records(path.parent))
    try:
        with contextlib.suppress(FileNotFoundError), checksums.open_file(path) as file:
            for number, line in enumerate(file, start=1):
                # A whole record ends with a newline, so a kill has torn this one.
                if not line.endswith(b"\n"):
                    break
                if problem := review.problem(line):
                    log.warning("%s, line %d is left out: %s.", path, number, problem)
                else:
                    yield plain(json.loads(line))
    except OSError as error:
        raise protocols.DataError(f"{path} cannot be read ({error.strerror or error})") from error
    for sentence in review.gaps():
        log.warning("%s", sentence)


def plain(record: dict[str, Any]) -> dict[str, Any]:
    """Returns a line's object without what belongs to the line: its checksum, and its place among the records."""
    return {name: value for name, value in record.items() if name not in ("checksum", "record")}
