"""Tasks of repositories read from files, and the files that sandboxes of repairs give back."""

import asyncio
import dataclasses
import json
import pathlib
import tarfile

import pytest
import repairs
import sandboxes

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.environments import published, repo_repair
from libra_jax.rewards.repair import snapshots
from libra_jax.tools import toolkit
from libra_jax.tools.sandbox import pool
from libra_jax.utils import resolving


@pytest.fixture
def written(tmp_path):
    """A file of one task whose repository is a folder, and of one whose repository is a tar."""
    for folder, texts in (("repository", repairs.REPOSITORY), ("hidden", repairs.TESTS)):
        for path, text in texts.items():
            place = tmp_path / folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
    with tarfile.open(tmp_path / "repository.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "repository", "repository-1.0")
    rows = [
        {"issue": f"Sums are off in {name}.", "repository": name, "tests": "hidden",
         "FAIL_TO_PASS": list(repairs.NAMES), "command": command}
        for name, command in (("repository", ""), ("repository.tar.gz", repairs.COMMAND))
    ]  # fmt: skip

    def write(**changes):
        rows[1].update(changes)
        lines = [json.dumps({key: value for key, value in row.items() if value is not None}) for row in rows]
        (tmp_path / "tasks.jsonl").write_text("\n".join(lines) + "\n")
        return str(tmp_path / "tasks.jsonl")

    return write


def read(path, **arguments):
    arguments = {"fail_to_pass_column": "FAIL_TO_PASS", "command_column": "command", "holdout": 0.0, **arguments}
    return repo_repair.task_source(path, **arguments)


def test_tasks_of_a_file_are_attempted_from_folder_and_tar(written):
    source = read(written())
    assert len(source) == 2
    for index in range(2):
        *_, ended = repairs.attempted(repairs.REPAIR, task=source.task(index))
        assert ended.reward == 1.0


LISTED = [{"path": path, "text": text} for path, text in {**repairs.TESTS, "tests/sums.json": "[23, 2]"}.items()]


def test_tests_may_be_listed_and_bring_data(written):
    for changes in ({"tests": LISTED}, {"tests": LISTED, "command": ""}):
        source = read(written(**changes))
        (task,) = (task for task in map(source.task, range(2)) if isinstance(task.payload["tests"], dict))
        *_, ended = repairs.attempted(repairs.REPAIR, task=task)
        assert ended.reward == 1.0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"repository": "nowhere"}, r"tasks\.jsonl, row 2: column 'repository': .*nowhere is no directory and no tar"),
        ({"tests": "nowhere"}, r"tasks\.jsonl, row 2: column 'tests': .*nowhere is no directory"),
        ({"repository": None}, r"tasks\.jsonl, line 2: no column 'repository'"),
        ({"issue": None}, r"tasks\.jsonl, line 2: no column 'issue'"),
        ({"FAIL_TO_PASS": "test_a"}, r"row 2: column 'FAIL_TO_PASS' must be a list of tests' names"),
        ({"FAIL_TO_PASS": []}, r"row 2: a test command needs the names of tests"),
        ({"command": "python -m unittest"}, r"row 2: 'python -m unittest' does not say which tests pass; add -v"),
        ({"tests": []}, r"row 2: column 'tests' must hold one file at least"),
        ({"tests": [{"path": "../a.py", "text": ""}]}, r"row 2: column 'tests' must be .* inside the repository"),
        ({"tests": [{"path": "./a.py", "text": ""}]}, r"row 2: column 'tests' must be .* inside the repository"),
        ({"tests": [{"path": "a.py"}]}, r"row 2: column 'tests' must be .* and a `text`, not \{'path': 'a.py'\}"),
    ],
)
def test_a_row_that_cannot_be_attempted_is_a_sentence_that_names_it(written, changes, sentence):
    with pytest.raises(protocols.DataError, match=sentence):
        read(written(**changes))


CALLS = [
    {"function": "calc:add", "arguments": [20, 3], "value": 23},
    {"function": "calc:add", "arguments": ["a", 1], "raises": "TypeError"},
]


def test_calls_of_a_file_judge_instead_of_tests(written):
    source = read_calls(written, CALLS)
    assert repairs.attempted(repairs.REPAIR, task=source.task(0))[-1].metrics["tests_passed"] == 2.0
    assert repairs.attempted(task=source.task(0))[-1].metrics["tests_passed"] == 1.0


@pytest.mark.parametrize(
    "calls",
    [[], [1], [{"function": "calc", "arguments": [], "value": 1}], [{**CALLS[0], "raises": "KeyError"}],
     [{"function": "calc:add", "arguments": [1, 2]}], [{"function": "calc:add", "value": 1}]],
    ids=str,
)  # fmt: skip
def test_calls_that_say_no_result_are_refused_with_their_row(written, calls):
    with pytest.raises(protocols.DataError, match=r"tasks\.jsonl, row 1: column 'calls'"):
        read_calls(written, calls)


def read_calls(written, calls):
    place = pathlib.Path(written())
    rows = [{**json.loads(line), "calls": calls, "tests": None} for line in place.read_text().splitlines()]
    place.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read(str(place), calls_column="calls", fail_to_pass_column="", command_column="")


