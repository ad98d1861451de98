"""Tasks from a table on disk, in a format of `tables.py`. A row has a prompt and the expected answer."""

from __future__ import annotations

import collections
import functools
import hashlib
import json
import logging
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.chat import messages
from libra_jax.rewards import answers
from libra_jax.rollouts import splits
from libra_jax.utils import tables


class FileTasks:
    """A file's rows by position. A permutation, which depends only on seed and epoch, shuffles them in each epoch.

    A hash of the prompt chooses the held-out rows, independent of the seed. All rows with the same prompt stay
    together, so no held-out prompt is ever trained on.

    Args:
      path: Path of the file, for ids and errors.
      seed: Seed of the order of training tasks.
      rows: Pairs of line or row number and payload.
      holdout: Share of the distinct prompts that are kept for evaluation, at least one. 0 means none.
      prompt: Name of the prompt in the payloads.
    """

    def __init__(
        self, path: str, seed: int, rows: Sequence[tuple[int, dict[str, Any]]], holdout: float, prompt: str = "prompt"
    ) -> None:
        self._path = path
        self._name = pathlib.Path(path).stem
        self._seed = seed
        # As JSON, because a prompt may be a list of messages, which a set cannot hold.
        keys = [json.dumps(payload[prompt], sort_keys=True) for _, payload in rows]
        prompts = set(keys)
        evaluated: set[str] = set()
        if holdout:
            if len(prompts) < 2:
                raise protocols.DataError(
                    f"{path}: its rows have only one prompt, so none can be held out; give "
                    "--config.task.arguments=\"{'holdout': 0}\""
                )
            # Ordered by hash, so that the choice depends on neither the seed nor the order of the rows.
            ranked = sorted(prompts, key=lambda key: hashlib.sha256(key.encode()).digest())
            # At least one prompt on each side.
            evaluated.update(ranked[: min(len(prompts) - 1, max(1, math.floor(holdout * len(prompts))))])
        self._train = [row for key, row in zip(keys, rows, strict=True) if key not in evaluated]
        self._evaluation = [row for key, row in zip(keys, rows, strict=True) if key in evaluated]
        # Two epochs: the next one begins before the last tasks of an epoch have ended.
        self._order = functools.lru_cache(maxsize=2)(self._permutation)

    def __len__(self) -> int:
        """Returns the number of training tasks in an epoch."""
        return len(self._train)

    def describe(self) -> str:
        """Returns how many tasks are held out, and how many differ in nothing but their answers. Empty if none."""
        answers_by_payload = collections.defaultdict[str, set[str]](set)
        for _, payload in self._train + self._evaluation:
            rest = json.dumps({**payload, "answer": ""}, sort_keys=True, default=str)
            answers_by_payload[rest].add(json.dumps(payload.get("answer"), default=str))
        unlike = sum(len(values) > 1 for values in answers_by_payload.values())
        text = f", {len(self._evaluation):,} held out" if self._evaluation else ""
        return f"{text}, {unlike:,} posed again with another answer" if unlike else text

    def task(self, index: int) -> protocols.Task:
        """Returns the training task with this index. The index may go past the first epoch."""
        epoch, place = divmod(index, len(self._train))
        return self._make("", epoch, self._train[self._order(epoch)[place]])

    def evaluation_task(self, index: int) -> protocols.Task:
        """Returns the held-out task with this index, in the file's order. Indices past the last task begin again."""
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
        name = f"{self._name}{split}-{number}"
        return protocols.Task(f"{name}-epoch{epoch}", payload, repeats=name) if epoch else protocols.Task(name, payload)


_warn_once = functools.cache(logging.getLogger(__name__).warning)  # checks before a run read a file several times

_OTHER_COLUMNS = (
    " (other columns are named as --config.task.arguments=\"{'columns': {'prompt': 'question', 'answer': "
    "'reward_model.ground_truth'}}\")"
)


def task_source(
    path: str = "",
    seed: int = 0,
    prompt_column: str = "prompt",
    answer_column: str = "answer",
    holdout: float = 0.05,
    columns: Sequence[str] | Mapping[str, str] = (),
    split: str = "train",
    missing_answers: str = "refuse",
) -> FileTasks:
    """Returns the tasks of a JSONL, JSON, Parquet or CSV file, or of a folder of them. See `tables.rows`.

    Args:
      path: Path of the file or folder. All rows are read, but only the columns that are needed.
      seed: Seed of the order of training tasks.
      prompt_column: Column with a text, or a list of messages in OpenAI's form.
      answer_column: Column with a text or number for the environment to compare with, or a list of right answers.
        Empty: tasks have no answer.
      holdout: Share of the distinct prompts that are kept for evaluation, at least one. 0 means none.
      columns: Further columns for the task's payload, or a mapping from names in the payload (also `prompt` and
        `answer`) to columns. A name with dots reaches into structures and lists: `reward_model.ground_truth`,
        `prompt.0.content`.
      split: Part of a folder to read.
      missing_answers: What to do with a file some of whose rows have no answer (null, NaN, blank, or no such column):
        "refuse" it, or "skip" these rows. Both say how many there are. A published file may have some.
    """
    rows = read(path, prompt_column, answer_column, columns, split, holdout, missing_answers)
    return FileTasks(path, seed, rows, holdout)


