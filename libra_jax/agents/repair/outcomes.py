"""Reads which tests passed, from a JUnit report or from a test runner's output."""

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
    """The text is not a JUnit report."""


def dotted(name: str) -> str:
    """Returns a test's name in `unittest`'s form. The input may have pytest's form."""
    return name.removeprefix("src/").replace(".py::", ".").replace("::", ".").replace("/", ".")


def of_junit(text: str) -> dict[str, bool]:
    """Returns which tests of a JUnit report passed. A test that appears several times has to pass each time.

    The report may come from an untrusted author, so entity declarations are refused.

    Raises:
      Unreadable: The text is not a JUnit report.
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
        # pytest reports an expected failure as skipped, with this type.
        bad = (
            part.tag in ("failure", "error") or (part.tag == "skipped" and part.get("type") != "pytest.xfail")
            for part in case
        )
        # Tested code may report a test once more; it can only spoil the outcome.
        passed[name] = passed.get(name, True) and not any(bad)
    return passed


def printed(text: str) -> dict[str, bool]:
    """Returns which tests passed by the output of `unittest -v`, `pytest -v` or `pytest -rA`.

    One contrary line is enough for a test to count as failed. Between a test's name and its outcome, `unittest` may
    print the docstring, and the test may print its own output.
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
            # Versions before Python 3.11 leave the name out.
            begun = where if where.endswith("." + name) else f"{where}.{name}"
            if found["bad"]:  # in the list of details at the end
                passed[begun] = False
        if begun and (found := _OUTCOME.match(line)):
            passed[begun] = found["word"] in _GOOD and passed.get(begun, True)
    return passed
