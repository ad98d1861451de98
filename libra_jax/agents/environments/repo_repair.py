"""Repairing a repository: the policy gets the repository and an issue, changes files with its tools, and tests judge.

A rollout's sandbox starts with the repository's snapshot. The first output that calls no tool ends the rollout. The
sandbox's files are then copied and the sandbox is ended. Hidden tests run on the copy in another sandbox, which the
policy never saw (`libra_jax/agents/repair/suites.py` has the rules there). No sandbox contains the tests before.

Generated tasks come from `libra_jax.agents.repair.planted:task_source`. Tasks in a file, as in SWE-bench (arXiv
2310.06770) and R2E-Gym (arXiv 2504.07164), come from `task_source` here.
"""

from __future__ import annotations

import collections
import functools
import logging
import math
import pathlib
import posixpath
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from libra_jax import config, protocols
from libra_jax.agents import datasets, deadlines, telling
from libra_jax.agents.environments import dialogue
from libra_jax.agents.repair import snapshots, suites
from libra_jax.agents.tools import toolbox, toolkit

PROMPT = (
    "The folder /workspace holds a repository. Resolve this issue by changing its files:\n\n{issue}\n\nWork with your "
    "tools. When you are done, say so in a message that calls none; hidden tests then run on the files. Your own tests "
    "and settings of test runners are left behind."
)

_VERDICTS = 4096
_LONGEST_REASON = 300
_log = logging.getLogger(__name__)

MORE_FILES = 2000
"""Number of files that a rollout may add to a repository.

A workspace with more files is refused, and its reward is 0.
"""


