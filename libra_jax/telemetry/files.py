"""Append-only files of whole records: what every sink of a run writes through, and how they are read back.

A record is a run of bytes that is on disk whole or not at all: a killed process leaves at most one torn record at the
end, which the next opening removes; a full disk leaves none. Not thread-safe: a run records from its event-loop thread.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from libra_jax import checksums
from libra_jax.telemetry import escapes

Warn = Callable[[str, str], None]
"""`warn(key, sentence)`: shows the sentence, once for each key."""

Guard = Callable[[], bool]
"""Whether this run may write into its workdir: False once another start of it has taken that over. From any thread."""


def always() -> bool:
    """Returns True: no other start of the run can be in that workdir."""
    return True


PLANS_FILE = "plans.jsonl"
"""The planner's decisions, one a line: what it looked at, what it found, and why it moved or not."""

TRANSITIONS_FILE = "transitions.jsonl"
"""Workers that changed sides and meshes that changed their size, one change a line, written when it ended."""

CONFIG_HISTORY_FILE = "config_history.jsonl"
"""Settings that changed when the run went on, one line a start: time, step, each setting's value before and after."""

FLUSH_BYTES = 64 * 1024
"""Pending bytes that cause a flush between steps."""

KEEP_BYTES = 1024 * 1024
"""Pending bytes kept while the file cannot be written; beyond it they are dropped, so that memory stays bounded."""


def whole_lines_end(path: Path) -> int:
    """Returns the offset just after the last newline of the file, in bytes; 0 for an empty or missing file."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            while end > 0:
                begin = max(0, end - FLUSH_BYTES)
                file.seek(begin)
                newline = file.read(end - begin).rfind(b"\n")
                if newline >= 0:
                    return begin + newline + 1
                end = begin
    except FileNotFoundError:
        pass
    return 0


class RecordFile:
    """Buffers records in memory and appends them whole. Never raises for what the disk does: it warns once.

    Args:
      path: the file; made on the first flush. It must end with a whole record.
      warn: receives the one warning.
      guard: asked before each append; records that may not be written are dropped.
    """

    def __init__(self, path: Path, warn: Warn, guard: Guard = always) -> None:
        self.path = path
        self._warn = warn
        self._guard = guard
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._descriptor: int | None = None
        self._end = 0
        self._removals = 0
        self._closed = False

    def write(self, record: bytes) -> None:
        """Adds one whole record; ignored after `close`."""
        if self._closed:
            return
        self._pending.append(record)
        self._pending_bytes += len(record)
        if self._pending_bytes >= FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hands the pending records to the operating system, whose cache outlives a killed process."""
        if not self._pending:
            return
        try:
            if self._guard():
                self._append(b"".join(self._pending))
        except OSError as error:
            self._warn(
                str(self.path),
                f"{self.path.name} cannot be written ({error.strerror or error}); the run goes on without it "
                f"until there is room in {self.path.parent}.",
            )
            if self._pending_bytes < KEEP_BYTES:
                return
        self._pending.clear()
        self._pending_bytes = 0

    def _append(self, data: bytes) -> None:
        if self._descriptor is not None and self._replaced(self._descriptor):
            os.close(self._descriptor)
            self._descriptor = None
            if not self.path.exists():
                self._removals += 1
                self._warn(
                    f"{self.path} removed {self._removals}",
                    f"{self.path} was removed while the run writes it: the run goes on in a new file, and what it "
                    "recorded there before is gone.",
                )
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._end = os.fstat(self._descriptor).st_size
        written = 0
        try:
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
            raise
        self._end += written

    def _replaced(self, descriptor: int) -> bool:
        """Returns whether another file is at the path now: a resumed run cuts records back by renaming over them."""
        try:
            return os.stat(self.path).st_ino != os.fstat(descriptor).st_ino
        except FileNotFoundError:
            return True

    def close(self) -> None:
        """Flushes and closes. Idempotent."""
        if self._closed:
            return
        self.flush()
        self._closed = True
        self._pending.clear()
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


class LineFile(RecordFile):
    """A file of JSON lines, opened for appending; a last line torn by a killed process is removed first."""

    def __init__(self, path: Path, warn: Warn, guard: Guard = always) -> None:
        try:
            end = whole_lines_end(path)
            if path.exists() and path.stat().st_size > end:
                os.truncate(path, end)
        except OSError as error:
            warn(str(path), f"{path.name} cannot be opened ({error.strerror or error}); the run goes on without it.")
        super().__init__(path, warn, guard)

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a record as a line."""
        self.write(json_line(record))


def finite(value: Any) -> Any:
    """Returns a value that strict JSON takes: None for numbers that are not finite, plain scalars for arrays' ones."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def json_line(record: Mapping[str, Any]) -> bytes:
    """One line of strict JSON. What JSON does not know is made `finite`, and else written as its `str`.

    A record that is not empty gets a field `checksum`, its last, by which a damaged line is found (`damage`).
    """
    try:
        text = json.dumps(record, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError):
        text = json.dumps(finite(record), allow_nan=False, ensure_ascii=False, default=str)
    data = escapes.json_text(text).encode("utf-8", "replace")
    return (checksums.sealed(data) if record else data) + b"\n"


def damage(line: bytes) -> str:
    """Returns what is wrong with a line that `json_line` wrote; empty if nothing is.

    A line without a checksum, which other programs and earlier versions write, has to be a JSON object and no more.
    """
    line = line.rstrip(b"\n")
    if checksums.carries(line):
        return "" if checksums.is_whole(line) else "its checksum is not the one it was written with"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return "it is not JSON"
    if not isinstance(record, dict):
        return "it is not a JSON object"
    return "its checksum is damaged" if _spoilt(line) else ""


def _spoilt(line: bytes) -> bool:
    """Returns whether a line ends with a checksum of `json_line` that is damaged, in its value or one byte of its name.

    The last field of another program's line may hold 32 hexadecimal digits, too.
    """
    found = _SPOILT.search(line)
    return found is not None and (found[1] is not None or _is_one_edit(found[2], b"checksum"))


def _is_one_edit(name: bytes, other: bytes) -> bool:
    """Returns whether one edit makes a text another: a byte changed, lost or added."""
    differ = (at for at, pair in enumerate(zip(name, other, strict=False)) if pair[0] != pair[1])
    same = next(differ, min(len(name), len(other)))
    rest, wanted = name[same:], other[same:]
    return name != other and (rest[1:] == wanted[1:] or rest == wanted[1:] or rest[1:] == wanted)


def torn(line: bytes) -> bool:
    """Returns whether a last line without a newline was left by a kill in the middle of a write, and is not damaged."""
    if line in (b"[", b"]"):
        return True
    return line.startswith(b"{") and b"\0" not in line and not _WHOLE.search(line)


_SPOILT = re.compile(rb', "(?:(checksum)": ".{32}|([^"]{7,9})": "[0-9a-f]{32})"\}$', re.DOTALL)
"""The end of a line whose checksum, or the name of that field, may not be what it was."""

_WHOLE = re.compile(rb'"checksum": "[0-9a-f]{32}"\}')


def whole_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSON-lines file written by a run, in order, without their checksums.

    A torn last line and a missing file are no error; damaged lines are left out with a warning.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            if problem := damage(line):
                logging.getLogger(__name__).warning("%s, line %d is left out: %s.", path, number, problem)
            else:
                record = json.loads(line)
                record.pop("checksum", None)
                yield record
