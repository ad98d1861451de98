"""Rows as the three published datasets have them, and what becomes of them."""

import ast
import json
import shlex

import pyarrow
import pytest
from pyarrow import parquet

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.environments import published
from libra_jax.rollouts import factories
from libra_jax.tools import toolkit

DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"content": "Solve. Answer: $Answer\n\nWhat is 17+17?", "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}
SEARCH = {
    "id": "train_0",
    "question": "total number of death row inmates in the us",
    "golden_answers": ["2,718", " 2718 ", "2,718"],
    "data_source": "nq",
    "prompt": [{"content": "Answer the given question.", "role": "user"}],
    "ability": "fact-reasoning",
    "reward_model": {"ground_truth": {"target": ["2,718"]}, "style": "rule"},
    "extra_info": {"index": 0, "split": "train"},
}
RESULT = {"test_file_names": ["test_1.py"], "test_file_codes": ["def test_a(): ..."], "new_commit_res_code": 0}
REPAIR = {
    "repo_name": "aiohttp",
    "docker_image": "namanjain12/aiohttp_final:f0d74880",
    "commit_hash": "b" * 40,
    "parsed_commit_content": json.dumps({"old_commit_hash": "a" * 40, "new_commit_hash": "b" * 40}),
    "execution_result_content": json.dumps(RESULT),
    "modified_files": ["aiohttp/web.py"],
    "num_non_test_lines": 3,
    "prompt": "You write issues. The solution is ...",
    "problem_statement": "[ISSUE] It crashes on empty input. [/ISSUE]",
    "expected_output_json": json.dumps({"TestA.test_a": "PASSED", "TestA.test_b": "FAILED"}),
}


def converted(tmp_path, name, rows):
    path = tmp_path / "published.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    count = published.Count()
    return list(published.tasks(published.DATASETS[name], str(path), "train", count)), count


def test_dapo_keeps_each_problem_once_and_counts_what_it_drops(tmp_path):
    other = {**DAPO, "prompt": [{"content": "What is 2+2?", "role": "user"}]}
    found, count = converted(
        tmp_path,
        "dapo_math",
        [
            DAPO,
            DAPO,
            {**DAPO, "extra_info": {"index": "other"}},
            {**DAPO, "reward_model": {"ground_truth": "35", "style": "x"}},
            {**other, "reward_model": {"ground_truth": " ", "style": "x"}},
            {**DAPO, "prompt": []},
            other,
        ],
    )
    assert found == [
        {"id": "9a9b6eb4", "prompt": [{"role": "user", "content": DAPO["prompt"][0]["content"]}], "answer": "34"},
        {"id": "9a9b6eb4", "prompt": [{"role": "user", "content": "What is 2+2?"}], "answer": "34"},
    ]
    assert (count.read, count.tasks) == (7, 2)
    assert count.dropped == {
        "the same prompt again": 2,
        "the same prompt again, with another answer": 1,
        "no answer": 1,
        "no prompt": 1,
    }


def test_search_r1_keeps_all_golden_answers_and_asks_with_a_question_mark(tmp_path):
    found, count = converted(
        tmp_path, "search_r1", [SEARCH, {**SEARCH, "question": " "}, {**SEARCH, "golden_answers": [""]}]
    )
    assert found == [
        {
            "id": "train_0",
            "prompt": "total number of death row inmates in the us?",
            "answer": ["2,718", "2718"],
            "source": "nq",
        }
    ]
    assert count.dropped == {"no prompt": 1, "no answer": 1}


def test_r2e_gym_gives_issue_tests_and_the_commit_before_the_fix_and_never_the_solution(tmp_path):
    broken = [
        {**REPAIR, "execution_result_content": "{"},
        {**REPAIR, "execution_result_content": json.dumps({**RESULT, "test_file_codes": []})},
        {**REPAIR, "expected_output_json": "{}"},
        {**REPAIR, "expected_output_json": json.dumps({"TestA.test_a": "FAILED"})},
        {**REPAIR, "parsed_commit_content": "{}"},
        {**REPAIR, "problem_statement": ""},
        {**REPAIR, "docker_image": None},
    ]
    (task,), count = converted(tmp_path, "r2e_gym", [REPAIR, *broken])
    assert task == {
        "project": "aiohttp",
        "commit": "a" * 40,
        "image": "namanjain12/aiohttp_final:f0d74880",
        "repository": "aiohttp_final-f0d74880.tar",
        "issue": "[ISSUE] It crashes on empty input. [/ISSUE]",
        "tests": [{"path": "r2e_tests/test_1.py", "text": "def test_a(): ..."}],
        "fail_to_pass": ["r2e_tests/test_1.py::TestA::test_a"],
        "command": "python3 -m pytest -rA r2e_tests",
    }
    assert count.dropped == {"no tests": 4, "no project or commit": 1, "no prompt": 1, "no image": 1}


