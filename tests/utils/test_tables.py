"""Tables on disk: nested columns, mappings, folders of Hugging Face datasets, and what is said of bad ones."""

import asyncio
import decimal
import gzip
import json
import pathlib
import re
import shutil

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from libra_jax import protocols
from libra_jax.environments import datasets, question
from libra_jax.utils import tables

SAVED = pathlib.Path(__file__).parent / "data" / "saved_datasets"
"""Written by Hugging Face's datasets 5.2: `Dataset.save_to_disk` to `one`, `DatasetDict.save_to_disk` to `parts`."""

ROWS = [
    {
        "question": f"What is {n}+{n}?",
        "prompt": [{"role": "user", "content": f"{n}+{n}"}],
        "reward_model": {"ground_truth": str(2 * n), "style": "rule"},
        "golden": [str(2 * n), f"{2 * n}.0"],
    }
    for n in range(30)
]


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def table(path, rows):
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def payloads(source):
    return sorted((dict(source.task(index).payload) for index in range(len(source))), key=str)


MAPPED = {"prompt": "prompt.0.content", "answer": "reward_model.ground_truth", "style": "reward_model.style"}


@pytest.mark.parametrize("write", [jsonl, table])
def test_names_in_the_payload_are_mapped_to_columns_and_into_them(tmp_path, write):
    path = write(tmp_path / f"tasks.{'jsonl' if write is jsonl else 'parquet'}", ROWS)
    found = payloads(datasets.task_source(path, holdout=0, columns=MAPPED))
    wanted = [{"prompt": f"{n}+{n}", "answer": str(2 * n), "style": "rule"} for n in range(30)]
    assert found == sorted(wanted, key=str)


def test_a_column_whose_own_name_has_a_dot_comes_first(tmp_path):
    path = jsonl(tmp_path / "t.jsonl", [{"a.b": "outer", "a": {"b": "inner"}, "answer": 1}])
    task = datasets.task_source(path, holdout=0, prompt_column="a.b").task(0)
    assert task.payload["prompt"] == "outer"


def test_several_answers_keep_their_types_and_no_column_of_answers_is_needed(tmp_path):
    path = jsonl(tmp_path / "t.jsonl", [{"prompt": "q", "answer": [1, "one", 1.5]}])
    assert datasets.task_source(path, holdout=0).task(0).payload["answer"] == [1, "one", 1.5]
    assert set(datasets.task_source(path, holdout=0, answer_column="").task(0).payload) == {"prompt"}


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"prompt": "questions"}, "row 1: no column 'questions'; did you mean 'question'?"),
        (
            {"answer": "reward_model.groundtruth"},
            "no column 'reward_model.groundtruth'; did you mean 'reward_model.ground_truth'?",
        ),
        ({"answer": "reward_model.x"}, "no column 'reward_model.x'; 'reward_model' has 'ground_truth', 'style'"),
        ({"prompt": "prompt.1.content"}, "no column 'prompt.1.content'; 'prompt' is a list of 1"),
        ({"answer": "question.text"}, "no column 'question.text'; 'question' is 'What is 0+0?'"),
        ({"answer": "golden.0.x"}, "no column 'golden.0.x'; 'golden.0' is '0'"),
    ],
)
def test_a_mapped_column_that_is_not_there_is_named_with_the_nearest(tmp_path, columns, problem):
    path = table(tmp_path / "tasks.parquet", ROWS)
    with pytest.raises(protocols.DataError) as caught:
        datasets.task_source(path, columns={"prompt": "question", "answer": "golden", **columns})
    assert f"{path}, " in str(caught.value)
    assert problem in str(caught.value)
    assert "--config.task.arguments=\"{'columns': {'prompt': 'question'" in str(caught.value)


