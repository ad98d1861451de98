"""Reads which tests passed, from a JUnit report or from what a test runner printed."""

from __future__ import annotations

import re
from xml.etree import ElementTree

_PYTEST = (
    re.compile(r"^(?P<test>\S+\.py(?:::\S+)+) (?P<word>PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b"),
    re.compile(r"^(?P<word>PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (?P<test>\S+\.py(?:::\S+)+)"),
)
_UNITTEST = re.compile(r"^(?P<bad>(?:FAIL|ERROR): )?(?P<test>\w+) \((?P<where>[\w.]+)\)")
_OUTCOME = re.compile(r"^(?:.* \.\.\. )?(?P<word>ok|FAIL|ERROR|skipped .*|expected failure|unexpected success)$")
_GOOD = ("ok", "expected failure", "PASSED", "XFAIL")


class Unreadable(Exception):
    """A report that is no JUnit report."""


def dotted(name: str) -> str:
    """Returns a test's name as `unittest` writes it; the name may be pytest's."""
    return name.removeprefix("src/").replace(".py::", ".").replace("::", ".").replace("/", ".")


def of_junit(text: str) -> dict[str, bool]:
    """Returns which tests of a JUnit report passed. A test that is in it several times has to pass each time.

    The report may have been written by anybody, so it may declare no entities.

    Raises:
      Unreadable: the text is no JUnit report.
    """
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise Unreadable("the report declares entities")
    try:
        root = ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError, RecursionError) as error:
        raise Unreadable(f"the report is no XML ({error})") from error
    passed: dict[str, bool] = {}
    for case in root.iter("testcase"):
        name = dotted(".".join(filter(None, (case.get("classname"), case.get("name")))))
        passed[name] = passed.get(name, True) and not any(_is_bad(part) for part in case)
    return passed


def _is_bad(part: ElementTree.Element) -> bool:
    if part.tag == "skipped":
        return part.get("type") != "pytest.xfail"
    return part.tag in ("failure", "error")


def printed(text: str) -> dict[str, bool]:
    """Returns which tests pass by what `unittest -v`, `pytest -v` or `pytest -rA` print; any contrary line counts.

    Between a test's name and its outcome `unittest` may print its docstring, and the test its own output.
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
            if found["bad"]:  # in the details at the end
                passed[begun] = False
        if begun and (found := _OUTCOME.match(line)):
            passed[begun] = found["word"] in _GOOD and passed.get(begun, True)
    return passed
