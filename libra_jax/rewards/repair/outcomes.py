"""Reads the outcomes of tests, from a JUnit report or a runner's output."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal
from xml.etree import ElementTree

Outcome = Literal["failed", "skipped", "xfailed", "passed"]
"""Outcome of a test. "xfailed" is a failure that was expected."""

_WORST: tuple[Outcome, ...] = ("failed", "skipped", "xfailed", "passed")
_PYTEST = (
    re.compile(r"^(?P<test>\S+\.py(?:::\S+)+) (?P<word>PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b"),
    re.compile(r"^(?P<word>PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (?P<test>\S+\.py(?:::\S+)+)"),
)
_UNITTEST = re.compile(r"^(?P<bad>(?:FAIL|ERROR): )?(?P<test>\w+) \((?P<where>[\w.]+)\)")
_OUTCOME = re.compile(r"^(?:.* \.\.\. )?(?P<word>ok|FAIL|ERROR|skipped .*|expected failure|unexpected success)$")
_WORDS: Mapping[str, Outcome] = {
    "ok": "passed", "PASSED": "passed", "expected failure": "xfailed", "XFAIL": "xfailed", "skipped": "skipped",
    "SKIPPED": "skipped",
}  # fmt: skip


def dotted(name: str) -> str:
    """Returns a test's name in `unittest`'s form. The input may have pytest's form."""
    return name.removeprefix("src/").replace(".py::", ".").replace("::", ".").replace("/", ".")


def of_junit(text: str) -> dict[str, Outcome]:
    """Returns the outcomes of a JUnit report. Of a test that appears several times, the worst one counts.

    Raises ValueError if the text is none. Its author is not trusted, so entity declarations are refused.
    """
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise ValueError("the report declares entities")
    try:
        root = ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError, RecursionError) as error:
        raise ValueError(f"the report is no XML ({error})") from error
    outcomes: dict[str, Outcome] = {}
    for case in root.iter("testcase"):
        name = dotted(".".join(filter(None, (case.get("classname"), case.get("name")))))
        _add(outcomes, name, "passed")
        for part in case:
            if part.tag in ("failure", "error"):
                _add(outcomes, name, "failed")
            elif part.tag == "skipped":  # pytest reports an expected failure this way
                _add(outcomes, name, "xfailed" if part.get("type") == "pytest.xfail" else "skipped")
    return outcomes


def _add(outcomes: dict[str, Outcome], name: str, outcome: Outcome) -> None:
    outcomes[name] = min(outcome, outcomes.get(name, "passed"), key=_WORST.index)


def printed(text: str) -> dict[str, Outcome]:
    """Returns outcomes by the output of `unittest -v`, `pytest -v` or `pytest -rA`.

    One contrary line is enough for a test to count as failed. Between a test's name and its outcome, `unittest` may
    print the docstring, and the test may print its own output.
    """
    outcomes: dict[str, Outcome] = {}
    current_test = ""
    for line in text.splitlines():
        for pattern in _PYTEST:
            if match := pattern.match(line):
                _add(outcomes, dotted(match["test"]), _WORDS.get(match["word"], "failed"))
        if match := _UNITTEST.match(line):
            where, name = match["where"], match["test"]
            # Versions before Python 3.11 leave the name out.
            current_test = where if where.endswith("." + name) else f"{where}.{name}"
            if match["bad"]:  # in the list of details at the end
                outcomes[current_test] = "failed"
        if current_test and (match := _OUTCOME.match(line)):
            word = "skipped" if match["word"].startswith("skipped") else match["word"]
            _add(outcomes, current_test, _WORDS.get(word, "failed"))
    return outcomes
