"""`launch/prepare_data.py` as a user meets it: files converted, counts told, and sentences for what cannot be."""

import functools
import json

import pyarrow
import pytest
import scripts
from pyarrow import parquet

from libra_jax.environments import datasets

prepare = functools.partial(scripts.run_forked, "prepare_data.py")


@pytest.fixture
def downloaded(tmp_path):
    """A folder as it is downloaded: Search-R1's columns, in two files."""
    folder = tmp_path / "nq_hotpotqa_train"
    (folder / "data").mkdir(parents=True)
    rows = [
        {"id": f"train_{n}", "question": f"who is {n % 25}", "golden_answers": [f"No. {n % 25}"], "data_source": "nq"}
        for n in range(30)
    ]
    for number, part in enumerate((rows[:20], rows[20:])):
        file = folder / "data" / f"train-{number:05}-of-00002.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(part), file)
    return folder


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_download_becomes_a_file_of_tasks_and_what_was_dropped_is_told(downloaded, tmp_path, ending):
    output = tmp_path / "out" / f"search.{ending}"
    result = prepare("--dataset=search_r1", f"--input={downloaded}", f"--output={output}")
    assert result.returncode == 0, result.stderr
    told, use = result.stdout.splitlines()
    assert told == (f"search_r1: 30 rows read, 25 tasks written to {output}; dropped: 5 (the same prompt again)")
    flags = (
        f"path={output}",
        "source=libra_jax.environments.datasets:task_source",
        "environment=libra_jax.environments.",
    )
    assert all(f" --config.task.{flag}" in use for flag in flags)
    source = datasets.task_source(str(output), holdout=0)
    assert len(source) == 25
    payload = source.task(0).payload
    assert payload["answer"] == [f"No. {payload['prompt'].removeprefix('who is ').removesuffix('?')}"]
    assert [file.name for file in output.parent.iterdir()] == [output.name]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            ("--dataset=dapo_math",),
            "row 1: no column 'prompt'; it has 'id', 'question', 'golden_answers', 'data_source'",
        ),
        (("--dataset=search",), "dapo_math|r2e_gym|search_r1"),
        (("--dataset=search_r1", "--split=test"), "has no split 'test'; it has train"),
        (("--dataset=search_r1", "--output=tasks.csv"), "--output: tasks.csv must end in .jsonl or .parquet"),
        (("--dataset=search_r1", "--input=nowhere.parquet"), "nowhere.parquet: no such file"),
    ],
)
def test_what_cannot_be_converted_is_one_sentence_and_leaves_no_file(downloaded, tmp_path, flags, problem):
    output = tmp_path / "tasks.jsonl"
    result = prepare(f"--input={downloaded}", f"--output={output}", *flags)
    assert result.returncode != 0
    assert result.stderr.startswith("error: ")
    assert problem in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.glob("tasks*"))


def test_a_dataset_of_which_nothing_is_left_is_an_error_and_an_earlier_file_stays(tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"id": 1, "question": "q", "golden_answers": [], "data_source": "nq"}) + "\n")
    output.write_text("kept\n")
    result = prepare("--dataset=search_r1", f"--input={source}", f"--output={output}")
    assert result.returncode == 1
    assert result.stderr == f"error: {source}: none of its 1 rows makes a task: dropped: 1 (no answer)\n"
    assert output.read_text() == "kept\n"
    result = prepare("--dataset=search_r1", f"--input={source}", f"--output={source}")
    assert "is the input; name another file" in result.stderr
