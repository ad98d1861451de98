"""`trace.jsonl`: one trajectory per line. Every real run writes it, and the simulator replays it.

A record is `{"trajectory_id", "prompt_id", "prompt_tokens", "turns": [{"generated_tokens", "tool", "status",
"payload_tokens", "tool_seconds"}]}`, with `group_id`, `step`, `policy_version`, `reward`, `start_seconds` and a turn's
`start_seconds` if they are known. A turn whose request moved between instances has `moves`, a list of {"source",
"target", "reason", "expected_gain"} (`protocols.Move`). Unknown keys are kept.

A rollout of several token segments (`protocols.Segment`) has `segments`, a list of {"parent", "shared_tokens",
"prompt_tokens"}, and its turns name theirs in `segment`. Turns are in the order in which they began.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from libra_jax.protocols import DataError
from libra_jax.telemetry import files
from libra_jax.utils import checksums

TRACE_FILE = "trace.jsonl"
STATUSES = ("success", "failure", "timeout")
MOST_TOKENS = 1_000_000_000
"""Largest number of tokens of anything in a trace. Beyond it, computed costs and times have no meaning."""

MOST_SECONDS = 10_000_000.0
"""Largest number of seconds of a tool call. The simulator takes a longer wait for a deadlock."""


def read(path: Path) -> list[dict[str, Any]]:
    """Reads and checks a trace.

    Returns:
      The records in order, with unknown keys kept.

    Raises:
      DataError: The file is missing or empty, or a line is not a record. The message names file and line.
    """
    records, hashes = [], set[int]()
    run_records = checksums.known_records(path.parent) if path.name == TRACE_FILE else None
    try:
        # A user may also hand a trace over in a pipe.
        with checksums.open_file(path) if path.name == TRACE_FILE else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    where = f"{path}, line {number}"
                    records.append(_parse(line.rstrip(), where))
                    # A user may select, sort and join the records of several runs.
                    foreign = files.foreign(line, TRACE_FILE, run_records)
                    _check(not foreign, where, f'{foreign}; of a line that belongs here, remove "record"')
                    _check(
                        not run_records or hash(line) not in hashes,
                        where,
                        "its record is in the file twice; remove one",
                    )
                    hashes.add(hash(line))
    except OSError as error:
        raise DataError(f"{path}: the trace cannot be read ({error.strerror or error})") from error
    if run_records and len(records) < (count := run_records["counts"].get(TRACE_FILE, 0)):
        raise DataError(f"{path}: holds {len(records)} of the {count} records that the run wrote; take the whole file")
    if not records:
        raise DataError(f"{path}: the trace holds no trajectory; give a file with one JSON object a line")
    return records


def is_record(record: Mapping[str, Any]) -> bool:
    """Returns whether a record has all required values."""
    try:
        _check_record(record, "")
    except DataError:
        return False
    return True


def move_reasons(turns: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the reason of each move of a record's turns."""
    for turn in turns:
        moves = turn.get("moves")
        for move in moves if isinstance(moves, list) else ():
            if isinstance(move, dict):
                yield str(move.get("reason"))


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: this is not UTF-8 text ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:  # the error's own text has line numbers too, counted from this line
        raise DataError(f"{where}: this is not JSON ({error.msg}, column {error.colno})") from None
    except ValueError as error:
        raise DataError(f"{where}: this is not JSON ({error})") from None
    except RecursionError:
        raise DataError(f"{where}: is nested too deeply for a trajectory") from None
    _check(isinstance(record, dict), where, "a record must be a JSON object")
    problem = files.damage(line)
    _check(
        not problem,
        where,
        f'the line is damaged ({problem}); of a line that you edited, remove "checksum" and "record"',
    )
    record = files.plain(record)
    _check_record(record, where)
    return record


