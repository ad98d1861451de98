"""Repairing a repository: the policy gets the repository and an issue, changes files with its tools, and tests judge.

A rollout's sandbox starts with the repository's snapshot. The first output that calls no tool ends the rollout. The
sandbox's files are then copied and the sandbox is ended. Hidden tests, or calls, run on the copy in another sandbox,
which the policy never saw (`libra_jax/rewards/repair/suites.py` has the rules there). No sandbox contains the tests
before, and none ever contains the right results of calls.

Generated tasks come from `libra_jax.examples.planted:task_source`. Tasks in a file, as in SWE-bench (arXiv
2310.06770) and R2E-Gym (arXiv 2504.07164), come from `task_source` here.
"""

from __future__ import annotations

import math
import pathlib
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.environments import datasets, dialogue
from libra_jax.rewards.repair import calls, grading, snapshots
from libra_jax.tools import toolbox, toolkit
from libra_jax.utils import deadlines

PROMPT = (
    "The folder /workspace holds a repository. Resolve this issue by changing its files:\n\n{issue}\n\nWork with your "
    "tools. When you are done, say so in a message that calls none; hidden tests then run on the files. Your own tests "
    "and settings of test runners are left behind."
)


@dataclass(frozen=True)
class _Repair:
    """Poses the issues of a run, and takes over the repaired files. `environment` documents the fields."""

    tools: toolkit.Toolkit
    prompt: str
    most_bytes: int
    grader: grading.Grader

    async def _snapshot(self, task: protocols.Task) -> snapshots.RepositorySnapshot:
        field = "files" if "files" in task.payload else "repository"
        return await deadlines.off_loop(snapshots.of_task, task, field, self.most_bytes)

    async def pose(self, task: protocols.Task, box: toolbox.Toolbox) -> Sequence[protocols.Message]:
        """Puts the repository into the rollout's sandbox and returns the issue."""
        assert box.session is not None
        # Only what the policy may see: the hidden tests never enter this sandbox.
        await box.session.begin((await self._snapshot(task)).pack())
        return [protocols.Message("user", self.prompt.replace("{issue}", task.payload["issue"]))]

    async def score(self, task: protocols.Task, answer: str, box: toolbox.Toolbox) -> dialogue.Verdict:
        """Returns the hidden tests' verdict on the sandbox's current files."""
        del answer
        assert box.session is not None
        snapshot = await self._snapshot(task)
        saved = await box.session.save(self.most_bytes)
        await box.session.close()  # frees its place, which may be the only one that the tests can get
        files, refused = await deadlines.off_loop(snapshots.taken_over, saved, self.most_bytes)
        outcome = await self.grader.grade(task, snapshot, files, refused)
        return dialogue.Verdict(outcome.reward, outcome.metrics)

    def demonstration(self, task: protocols.Task) -> Sequence[protocols.Message]:
        """Returns the solved dialogue of a planted bug: viewing the file, changing it, and a final word."""
        fix = task.payload.get("fix", {})
        config_lib.check(
            bool(fix),
            "warm_start.steps",
            "must be 0: these tasks come without their fix, so there are no demonstrations",
        )
        config_lib.check(
            "edit" in self.tools.names and not self.tools.describe,
            "warm_start.steps",
            "demonstrations of repairs take the tool 'edit' in tools.use, and tools.describe=False",
        )
        write, path = self.tools.format.write, fix["path"]
        text = task.payload["files"][path]
        look = write("shell", {"command": f"cat {path}"})
        if "shell" not in self.tools.names:
            look = write("edit", {"command": "view", "path": path})
            # The tool `edit` shows lines with their numbers.
            text = "".join(f"{number}\t{line}\n" for number, line in enumerate(text.splitlines(), 1))
        change = {"old": fix["old"], "new": fix["new"], "command": "replace", "path": path}
        steps = [(look, text), (write("edit", change), f"changed {path}")]
        issue = protocols.Message("user", self.prompt.replace("{issue}", task.payload["issue"]))
        return dialogue.solved([issue], steps, "done")


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
    """
    field = "task.environment_arguments"
    config_lib.check("{issue}" in prompt, f"{field}.prompt", "must hold {issue}, in whose place the issue is put")
    good = 0 < test_seconds < math.inf
    config_lib.check(good, f"{field}.test_seconds", f"must be positive and finite, not {test_seconds}")
    # 1.9 and not 2: `call_seconds` is 95% of task.tool_seconds (`config.environments.SHARE_OF_CALLS`).
    config_lib.check(
        test_seconds <= tools.call_seconds / 1.9,
        f"{field}.test_seconds",
        f"must be at most half of task.tool_seconds, not {test_seconds}; raise task.tool_seconds",
    )
    config_lib.check(most_mib > 0, f"{field}.most_mib", f"must be positive, not {most_mib}")
    config_lib.check(
        bool(tools.names), "tools.use", "names no tool, and without one no file can be changed: add 'edit'"
    )
    most_bytes = most_mib * 2**20
    repair = _Repair(tools, prompt, most_bytes, grading.grader(tools, partial, test_seconds, most_bytes))
    return dialogue.Dialogue(
        tools, repair.pose, repair.score, system=system, sandbox=True, demonstrate=repair.demonstration
    )


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
    """Checks a task of a file. `names` has the columns by their name in the payload; `where` has file and row."""
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
