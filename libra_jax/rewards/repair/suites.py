"""Judges a repository as a policy left it, in a sandbox that the policy never saw: by calls, or by a suite of tests.

Calls of functions (`calls.py`) are judged outside of the process that runs the policy's code. Nothing there is trusted.

A suite's tests import the tested code, so both share a process, which writes the report. The tests and their helpers
come from the task. The policy's files are copied next to them as data, except files that decide how tests run. No test
counts as passed if control tests, whose outcomes the host chose at random, have other outcomes, or if test files or
settings of runners changed. An expected failure passes only if the unchanged repository has it too; a skipped test
never does. What such a verdict still trusts is in docs/guides/repositories.md.

Without a command, Python's `unittest` runs the tests. With a command, such as `python -m pytest tests`, the project's
own runner does, as in SWE-bench and R2E-Gym. Data model of SWE-bench (arXiv 2310.06770): tests that fail before and
pass after, and tests that pass before and after.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import pathlib
import secrets
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from libra_jax import protocols
from libra_jax.rewards.repair import calls as calls_module
from libra_jax.rewards.repair import outcomes, snapshots
from libra_jax.tools.sandbox import limits, pool
from libra_jax.utils import deadlines

ATTEMPTS = 2
"""Number of sandboxes that a run may use, if one dies or a signal ends the tests."""

_CONTROLS = 4
PROGRAMS = {name: pathlib.Path(__file__).with_name(f"{name}.py").read_text() for name in ("runner", "unittest_report")}
"""Programs that a sandbox gets for the tests, as text."""
_OPERATORS_OF_SHELL = frozenset("|;&<>`$()\n")


@dataclass(frozen=True)
class Suite:
    """Hidden tests, or calls.

    Attributes:
      tests: Files by path.
      must_pass: Names of tests that have to pass. Empty: all tests, and at least one.
      command: Command that runs the tests in the workspace. Empty: `unittest` runs them.
      seconds: Seconds that a run may take. None: the limit of any call.
      calls: Calls that judge instead of tests. Empty: the tests judge.
    """

    tests: Mapping[str, snapshots.File]
    must_pass: Sequence[str] = ()
    command: str = ""
    seconds: float | None = None
    calls: Sequence[calls_module.ExpectedCall] = ()

    @property
    def total(self) -> int:
        """Number of tests or calls that must pass. 0 if only a run tells."""
        return len(self.calls or self.must_pass)

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any], tests: Mapping[str, snapshots.File], seconds: float) -> Suite:
        """Returns the suite of a task, whose test files are read already."""
        if payload.get("calls"):
            return cls({}, seconds=seconds, calls=calls_module.read(payload["calls"], "the task's field 'calls'"))
        must_pass = (*payload.get("fail_to_pass", ()), *payload.get("pass_to_pass", ()))
        return cls(tests, must_pass, payload.get("test_command", ""), seconds)


@dataclass(frozen=True)
class SuiteVerdict:
    """The verdict on a run.

    Attributes:
      passed: Number of tests that passed, of those that must.
      total: Number of tests that must pass. 0 if unknown, because the run had no result.
      problem: Why the run passed nothing, in a few words. Empty if it has a result.
      overdue: Whether the run took too long.
      deceit: Whether the tested code forged a report, or changed files of the tests.
      broke: Whether the tested code or its files ended the sandbox or did not fit into it.
    """

    passed: int
    total: int
    problem: str = ""
    overdue: bool = False
    deceit: bool = False
    broke: bool = False

    @property
    def solved(self) -> bool:
        """Whether all tests passed that must pass."""
        return 0 < self.total == self.passed

    @property
    def share(self) -> float:
        """Share of the tests that passed, of those that must."""
        return self.passed / self.total if self.total else 0.0


@dataclass(frozen=True)
class Findings:
    """The findings of one run.

    Attributes:
      outcomes: Outcome of each test, by name.
      problem: Why there is no result, in a few words. Empty if there is one.
      overdue: Whether the run took too long.
      forged: Whether the problem is a forged report, or a changed file of the tests.
      killed: Whether a signal ended the run. Its sender is unknown.
    """

    outcomes: Mapping[str, outcomes.Outcome] = field(default_factory=dict)
    problem: str = ""
    overdue: bool = False
    forged: bool = False
    killed: bool = False


UnchangedRuns = MutableMapping[str, asyncio.Task[Findings]]
"""Runs of unchanged repositories, by digest: those that are under way, and those that have a result."""


class _Died(Exception):
    """The sandbox ended during the tests, or the files did not fit into it."""


async def run(
    sandbox: pool.Sandbox,
    snapshot: snapshots.RepositorySnapshot,
    workspace: Mapping[str, snapshots.File],
    suite: Suite,
    unchanged_runs: UnchangedRuns | None = None,
) -> SuiteVerdict:
    """Runs hidden tests on a repository as a policy left it. The tested code is responsible for its effects on the run.

    If the sandbox dies, the run is repeated once. If it dies again, the unchanged repository is run right afterwards.
    If that run survives, the policy's files ended the sandbox. A run that signals end twice has ended itself, because
    this looks the same as the kernel's killer on a machine without memory. Such a verdict has a `problem` and holds for
    this run only.

    Args:
      sandbox: Pool that provides fresh sandboxes.
      snapshot: The original repository.
      workspace: Current files by path.
      suite: The tests.
      unchanged_runs: Findings on unchanged repositories, kept between calls. Belongs to one event loop.

    Raises:
      WorkerLost: Sandboxes did not start, or were killed while files were unpacked. Also if they died during the run
        and during that of the unchanged repository.
    """
    bench = _Bench(sandbox, snapshot, suite, {} if unchanged_runs is None else unchanged_runs)
    try:
        findings = await bench.findings(workspace)
    except _Died as death:
        try:
            # Now, because earlier findings say nothing about the machine's current state.
            unchanged = await bench.findings(snapshot.files, 0.5)
            if unchanged.killed:
                raise _Died(unchanged.problem)
        except _Died as error:
            raise protocols.WorkerLost(
                f"sandboxes died under the hidden tests ({death}), and under those of the unchanged repository "
                f"({error}); see that this machine has memory left, and sandbox.memory_mib"
            ) from error
        return SuiteVerdict(0, suite.total, f"ended the sandbox: {death}", broke=True)
    if findings.problem:
        return SuiteVerdict(0, suite.total, findings.problem, findings.overdue, findings.forged)
    required_tests = [outcomes.dotted(name) for name in suite.must_pass]
    before: Mapping[str, outcomes.Outcome] = {}
    if not suite.calls and (not required_tests or "xfailed" in findings.outcomes.values()):
        with contextlib.suppress(_Died):
            before = (await bench.unchanged()).outcomes
    files = [outcomes.dotted(f"{path}::") for path in suite.tests]
    required_tests = required_tests or _all_tests(findings.outcomes, before, files)
    # The tested code can cause a skip or an expected failure itself, so only those of the unchanged repository count.
    good = [
        name
        for name in required_tests
        if (outcome := findings.outcomes.get(name)) == "passed" or outcome == "xfailed" == before.get(name)
    ]
    return SuiteVerdict(len(good), len(required_tests))


def _all_tests(
    after: Mapping[str, outcomes.Outcome], before: Mapping[str, outcomes.Outcome], files: Sequence[str]
) -> list[str]:
    """Returns the tests that have to pass if a task names none: all of the suite, also those that did not run.

    A test that is skipped on the policy's files (`after`) and in the unchanged repository (`before`) is left out. So is
    a passed test that the unchanged repository does not have, unless it cannot import the file: the tested code may
    bring tests of its own.
    """
    # `unittest_report.py` names the import of a file, pytest the file. Tested code may name its tests anything.
    unloaded = tuple(file for file in files if before.keys() & {f"{file}import", file.removesuffix(".")})
    return [
        name
        for name in sorted(after.keys() | before.keys())
        if (name in after or not name.endswith(".import"))
        and not after.get(name) == before.get(name) == "skipped"
        and not (before and name not in before and after[name] == "passed" and not name.startswith(unloaded))
    ]


@dataclass(frozen=True)
class _Bench:
    """Judges files by one suite. Judges the unchanged repository at most once, and only if needed."""

    sandbox: pool.Sandbox
    snapshot: snapshots.RepositorySnapshot
    suite: Suite
    unchanged_runs: UnchangedRuns

    async def unchanged(self) -> Findings:
        """Returns the findings on the original repository, in half of the seconds of a run at most.

        Rollouts that ask at the same time share one run. Findings without a result are not kept.
        """
        key = await deadlines.off_loop(digest, self.snapshot, self.snapshot.files, self.suite)
        task = self.unchanged_runs.get(key)
        if task is None:

            def forget(test_run: asyncio.Task[Findings]) -> None:
                lost = test_run.cancelled() or test_run.exception() is not None or bool(test_run.result().problem)
                if lost and self.unchanged_runs.get(key) is test_run:
                    del self.unchanged_runs[key]

            task = asyncio.get_running_loop().create_task(self.findings(self.snapshot.files, 0.5))
            self.unchanged_runs[key] = task
            task.add_done_callback(forget)
        return await asyncio.shield(task)  # one caller's deadline must not cancel the run for the others

    async def findings(self, workspace: Mapping[str, snapshots.File], share: float = 1.0) -> Findings:
        """Returns the findings on some files.

        All tries together get the seconds of one run, so that tested code cannot outlast the caller's deadline. The
        first try may use them all. Before another try, the time that the sandbox took to start and unpack counts too.

        Args:
          workspace: Files by path.
          share: Share of the suite's seconds that all tries together may take.

        Raises:
          _Died: The sandboxes died, one after the other.
          WorkerLost: No sandbox started, or they were killed while files were unpacked.
        """
        findings: Findings | None = None
        max_seconds = share * self.sandbox.limits.of_call(self.suite.seconds)
        clock, remaining_seconds = asyncio.get_running_loop().time, max_seconds
        start = clock()
        for attempt in range(1, ATTEMPTS + 1):
            examination = await deadlines.off_loop(_Examination, self.snapshot, workspace, self.suite)
            try:
                outcome = await self.sandbox.examine(examination.files, examination.code, remaining_seconds)
            except pool.NotUnpacked as error:
                death = str(error)
            except protocols.WorkerLost:
                if attempt == ATTEMPTS or clock() - start > max_seconds / 2:
                    raise
            else:
                if outcome.broken or (outcome.by_code and outcome.status == "failure"):
                    death = outcome.text
                else:
                    # Off the loop, because a hostile report may be long.
                    findings = await deadlines.off_loop(examination.read, outcome)
            remaining_seconds = max_seconds - (clock() - start)
            if (findings is not None and not findings.killed) or remaining_seconds < max_seconds / 2:
                break
        if findings is None:
            raise _Died(death)
        return findings


def digest(snapshot: snapshots.RepositorySnapshot, workspace: Mapping[str, snapshots.File], suite: Suite) -> str:
    """Returns a digest of everything that a verdict depends on.

    The unchanged repository belongs to it: without named tests, its outcomes say which tests have to pass.
    """
    hasher = hashlib.sha256()
    for files in (snapshot.files, snapshots.for_tests(snapshot, workspace, suite.tests).files, suite.tests):
        for path in sorted(files):
            content = files[path].content
            # The length keeps the boundaries between files unambiguous.
            hasher.update(f"{path!r} {len(content)} {files[path].executable}".encode(errors="surrogateescape"))
            hasher.update(content)
    hasher.update(repr((tuple(suite.must_pass), suite.command, suite.seconds, suite.calls)).encode())
    return hasher.hexdigest()


class _Examination:
    """One run. A sandbox gets `files` and `code`, and `read` interprets its answer."""

    def __init__(
        self, snapshot: snapshots.RepositorySnapshot, workspace: Mapping[str, snapshots.File], suite: Suite
    ) -> None:
        self._suite, self._secret = suite, secrets.token_hex(16)
        self._controls: dict[str, bool] = {}
        self._modules: dict[str, str] = {}
        tests = dict(suite.tests)
        for path, file in suite.tests.items():
            name = path.rpartition("/")[2]
            named = name.startswith("test")
            if not (name.endswith(".py") and (named or self._runs(name, file))):
                continue
            # Control tests at the file's end: their outcomes are known, so a report with other outcomes is forged.
            lines, case = ["", "import unittest as _unittest", ""], f"Test{secrets.token_hex(8).title()}"
            lines.append(f"class {case}(_unittest.TestCase):")
            for place in range(_CONTROLS):
                test, check = self._control(f"{path}::{case}", place)
                lines += [f"    def {test}(self):", f"        {check}"]
            # Other runners do not run plain functions, and other files may be imported with all of their functions.
            if named and (not suite.command or "pytest" in suite.command):
                for place in range(2):
                    test, check = self._control(path, place)
                    lines += [f"def {test}():", f"    {check}"]
            tests[path] = snapshots.File(file.content + "\n".join(lines).encode() + b"\n", file.executable)
        files = snapshots.for_tests(snapshot, workspace, tests)
        self.files = files.pack()
        if suite.calls:
            self.code = calls_module.code(suite.calls, pool.EXAMINATION_OUTPUT_BYTES)
            return
        request = {
            "secret": self._secret,
            "command": suite.command,
            "unittest": PROGRAMS["unittest_report"],
            "most_bytes": pool.EXAMINATION_OUTPUT_BYTES,
            "tests": list(tests),
            "added": snapshots.new_modules(snapshot, tests, files.files),
            "startup": [name for name in snapshots.OWNED if not name.endswith((".pyc", ".pyo"))],
        }
        # Not with the workspace on the path: a module of the repository's own may have the name of a standard one.
        self.code = (
            f"import sys\ndel sys.path[0]\nexec({PROGRAMS['runner']!r})\nmain(json.loads({json.dumps(request)!r}))\n"
        )

    def _runs(self, name: str, file: snapshots.File) -> bool:
        """Returns whether tests of a file run whose name does not begin with "test". pytest takes `*_test.py`."""
        is_collected = not self._suite.command or ("pytest" in self._suite.command and name.endswith("_test.py"))
        return is_collected and b"def test" in file.content

    def _control(self, where: str, place: int) -> tuple[str, str]:
        """Returns name and body of a control test. The first passes; of those that fail, one is of each form."""
        good = place == 0 or (place > 2 and secrets.randbelow(2) == 1)
        first = secrets.token_hex(4)
        second = first if good else secrets.token_hex(4)
        test = f"test_{secrets.token_hex(8)}"
        name = outcomes.dotted(f"{where}::{test}")
        self._controls[name] = good
        self._modules[name] = outcomes.dotted(f"{where.partition('::')[0]}::").removesuffix(".")
        # A plain function, which has no `self` to assert with.
        if where.endswith(".py"):
            return test, f"assert {first!r} == {second!r}"
        forms = (f"self.assertEqual({first!r}, {second!r})", f"assert {first!r} == {second!r}")
        return test, forms[place - 1] if place in (1, 2) else secrets.choice(forms)

    def read(self, outcome: limits.SandboxOutcome) -> Findings:
        """Returns the findings of a run from its sandbox's outcome."""
        if outcome.status == "timeout":
            return Findings(problem=outcome.text or "took too long", overdue=True)
        killed = outcome.status == "failure" and "ended by signal" in outcome.text
        if self._suite.calls and not killed:
            right = calls_module.judge(self._suite.calls, outcome.text)
            return Findings({name: "passed" if good else "failed" for name, good in right.items()})
        try:
            answer = json.loads(outcome.text) if outcome.status == "success" else {}
        except (ValueError, RecursionError):
            answer = {}
        if not isinstance(answer, dict) or answer.get("secret") != self._secret:
            return Findings(problem=f"the tests have no result: {limits.cut(outcome.text, 200)}", killed=killed)
        if answer.get("problem"):
            return Findings(problem=str(answer["problem"]))
        if answer["touched"]:
            return Findings(problem=f"{answer['touched'][0]} was touched while the tests ran", forged=True)
        junit = answer.get("junit")
        if junit is None and (not self._suite.command or "pytest" in self._suite.command):
            return Findings(problem="the runner wrote no report", forged=True)  # one that runs to its end does
        try:
            results = outcomes.printed(str(answer.get("printed", ""))) if junit is None else outcomes.of_junit(junit)
        except ValueError as error:
            return Findings(problem=str(error), forged=True)
        for name, good in self._controls.items():
            # Our own runner reports a module whose import failed, so its controls could not run. Other runners do not
            # report it.
            module = self._modules[name]
            unloaded = not self._suite.command and f"{module}.import" in results
            # A project may set other names of test files. None of the tests in such a file passes, then.
            if not module.rpartition(".")[2].startswith("test"):
                unloaded |= not any(test.startswith(f"{module}.") for test in results)
            if results.get(name) != ("passed" if good else "failed") and not (unloaded and name not in results):
                return Findings(
                    problem="tests that must pass or fail in any case did not, or were not run", forged=True
                )
        simple = self._suite.command and not _OPERATORS_OF_SHELL & set(self._suite.command)
        # A simple command must fail, because some controls fail in every run.
        if simple and self._controls and answer.get("status") == 0:
            return Findings(problem="the test command ended with status 0 although a test failed", forged=True)
        return Findings({name: outcome for name, outcome in results.items() if name not in self._controls})