class Repair:
    """State that the rollouts of one run share: the settings, and earlier verdicts on the same files."""

    def __init__(self, tools: toolkit.Toolkit, prompt: str, partial: bool, seconds: float, most_mib: int) -> None:
        self._tools, self._prompt, self._partial = tools, prompt, partial
        self._seconds, self._most_bytes = seconds, most_mib * 2**20
        self._verdicts: collections.OrderedDict[str, suites.Verdict] = collections.OrderedDict()
        self._unchanged: suites.Known = {}
        self._reasons = telling.FirstFew(lambda sentence: _log.warning("%s", sentence))

    async def pose(self, task: protocols.Task, box: toolbox.Toolbox) -> Sequence[protocols.Message]:
        """Puts the repository into the rollout's sandbox and returns the issue."""
        assert box.session is not None
        snapshot = await self._snapshot(task.payload)
        await box.session.begin(snapshot.pack())
        return [protocols.Message("user", self._prompt.replace("{issue}", task.payload["issue"]))]

    async def score(self, task: protocols.Task, answer: str, box: toolbox.Toolbox) -> dialogue.Verdict:
        """Returns the hidden tests' verdict on the sandbox's current files."""
        del answer
        assert box.session is not None
        snapshot = await self._snapshot(task.payload)
        saved = await box.session.save(self._most_bytes)
        if saved.broken:
            raise protocols.WorkerLost(f"the attempt's sandbox died when its files were taken over: {saved.text}")
        await box.session.close()  # frees its place, which may be the only one that the tests can get
        try:
            if saved.status != "success":
                raise snapshots.Hostile(saved.text)
            most = len(snapshot.files) + MORE_FILES
            workspace = await deadlines.off_loop(snapshots.taken_over, saved.archive, self._most_bytes, most)
        # Too large, or made unreadable: the policy did it, so this is a reward of 0 and not a crash.
        except snapshots.Hostile as error:
            verdict = suites.Verdict(0, len(_must_pass(task.payload)), f"left files that were refused: {error}")
            return self._told(task, verdict, 0.0, 0, refused=True)
        verdict = await self._judge(snapshot, workspace, await self._suite(task.payload))
        reward = verdict.share if self._partial else float(verdict.solved)
        lines = await deadlines.off_loop(snapshots.changed_lines, snapshot.files, workspace)
        return self._told(task, verdict, reward, lines)

    def _told(
        self, task: protocols.Task, verdict: suites.Verdict, reward: float, lines: int, *, refused: bool = False
    ) -> dialogue.Verdict:
        """Returns the verdict with its metrics. Logs the reason for the first rollouts that were worth nothing."""
        if refused or verdict.deceit or verdict.broke:
            self._reasons.tell(f"An attempt at {task.prompt_id} is worth 0: {_plain(verdict.problem)}")
        metrics = {
            "tests_passed": float(verdict.passed),
            "tests_total": float(verdict.total),
            "tests_overdue": float(verdict.overdue),
            "tests_deceived": float(verdict.deceit),
            "sandbox_broken": float(verdict.broke),
            "files_refused": float(refused),
            "patch_lines": float(lines),
        }
        return dialogue.Verdict(reward, metrics)

    async def _judge(
        self, snapshot: snapshots.Snapshot, workspace: Mapping[str, snapshots.File], suite: suites.Suite
    ) -> suites.Verdict:
        key = await deadlines.off_loop(suites.digest, snapshot, workspace, suite)
        if key in self._verdicts:  # most rollouts of an easy task end with the same files
            # The verdict that was not used for the longest time is dropped first.
            self._verdicts.move_to_end(key)
            return self._verdicts[key]
        verdict = await suites.run(await self._tools.sandbox(), snapshot, workspace, suite, self._unchanged)
        if not (verdict.problem or verdict.overdue):  # a fault of this test run may not happen again
            self._verdicts[key] = verdict
            if len(self._verdicts) > _VERDICTS:
                self._verdicts.popitem(last=False)
        while len(self._unchanged) > _VERDICTS:
            del self._unchanged[next(iter(self._unchanged))]
        return verdict

    async def _snapshot(self, payload: Mapping[str, Any]) -> snapshots.Snapshot:
        if "files" in payload:
            return snapshots.Snapshot.of_texts(payload["files"])
        return await deadlines.off_loop(_read, payload["repository"], self._most_bytes)

    async def _suite(self, payload: Mapping[str, Any]) -> suites.Suite:
        tests = await deadlines.off_loop(_tests, payload, self._most_bytes)
        return suites.Suite(tests, _must_pass(payload), payload.get("test_command", ""), self._seconds)

    def demonstration(self, task: protocols.Task) -> Sequence[protocols.Message]:
        """Returns the solved dialogue of a planted bug: viewing the file, changing it, and a final word."""
        fix = task.payload.get("fix", {})
        config.check(
            bool(fix),
            "warm_start.steps",
            "must be 0: these tasks come without their fix, so there are no demonstrations",
        )
        config.check(
            "edit" in self._tools.names and not self._tools.describe,
            "warm_start.steps",
            "demonstrations of repairs take the tool 'edit' in tools.use, and tools.describe=False",
        )
        write, path = self._tools.format.write, fix["path"]
        text = task.payload["files"][path]
        look = write("shell", {"command": f"cat {path}"})
        if "shell" not in self._tools.names:
            look = write("edit", {"command": "view", "path": path})
            text = "".join(f"{number}\t{line}\n" for number, line in enumerate(text.splitlines(), 1))
        change = {"old": fix["old"], "new": fix["new"], "command": "replace", "path": path}
        return [
            protocols.Message("user", self._prompt.replace("{issue}", task.payload["issue"])),
            protocols.Message("assistant", look),
            protocols.Message("tool", text),
            protocols.Message("assistant", write("edit", change)),
            protocols.Message("tool", f"changed {path}"),
            protocols.Message("assistant", "done"),
        ]


def _plain(text: str) -> str:
    """Returns the beginning of a text that a policy may have written.

    It is safe to log: no escape reaches the terminal.
    """
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[:_LONGEST_REASON])


def _must_pass(payload: Mapping[str, Any]) -> tuple[str, ...]:
    return (*payload.get("fail_to_pass", ()), *payload.get("pass_to_pass", ()))


def _tests(payload: Mapping[str, Any], most_bytes: int) -> Mapping[str, snapshots.File]:
    """Returns the hidden tests' files, from the path or the texts in the task."""
    tests = payload["tests"]
    return (_read(tests, most_bytes) if isinstance(tests, str) else snapshots.Snapshot.of_texts(tests)).files


@functools.lru_cache(maxsize=64)
def _read(path: str, most_bytes: int) -> snapshots.Snapshot:
    """Returns the repository at a path.

    Cached, because the rollouts of a group run in sequence on the same repository.
    """
    return snapshots.Snapshot.read(pathlib.Path(path), most_bytes)


