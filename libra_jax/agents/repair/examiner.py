"""The process that runs hidden tests in a sandbox and says which of them pass; the tested code runs in another.

Handed to the sandbox as text, after `server.py` and `standins.py`: standard library only. It cannot be traced or read
by what it tests, and alone holds the descriptor that it answers on. The tests' Python files are taken into memory;
where they run here, they are gone from the disk before anything of the repository starts. Other files of theirs stay:
they are no secret then (`suites.telling_data`).

Tests import the repository's modules as they always do, and get stand-ins. So neither a patched `unittest`, nor a
printed "ok", nor an early exit, nor an object that equals everything can make a test pass.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.machinery
import io
import json
import os
import re
import subprocess
import sys
import types
import unittest
from collections.abc import Mapping
from typing import Any

from libra_jax.agents.repair import standins

_PR_SET_DUMPABLE = 4


def seclude() -> int:
    """Keeps everyone else's hands off this process; where its answer goes, which no child inherits."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    answer, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for target in (0, 1, 2):
        os.dup2(nothing, target)
    return answer


class Result(unittest.TestResult):
    """Who passed, by name. A name that is there several times has to pass each time."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self.passed: dict[str, bool] = {}
        self._running: dict[unittest.TestCase, bool] = {}

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._running[test] = False

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        name = _name(test)
        self.passed[name] = self._running.pop(test) and self.passed.get(name, True)

    def addError(self, test: unittest.TestCase, error: Any) -> None:
        super().addError(test, error)
        if test not in self._running:  # what goes before or after the tests of a class or module
            self.passed[_name(test)] = False

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._running[test] = True

    def addExpectedFailure(self, test: unittest.TestCase, error: Any) -> None:
        self._running[test] = True


def _name(test: unittest.TestCase) -> str:
    return str(getattr(test, "libra_name", "") or test.id())


def _suite(module: types.ModuleType) -> unittest.TestSuite:
    """Its test cases, and its functions named test_..., which take nothing."""
    suite = unittest.TestSuite([unittest.defaultTestLoader.loadTestsFromModule(module)])
    for name, value in list(vars(module).items()):
        if name.startswith("test_") and isinstance(value, types.FunctionType) and not value.__code__.co_argcount:
            test = unittest.FunctionTestCase(value)
            test.libra_name = f"{module.__name__}.{name}"  # type: ignore[attr-defined]
            suite.addTest(test)
    return suite


def _in_memory(request: Mapping[str, Any], workspace: str) -> dict[str, tuple[str, str]]:
    """The hidden modules by name, with their path; their files are gone from the disk."""
    found = {}
    for path, source in request["sources"].items():
        place = os.path.join(workspace, path)
        os.unlink(place)
        name = path.removeprefix("src/").removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        found[name] = (place, source)
    return found


def _path(workspace: str) -> list[str]:
    """Where the repository's process looks for modules first."""
    packages = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [os.path.join(workspace, "src"), workspace, *filter(None, packages)]


def isolated(request: Mapping[str, Any], workspace: str, source: str) -> dict[str, bool]:
    """Runs the hidden tests here, and the repository beside; which of them pass."""
    tests = _in_memory(request, workspace)
    link = standins.Link(source, _path(workspace))
    result = Result()
    try:
        found_elsewhere = {name for name in request["roots"] if importlib.machinery.PathFinder.find_spec(name)}
        roots = set(request["roots"]) - (found_elsewhere - set(request["own"]))  # nothing takes a package's place
        sys.meta_path.insert(0, standins.Finder(tests, roots, link))
        for name in tests:
            try:
                module = importlib.import_module(name)
            except BaseException:
                result.passed[f"{name}.import"] = False
                continue
            _suite(module).run(result)
    finally:
        link.close()
    return result.passed


_PYTEST = (
    re.compile(r"^(?P<test>\S+\.py(?:::\S+)+) (?P<word>PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b"),
    re.compile(r"^(?P<word>PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (?P<test>\S+\.py(?:::\S+)+)"),
)
_UNITTEST = re.compile(r"^(?P<bad>(?:FAIL|ERROR): )?(?P<test>\w+) \((?P<where>[\w.]+)\)")
_OUTCOME = re.compile(r"^(?:.* \.\.\. )?(?P<word>ok|FAIL|ERROR|skipped .*|expected failure|unexpected success)$")
_GOOD = ("ok", "expected failure", "PASSED", "XFAIL")


def dotted(name: str) -> str:
    """A test's name as `unittest` writes it, of one that is perhaps pytest's."""
    return name.removeprefix("src/").replace(".py::", ".").replace("::", ".").replace("/", ".")


def reported(text: str) -> dict[str, bool]:
    """Which tests pass by what `unittest -v`, `pytest -v` or `pytest -rA` write; any report to the contrary counts.

    Between a test's name and its outcome `unittest` may have its docstring, and whatever it printed.
    """
    passed: dict[str, bool] = {}
    begun = ""
    for line in text.splitlines():
        for pattern in _PYTEST:
            if found := pattern.match(line):
                name = dotted(found["test"])
                passed[name] = found["word"] in _GOOD and passed.get(name, True)
        if found := _UNITTEST.match(line):
            where, name = found["where"], found["test"]
            begun = where if where.endswith("." + name) else f"{where}.{name}"  # before Python 3.11
            if found["bad"]:  # of the details at the end
                passed[begun] = False
        if begun and (found := _OUTCOME.match(line)):
            passed[begun] = found["word"] in _GOOD and passed.get(begun, True)
    return passed


def commanded(request: Mapping[str, Any], workspace: str) -> dict[str, bool]:
    """Runs a command; which tests pass, by its output."""
    path = _path(workspace)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"}
    shell = subprocess.run(
        ["/bin/bash", "--noprofile", "--norc", "-c", request["command"]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=workspace,
        env=environment,
        check=False,
    )
    return reported(shell.stdout.decode(errors="replace"))


def main(request_text: str, workspace: str, source: str) -> None:
    """Runs the tests and writes the answer: the request's secret, how many of the names asked for passed, and controls.

    Of each control there is a letter, as some of them have to fail.

    Args:
      request_text: JSON; `suites.py` makes it.
      workspace: where the repository and the tests are.
      source: of the repository's process.
    """
    answer, request = seclude(), json.loads(request_text)
    passed = commanded(request, workspace) if request["command"] else isolated(request, workspace, source)
    wanted = request["wanted"] or sorted(passed.keys() - set(request["controls"]))
    said = {
        "secret": request["secret"],
        "passed": sum(passed.get(name, False) for name in wanted),
        "total": len(wanted),
        "controls": "".join("-" if name not in passed else "FP"[passed[name]] for name in request["controls"]),
    }
    os.write(answer, json.dumps(said).encode())
