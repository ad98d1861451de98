"""Repairing a repository: the policy gets the repository and an issue, changes files with its tools, and tests judge.

A rollout's sandbox starts with the repository's snapshot. The first output that calls no tool ends the rollout. The
sandbox's files are then copied and the sandbox is ended. Hidden tests, or calls, run on the copy in another sandbox,
which the policy never saw (`libra_jax/agents/repair/suites.py` has the rules there). No sandbox contains the tests
before, and none ever contains the right results of calls.

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
from collections.abc import Mapping, Sequence
from typing import Any

from libra_jax import config, protocols
from libra_jax.agents import datasets, deadlines, resolving
from libra_jax.agents.environments import dialogue
from libra_jax.agents.repair import calls, snapshots, suites
from libra_jax.agents.tools import toolbox, toolkit

PROMPT = (
    "The folder /workspace holds a repository. Resolve this issue by changing its files:\n\n{issue}\n\nWork with your "
    "tools. When you are done, say so in a message that calls none; hidden tests then run on the files. Your own tests "
    "and settings of test runners are left behind."
)

_VERDICTS = 4096
_log = logging.getLogger(__name__)


class Repair:
    """State that the rollouts of one run share: the settings, and earlier verdicts on the same files."""

    def __init__(self, tools: toolkit.Toolkit, prompt: str, partial: bool, seconds: float, most_mib: int) -> None:
        self._tools, self._prompt, self._partial = tools, prompt, partial
        self._seconds, self._most_bytes = seconds, most_mib * 2**20
        self._verdicts: collections.OrderedDict[str, suites.Verdict] = collections.OrderedDict()
        self._unchanged: suites.Known = {}
        self._reasons = resolving.FirstFew(lambda sentence: _log.warning("%s", sentence))

    async def pose(self, task: protocols.Task, box: toolbox.Toolbox) -> Sequence[protocols.Message]:
        """Puts the repository into the rollout's sandbox and returns the issue."""
        assert box.session is not None
        payload = task.payload
        given = payload["files"] if "files" in payload else payload["repository"]
        snapshot = await deadlines.off_loop(_files, given, self._most_bytes)
        # Only what the policy may see: the hidden tests never enter this sandbox.
        await box.session.begin(snapshot.pack())
        return [protocols.Message("user", self._prompt.replace("{issue}", payload["issue"]))]

    async def score(self, task: protocols.Task, answer: str, box: toolbox.Toolbox) -> dialogue.Verdict:
        """Returns the hidden tests' verdict on the sandbox's current files."""
        del answer
        assert box.session is not None
        payload, refused, lines = task.payload, False, 0
        tests = await deadlines.off_loop(_files, payload.get("tests", {}), self._most_bytes)
        suite = suites.Suite.from_payload(payload, tests.files, self._seconds)
        given = payload["files"] if "files" in payload else payload["repository"]
        snapshot = await deadlines.off_loop(_files, given, self._most_bytes)
        saved = await box.session.save(self._most_bytes)
        if saved.broken:
            raise protocols.WorkerLost(f"the rollout's sandbox died when its files were taken over: {saved.text}")
        await box.session.close()  # frees its place, which may be the only one that the tests can get
        try:
            if saved.status != "success":
                raise snapshots.Hostile(saved.text)
            most = len(snapshot.files) + suites.MORE_FILES
            workspace = await deadlines.off_loop(snapshots.taken_over, saved.archive, self._most_bytes, most)
        # Too large, or made unreadable: the policy did it, so this is a reward of 0 and not a crash.
        except snapshots.Hostile as error:
            refused = True
            verdict = suites.Verdict(0, len(suite.calls or suite.must_pass), f"left files that were refused: {error}")
        else:
            verdict = await self._judge(snapshot, workspace, suite)
            lines = await deadlines.off_loop(snapshots.changed_lines, snapshot.files, workspace)
        if refused or verdict.deceit or verdict.broke:
            self._reasons.tell(f"A rollout of {task.prompt_id} is worth 0: {resolving.loggable(verdict.problem)}")
        reward = 0.0 if refused else verdict.share if self._partial else float(verdict.solved)
        return dialogue.Verdict(reward, verdict.metrics(refused, lines))

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
            # The tool `edit` shows lines with their numbers.
            text = "".join(f"{number}\t{line}\n" for number, line in enumerate(text.splitlines(), 1))
        change = {"old": fix["old"], "new": fix["new"], "command": "replace", "path": path}
        calls = [(look, text), (write("edit", change), f"changed {path}")]
        issue = protocols.Message("user", self._prompt.replace("{issue}", task.payload["issue"]))
        return dialogue.solved([issue], calls, "done")


