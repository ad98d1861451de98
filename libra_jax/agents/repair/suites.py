"""Hidden tests: laid over what a policy left, run in a sandbox that it never saw, and their verdict.

Two ways. Without a command, Python's `unittest` runs them in a process that the tested code cannot reach, not even by
being imported (`examiner.py`): what that code does to its own process decides nothing, and there is no file for it to
read the answers from: hidden data besides Python is refused (`telling_data`). With a command, such as
`python -m pytest -rA tests`, the project's own runner imports the tested code, as SWE-bench and R2E-Gym have it. What
the policy planted around its code is gone then, too; but code that was written to deceive the very process that judges
it can be caught only. So controls are mixed into the tests: some that have to pass, and some that have to fail, by a
coin tossed on the host. A run in which one comes out wrong or is not reported at all passes nothing.

Data model of SWE-bench (arXiv 2310.06770): tests that fail before and pass after, and those that pass before and after.
"""

from __future__ import annotations

import functools
import hashlib
import json
import pathlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from libra_jax import config, protocols
from libra_jax.agents.repair import examiner, snapshots
from libra_jax.agents.sandbox import limits, pool

ATTEMPTS = 2
"""Sandboxes that a run may take, where one dies of itself or the run is killed from somewhere."""

_CONTROLS = 4
_ANSWER_BYTES = 128  # of an answer, besides a letter for each control
_BOOT = (
    "import sys, types\n"
    "workspace = sys.path.pop(0)\n"  # before anything is imported: nothing of the policy's may be
    "package = sys.modules['libra_jax.agents.repair'] = types.ModuleType('package')\n"
    "for name, source in PROGRAMS.items():\n"
    "    module = types.ModuleType(name)\n"
    "    exec(compile(source, name, 'exec'), module.__dict__)\n"
    "    setattr(package, name, module)\n"
    "package.examiner.main(REQUEST, workspace, PROGRAMS['server'])\n"
)


@dataclass(frozen=True)
class Suite:
    """Hidden tests.

    Attributes:
      tests: files by path.
      must_pass: names of tests that have to pass; empty: all that there are, and at least one.
      command: runs them, from the workspace; empty: `unittest`, apart from what it tests.
      seconds: that a run may take; None: as any call.
    """

    tests: Mapping[str, snapshots.File]
    must_pass: Sequence[str] = ()
    command: str = ""
    seconds: float | None = None


@dataclass(frozen=True)
class Verdict:
    """What a run came to.

    Attributes:
      passed: tests that passed, of those that must.
      total: tests that must pass; 0 where no one knows how many there are, as nothing came of the run.
      problem: what befell the run, in a few words; empty: nothing.
      overdue: it took too long.
    """

    passed: int
    total: int
    problem: str = ""
    overdue: bool = False

    @property
    def solved(self) -> bool:
        """Whether every test passed that must."""
        return 0 < self.total == self.passed

    @property
    def share(self) -> float:
        """Of the tests that must pass, those that do."""
        return self.passed / self.total if self.total else 0.0


async def run(
    sandbox: pool.Sandbox, snapshot: snapshots.Snapshot, workspace: Mapping[str, snapshots.File], suite: Suite
) -> Verdict:
    """Runs hidden tests on a repository as a policy left it. What the tested code does to the run is its own fault.

    So is a run that a signal ended, if the second one ends so too: code can kill itself, and no one can tell that from
    the kernel's killer where a machine is out of memory. Such a verdict has its `problem`, and holds for this run only.

    Args:
      sandbox: where fresh ones come from.
      snapshot: the repository as it was.
      workspace: files as they are now, by path.
      suite: the tests.

    Raises:
      ConfigError: the tests bring hidden data and no command, or `sandbox.output_bytes` are too few.
      WorkerLost: sandboxes died under the run, one after the other.
    """
    data = telling_data(snapshot, suite.tests)
    config.check(
        bool(suite.command) or not data, "task.arguments.command_column", f"must name a command: {DATA.format(data)}"
    )
    for attempt in range(ATTEMPTS):
        examination = _Examination(snapshot, workspace, suite)
        config.check(
            examination.answer_bytes <= sandbox.limits.output_bytes,
            "sandbox.output_bytes",
            f"{sandbox.limits.output_bytes} are too few for a verdict on {len(suite.tests)} hidden files; make it "
            f"{examination.answer_bytes}",
        )
        outcome = await sandbox.examine(examination.files, examination.code, suite.seconds)
        last = attempt + 1 == ATTEMPTS
        if outcome.broken and last:
            raise protocols.WorkerLost(
                f"{ATTEMPTS} sandboxes died under the hidden tests, the last one with {outcome.text!r}; see that this "
                "machine has memory left, and sandbox.memory_mib"
            )
        killed = outcome.status == "failure" and "ended by signal" in outcome.text  # by whom, no one can tell
        if not outcome.broken and (last or not killed):
            return examination.judge(outcome)
    raise AssertionError("unreachable")