def _check_record(record: Mapping[str, Any], where: str) -> None:
    for name in ("trajectory_id", "prompt_id"):
        _check(name in record, where, f'"{name}" is missing; docs/reference/workdir.md names the fields of a trace')
        _check(isinstance(record.get(name), str), where, f'"{name}" must be a string, not {record.get(name)!r}')
    _check_count(record, "prompt_tokens", where)
    turns = record.get("turns")
    if not isinstance(turns, list):
        raise DataError(f'{where}: "turns" must be a list, not {turns!r}')
    for index, turn in enumerate(turns):
        here = f"{where}, turn {index}"
        _check(isinstance(turn, dict), here, "a turn must be a JSON object")
        _check_count(turn, "generated_tokens", here)
        _check_count(turn, "payload_tokens", here)
        tool, status, seconds = turn.get("tool"), turn.get("status"), turn.get("tool_seconds")
        _check(tool is None or isinstance(tool, str), here, f'"tool" must be a string or null, not {tool!r}')
        _check(status is None or status in STATUSES, here, f'"status" must be one of {", ".join(STATUSES)} or null')
        for name in ("call", "error"):
            value = turn.get(name, "")
            _check(isinstance(value, str), here, f'"{name}" must be a string, not {value!r:.40}')
        # bool is an int too.
        number = isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 <= seconds <= MOST_SECONDS
        bounds = f"a number of at least 0 and at most {MOST_SECONDS:,.0f}"
        _check(number, here, f'"tool_seconds" must be {bounds}, not {seconds!r}')
    _check_segments(record, turns, where)


def _check_segments(record: Mapping[str, Any], turns: Sequence[Mapping[str, Any]], where: str) -> None:
    """Checks the segments of a record, and that no segment begins with more than its parent held by then."""
    segments = record.get("segments", [{"parent": None, "shared_tokens": 0, "prompt_tokens": record["prompt_tokens"]}])
    if not isinstance(segments, list) or not segments:
        raise DataError(f'{where}: "segments" must be a list with an object for each segment, not {segments!r:.40}')
    for index, segment in enumerate(segments):
        here = f"{where}, segment {index}"
        _check(isinstance(segment, dict), here, "a segment must be a JSON object")
        _check_count(segment, "shared_tokens", here)
        _check_count(segment, "prompt_tokens", here)
        parent, shared = segment.get("parent"), segment["shared_tokens"]
        before = parent is None or (isinstance(parent, int) and not isinstance(parent, bool) and 0 <= parent < index)
        earlier = f"the number of an earlier segment (below {index}) or null" if index else "null, as for any first one"
        _check(before, here, f'"parent" must be {earlier}, not {parent!r:.40}')
        _check(parent is not None or not shared, here, f'"shared_tokens" must be 0 without a "parent", not {shared}')
    contexts: dict[int, int] = {}

    def begin(index: int) -> None:
        """Begins a segment, and the one whose context it begins with."""
        if index in contexts:
            return
        parent, shared = segments[index]["parent"], segments[index]["shared_tokens"]
        if parent is not None:
            begin(parent)
            here, parent_tokens = f"{where}, segment {index}", contexts[parent]
            limit_text = f"at most {parent_tokens}, the tokens of segment {parent} by then"
            _check(shared <= parent_tokens, here, f'"shared_tokens" must be {limit_text}, not {shared}')
        contexts[index] = shared + segments[index]["prompt_tokens"]

    for number, turn in enumerate(turns):
        place = turn.get("segment", 0)
        is_valid = isinstance(place, int) and not isinstance(place, bool) and 0 <= place < len(segments)
        range_text = (
            f'one of the {len(segments)} of "segments", from 0' if "segments" in record else '0 without "segments"'
        )
        _check(is_valid, f"{where}, turn {number}", f'"segment" must be {range_text}, not {place!r:.40}')
        begin(place)
        contexts[place] += turn["generated_tokens"] + turn["payload_tokens"]


def _check_count(holder: Mapping[str, Any], name: str, where: str) -> None:
    value = holder.get(name)
    is_valid = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TOKENS
    _check(
        is_valid, where, f'"{name}" must be a whole number of at least 0 and at most {MOST_TOKENS:,}, not {value!r:.40}'
    )


def _check(condition: bool, where: str, problem: str) -> None:
    if not condition:
        raise DataError(f"{where}: {problem}")