def test_tests_of_r2e_gym_get_the_names_that_pytest_has_for_them(tmp_path):
    codes = ["class TestA:\n    def test_a(self): ...", "def test_b(): ...\ndef test_c(): ...", "def test_c(): ..."]
    result = {"test_file_names": ["test_1.py", "test_2.py", "test_3.py"], "test_file_codes": codes}
    row = {**REPAIR, "execution_result_content": json.dumps(result)}

    def names(*passing):
        expected = json.dumps({"test_b[0]": "FAILED", **dict.fromkeys(passing, "PASSED")})
        return converted(tmp_path, "r2e_gym", [{**row, "expected_output_json": expected}])

    (task,), _ = names("TestA.test_a", "\x1b[1mtest_b[1.5]\x1b[0m", "")
    assert task["fail_to_pass"] == ["r2e_tests/test_1.py::TestA::test_a", "r2e_tests/test_2.py::test_b[1.5]"]
    for name in ("test_c", "TestB.test_a"):
        assert names(name)[1].dropped == {"a test that is in several files or in none": 1}
    assert names("test_b[a b]")[1].dropped == {"a test whose name has spaces, which ends it in a report": 1}


@pytest.mark.parametrize(("name", "row"), [("dapo_math", DAPO), ("search_r1", SEARCH), ("r2e_gym", REPAIR)])
def test_a_file_of_another_dataset_is_told_from_its_columns(tmp_path, name, row):
    known = published.DATASETS[name]
    for column in known.columns:
        outer = column.split(".")[0]
        with pytest.raises(protocols.DataError) as caught:
            converted(tmp_path, name, [{key: value for key, value in row.items() if key != outer}])
        assert f"published.parquet, row 1: no column {column!r}; " in str(caught.value)
        assert f"({name} is {known.title}, with the columns {', '.join(known.columns)})" in str(caught.value)


@pytest.mark.parametrize(("name", "row"), [("dapo_math", DAPO), ("search_r1", SEARCH), ("r2e_gym", REPAIR)])
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_what_is_written_is_read_as_tasks_by_the_flags_that_are_told(tmp_path, name, row, ending):
    (record,), _ = converted(tmp_path, name, [row])
    path = tmp_path / f"tasks.{ending}"
    path.write_text(json.dumps(record) + "\n")
    if ending == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist([record]), path)
    if name == "r2e_gym":
        (tmp_path / record["repository"]).mkdir()  # a folder does as well
    settings = {}
    for word in shlex.split(published.DATASETS[name].flags):
        flag, _, value = word.partition("=")
        settings[flag] = value
    task = config_lib.TaskConfig(
        source=settings.pop("--config.task.source"),
        environment=settings.pop("--config.task.environment"),
        path=str(path),
        arguments={"holdout": 0, **ast.literal_eval(settings.pop("--config.task.arguments", "{}"))},
    )
    tools = config_lib.ToolsConfig(
        use=ast.literal_eval(settings.pop("--config.tools.use", "()")),
        arguments=ast.literal_eval(settings.pop("--config.tools.arguments", "{}")),
    )
    assert not settings
    factories.environment_factory(task, toolkit.Toolkit(tools, config_lib.SandboxConfig()))
    payload = factories.task_source(task, 0).task(0).payload
    if name != "r2e_gym":
        assert (payload["prompt"], payload["answer"]) == (record["prompt"], record["answer"])
        return
    assert payload == {
        "issue": record["issue"],
        "repository": str(tmp_path / "aiohttp_final-f0d74880.tar"),
        "tests": {"r2e_tests/test_1.py": "def test_a(): ..."},
        "fail_to_pass": record["fail_to_pass"],
        "pass_to_pass": [],
        "test_command": record["command"],
    }