def read(
    path: str,
    prompt_column: str,
    answer_column: str,
    columns: Sequence[str] | Mapping[str, str],
    split: str,
    holdout: float,
    missing_answers: str = "refuse",
) -> list[tuple[int, dict[str, Any]]]:
    """Returns the numbers and payloads of a file's rows. The arguments and errors are those of `task_source`."""
    config_lib.check(
        bool(path), "task.path", "is empty: name a .jsonl, .parquet or .csv file of tasks, or a dataset's folder"
    )
    config_lib.check(0 <= holdout < 1, "task.arguments.holdout", f"must lie in [0, 1), not {holdout}")
    config_lib.check_choice(missing_answers, ("refuse", "skip"), "task.arguments.missing_answers")
    field = "task.arguments.columns"
    config_lib.check(not isinstance(columns, str), field, f"must be a list or a mapping, not {columns!r}")
    column_names = dict(columns) if isinstance(columns, Mapping) else {column: column for column in columns}
    for name, column in column_names.items():
        config_lib.check(isinstance(column, str) and bool(column), field, f"{name!r} names no column, but {column!r}")
    # The given columns come last, so that they may name those of prompt and answer, too.
    mapping = {"prompt": prompt_column, **({"answer": answer_column} if answer_column else {}), **column_names}
    config_lib.check(
        bool(mapping["prompt"]), "task.arguments.prompt_column", "is empty: name the column of the prompts"
    )
    answer = mapping.pop("answer", "")
    numbered_rows: list[tuple[int, dict[str, Any]]] = []
    missing: list[str] = []
    no_column: protocols.DataError | None = None
    for row in tables.rows(path, (*mapping.values(), *([answer] if answer else [])), split):
        payload = {name: tables.value(row, column, _OTHER_COLUMNS) for name, column in mapping.items()}
        payload["prompt"] = _prompt(payload["prompt"], row.where, mapping["prompt"])
        if answer:
            try:
                value = tables.value(row, answer, _OTHER_COLUMNS)
            except protocols.DataError as error:  # rows of a JSONL file may leave the column out
                no_column, value = no_column or error, None
            if answers.is_missing(value):
                missing.append(row.where)
                continue
            payload["answer"] = _answer(value, row.where, answer)
        _check_plain(payload, row.where)
        numbered_rows.append((row.number, payload))
    if missing:
        if no_column is not None and not numbered_rows:  # the name is wrong
            raise no_column
        count = f"{len(missing):,} of {len(missing) + len(numbered_rows):,} rows have no answer (column {answer!r})"
        if missing_answers == "refuse":
            raise protocols.DataError(
                f"{missing[0]}: {count}, this one first; write them, or leave such rows out with "
                "--config.task.arguments=\"{'missing_answers': 'skip'}\""
            )
        _warn_once("%s: %s, and are skipped", path, count)
    if not numbered_rows:
        raise protocols.DataError(
            f'{path}: holds no tasks; a JSONL file has one a line, such as {{"prompt": "12+30", "answer": "42"}} '
            "(config.task.path)"
        )
    return numbered_rows


def of_rows(rows: Sequence[Mapping[str, Any]], seed: int = 0, holdout: float = 0.05) -> FileTasks:
    """Returns tasks from rows that a Python program has made.

    Args:
      rows: Payloads. Each has a `prompt` (a text, or a list of messages) and further fields for its environment.
      seed: Seed of the order of training tasks.
      holdout: Share of the distinct prompts that are kept for evaluation. 0 means none. A single prompt is never kept.
    """
    numbered_rows = []
    for number, row in enumerate(rows):
        where = f"tasks[{number}]"
        if not isinstance(row, Mapping):
            raise protocols.DataError(f"{where}: is {row!r:.80}; it has to be a mapping with a 'prompt'")
        payload = {**row, "prompt": _prompt(row.get("prompt"), where, "prompt")}
        answer = row.get("answer", "")
        if answers.is_missing(answer) and answer not in ("", []):
            raise protocols.DataError(f"{where}: 'answer' is {answer!r}; write it, or leave it or the row out")
        _check_plain(payload, where)
        numbered_rows.append((number, payload))
    if not numbered_rows:
        raise protocols.DataError("tasks: is empty; give at least one mapping with a 'prompt'")
    # A single prompt cannot lie on both sides of the split.
    alone = all(payload["prompt"] == numbered_rows[0][1]["prompt"] for _, payload in numbered_rows)
    return FileTasks("tasks", seed, numbered_rows, 0.0 if alone else holdout)


def _prompt(value: Any, where: str, column: str) -> Any:
    if isinstance(value, str) and value.strip():
        return value
    problem = (
        f"{where}: column {column!r} must be a text that is not empty, or a list of messages with role and content"
    )
    if not isinstance(value, list) or not value:
        raise protocols.DataError(problem)
    try:
        for item in value:
            messages.from_dict(item)
    except protocols.DataError as error:
        raise protocols.DataError(f"{problem}; {error}") from error
    # Empty fields go: tables of one schema give each message all fields, and a prompt is known by its text.
    return [
        {key: part for key, part in item.items() if key in ("role", "content") or part not in messages.EMPTY}
        for item in value
    ]


def _answer(value: Any, where: str, column: str) -> Any:
    """Returns one answer, or a list of answers that are all right, after a check of their types."""
    for item in value if isinstance(value, list) else [value]:
        # bool is a subclass of int, and True is no answer that a policy could give.
        good = isinstance(item, str | int | float) and not isinstance(item, bool) and not answers.is_missing(item)
        if not good or item in (math.inf, -math.inf):
            raise protocols.DataError(
                f"{where}: column {column!r} must be a text or a finite number, or a list of them, not {item!r:.80}"
            )
    return value


def _check_plain(payload: Mapping[str, Any], where: str) -> None:
    try:
        json.dumps(payload)
    except (TypeError, ValueError) as error:
        raise protocols.DataError(
            f"{where}: columns in config.task.arguments names a column that JSON cannot hold ({error})"
        ) from error
