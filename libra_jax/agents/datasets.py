"""Tasks from a JSONL or Parquet file: a prompt and the expected answer a row."""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from libra_jax import config, protocols
from libra_jax.agents import splits

OTHER_FORMATS = (".csv", ".tsv", ".xlsx")
"""Endings of files that hold tables all right. A file of any further ending is read as JSONL."""


class FileTasks:
    """A file's rows by position: reshuffled each epoch by a permutation that depends on seed and epoch only.

    Held-out rows are chosen by their prompt's hash, whatever the seed, and all rows of one prompt go together: no
    held-out prompt is ever trained on.
    """

    def __init__(self, path: str, seed: int, rows: Sequence[tuple[int, dict[str, Any]]], holdout: float) -> None:
        """`rows` are (line or row number, payload)."""
        self._path = path
        self._name = pathlib.Path(path).stem
        self._seed = seed
        held_out = _held_out_prompts(path, [payload for _, payload in rows], holdout)
        self._train = [row for row in rows if _key(row[1]) not in held_out]
        self._evaluation = [row for row in rows if _key(row[1]) in held_out]
        self._order = functools.lru_cache(maxsize=2)(self._permutation)

    def __len__(self) -> int:
        """Training tasks of an epoch."""
        return len(self._train)

    def task(self, index: int) -> protocols.Task:
        """The index-th training task, over as many epochs as it takes."""
        epoch, place = divmod(index, len(self._train))
        return self._make("", epoch, self._train[self._order(epoch)[place]])

    def evaluation_task(self, index: int) -> protocols.Task:
        """The index-th held-out task, in the file's order, over and over.

        Raises:
          DataError: nothing is held out.
        """
        if not self._evaluation:
            raise protocols.DataError(
                f"{self._path}: no task is held out for evaluation; give a holdout above 0 as "
                "--config.task.arguments=\"{'holdout': 0.05}\", or --config.evaluation.every=0"
            )
        epoch, place = divmod(index, len(self._evaluation))
        return self._make("-evaluation", epoch, self._evaluation[place])

    def _permutation(self, epoch: int) -> list[int]:
        order = list(range(len(self._train)))
        splits.generator("epoch", self._seed, epoch).shuffle(order)
        return order

    def _make(self, split: str, epoch: int, row: tuple[int, dict[str, Any]]) -> protocols.Task:
        number, payload = row
        suffix = f"-epoch{epoch}" if epoch else ""
        return protocols.Task(f"{self._name}{split}-{number}{suffix}", payload)


def _key(payload: Mapping[str, Any]) -> str:
    return json.dumps(payload["prompt"], sort_keys=True)


def _held_out_prompts(path: str, payloads: Sequence[Mapping[str, Any]], holdout: float) -> set[str]:
    prompts = {_key(payload) for payload in payloads}
    if holdout == 0:
        return set()
    if len(prompts) < 2:
        raise protocols.DataError(
            f"{path}: its rows have only one prompt, so none can be held out; give "
            "--config.task.arguments=\"{'holdout': 0}\""
        )
    count = min(len(prompts) - 1, max(1, math.floor(holdout * len(prompts))))
    ranked = sorted(prompts, key=lambda prompt: hashlib.sha256(prompt.encode()).digest())
    return set(ranked[:count])


