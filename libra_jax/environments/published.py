"""Published datasets as tasks: the columns of their downloaded files, and how a row becomes a task.

`dapo_math` (BytedTsinghua-SIA/DAPO-Math-17k): `prompt` (messages), `reward_model.ground_truth`, `extra_info.index`.
`search_r1` (PeterJinGo/nq_hotpotqa_train): `id`, `question`, `golden_answers` (several), `data_source`.
`r2e_gym` (R2E-Gym/R2E-Gym-Subset and -Lite): `repo_name`, `docker_image`, `problem_statement`, and in JSON
`parsed_commit_content` (`old_commit_hash`), `execution_result_content` (`test_file_names`, `test_file_codes`) and
`expected_output_json` (outcome by test).

DAPO's file repeats its 17 thousand problems a hundred times.

Rows of R2E-Gym contain no repository. It is in the image at /testbed, and has to be saved under the task's name for it.
The column `prompt` contains the solution, so it is not read. Tests that are expected to fail before and after the fix
judge nothing. The rows do not tell which other tests pass before the fix, so all are listed as tests that it makes
pass.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from libra_jax.utils import tables

Record = dict[str, Any]


class UnusableRow(Exception):
    """A row makes no task. The message is the reason, with the same text for all such rows."""


@dataclass(frozen=True)
class Dataset:
    """A published dataset.

    Attributes:
      title: Where the dataset is published.
      columns: Columns that are read.
      convert: Makes a JSON-compatible task from a row. Raises UnusableRow, or DataError if a column is missing.
      flags: Command-line flags to train on it, besides `--config.task.path`, in shell syntax.
      needs: What has to exist before training. Empty if nothing.
    """

    title: str
    columns: tuple[str, ...]
    convert: Callable[[tables.TableRow], Record]
    flags: str
    needs: str = ""


@dataclass
class Count:
    """Numbers of rows `read`, of `tasks` made, and of rows `dropped` by reason."""

    read: int = 0
    tasks: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


def tasks(dataset: Dataset, path: str, split: str, count: Count) -> Iterator[Record]:
    """Yields the tasks of a downloaded dataset, each prompt once.

    Args:
      dataset: The dataset.
      path: Path of its file or folder.
      split: Part of a folder to read.
      count: Updated with each row.
    """
    answer_digests: dict[bytes, bytes] = {}
    for row in tables.rows(path, dataset.columns, split):
        count.read += 1
        try:
            record = dataset.convert(row)
            # Digests, because the texts of a large file would not fit into memory.
            prompt_digest, answer_digest = (
                hashlib.blake2b(
                    json.dumps([record.get(name) for name in names], sort_keys=True).encode(), digest_size=16
                ).digest()
                for names in (_POSED, _RIGHT)
            )
            if prompt_digest in answer_digests:
                raise UnusableRow(_REPEATED if answer_digests[prompt_digest] == answer_digest else _CONTRADICTED)
        except UnusableRow as reason:
            count.dropped[str(reason)] += 1
            continue
        answer_digests[prompt_digest] = answer_digest
        count.tasks += 1
        yield record


_POSED = ("prompt", "issue", "project")
_RIGHT = ("answer", "tests", "fail_to_pass")


def _value(row: tables.TableRow, column: str, dataset: str) -> Any:
    source = DATASETS[dataset]
    return tables.value(row, column, f" ({dataset} is {source.title}, with the columns {', '.join(source.columns)})")


def _text(value: Any, reason: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UnusableRow(reason)
    return value.strip()


def _json(value: Any, kind: type, reason: str) -> Any:
    """Returns the value in a column of JSON text. Raises UnusableRow if it is of another kind."""
    try:
        content = json.loads(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise UnusableRow(reason) from error
    if not isinstance(content, kind):
        raise UnusableRow(reason)
    return content


def _dapo(row: tables.TableRow) -> Record:
    prompt = _value(row, "prompt", "dapo_math")
    answer = _value(row, "reward_model.ground_truth", "dapo_math")
    messages = prompt if isinstance(prompt, list) else [None]
    good = [item for item in messages if isinstance(item, Mapping) and item.get("role") and item.get("content")]
    if not good or len(good) != len(messages):
        raise UnusableRow(_NO_PROMPT)
    return {
        "id": str(_value(row, "extra_info.index", "dapo_math")),
        "prompt": [{"role": str(item["role"]), "content": str(item["content"]).strip()} for item in good],
        "answer": _text(answer, _NO_ANSWER),
    }


def _search_r1(row: tables.TableRow) -> Record:
    golden = _value(row, "golden_answers", "search_r1")
    answers = [text.strip() for text in golden or () if isinstance(text, str) and text.strip()]
    if not answers:
        raise UnusableRow(_NO_ANSWER)
    question = _text(_value(row, "question", "search_r1"), _NO_PROMPT)
    return {
        "id": str(_value(row, "id", "search_r1")),
        "prompt": question if question.endswith("?") else f"{question}?",  # Search-R1 puts questions this way
        "answer": list(dict.fromkeys(answers)),
        "source": str(_value(row, "data_source", "search_r1")),
    }


def _r2e_gym(row: tables.TableRow) -> Record:
    result = _json(_value(row, "execution_result_content", "r2e_gym"), dict, _NO_TESTS)
    names, codes = result.get("test_file_names"), result.get("test_file_codes")
    if not (isinstance(names, list) and isinstance(codes, list) and names and len(names) == len(codes)):
        raise UnusableRow(_NO_TESTS)
    expected = _json(_value(row, "expected_output_json", "r2e_gym"), dict, _NO_TESTS)
    if not expected:
        raise UnusableRow(_NO_TESTS)
    commit = _json(_value(row, "parsed_commit_content", "r2e_gym"), dict, _NO_COMMIT)
    image = _text(_value(row, "docker_image", "r2e_gym"), "no image")
    # The folder of R2E-Gym's own test command. It belongs to the suite, so the policy's files in it are left out.
    tests = [{"path": f"r2e_tests/{name}", "text": str(code)} for name, code in zip(names, codes, strict=True)]
    passing = [name for name, outcome in expected.items() if outcome == "PASSED"]
    return {
        "project": _text(_value(row, "repo_name", "r2e_gym"), _NO_COMMIT),
        "commit": _text(commit.get("old_commit_hash"), _NO_COMMIT),
        "image": image,
        "repository": f"{image.rpartition('/')[2].replace(':', '-')}.tar",
        "issue": _text(_value(row, "problem_statement", "r2e_gym"), _NO_PROMPT),
        "tests": tests,
        "fail_to_pass": _names(passing, tests),
        "command": "python3 -m pytest -rA r2e_tests",
    }


def _names(listed: list[str], tests: list[dict[str, str]]) -> list[str]:
    """Returns `pytest`'s full names of tests that are listed without their file, such as `TestA.test_b[1]`.

    The listed names were read from a report. Some still have terminal colours. An empty name is from a line without a
    test.
    """
    short = [re.sub(r"\x1b\[[\d;]*m", "", name) for name in listed]
    # A report without any name was not written by the tests.
    if not any(short):
        raise UnusableRow(_NO_TESTS)
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    inside: dict[str, set[str]] = {}
    for file in tests:
        names = inside.setdefault(file["path"], set())
        with contextlib.suppress(SyntaxError, ValueError, RecursionError):  # such a file defines no test
            for node in ast.parse(file["text"]).body:
                prefix, body = (f"{node.name}.", node.body) if isinstance(node, ast.ClassDef) else ("", [node])
                names |= {f"{prefix}{function.name}" for function in body if isinstance(function, functions)}
    full_names = []
    for name in filter(None, short):
        plain, bracket, rest = name.partition("[")
        # With a single file there is no doubt, even if the test is made at run time and so not found in the text.
        paths = [path for path, names in inside.items() if plain in names or len(tests) == 1]
        if len(paths) != 1:
            raise UnusableRow("a test that is in several files or in none")
        if any(map(str.isspace, name)):
            raise UnusableRow("a test whose name has spaces, which ends it in a report")
        full_names.append(f"{paths[0]}::{plain.replace('.', '::')}{bracket}{rest}")
    return full_names


def _flags(source: str, environment: str, *further_flags: str) -> str:
    flags = (f"--config.task.source={source}:task_source", f"--config.task.environment={environment}:environment")
    return " ".join((*flags, *further_flags))


_NO_PROMPT, _NO_ANSWER, _NO_TESTS = "no prompt", "no answer", "no tests"
_NO_COMMIT = "no project or commit"
_REPEATED, _CONTRADICTED = "the same prompt again", "the same prompt again, with another answer"

DATASETS = {
    "dapo_math": Dataset(
        "BytedTsinghua-SIA/DAPO-Math-17k",
        ("prompt", "reward_model.ground_truth", "extra_info.index"),
        _dapo,
        _flags("libra_jax.environments.datasets", "libra_jax.environments.math"),
    ),
    "search_r1": Dataset(
        "PeterJinGo/nq_hotpotqa_train",
        ("id", "question", "golden_answers", "data_source"),
        _search_r1,
        _flags(
            "libra_jax.environments.datasets",
            "libra_jax.environments.search_qa",
            "--config.tools.use=\"('search',)\"",
            "--config.tools.arguments=\"{'search': "
            "{'path': 'wiki.jsonl', 'title_column': '', 'text_column': 'contents'}}\"",
        ),
        needs="wiki.jsonl has the passages to search, such as those that Search-R1 publishes",
    ),
    "r2e_gym": Dataset(
        "R2E-Gym/R2E-Gym-Subset or R2E-Gym/R2E-Gym-Lite",
        (
            "repo_name",
            "docker_image",
            "problem_statement",
            "parsed_commit_content",
            "execution_result_content",
            "expected_output_json",
        ),
        _r2e_gym,
        _flags(
            "libra_jax.environments.repo_repair",
            "libra_jax.environments.repo_repair",
            "--config.task.arguments=\"{'fail_to_pass_column': 'fail_to_pass', 'command_column': 'command'}\"",
            "--config.tools.use=\"('shell', 'edit')\"",
        ),
        needs="/testbed of each task's `image`, without .git, .venv and r2e_tests, lies beside the file as the tar "
        "that its `repository` names, and sandbox.packages has pytest and what the projects import",
    ),
}
"""Datasets by their name in `launch/prepare_data.py`."""