def test_a_converted_row_of_r2e_gym_is_attempted(tmp_path):
    """With pytest itself, but none of the plugins that are installed beside it here."""
    sandboxes.skip_without_bubblewrap()
    code = repairs.TESTS["tests/test_calc.py"]
    names = [name.partition("::")[2].replace("::", ".") for name in repairs.NAMES]
    row = {
        "repo_name": "calc",
        "docker_image": "someone/calc_final:1",
        "parsed_commit_content": json.dumps({"old_commit_hash": "a" * 40}),
        "execution_result_content": json.dumps({"test_file_names": ["test_1.py"], "test_file_codes": [code]}),
        "problem_statement": "Sums are off.",
        "expected_output_json": json.dumps(dict.fromkeys(names, "PASSED")),
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    known = published.DATASETS["r2e_gym"]
    (record,) = published.tasks(known, str(tmp_path / "rows.jsonl"), "train", published.Count())
    (tmp_path / "tasks.jsonl").write_text(json.dumps(record) + "\n")
    with tarfile.open(tmp_path / record["repository"], "w") as archive:
        for path, text in repairs.REPOSITORY.items():
            (tmp_path / path).write_text(text)
            archive.add(tmp_path / path, f"testbed/{path}")
    task = read(str(tmp_path / "tasks.jsonl"), fail_to_pass_column="fail_to_pass").task(0)
    packages = repairs.pytest_alone(tmp_path)

    async def body():
        with_pytest = dataclasses.replace(repairs.SANDBOX, packages=(packages,))
        async with toolkit.Toolkit(config_lib.ToolsConfig(use=("edit",), describe=False), with_pytest) as tools:
            environment = repo_repair.environment(tools, test_seconds=30.0)
            await environment.reset(task)
            await environment.step(tools.format.write(*repairs.REPAIR))
            ended = await environment.step("done")
            await environment.close()
            return ended.reward, ended.metrics["tests_passed"]

    assert asyncio.run(body()) == (1.0, 3.0)


def test_tasks_without_their_fix_have_no_demonstrations(written):
    source = read(written())

    async def work(tools):
        return repo_repair.environment(tools).demonstration(source.task(0))

    with pytest.raises(protocols.ConfigError, match=r"warm_start\.steps: must be 0: .* come without their fix"):
        repairs.with_tools(work)


def test_a_repository_that_is_none_is_refused(tmp_path):
    (tmp_path / "noise").write_text("noise")
    with pytest.raises(protocols.DataError, match="not readable as a tar"):
        snapshots.RepositorySnapshot.read(tmp_path / "noise", 1000)
    with pytest.raises(protocols.DataError, match="no such directory or tar"):
        snapshots.RepositorySnapshot.read(tmp_path / "nothing", 1000)
    with pytest.raises(protocols.DataError, match="takes more than 3 bytes"):
        snapshots.RepositorySnapshot.read(tmp_path, 3)


def test_a_reason_in_the_log_has_no_escapes_and_an_end():
    assert resolving.loggable("a\x1b[2Jb\n\u202e" + "c" * 999) == "a\\x1b[2Jb\\n\\u202e" + "c" * 292


def test_lines_of_a_large_file_are_counted_only(monkeypatch):
    monkeypatch.setattr(snapshots, "LONG_BYTES", 8)
    before, after = ({"a": snapshots.File(text)} for text in (b"1\n2\n", b"3\n4\n"))
    assert snapshots.changed_lines(before, after) == 4
    assert snapshots.changed_lines(before, {"a": snapshots.File(b"5\n" * 9)}) == 7


# What a session gives back ------------------------------------------------------------------------------------------


def test_a_session_gives_its_regular_files_back():
    sandboxes.skip_without_bubblewrap()

    async def work(sandbox, session):
        begun = snapshots.RepositorySnapshot.of_texts({"a/b.py": "1", "c": "2"}).pack()
        await session.begin(begun)
        untouched = await session.save(10_000)
        await session.shell("echo 3 >d; chmod +x d; rm c; ln -s d e; mkfifo f; mkdir g; ln d h")
        return begun, untouched, await session.save(100_000), await session.save(9000), await session.python("6 * 7")

    begun, untouched, saved, refused, after = sandboxes.with_session(work)
    assert untouched.archive == begun
    files, _ = snapshots.taken_over(saved, 100_000)
    assert {path: file.content for path, file in files.items()} == {"a/b.py": b"1", "d": b"3\n", "h": b"3\n"}
    assert (files["d"].executable, files["a/b.py"].executable) == (True, False)
    assert (refused.status, refused.archive) == ("failure", b"")
    assert refused.text == "error: the files take more than 9000 bytes"
    assert after.text == "42\n"


def test_an_examination_gets_a_sandbox_that_served_nothing_and_serves_nothing_after():
    sandboxes.skip_without_bubblewrap()

    async def body():
        async with pool.Sandbox(sandboxes.SMALL, warm=1) as sandbox:
            await sandbox.run("1")
            kept = list(sandbox._idle)
            files = snapshots.RepositorySnapshot.of_texts({"f": "x"}).pack()
            outcome = await sandbox.examine(files, "print(open('f').read())", 2.0)
            return outcome, kept, [live for live in sandbox._live if live not in sandbox._idle]

    outcome, kept, retired = asyncio.run(body())
    assert (outcome.status, outcome.text) == ("success", "x\n")
    assert not any(live.alive or live in kept for live in retired)