def environment(
    tools: toolkit.Toolkit,
    prompt: str = PROMPT,
    system: str = "",
    partial: bool = False,
    test_seconds: float = 5.0,
    most_mib: int = 32,
) -> dialogue.Dialogue:
    """Returns the environment for one rollout.

    Args:
      tools: Tools of the run. At least one must work in a sandbox.
      prompt: Prompt for the policy. {issue} stands for the issue.
      system: System message. Empty means none.
      partial: Whether the reward is the share of tests that pass. Otherwise it is 1 if all pass, and 0 if not.
      test_seconds: Seconds that the hidden tests may take. Slower tests have failed. At most half of
        `task.tool_seconds`, because the unchanged repository may have to be judged too, and hanging code must not look
        like a hanging environment.
      most_mib: Largest size of a repository's files in MiB, before and after the rollout.

    Raises:
      ConfigError: An argument is out of range, or there is no tool.
    """
    field = "task.environment_arguments"
    config.check("{issue}" in prompt, f"{field}.prompt", "must hold {issue}, in whose place the issue is put")
    good = 0 < test_seconds < math.inf
    config.check(good, f"{field}.test_seconds", f"must be positive and finite, not {test_seconds}")
    config.check(
        test_seconds <= tools.call_seconds / 1.9,
        f"{field}.test_seconds",
        f"must be at most half of task.tool_seconds, not {test_seconds}; raise task.tool_seconds",
    )
    config.check(most_mib > 0, f"{field}.most_mib", f"must be positive, not {most_mib}")
    config.check(bool(tools.names), "tools.use", "names no tool, and without one no file can be changed: add 'edit'")
    repair = _shared(tools, prompt, partial, test_seconds, most_mib)
    return dialogue.Dialogue(
        tools, repair.pose, repair.score, system=system, sandbox=True, demonstrate=repair.demonstration
    )


@functools.lru_cache(maxsize=4)
def _shared(tools: toolkit.Toolkit, prompt: str, partial: bool, seconds: float, most_mib: int) -> Repair:
    return Repair(tools, prompt, partial, seconds, most_mib)


class FileRepairs:
    """Tasks from a file that names repositories. The rows are checked when the file is read."""

    def __init__(self, source: datasets.FileTasks, names: Mapping[str, str], path: str) -> None:
        self._source, self._names, self._path = source, names, path

    def __len__(self) -> int:
        """Returns the number of training tasks in an epoch."""
        return len(self._source)

    def task(self, index: int) -> protocols.Task:
        """Returns the training task with this index. The index may go past the first epoch."""
        return self._made(self._source.task(index))

    def evaluation_task(self, index: int) -> protocols.Task:
        """Returns the held-out task with this index. Indices past the last task begin again.

        Raises:
          DataError: No task is held out.
        """
        return self._made(self._source.evaluation_task(index))

    def check(self) -> None:
        """Checks every training task.

        Raises:
          DataError: A row is malformed, or names a path that does not exist. The message has the file and the row.
        """
        for index in range(len(self)):
            row = self._source.task(index)
            where = f"{self._path}, row {row.prompt_id.rpartition('-')[2]}"
            if isinstance(row.payload["tests"], list):
                _check_listed(row.payload["tests"], f"{where}: column {self._names['tests']!r}")
            payload = self._made(row).payload
            for name in ("repository", "tests"):
                place = payload[name]
                if isinstance(place, str) and not pathlib.Path(place).exists():
                    column = self._names[name]
                    raise protocols.DataError(f"{where}: column {column!r}: {place} is no directory and no tar")
            for name in ("fail_to_pass", "pass_to_pass"):
                listed = payload[name]
                if not (isinstance(listed, list) and all(isinstance(test, str) for test in listed)):
                    column = self._names[name]
                    raise protocols.DataError(f"{where}: column {column!r} must be a list of tests' names")
            _check_command(payload, where)
            _check_data(payload, f"{where}: column {self._names['tests']!r}")

    def _made(self, row: protocols.Task) -> protocols.Task:
        folder = pathlib.Path(self._path).parent
        values, tests = row.payload, row.payload["tests"]
        listed = isinstance(tests, list)
        payload = {
            "issue": values["prompt"],
            "repository": str(folder / str(values["repository"])),
            "tests": {file["path"]: file["text"] for file in tests} if listed else str(folder / str(tests)),
            "fail_to_pass": values.get("fail_to_pass", []),
            "pass_to_pass": values.get("pass_to_pass", []),
            "test_command": values.get("test_command", ""),
        }
        return protocols.Task(row.prompt_id, payload)