def task_source(
    path: str = "",
    seed: int = 0,
    prompt_column: str = "prompt",
    answer_column: str = "answer",
    holdout: float = 0.05,
    columns: Sequence[str] = (),
) -> FileTasks:
    """Tasks of a JSONL file (one object a line) or a Parquet file (ending in .parquet).

    Args:
      path: the file; read whole.
      seed: of the order of training tasks.
      prompt_column: a string, or a list of {"role", "content"} messages.
      answer_column: a string or number, for the environment to compare with.
      holdout: share of the distinct prompts kept for evaluation, at least one; 0 is none.
      columns: further columns that the environment wants in the task's payload.

    Raises:
      ConfigError: no path, or `holdout` is out of range.
      DataError: the file is missing, empty or malformed; the message names file and line.
    """
    config.check(bool(path), "task.path", "is empty: name a .jsonl or .parquet file of tasks")
    config.check(0 <= holdout < 1, "task.arguments.holdout", f"must lie in [0, 1), not {holdout}")
    file = pathlib.Path(path)
    if file.is_dir():
        raise protocols.DataError(f"{path}: is a folder; name one .jsonl or .parquet file of tasks in it")
    if not file.is_file():
        near = difflib.get_close_matches(file.name, _names_in(file.parent), n=1)
        hint = f"; did you mean {file.parent / near[0]}?" if near else ""
        raise protocols.DataError(f"{path}: no such file of tasks{hint}")
    if file.suffix.lower() in OTHER_FORMATS:
        raise protocols.DataError(f"{path}: only .jsonl and .parquet files are read, not {file.suffix}; convert it")
    read = _parquet_rows if file.suffix == ".parquet" else _jsonl_rows
    wanted = (prompt_column, answer_column, *columns)
    rows = []
    for number, where, row in read(file):
        for column in wanted:
            _check_column(row, column, where)
        payload = {column: row[column] for column in columns}
        payload["prompt"] = _prompt(row[prompt_column], where, prompt_column)
        payload["answer"] = _answer(row[answer_column], where, answer_column)
        _check_plain(payload, where)
        rows.append((number, payload))
    if not rows:
        raise protocols.DataError(f"{path}: the file holds no tasks; write one JSON object a line")
    return FileTasks(path, seed, rows, holdout)


def _names_in(folder: pathlib.Path) -> list[str]:
    return [item.name for item in folder.iterdir()] if folder.is_dir() else []


def _jsonl_rows(file: pathlib.Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip())
            except UnicodeDecodeError as error:
                raise protocols.DataError(f"{where}: not UTF-8 text ({error.reason})") from error
            except json.JSONDecodeError as error:  # its own text counts lines, too, from this one
                raise protocols.DataError(f"{where}: not a JSON object ({error.msg}, column {error.colno})") from error
            except (ValueError, RecursionError) as error:
                raise protocols.DataError(f"{where}: not a JSON object ({error})") from error
            if not isinstance(row, dict):
                raise protocols.DataError(f"{where}: a JSON object is expected, not {type(row).__name__}")
            yield number, where, row


def _parquet_rows(file: pathlib.Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    import pyarrow  # here, so that only runs on Parquet files pay for it
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(file)
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise protocols.DataError(f"{file}: not a readable Parquet file ({reason})") from error
    number = 0
    for batch in table.to_batches():
        for row in batch.to_pylist():
            number += 1
            yield number, f"{file}, row {number}", row


def _check_column(row: Mapping[str, Any], column: str, where: str) -> None:
    if column in row:
        return
    near = difflib.get_close_matches(column, row, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(map(repr, row)) or 'no columns'}"
    raise protocols.DataError(
        f"{where}: no column {column!r}; {hint} (other columns are named as "
        "--config.task.arguments=\"{'prompt_column': 'question', 'answer_column': 'solution'}\")"
    )


def _prompt(value: Any, where: str, column: str) -> Any:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value:
        messages = [item for item in value if isinstance(item, dict)]
        texts = [item.get(key) for item in messages for key in ("role", "content")]
        if len(messages) == len(value) and all(isinstance(text, str) for text in texts):
            return [{"role": item["role"], "content": item["content"]} for item in messages]
    raise protocols.DataError(
        f"{where}: column {column!r} must be a text that is not empty, or a list of messages with role and content"
    )


def _answer(value: Any, where: str, column: str) -> str:
    if isinstance(value, str | int | float) and not isinstance(value, bool) and str(value).strip():
        return str(value)
    raise protocols.DataError(f"{where}: column {column!r} must be a text or a number, not {value!r}")


def _check_plain(payload: Mapping[str, Any], where: str) -> None:
    try:
        json.dumps(payload)
    except (TypeError, ValueError) as error:
        raise protocols.DataError(
            f"{where}: columns in config.task.arguments names a column that JSON cannot hold ({error})"
        ) from error
