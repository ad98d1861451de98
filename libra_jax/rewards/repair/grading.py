"""Grades the files that policies left, by the hidden tests or calls of their tasks, and keeps a run's verdicts."""

from __future__ import annotations

import collections
import functools
import logging
from collections.abc import Mapping

from libra_jax import protocols
from libra_jax.rewards.repair import snapshots, suites
from libra_jax.tools import toolkit
from libra_jax.utils import deadlines, resolving

MORE_FILES = 2000
"""Number of files that a policy may add to a repository. One with more is refused, and its reward is 0."""

_VERDICTS = 4096
_log = logging.getLogger(__name__)


class Grader:
    """Grades the rollouts of one run. Equal files are judged once.

    Args:
      tools: Tools of the run, whose sandbox runs the tests.
      partial: Whether the reward is the share of tests that pass. Otherwise it is 1 if all pass, and 0 if not.
      seconds: Seconds that the tests may take. Slower ones have failed.
      most_bytes: Most bytes of the task's files.
    """

    def __init__(self, tools: toolkit.Toolkit, partial: bool, seconds: float, most_bytes: int) -> None:
        self._tools, self._partial, self._seconds, self._most_bytes = tools, partial, seconds, most_bytes
        self._verdicts: collections.OrderedDict[str, suites.SuiteVerdict] = collections.OrderedDict()
        self._unchanged: suites.UnchangedRuns = {}
        self._reasons = resolving.FirstFew(lambda sentence: _log.warning("%s", sentence))

    async def grade(
        self,
        task: protocols.Task,
        snapshot: snapshots.RepositorySnapshot,
        files: Mapping[str, snapshots.File],
        refused: str,
    ) -> protocols.Outcome:
        """Returns the reward of a rollout and its metrics.

        Args:
          task: Task with the hidden tests or calls.
          snapshot: The repository that the policy began with.
          files: Files that it left, by path.
          refused: Why its files were not taken. Empty if they were.
        """
        field = "" if task.payload.get("calls") else "tests"
        tests = await deadlines.off_loop(snapshots.of_task, task, field, self._most_bytes)
        suite = suites.Suite.from_payload(task.payload, tests.files, self._seconds)
        if len(files) > len(snapshot.files) + MORE_FILES:
            refused = f"more than {len(snapshot.files) + MORE_FILES} files"
        # Too large, or made unreadable: the policy did it, so this is a reward of 0 and not a crash.
        verdict, lines = suites.SuiteVerdict(0, suite.total, f"left files that were refused: {refused}"), 0
        if not refused:
            verdict = await self._judge(snapshot, files, suite)
            lines = await deadlines.off_loop(snapshots.changed_lines, snapshot.files, files)
        if refused or verdict.deceit or verdict.broke:
            self._reasons.tell(f"A rollout of {task.prompt_id} is worth 0: {resolving.loggable(verdict.problem)}")
        metrics = {
            "tests_passed": verdict.passed,
            "tests_total": verdict.total,
            "tests_overdue": verdict.overdue,
            "tests_deceived": verdict.deceit,
            "sandbox_broken": verdict.broke,
            "files_refused": bool(refused),
            "patch_lines": lines,
        }
        reward = verdict.share if self._partial else float(verdict.solved)
        return protocols.Outcome(reward, {name: float(value) for name, value in metrics.items()})

    async def _judge(
        self, snapshot: snapshots.RepositorySnapshot, workspace: Mapping[str, snapshots.File], suite: suites.Suite
    ) -> suites.SuiteVerdict:
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


grader = functools.lru_cache(maxsize=4)(Grader)
"""The same arguments share one grader, so that the rollouts of a run see each other's verdicts."""
