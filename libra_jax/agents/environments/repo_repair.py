"""Repairing a repository: the policy gets it with an issue, works on it with its tools, and hidden tests judge.

An attempt's sandbox begins with the repository's snapshot. The first output that calls no tool ends it: the sandbox's
files are taken over, the sandbox is ended, and hidden tests run on the files in another that the policy never saw
(`libra_jax/agents/repair/suites.py` has what holds there). The tests are in no sandbox before.

Tasks come from `libra_jax.agents.repair.planted:task_source`, made up, or from a file by `task_source` here, as
SWE-bench (arXiv 2310.06770) and R2E-Gym (arXiv 2504.07164) have them.
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
"""Files that an attempt may add to a repository; a workspace with more is refused, and the attempt has failed."""


class Repair:
    """What the attempts of one run share: settings, and the verdicts on files that were judged before."""

    def __init__(self, tools: toolkit.Toolkit, prompt: str, partial: bool, seconds: float, most_mib: int) -> None:
        self._tools, self._prompt, self._partial = tools, prompt, partial
        self._seconds, self._most_bytes = seconds, most_mib * 2**20
        self._verdicts: collections.OrderedDict[str, suites.Verdict] = collections.OrderedDict()
        self._unchanged: suites.Known = {}
        self._reasons = telling.FirstFew(lambda sentence: _log.warning("%s", sentence))

    async def pose(self, task: protocols.Task, box: toolbox.Toolbox) -> Sequence[protocols.Message]:
        """Puts the repository into the attempt's sandbox and shows the issue."""
        assert box.session is not None
        snapshot = await self._snapshot(task.payload)
        await box.session.begin(snapshot.pack())
        return [protocols.Message("user", self._prompt.replace("{issue}", task.payload["issue"]))]

    async def score(self, task: protocols.Task, answer: str, box: toolbox.Toolbox) -> dialogue.Verdict:
        """The hidden tests' verdict on the sandbox's files as they are."""
        del answer
        assert box.session is not None
        snapshot = await self._snapshot(task.payload)
        saved = await box.session.save(self._most_bytes)
        if saved.broken:
            raise protocols.WorkerLost(f"the attempt's sandbox died when its files were taken over: {saved.text}")
        await box.session.close()  # its place may be the only one that the tests can get
        try:
            if saved.status != "success":
                raise snapshots.Hostile(saved.text)
            most = len(snapshot.files) + MORE_FILES
            workspace = await deadlines.off_loop(snapshots.taken_over, saved.archive, self._most_bytes, most)
        except snapshots.Hostile as error:  # too much, or made so that it cannot be read: the policy's own doing
            verdict = suites.Verdict(0, len(_must_pass(task.payload)), f"left files that were refused: {error}")
            return self._told(task, verdict, 0.0, 0, refused=True)
        verdict = await self._judge(snapshot, workspace, await self._suite(task.payload))
        reward = verdict.share if self._partial else float(verdict.solved)
        lines = await deadlines.off_loop(snapshots.changed_lines, snapshot.files, workspace)
        return self._told(task, verdict, reward, lines)

    def _told(
        self, task: protocols.Task, verdict: suites.Verdict, reward: float, lines: int, *, refused: bool = False
    ) -> dialogue.Verdict:
        """The verdict with its metrics; the first attempts that came to nothing are logged with the reason."""
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
        if key in self._verdicts:  # most attempts at an easy task end alike
            self._verdicts.move_to_end(key)
            return self._verdicts[key]
        verdict = await suites.run(await self._tools.sandbox(), snapshot, workspace, suite, self._unchanged)
        if not (verdict.problem or verdict.overdue):  # a fault of this run may not recur in the next
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
        """The solved dialogue of a planted bug: a look at the file, the change, and a word."""
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
    """Returns the begin of a text that a policy may have written, for a log: escapes do nothing to a terminal."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[:_LONGEST_REASON])


def _must_pass(payload: Mapping[str, Any]) -> tuple[str, ...]:
    return (*payload.get("fail_to_pass", ()), *payload.get("pass_to_pass", ()))


def _tests(payload: Mapping[str, Any], most_bytes: int) -> Mapping[str, snapshots.File]:
    """The hidden tests' files, from where the task says that they are, or as it has them."""
    tests = payload["tests"]
    return (_read(tests, most_bytes) if isinstance(tests, str) else snapshots.Snapshot.of_texts(tests)).files


@functools.lru_cache(maxsize=64)
def _read(path: str, most_bytes: int) -> snapshots.Snapshot:
    """The attempts of a group come one after the other, and all want the same."""
    return snapshots.Snapshot.read(pathlib.Path(path), most_bytes)


def environment(
    tools: toolkit.Toolkit,
    prompt: str = PROMPT,
    system: str = "",
    partial: bool = False,
    test_seconds: float = 5.0,
    most_mib: int = 32,
) -> dialogue.Dialogue:
    """A fresh attempt.

    Args:
      tools: the run's; of those that work in a sandbox, at least one.
      prompt: what the policy is told; {issue} stands for the issue.
      system: system message; empty is none.
      partial: the reward is the share of the tests that pass, not 1 for all and 0 else.
      test_seconds: that the hidden tests may take, past which they have failed. At most half of `task.tool_seconds`:
        the unchanged repository may have to be judged, too, and code that hangs must not pass for an environment that
        does.
      most_mib: MiB of files that a repository may have, before and after.

    Raises:
      ConfigError: an argument is out of range, or there is no tool.
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
    """Repositories that a file of tasks names; its rows are checked when it is read."""

    def __init__(self, source: datasets.FileTasks, names: Mapping[str, str], path: str) -> None:
        self._source, self._names, self._path = source, names, path

    def __len__(self) -> int:
        """Training tasks of an epoch."""
        return len(self._source)

    def task(self, index: int) -> protocols.Task:
        """The index-th training task, over as many epochs as it takes."""
        return self._made(self._source.task(index))

    def evaluation_task(self, index: int) -> protocols.Task:
        """The index-th held-out task, over and over.

        Raises:
          DataError: nothing is held out.
        """
        return self._made(self._source.evaluation_task(index))

    def check(self) -> None:
        """Looks at every training task.

        Raises:
          DataError: one is malformed, or names what is not there; the message has file and row.
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
    if suites.telling_data(snapshots.Snapshot({}), tests):  # else there is no need to read the repository
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
    """Tasks from a file that `datasets.task_source` reads. Paths in it are from the file's own folder.

    Args:
      path: the file.
      seed: of the order of training tasks.
      issue_column: what the policy is told.
      repository_column: path of a directory or a tar, as the policy gets it.
      tests_column: path of a directory or a tar with the hidden tests' files, at their places in the repository; or the
        files themselves, a list of {"path", "text"}.
      fail_to_pass_column: list of names of tests that the fix makes pass (`tests/test_a.py::TestA::test_b`, or dotted);
        empty: all tests have to pass.
      pass_to_pass_column: of tests that pass already and still have to; empty: none.
      command_column: what runs the tests, from the repository's root. `pytest` reports by itself; any other runner has
        to print each test's name and outcome as `unittest -v` does. Empty: Python's `unittest` in the sandbox. Such
        tests bring no files besides Python's, but for those that the repository has anyway.
      holdout: share of the distinct issues kept for evaluation, at least one; 0 is none.

    Raises:
      ConfigError: no path, or `holdout` is out of range.
      DataError: the file is missing, empty or malformed, or names what is not there; with file and row.
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

    made(0.0).check()  # all rows are training tasks then
    return made(holdout)