@pytest.mark.parametrize("write", [jsonl, table])
@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        ({"golden": []}, "1 of 30 rows have no answer (column 'golden'), this one first"),
        ({"golden": ["a", " "]}, "column 'golden' must be a text or a finite number, or a list of them, not ' '"),
        ({"question": ""}, "column 'question' must be a text that is not empty"),
        ({"question": None}, "column 'question' must be a text that is not empty"),
    ],
)
def test_a_malformed_row_17_is_named(tmp_path, write, broken, problem):
    rows = [*ROWS[:16], {**ROWS[16], **broken}, *ROWS[17:]]
    path = write(tmp_path / f"tasks.{'jsonl' if write is jsonl else 'parquet'}", rows)
    with pytest.raises(protocols.DataError) as caught:
        datasets.task_source(path, columns={"prompt": "question", "answer": "golden"})
    assert f"{path}, {'line' if write is jsonl else 'row'} 17: {problem}" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"columns": "question"}, r"task\.arguments\.columns: must be a list or a mapping, not 'question'"),
        ({"columns": {"answer": 3}}, r"task\.arguments\.columns: 'answer' names no column, but 3"),
        ({"columns": {"answer": ""}}, r"task\.arguments\.columns: 'answer' names no column, but ''"),
        ({"prompt_column": ""}, r"task\.arguments\.prompt_column: is empty"),
    ],
)
def test_a_mapping_that_maps_nothing_is_refused(tmp_path, arguments, problem):
    with pytest.raises(protocols.ConfigError, match=problem):
        datasets.task_source(jsonl(tmp_path / "t.jsonl", ROWS), **arguments)


# Types and forms ------------------------------------------------------------------------------------------------------

NUMBERS = [0.00001, 0.1, 42, 3.5, 1e20, -7]


def reward(source, output, match):
    async def body():
        environment = question.environment(match=match)
        await environment.reset(source.task(0))
        return (await environment.step(output)).reward

    return asyncio.run(body())


@pytest.mark.parametrize("answer", NUMBERS)
@pytest.mark.parametrize("ending", ["jsonl", "csv", "float.parquet", "double.parquet", "json", "jsonl.gz"])
def test_a_number_of_any_file_is_answered_by_its_decimal(tmp_path, ending, answer):
    path, row = tmp_path / f"t.{ending}", {"prompt": "q", "answer": answer}
    if ending == "csv":
        path.write_text(f"prompt,answer\nq,{answer}\n")
    elif ending.endswith("parquet"):
        kind = pyarrow.float32() if ending.startswith("float") else pyarrow.float64()
        parquet.write_table(pyarrow.table({"prompt": ["q"], "answer": pyarrow.array([answer], kind)}), path)
    else:
        content = (json.dumps([row], indent=1) if ending == "json" else json.dumps(row)).encode()
        path.write_bytes(gzip.compress(content) if ending.endswith("gz") else content)
    source = datasets.task_source(str(path), holdout=0)
    written = f"{decimal.Decimal(repr(answer)):f}"
    assert reward(source, f"It is {written}.", "numeric") == 1.0
    assert reward(source, written, "exact") == float(ending != "csv" or written == str(answer))
    assert reward(source, "5", "numeric") == 0.0