DATA = (
    "the hidden tests bring {!r}, which the tested code could read where it runs apart from them; give the task a test "
    "command, or have the file in the repository, where the policy sees it too"
)
"""Why data that `telling_data` finds are refused."""


def telling_data(snapshot: snapshots.Snapshot, tests: Mapping[str, snapshots.File]) -> str:
    """Path of hidden data, if the tests bring any besides what the repository has anyway; empty: they bring none.

    Python files are run from memory. Other files would have to lie where the tests, and so the tested code, open them.
    """
    for path, file in tests.items():
        known = snapshot.files.get(path)
        if not path.endswith(".py") and file.content and (known is None or known.content != file.content):
            return path
    return ""


def digest(snapshot: snapshots.Snapshot, workspace: Mapping[str, snapshots.File], suite: Suite) -> str:
    """Of all that a verdict depends on."""
    found = hashlib.sha256()
    for files in (snapshots.for_tests(snapshot, workspace, suite.tests).files, suite.tests):
        for path in sorted(files):
            content = files[path].content
            found.update(f"{path!r} {len(content)} {files[path].executable}".encode(errors="surrogateescape"))
            found.update(content)
    found.update(repr((tuple(suite.must_pass), suite.command, suite.seconds)).encode())
    return found.hexdigest()


class _Examination:
    """One run: `files` and `code` are what a sandbox gets; `judge` reads what it says."""

    def __init__(self, snapshot: snapshots.Snapshot, workspace: Mapping[str, snapshots.File], suite: Suite) -> None:
        self._suite, self._secret = suite, secrets.token_hex(16)
        self._controls: dict[str, bool] = {}
        tests = {path: self._controlled(path, file) for path, file in suite.tests.items()}
        made_up = snapshots.for_tests(snapshot, workspace, tests)
        self.files = made_up.pack()
        wanted = [examiner.dotted(name) for name in suite.must_pass]
        sources = {path: file.content.decode(errors="replace") for path, file in tests.items() if path.endswith(".py")}
        request = {
            "secret": self._secret,
            "command": suite.command,
            "sources": {} if suite.command else sources,
            "roots": snapshots.top_modules(path for path in made_up.files if path not in tests),
            "own": snapshots.top_modules(snapshot.files),
            "wanted": wanted,
            "controls": list(self._controls),
        }
        self.code = f"REQUEST, PROGRAMS = {(json.dumps(request), programs())!r}\n{_BOOT}"

    @property
    def answer_bytes(self) -> int:
        """How long the answer gets, at most: however many tests there are, it counts them."""
        return len(self._controls) + _ANSWER_BYTES

    def _controlled(self, path: str, file: snapshots.File) -> snapshots.File:
        """The file with controls, where a command will run it."""
        name = path.rpartition("/")[2]
        if not self._suite.command or not (name.startswith("test") and name.endswith(".py")):
            return file
        lines, case = ["", "import unittest as _unittest", ""], f"Test{secrets.token_hex(8).title()}"
        lines.append(f"class {case}(_unittest.TestCase):")
        for place in range(_CONTROLS):
            good = place == 0 or (place > 1 and secrets.randbelow(2) == 1)  # one of each kind at least
            left = secrets.token_hex(4)
            right = left if good else secrets.token_hex(4)
            check = secrets.choice((f"self.assertEqual({left!r}, {right!r})", f"assert {left!r} == {right!r}"))
            method = f"test_{secrets.token_hex(8)}"
            lines += [f"    def {method}(self):", f"        {check}"]
            self._controls[examiner.dotted(f"{path}::{case}::{method}")] = good
        return snapshots.File(file.content + "\n".join(lines).encode() + b"\n", file.executable)

    def judge(self, outcome: limits.Outcome) -> Verdict:
        """The verdict on what the sandbox said; whatever is not as it should be passes nothing."""
        total = len(self._suite.must_pass)
        if outcome.status == "timeout":
            return Verdict(0, total, outcome.text, overdue=True)
        try:
            answer = json.loads(outcome.text) if outcome.status == "success" else {}
        except (ValueError, RecursionError):
            answer = {}
        if not isinstance(answer, dict) or answer.get("secret") != self._secret:
            return Verdict(0, total, f"the tests came to nothing: {limits.cut(outcome.text, 200)}")
        if answer["controls"] != "".join("FP"[good] for good in self._controls.values()):
            return Verdict(0, total, "tests that must fail or pass in any case came out otherwise, or were not run")
        return Verdict(answer["passed"], answer["total"])


@functools.cache
def programs() -> dict[str, str]:
    """What a sandbox under test is handed, each after those that it needs."""
    here = pathlib.Path(examiner.__file__).parent
    return {name: (here / f"{name}.py").read_text() for name in ("server", "standins", "examiner")}
