"""Runs test files with `unittest`, and writes a JUnit report: `python -c SOURCE REPORT FILE...`.

A sandbox gets this file as text. Standard library only. Runs test cases, and functions named test_ without arguments.
"""

from __future__ import annotations

import functools
import importlib
import io
import os
import sys
import types
import unittest
from collections.abc import Sequence
from xml.etree import ElementTree

IMPORT = "import"
"""Name of the test case that stands for the import of a test file."""


class JunitResult(unittest.TestResult):
    """Outcomes as JUnit test cases, in the order in which the tests ended."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self.root = ElementTree.Element("testsuite")
        self._outcome = "error"

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._outcome = ""

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        self.add(str(getattr(test, "libra_name", "") or test.id()), self._outcome or "error")

    def add(self, name: str, outcome: str) -> None:
        """Adds a test case to the report."""
        place, _, short = name.rpartition(".")
        case = ElementTree.SubElement(self.root, "testcase", {"classname": place, "name": short})
        if outcome == "xfail":
            ElementTree.SubElement(case, "skipped", {"type": "pytest.xfail"})
        elif outcome != "passed":
            ElementTree.SubElement(case, outcome)

    def _record(self, outcome: str, test: unittest.TestCase, *_: object) -> None:
        """Records an outcome, without the base class, which would keep a text of each error."""
        if not isinstance(test, unittest.TestCase):  # the set-up or tear-down of a class or module
            self.add(test.id(), outcome)
        elif outcome == "error" or not self._outcome:  # a later success takes no failure back
            self._outcome = outcome

    def addSubTest(self, test: unittest.TestCase, subtest: object, error: object) -> None:
        if error is not None:
            self._record("error", test)

    addFailure = addUnexpectedSuccess = addError = functools.partialmethod(_record, "error")
    addSkip = functools.partialmethod(_record, "skipped")
    addSuccess = functools.partialmethod(_record, "passed")
    addExpectedFailure = functools.partialmethod(_record, "xfail")


def main(report: str, paths: Sequence[str]) -> None:
    """Runs the tests of some files, which lie in the current folder or in its folder src."""
    # Taken before the tested code is imported, which could replace them.
    write, result = ElementTree.tostring, JunitResult()
    for path in paths:
        name = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        try:
            module = importlib.import_module(name)
            places = [os.path.abspath(place) for place in (path, os.path.join("src", path))]
            if module.__file__ is None or os.path.abspath(module.__file__) not in places:
                raise ImportError
        except BaseException:  # SystemExit too: the other files still have to run
            result.add(f"{name}.{IMPORT}", "error")
            continue
        suite = unittest.TestSuite([unittest.defaultTestLoader.loadTestsFromModule(module)])
        for short, value in list(vars(module).items()):
            if short.startswith("test_") and isinstance(value, types.FunctionType) and not value.__code__.co_argcount:
                test = unittest.FunctionTestCase(value)
                test.libra_name = f"{name}.{short}"  # type: ignore[attr-defined]
                suite.addTest(test)
        suite.run(result)
    with open(report, "wb") as file:
        file.write(write(result.root))


if __name__ == "__main__":
    # `-c` puts an empty text here, and modules would be found by it a second time.
    sys.path.remove("")
    main(sys.argv[1], sys.argv[2:])