def test_numbers_keep_their_type_and_the_digits_that_were_written(tmp_path):
    columns = {
        "single": pyarrow.array([0.1, None, 1e-5], pyarrow.float32()),
        "nested": pyarrow.array([[{"x": 0.3}], [], None], pyarrow.list_(pyarrow.struct([("x", pyarrow.float32())]))),
        "money": pyarrow.array([decimal.Decimal("1.50"), None, decimal.Decimal("0.01")], pyarrow.decimal128(9, 2)),
        "exact": pyarrow.array([decimal.Decimal("0." + "1" * 30), None, None], pyarrow.decimal128(38, 30)),
        "large": pyarrow.array([2**53 + 1, 0, None], pyarrow.int64()),
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    found = [row.values for row in tables.rows(str(tmp_path / "t.parquet"))]
    assert [row["single"] for row in found] == [0.1, None, 1e-5]
    assert [row["nested"] for row in found] == [[{"x": 0.3}], [], None]
    assert [row["money"] for row in found] == [1.5, None, 0.01]
    assert [row["exact"] for row in found] == ["0." + "1" * 30, None, None]
    assert [row["large"] for row in found] == [2**53 + 1, 0, None]


@pytest.mark.parametrize("kind", [pyarrow.float16(), pyarrow.float32(), pyarrow.float64(), pyarrow.decimal128(9, 4)])
@pytest.mark.parametrize(
    "nest",
    [
        lambda kind: pyarrow.list_(kind),
        lambda kind: pyarrow.list_(kind, 3),
        lambda kind: pyarrow.large_list(kind),
        lambda kind: pyarrow.map_(pyarrow.string(), kind),
        lambda kind: pyarrow.list_(pyarrow.struct([("float", kind), ("x", pyarrow.int8())])),
        lambda kind: pyarrow.struct([("x", pyarrow.large_list(pyarrow.list_(kind, 1)))]),
    ],
    ids=["list", "fixed", "large", "map", "structs", "deep"],
)
def test_nested_numbers_have_the_digits_that_were_written(tmp_path, nest, kind):
    a, b = map(decimal.Decimal if pyarrow.types.is_decimal(kind) else float, ("0.1", "42"))
    forms = {
        pyarrow.types.is_map: lambda a, b: [("a", a), ("b", b)],
        pyarrow.types.is_struct: lambda a, b: {"x": [[a], [b], None]},
        lambda kind: str(kind).startswith("list<item: struct"): lambda a, b: [{"float": a, "x": 1}, None],
    }
    value = next((form for holds, form in forms.items() if holds(nest(kind))), lambda a, b: [a, None, b])
    column = pyarrow.array([value(a, b), None], nest(kind))
    batches = pyarrow.table({"c": column})
    with pyarrow.OSFile(str(tmp_path / "t.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, batches.schema) as out:
        out.write_table(batches)
    assert [row.values["c"] for row in tables.rows(str(tmp_path / "t.arrow"))] == [value(0.1, 42), None]


@pytest.mark.parametrize(
    ("output", "right"), [("42", 1.0), ("42.00", 1.0), ("42.0", 1.0), ("42.01", 0.0), ("4200", 0.0)]
)
@pytest.mark.parametrize("digits", [10, 38])
def test_a_decimal_answer_is_compared_by_value(tmp_path, digits, output, right):
    answer = pyarrow.array([decimal.Decimal("42.00")], pyarrow.decimal128(digits, 2))
    parquet.write_table(pyarrow.table({"prompt": ["q"], "answer": answer}), tmp_path / "t.parquet")
    assert reward(datasets.task_source(str(tmp_path / "t.parquet"), holdout=0), output, "exact") == right


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.csv", b"\xef\xbb\xbfquestion;golden\nWhat, then?;0,5\n"),
        ("t.csv", b'"question";"golden, or not"\n"What, then?";"0,5"\n'),
        ("t.csv.gz", gzip.compress(b'question,golden\n"What, then?","0,5"\n')),
        ("t.jsonl.gz", gzip.compress(b'{"question": "What, then?", "golden": "0,5"}\n')),
        ("t.json", b'\xef\xbb\xbf [{"question": "What, then?",\n "golden": "0,5"}]'),
        ("t.json", b'{"question": "What, then?", "golden": "0,5"}\n'),
    ],
    ids=["semicolons", "quoted", "packed csv", "packed lines", "list", "lines"],
)
def test_tables_are_read_in_the_forms_that_tools_write(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert [[*row.values.values()] for row in tables.rows(str(tmp_path / name))] == [["What, then?", "0,5"]]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("t.json", b'[{"a": 1}, 2]', r"t\.json, item 2: a JSON object is expected, not int"),
        ("t.json", b'[{"a": 1}', r"t\.json: not a JSON list \("),
        ("t.json", b'[{"a": 1, "a": 2}]', r"t\.json: not a JSON list \(the key 'a' stands twice\)"),
        ("t.jsonl", b'{"a": 1}\n{"b": [{"a": 1, "a": 1}]}', r"t\.jsonl, line 2: .*the key 'a' stands twice"),
        ("t.jsonl.gz", b"{}", r"t\.jsonl\.gz: not a readable gzip file"),
        ("t.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 99)[:-9], r"t\.jsonl\.gz: not a readable gzip file"),
    ],
    ids=["item", "unclosed", "twice", "twice inside", "not packed", "cut off"],
)
def test_broken_lists_and_packed_files_are_named(tmp_path, name, content, problem):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(protocols.DataError, match=problem):
        list(tables.rows(str(tmp_path / name)))


# CSV ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ending", "delimiter"), [("csv", ","), ("tsv", "\t"), ("CSV", ",")])
def test_values_of_csv_are_texts_as_they_are_written(tmp_path, ending, delimiter):
    path = tmp_path / f"tasks.{ending}"
    rows = [["question", "golden"], ['"Is 7, or\n""007"", longer?"', "007"], ["2024-01-01", "1e3"], ["nothing", ""]]
    path.write_text("\ufeff" + "".join(delimiter.join(row) + "\n" for row in rows))
    found = list(tables.rows(str(path)))
    assert found[0] == tables.TableRow(1, f"{path}, row 1", {"question": 'Is 7, or\n"007", longer?', "golden": "007"})
    assert [row.values["golden"] for row in found] == ["007", "1e3", ""]
    with pytest.raises(protocols.DataError, match=r"row 3: 1 of 3 rows have no answer \(column 'golden'\)"):
        datasets.task_source(str(path), prompt_column="question", answer_column="golden")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", r"tasks\.csv: not a readable CSV file \(CSV parse error: Empty CSV"),
        (b"a,a\n1,2\n", r"tasks\.csv: not a readable CSV file \(CSV file contained multiple columns named a"),
        (
            b"a,b\n1,2\n1,2,3\n",
            r"tasks\.csv, row 2: not a readable CSV file \(CSV parse error: Expected 2 columns, got 3",
        ),
        (b"a,b\n" + b"1,2\n" * 9 + b"\xff,2\n", r"tasks\.csv, row 10: not a readable CSV file \(.*invalid UTF8"),
    ],
)
def test_bad_csv_is_named_with_its_row(tmp_path, content, problem):
    path = tmp_path / "tasks.csv"
    path.write_bytes(content)
    with pytest.raises(protocols.DataError, match=problem):
        list(tables.rows(str(path)))