def _files(source: str | Mapping[str, str], most_bytes: int) -> snapshots.Snapshot:
    """Returns the files of a repository, or of hidden tests, from their path or their texts."""
    return _read(pathlib.Path(source), most_bytes) if isinstance(source, str) else snapshots.Snapshot.of_texts(source)


_read = functools.lru_cache(maxsize=64)(snapshots.Snapshot.read)
"""Cached, because the rollouts of a group run in sequence on the same repository."""


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
    # 1.9 and not 2: `call_seconds` is 95% of task.tool_seconds (`config.environments.SHARE_OF_CALLS`).
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


_shared = functools.lru_cache(maxsize=4)(Repair)
"""The same arguments share one object, so that the rollouts of a run see each other's verdicts."""


def _check_listed(tests: Sequence[Any], where: str) -> None:
    """Checks tests that a row gives as a list of files. Raises DataError if one is malformed, or there is none."""
    for file in tests:
        good = isinstance(file, Mapping) and all(isinstance(file.get(name), str) for name in ("path", "text"))
        if not (good and snapshots.is_inside(file["path"]) and posixpath.normpath(file["path"]) == file["path"]):
            raise protocols.DataError(
                f"{where} must be a path, or a list of files with a `path` inside the repository and a `text`, "
                f"not {file!r:.80}"
            )
    if not tests:
        raise protocols.DataError(f"{where} must hold one file at least")


def _check(payload: Mapping[str, Any], names: Mapping[str, str], where: str) -> None:
    """Checks a task of a file.

    Args:
      payload: Payload of the task.
      names: Columns by their name in the payload.
      where: File and row, for errors.

    Raises:
      DataError: A path does not exist, a list is malformed, or the tests cannot be judged.
    """
    for name in ("repository", "tests"):
        place = payload.get(name)
        if isinstance(place, str) and not pathlib.Path(place).exists():
            raise protocols.DataError(f"{where}: column {names[name]!r}: {place} is no directory and no tar")
    if "calls" in payload:
        calls.read(payload["calls"], f"{where}: column {names['calls']!r}")
        return
    for name in ("fail_to_pass", "pass_to_pass"):
        listed = payload[name]
        if not (isinstance(listed, list) and all(isinstance(test, str) for test in listed)):
            raise protocols.DataError(f"{where}: column {names[name]!r} must be a list of tests' names")
    if command := payload["test_command"]:
        if not payload["fail_to_pass"]:
            raise protocols.DataError(
                f"{where}: a test command needs the names of tests that have to pass; name their column as "
                "--config.task.arguments=\"{'fail_to_pass_column': 'FAIL_TO_PASS'}\""
            )
        verbose = any(word.startswith(("-v", "--verbose")) for word in str(command).split())
        if "unittest" in command and not verbose:
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
    calls_column: str = "",
    holdout: float = 0.05,
) -> datasets.FileTasks:
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
        itself. Other runners have to print each test's name and outcome like `unittest -v`. Empty: Python's `unittest`.
      calls_column: Column with a list of calls that judge instead of tests:
        {"function": "package.module:name", "arguments": [...], "value": ...}, with "raises" instead of "value" for
        the name of an exception. Empty: the tests judge.
      holdout: Share of the distinct issues that are kept for evaluation, at least one. 0 means none.

    Raises:
      ConfigError: No path is given, or `holdout` is out of range.
      DataError: The file is missing, empty or malformed, or names a path that does not exist. Has the file and the row.
    """
    names = {
        "repository": repository_column,
        "tests": "" if calls_column else tests_column,
        "calls": calls_column,
        "fail_to_pass": fail_to_pass_column,
        "pass_to_pass": pass_to_pass_column,
        "test_command": command_column,
    }
    columns = {name: column for name, column in names.items() if column}
    folder, rows = pathlib.Path(path).parent, []
    for number, values in datasets.read(path, issue_column, "", columns, "train", holdout):
        where, tests = f"{path}, row {number}", values.get("tests", "")
        listed = isinstance(tests, list)
        # Checked first: the payload takes the path and text of each file for granted.
        if listed:
            _check_listed(tests, f"{where}: column {tests_column!r}")
        judged: dict[str, Any] = {"calls": values.get("calls")}
        if not calls_column:
            judged = {
                "tests": {file["path"]: file["text"] for file in tests} if listed else str(folder / str(tests)),
                "fail_to_pass": values.get("fail_to_pass", []),
                "pass_to_pass": values.get("pass_to_pass", []),
                "test_command": values.get("test_command", ""),
            }
        payload = {"issue": values["prompt"], "repository": str(folder / str(values["repository"])), **judged}
        _check(payload, names, where)
        rows.append((number, payload))
    return datasets.FileTasks(path, seed, rows, holdout, prompt="issue")
