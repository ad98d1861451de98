"""Runs hidden tests with `unittest` in the process that imports the tested code, and writes a JUnit report.

A sandbox gets this file as text, so it imports the standard library only. `referee.py` forks this process; the tested
code cannot reach the referee. The sources of the hidden modules are only in memory, not on disk.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import sys
import types
import unittest
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from libra_jax.agents.repair import guard

_CLOSELY = 200  # the guard checks after each of the first 200 tests, and then after every 200th

IMPORT = "import"
"""Name of the test case that stands for the import of a test module."""


class Result(unittest.TestResult):
    """Outcomes as JUnit test cases, in the order in which the tests ended."""

    def __init__(self, look: guard.Guard) -> None:
        super().__init__(io.StringIO())
        self._guard, self._passed = look, False
        self.root = ElementTree.Element("testsuite")
        self.changes: dict[str, None] = {}

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._passed = False

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        # An attribute on the instance would hide a method of TestCase from the test itself.
        for name in vars(test).keys() & vars(unittest.TestCase).keys():
            if callable(vars(test)[name]):
                self.changes[f"{name} of a test case was replaced"] = None
        self.add(str(getattr(test, "libra_name", "") or test.id()), self._passed)
        if self.testsRun <= _CLOSELY or not self.testsRun % _CLOSELY:  # a check takes half a millisecond
            self.changes.update(dict.fromkeys(self._guard.changes()))

    def add(self, name: str, passed: bool) -> None:
        """Adds a test case to the report."""
        place, _, short = name.rpartition(".")
        case = ElementTree.SubElement(self.root, "testcase", {"classname": place, "name": short})
        if not passed:
            ElementTree.SubElement(case, "error")

    # Each bad outcome takes back a success, which tested code may have reported through the frames of its callers.

    def addFailure(self, test: unittest.TestCase, *_: object) -> None:
        # Without the base class, which would keep a text of each error; nobody reads those lists.
        self._passed = False

    addSkip = addUnexpectedSuccess = addFailure  # type: ignore[assignment]

    def addError(self, test: unittest.TestCase, *_: object) -> None:
        self._passed = False
        if not isinstance(test, unittest.TestCase):  # the set-up or tear-down of a class or module
            self.add(test.id(), False)

    def addSuccess(self, test: unittest.TestCase, *_: object) -> None:
        self._passed = True

    addExpectedFailure = addSuccess  # type: ignore[assignment]


class Sources(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads the tests' modules from memory, and the packages above them from the workspace.

    Args:
      sources: Path and text by dotted name.
      roots: Folders with the workspace's modules.
      look: Guard that watches loaded modules.
      seer: Witness that rewritten sources call.

    Attributes:
      loaded: Modules of the tests that have been imported, by name.
    """

    def __init__(
        self, sources: Mapping[str, tuple[str, str]], roots: Sequence[str], look: guard.Guard, seer: guard.Witness
    ) -> None:
        self._roots, self._guard, self._seer = roots, look, seer
        self._sources = dict(sources)
        above = {name.rsplit(".", count)[0] for name in sources for count in range(1, name.count(".") + 1)}
        self._above = above - sources.keys()
        self.loaded: dict[str, types.ModuleType] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Finds the modules of the tests and the packages above them. See `importlib`."""
        if name in self._sources:
            place = self._sources[name][0]
            package = os.path.basename(place) == "__init__.py"
            found = importlib.machinery.ModuleSpec(name, self, origin=place, is_package=package)
            if package:
                found.submodule_search_locations = [os.path.dirname(place)]
            return found
        if name not in self._above:
            return None
        folders = [os.path.join(root, *name.split(".")) for root in self._roots]
        folders = [folder for folder in folders if os.path.isdir(folder)]
        for folder in folders:
            begin = os.path.join(folder, "__init__.py")
            if os.path.isfile(begin):
                return importlib.util.spec_from_file_location(name, begin, submodule_search_locations=[folder])
        # As Python itself would make it of folders without __init__.py.
        bare = importlib.machinery.ModuleSpec(name, None, is_package=True)
        bare.submodule_search_locations = folders
        return bare

    def exec_module(self, module: types.ModuleType) -> None:
        """Runs a module's rewritten source. See `importlib`."""
        name = module.__name__
        path, text = self._sources[name]
        tree = ast.parse(text, path)
        module.__file__ = path
        self.loaded[name] = module
        names = guard.names_of(tree)
        module.__dict__.update(self._seer.namespace)
        # Compiled with the file's own path, by which a `Witness` tells tests from tested code.
        code = compile(ast.fix_missing_locations(guard.Rewriter().visit(tree)), path, "exec")
        exec(code, module.__dict__)
        self._guard.watch(module, names)


def play(
    tests: Mapping[str, tuple[str, str]],
    helpers: Mapping[str, tuple[str, str]],
    roots: Sequence[str],
    workspace: str,
) -> dict[str, Any]:
    """Runs the hidden modules' test cases, and their functions named test_ that take no arguments.

    Args:
      tests: Path and text of each hidden module, by dotted name.
      helpers: Path and text of the repository's own modules for its tests, by dotted name.
      roots: Folders with the workspace's modules.
      workspace: Folder of the tested code.

    Returns:
      `junit`, the report, and `changes` and `lies`, in a few words each.
    """
    look = guard.Guard()
    seer = guard.Witness(workspace, {path for path, _ in (*tests.values(), *helpers.values())})
    for name in guard.WATCHED:
        look.watch(importlib.import_module(name))
    finder = Sources({**helpers, **tests}, roots, look, seer)
    for path, text in tests.values():
        with contextlib.suppress(SyntaxError, ValueError):  # the later import reports it
            look.expect(guard.names_of(ast.parse(text, path)))
    # Taken before the tested code is imported, which could replace them.
    write, result = ElementTree.tostring, Result(look)
    # First, so that no file of the policy can take the place of a hidden module.
    sys.meta_path.insert(0, finder)
    for name in tests:
        try:
            module = importlib.import_module(name)
        except BaseException:
            result.add(f"{name}.{IMPORT}", False)
            continue
        if module is not finder.loaded.get(name):
            result.changes[f"the test module {name} was replaced"] = None
            continue
        suite = unittest.TestSuite([unittest.defaultTestLoader.loadTestsFromModule(module)])
        for short, value in list(vars(module).items()):
            if short.startswith("test_") and isinstance(value, types.FunctionType) and not value.__code__.co_argcount:
                test = unittest.FunctionTestCase(value)
                test.libra_name = f"{name}.{short}"  # type: ignore[attr-defined]
                suite.addTest(test)
        suite.run(result)
    changes = [*result.changes, *(change for change in look.changes() if change not in result.changes)]
    report = write(result.root, encoding="unicode")
    return {"junit": report, "changes": changes, "lies": [*seer.seen]}
