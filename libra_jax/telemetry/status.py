"""The current state of a run, for `status.json`, the health page and the live view. Also tells if a run is alive.

`<workdir>/status.json` is replaced about once a second while the process lives (`Heartbeat`). Clocks of different hosts
differ, so comparing times never decides if a run is alive. On the run's own host, its process decides. On other hosts,
the file has to change while it is watched.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from libra_jax import protocols
from libra_jax.telemetry import console, escapes, files, sinks
from libra_jax.utils import checksums, deadlines, machine, user_code

STATUS_FILE = "status.json"

SILENT_SECONDS = 10.0
"""Seconds without an answer of the event loop after which a run is reported as unhealthy."""

WATCH_SECONDS = 10.0
"""Seconds without a change after which a watched file counts as a dead run's. Ten times the normal interval."""

LOOK_SECONDS = 0.25
"""Seconds between two checks of a watched file."""

BEAT_SECONDS = 1.0

STUCK_SECONDS = 20.0
"""Seconds without an answer of the event loop after which standard error names the line that blocks it."""

NOTES = 5
REPLACED = "groups/replaced_"


class RunStatus(sinks.Sink):
    """The current state of a run. The event-loop thread updates it. Any thread may ask for the `view`.

    Args:
      steps: Number of training steps of the whole run.
      fencing_token: Fencing token of this start of the run in its workdir.
      clock: Returns the current seconds on the event loop's clock.
      waits: Returns the waits that are under way.
      earlier: Last view of the previous start in the workdir. None for the first start.
      step: Number of training steps that the run has taken before this start.

    Attributes:
      endpoint: Address of the health page. Empty if there is none.
      trained: Whether this start has ended a training step.
      recorder: Takes the warnings of the status file. None until the run has one; such warnings are logged.
    """

    def __init__(
        self,
        name: str,
        steps: int,
        fencing_token: int,
        clock: Callable[[], float],
        waits: Callable[[], Sequence[deadlines.Wait]] = tuple,
        *,
        earlier: Mapping[str, Any] | None = None,
        step: int = 0,
    ) -> None:
        self._clock = clock
        self._waits = waits
        self._began = clock()
        self._answered = self._began
        self._fixed = {
            "run": name,
            "steps": steps,
            "fencing_token": fencing_token,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "place": machine.identity(),
            "process_began": _process_began(os.getpid()),
            "began": time.time(),
        }
        earlier_view = earlier or {}
        first = earlier_view.get("first_began", earlier_view.get("began"))
        ran = earlier_view.get("run_seconds", earlier_view.get("seconds"))
        # The earlier file may be of another version or damaged. Values that are no finite numbers are ignored.
        first, ran = (
            value if isinstance(value, int | float) and math.isfinite(value) else None for value in (first, ran)
        )
        self._fixed["first_began"] = self._fixed["began"] if first is None else first
        self._ran_before = 0.0 if ran is None else float(ran)
        self._ended_at: float | None = None
        self._speed = console.TokenRate()
        self._workers: dict[str, tuple[str, float]] = {}
        self._failures: collections.Counter[str] = collections.Counter()
        self._replaced: collections.Counter[str] = collections.Counter()
        self._notes: collections.deque[str] = collections.deque(maxlen=NOTES)
        self._scalars: dict[str, float] = {}
        self._step = step
        self._ended: dict[str, str] | None = None
        self.endpoint = ""
        self.trained = False
        self.recorder: protocols.Recorder | None = None

    def metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        # A new object each time, because another thread may be reading the old one in `view`.
        self._step, self._scalars, self.trained = step, dict(scalars), True
        self._speed.step_ended(scalars)
        for name, count in scalars.items():
            if name.startswith(REPLACED):
                self._replaced[name.removeprefix(REPLACED)] += int(count)

    def status(self, worker: str, text: str) -> None:
        self._workers[worker] = text, self._clock()
        self._failures[worker] += text == protocols.LOST

    def note(self, text: str) -> None:
        self._notes.append(text)

    def warn(self, text: str) -> None:
        """Hands a sentence to the run's recorder. Before the run has one, the sentence is logged."""
        if self.recorder is None:
            logging.getLogger(__name__).warning(text)
        else:
            self.recorder.note(text)

    def answered(self) -> None:
        """Notes that the event loop has answered."""
        self._answered = self._clock()

    def end(self, how: str, sentence: str) -> None:
        """Ends the run with `done`, `stopped` or `failed`."""
        self._ended = {"how": how, "sentence": sentence}
        self._ended_at = self._clock()

    def view(self) -> dict[str, Any]:
        """Returns the whole state as plain values for JSON. Durations count until now."""
        now = self._clock()
        waits: list[dict[str, Any]] = [
            {"subject": wait.subject, "seconds": now - wait.began, "deadline": wait.seconds, "queued": wait.turn.queued}
            for wait in self._waits()
        ]
        # The waits that are nearest to their deadlines come first, because a screen shows only a few.
        waits.sort(key=lambda wait: -wait["seconds"] / wait["deadline"])
        silent = now - self._answered
        seconds = (now if self._ended_at is None else self._ended_at) - self._began
        problems = [
            f"{wait['subject']} has taken {wait['seconds']:.0f} s of the {wait['deadline']:g} s it may take."
            for wait in waits
            if wait["seconds"] > wait["deadline"] and not wait["queued"]
        ]
        if silent > SILENT_SECONDS:
            problems.insert(0, f"The event loop has not answered for {silent:.0f} s.")
        return {
            **self._fixed,
            "step": self._step,
            "policy_version": int(self._scalars.get("policy_version", self._step)),
            "seconds": seconds,
            "run_seconds": self._ran_before + seconds,
            "tokens_per_second": self._speed.tokens_per_second,
            "wall": time.time(),
            "monotonic": time.monotonic(),
            "loop_silent_seconds": silent,
            "workers": {
                name: {"doing": text, "seconds": max(0.0, now - since)}
                for name, (text, since) in dict(self._workers).items()
            },
            "waits": files.finite(waits[:NOTES]),
            # Copied in one step, because the event loop's thread may add an entry at the same time.
            "failures": {worker: count for worker, count in dict(self._failures).items() if count},
            "replaced": dict(self._replaced),
            "scalars": files.finite(self._scalars),
            "notes": list(self._notes),
            "endpoint": self.endpoint,
            "records": None if self.recorder is None else self.recorder.records(),
            "ended": self._ended,
            "problems": [] if self._ended else problems,
        }