_SAYS_NAMES = ("-v", "--verbose")


def _check_listed(tests: Sequence[Any], where: str) -> None:
    for file in tests:
        good = isinstance(file, Mapping) and all(isinstance(file.get(name), str) for name in ("path", "text"))
        if not (good and snapshots.is_inside(file["path"]) and posixpath.normpath(file["path"]) == file["path"]):
            raise protocols.DataError(
                f"{where} must be a path, or a list of files with a `path` inside the repository and a `text`, "
                f"not {file!r:.80}"
            )
    if not tests:
        raise protocols.DataError(f"{where} must hold one file at least")


def _check_data(payload: Mapping[str, Any], where: str) -> None:
    if payload["test_command"]:
        return
    tests = _tests(payload, sys.maxsize)
    if suites.telling_data(snapshots.Snapshot({}), tests):  # if the tests name no data, the repository need not be read
        snapshot = snapshots.Snapshot.read(pathlib.Path(payload["repository"]), sys.maxsize)
        if data := suites.telling_data(snapshot, tests):
            raise protocols.DataError(f"{where}: {suites.DATA.format(data)}")


def _check_command(payload: Mapping[str, Any], where: str) -> None:
    command = payload["test_command"]
    if not command:
        return
    if not payload["fail_to_pass"]:
        raise protocols.DataError(
            f"{where}: a test command needs the names of tests that have to pass; name their column as "
            "--config.task.arguments=\"{'fail_to_pass_column': 'FAIL_TO_PASS'}\""
        )
    silent = not any(word.startswith(_SAYS_NAMES) for word in str(command).split())
    if silent and "unittest" in command:
        raise protocols.DataError(f"{where}: {command!r} does not say which tests pass; add -v")


def task_source(
    path: str = "",
    seed: int = 0,
    issue_column: str = "issue",
    repository_column: str = "repository",
    tests_column: str = "tests",
    fail_to_pass_column: str = "",
    pass_to_pass_column: str = "",
    command_column: str = "",
    holdout: float = 0.05,
) -> FileRepairs:
    """Returns tasks from a file that `datasets.task_source` can read. Paths in it are relative to the file's folder.

    Args:
      path: Path of the file.
      seed: Seed of the order of training tasks.
      issue_column: Column with the issue.
      repository_column: Column with the path of a directory or tar, which is what the policy gets.
      tests_column: Column with the hidden tests: the path of a directory or tar, laid out like the repository, or the
        files themselves as a list of {"path", "text"}.
      fail_to_pass_column: Column with a list of tests that the fix makes pass (`tests/test_a.py::TestA::test_b`, or
        dotted). Empty: all tests have to pass.
      pass_to_pass_column: Column with a list of tests that already pass and must keep passing. Empty: none.
      command_column: Column with the command that runs the tests, from the repository's root. `pytest` reports by
        itself. Other runners have to print each test's name and outcome like `unittest -v`. Empty: Python's `unittest`
        in the sandbox, whose tests may bring only Python files, except for files that the repository has anyway.
      holdout: Share of the distinct issues that are kept for evaluation, at least one. 0 means none.

    Raises:
      ConfigError: No path is given, or `holdout` is out of range.
      DataError: The file is missing, empty or malformed, or names a path that does not exist. Has the file and the row.
    """
    names = {
        "repository": repository_column,
        "tests": tests_column,
        "fail_to_pass": fail_to_pass_column,
        "pass_to_pass": pass_to_pass_column,
        "test_command": command_column,
    }
    columns = {name: column for name, column in names.items() if column}

    def made(share: float) -> FileRepairs:
        source = datasets.task_source(
            path, seed, prompt_column=issue_column, answer_column="", holdout=share, columns=columns
        )
        return FileRepairs(source, names, path)

    made(0.0).check()  # with nothing held out, the check sees every row
    return made(holdout)