# Folders --------------------------------------------------------------------------------------------------------------


def test_a_folder_of_parquet_files_is_read_in_their_order_by_split(tmp_path):
    (tmp_path / "data").mkdir()
    table(tmp_path / "data" / "train-00001-of-00002.parquet", ROWS[10:20])
    table(tmp_path / "data" / "train-00000-of-00002.parquet", ROWS[:10])
    table(tmp_path / "data" / "test-00000-of-00001.parquet", ROWS[20:])
    found = list(tables.rows(str(tmp_path)))
    assert [row.values["question"] for row in found] == [row["question"] for row in ROWS[:20]]
    assert [row.number for row in found] == list(range(1, 21))
    assert found[12].where == f"{tmp_path}/data/train-00001-of-00002.parquet, row 3"
    assert [row.values for row in tables.rows(str(tmp_path), split="test")] == ROWS[20:]
    with pytest.raises(protocols.DataError, match=r"has no split 'dev'; it has test, train \(choose as .*'split'"):
        list(tables.rows(str(tmp_path), split="dev"))


@pytest.mark.parametrize("ending", ["jsonl", "csv", "tsv", "jsonl.gz"])
def test_a_folder_may_hold_files_of_any_kind_but_one_kind_a_split(tmp_path, ending):
    text = {"jsonl": '{"prompt": "q"}\n', "csv": "prompt\nq\n", "tsv": "prompt\nq\n"}[ending.removesuffix(".gz")]
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test"):
        packed = gzip.compress(text.encode()) if ending.endswith("gz") else text.encode()
        (tmp_path / f"{name}.{ending}").write_bytes(packed)
    assert [dict(row.values) for row in tables.rows(str(tmp_path))] == [{"prompt": "q"}] * 2
    assert len(list(tables.rows(str(tmp_path), split="test"))) == 1
    table(tmp_path / "train.parquet", ROWS)
    with pytest.raises(protocols.DataError, match=r"has the split 'train' as [.\w]+ and [.\w]+; name a single file"):
        list(tables.rows(str(tmp_path)))