def _process_began(pid: int) -> int:
    """Returns the ticks from the host's start to the process's start.

    No clock changes them. -1 if the process is gone.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return -1
    # The name in parentheses may contain spaces: fields are counted after it. A zombie counts as gone.
    fields = stat.rpartition(")")[2].split()
    return -1 if fields[0] == "Z" else int(fields[19])


_NUMBERS = {"type": "object", "additionalProperties": {"type": ["number", "null"]}}
_SECONDS = {"type": "number", "minimum": 0, "maximum": 1e12}
_TEXTS = {"type": "array", "items": {"type": "string"}}


def _object(**properties: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON schema of an object with at least these properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}


SCHEMA = _object(
    run={"type": "string"},
    steps={"type": "integer"},
    fencing_token={"type": "integer"},
    host={"type": "string"},
    pid={"type": "integer"},
    place={"type": "string"},
    process_began={"type": "integer"},
    began={"type": "number", "minimum": 0, "maximum": 1e11},  # a date that datetime can show
    step={"type": "integer"},
    policy_version={"type": "integer"},
    seconds=_SECONDS,
    workers={"type": "object", "additionalProperties": _object(doing={"type": "string"}, seconds=_SECONDS)},
    waits={
        "type": "array",
        # JSON has no number for an infinite deadline, so it is null.
        "items": _object(subject={"type": "string"}, seconds=_SECONDS, deadline={"type": ["number", "null"]}),
    },
    failures={"type": "object", "additionalProperties": {"type": "integer"}},
    replaced={"type": "object", "additionalProperties": {"type": "integer"}},
    scalars=_NUMBERS,
    notes=_TEXTS,
    endpoint={"type": "string"},
    ended={"anyOf": [{"type": "null"}, _object(how={"type": "string"}, sentence={"type": "string"})]},
    problems=_TEXTS,
)
"""JSON schema of the fields that readers of `status.json` rely on."""


class Ended(TypedDict):
    """How a run ended ("done", "failed" or "stopped"), and the sentence that it left."""

    how: str
    sentence: str


class Record(TypedDict):
    """The content of `status.json`, as `SCHEMA` has it. Times are in seconds."""

    run: str
    steps: int
    fencing_token: int
    host: str
    pid: int
    place: str
    process_began: int
    began: float
    step: int
    policy_version: int
    seconds: float
    workers: Mapping[str, Any]
    waits: Sequence[Mapping[str, Any]]
    failures: Mapping[str, int]
    replaced: Mapping[str, int]
    scalars: Mapping[str, float]
    notes: Sequence[str]
    endpoint: str
    ended: Ended | None
    problems: Sequence[str]


def read(workdir: Path) -> Record | None:
    """Returns the content of `status.json`. None if the file does not exist.

    Raises:
      DataError: The file cannot be read, or is not a run's. The message names the wrong field.
    """
    import jsonschema  # imported here, because every worker imports this module

    file = workdir / STATUS_FILE
    try:
        text = checksums.read_bytes(file)
        record: Record = json.loads(text, parse_constant=_refuse)
        # Before the schema, whose message would blame a field of damaged bytes.
        if problem := files.damage(text):
            raise ValueError(problem)
        jsonschema.validate(record, SCHEMA)
    except FileNotFoundError:
        return None
    except jsonschema.ValidationError as error:
        field = ".".join(map(str, error.absolute_path))
        problem = f"{field}: {error.message}" if field else error.message
        raise protocols.DataError(f"{file} cannot be read ({problem:.200}); give the workdir of a run") from None
    except (OSError, ValueError, RecursionError) as error:
        raise protocols.DataError(f"{file} cannot be read ({error}); give the workdir of a run") from error
    return record


def _refuse(text: str) -> float:
    raise ValueError(f"it holds {text}")


def _fingerprint(workdir: Path) -> tuple[Any, ...]:
    """Returns a value that every heartbeat changes, even if a full disk allows it only to touch the file."""
    try:
        with checksums.open_file(workdir / STATUS_FILE) as file:  # opening makes a network file system ask its server
            file_stat = os.fstat(file.fileno())
            # Three signs: a heartbeat renames a new file, or only touches it, and clocks may have a coarse grain.
            return file_stat.st_ino, file_stat.st_mtime_ns, file.read()
    except OSError:
        return ()


def changes_within(workdir: Path, seconds: float, sleep: Callable[[float], None] = time.sleep) -> bool:
    """Returns whether the file changes while it is watched, for at most `seconds`."""
    before, deadline = _fingerprint(workdir), time.monotonic() + seconds
    while time.monotonic() < deadline:
        sleep(LOOK_SECONDS)
        if _fingerprint(workdir) not in (before, ()):
            return True
    return False


def is_alive(workdir: Path, record: Record, seconds: float = WATCH_SECONDS) -> bool:
    """Returns whether the run is alive: by its process if that is on this host, otherwise by watching the file."""
    if record["ended"]:
        return False
    if record["place"] == machine.identity():
        # Another process may have the same id by now, so the time of its start is compared too.
        return _process_began(record["pid"]) == record["process_began"] != -1
    return changes_within(workdir, seconds)


class Heartbeat:
    """Watches the event loop in which it is created, until `close`.

    Args:
      run: State that is written.
      guard: Returns whether this run may still write there.
    """

    def __init__(
        self,
        workdir: Path,
        run: RunStatus,
        *,
        guard: files.Guard = files.always,
    ) -> None:
        self._file = workdir / STATUS_FILE
        self._earlier = b""
        with contextlib.suppress(OSError):
            self._earlier = checksums.read_bytes(self._file)
        self._run = run
        self._guard = guard
        self._loop = asyncio.get_running_loop()
        self._beats = 0
        self._warned = False
        self._told_stuck = False
        self._thread_of_loop = threading.get_ident()
        self._ended = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._beat, name="libra-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Writes the file a last time and ends the thread. Idempotent."""
        if self._stopped():
            self._write()

    def withdraw(self) -> None:
        """Ends the thread and puts back the file of the earlier start."""
        if self._stopped() and self._guard():
            self._replace(self._earlier)

    def _stopped(self) -> bool:
        """Ends the thread. Returns whether the caller may write the file now."""
        if self._ended.is_set():
            return False
        self._ended.set()
        self._thread.join(BEAT_SECONDS)
        # A thread that is still alive hangs on a file server, which must not hold up the run's end.
        return not self._thread.is_alive()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with contextlib.suppress(RuntimeError):  # the loop is closed
                # A blocked loop does not run this, so that its silence grows in the view.
                self._loop.call_soon_threadsafe(self._run.answered)
            self._write()
            seconds = self._run.view()["loop_silent_seconds"]
            if seconds < STUCK_SECONDS:
                self._told_stuck = False
            elif not self._told_stuck:
                # Once per blockage. This thread names the line of a user's code, because the blocked loop cannot.
                self._told_stuck = True
                place = user_code.running(sys._current_frames().get(self._thread_of_loop))
                if place:
                    print(
                        f"warning: {escapes.visible(place)}, has kept the event loop for {seconds:.0f} s, and nothing "
                        "else of the run goes on meanwhile; call what blocks by asyncio.to_thread.",
                        file=sys.stderr,
                        flush=True,
                    )

    def _write(self) -> None:
        if not self._guard():
            return
        self._beats += 1
        self._replace(files.json_line({**self._run.view(), "beat": self._beats}))

    def _replace(self, content: bytes) -> None:
        partial = self._file.with_suffix(".partial")
        try:
            partial.write_bytes(content)
            # Replaced in one step: a reader sees the old content or the new one, never a part.
            partial.replace(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                os.utime(self._file)  # this needs no room on the disk, and shows watchers that the run is alive
            if not self._warned:
                self._warned = True
                problem = f"{self._file.name} cannot be written ({error.strerror or error})"
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    warning = f"warning: {problem}; the run goes on without it."
                    self._loop.call_soon_threadsafe(self._run.warn, warning)