def test_what_hugging_faces_package_saved_is_read_as_it_reads_it():
    wanted = json.loads((SAVED / "rows.json").read_text())
    assert [dict(row.values) for row in tables.rows(str(SAVED / "one"))] == wanted["one"]
    for split, rows in wanted["parts"].items():
        found = list(tables.rows(str(SAVED / "parts"), split=split))
        assert [dict(row.values) for row in found] == rows
    source = datasets.task_source(str(SAVED / "one"), holdout=0, columns={"prompt": "question", "answer": "golden"})
    assert len(source) == len(wanted["one"])


def test_only_the_columns_asked_for_are_read():
    (row, *_) = tables.rows(str(SAVED / "one"), ("question", "reward_model.style"))
    assert set(row.values) == {"question", "reward_model"}


@pytest.fixture
def saved(tmp_path):
    return pathlib.Path(shutil.copytree(SAVED / "one", tmp_path / "one"))


def test_a_saved_dataset_that_is_not_whole_is_named(saved):
    (file,) = saved.glob("*.arrow")
    whole = file.read_bytes()
    file.write_bytes(b"no arrow")
    with pytest.raises(protocols.DataError, match=r"\.arrow: not a readable Arrow file"):
        list(tables.rows(str(saved)))
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(protocols.DataError, match=r"\.arrow: not a readable Arrow file"):
        list(tables.rows(str(saved)))
    file.unlink()
    with pytest.raises(
        protocols.DataError, match=r"\.arrow: no such file, and .*state\.json names it; copy the folder"
    ):
        list(tables.rows(str(saved)))


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ("{", r"state\.json: not readable as Hugging Face's datasets writes it"),
        ("[]", r"state\.json: not readable as Hugging Face's datasets writes it"),
        ("{}", r"state\.json: has no list '_data_files'"),
        ('{"_data_files": "x"}', r"state\.json: has no list '_data_files'"),
        (
            '{"_data_files": [], "_indices_data_files": [{"filename": "i"}]}',
            r"call flatten_indices\(\) before save_to_",
        ),
    ],
)
def test_a_state_that_is_not_as_the_package_writes_it_is_named(saved, state, problem):
    (saved / "state.json").write_text(state)
    with pytest.raises(protocols.DataError, match=problem):
        list(tables.rows(str(saved)))


def test_a_folder_without_tables_says_what_would_be_one(tmp_path):
    with pytest.raises(protocols.DataError, match=r"is a folder without tables: give the one that save_to_disk wrote"):
        datasets.task_source(str(tmp_path))
    with pytest.raises(protocols.DataError, match="no such file of passages"):
        list(tables.rows(str(tmp_path / "x.jsonl"), of="passages"))
    with pytest.raises(protocols.DataError, match=r"has no split 'dev'; it has train, test"):
        list(tables.rows(str(SAVED / "parts"), split="dev"))


LEAVES = st.none() | st.booleans() | st.integers() | st.text("xy1", max_size=3)
NAMES = st.text("abc.", min_size=1, max_size=4)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3))


@given(st.dictionaries(NAMES, VALUES, max_size=3), st.text("abc.0123", max_size=8))
def test_any_column_of_any_row_has_a_value_or_a_sentence(values, column):
    row = tables.TableRow(1, "file, row 1", values)
    here = values
    try:
        for part in [column] if column in values else column.split("."):
            here = here[int(part)] if isinstance(here, list) and part.isdecimal() else dict(here)[part]
    except (LookupError, TypeError, ValueError):
        with pytest.raises(protocols.DataError, match=re.escape(f"file, row 1: no column {column!r}; ")):
            tables.value(row, column)
    else:
        assert tables.value(row, column) == here
