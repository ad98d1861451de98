r"""Reads answers: the marked part of an output, and the numbers in it. All graders use these functions.

An output of any length takes time that grows with its length alone: no pattern here looks further than the next mark.
"""

from __future__ import annotations

import collections
import contextlib
import decimal
import fractions
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from libra_jax.chat import thoughts

# Marks ----------------------------------------------------------------------------------------------------------------

_TAG, _TAG_END = "<answer>", "</answer>"

# Escaped braces are text. `\boxed 42$` is how some models write `\boxed{42}$`.
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*(?P<box>\{)|\\boxed +(?P<bare>[^\s{}$\\][^{}$\\\n]*)|\\[{}]|[{}]")


def boxes(text: str) -> list[tuple[int, int]]:
    r"""Returns where the content of each `\boxed{}` or `\fbox{}` with balanced braces begins and ends, in order."""
    spans: list[tuple[int, int]] = []
    open_braces: list[int] = []  # where the content of each open brace begins; -1 if the brace is no box's
    for mark in _BRACES.finditer(text):
        if mark["bare"]:
            spans.append(mark.span("bare"))
        elif mark["box"] or mark[0] == "{":
            open_braces.append(mark.end() if mark["box"] else -1)
        elif mark[0] == "}" and open_braces and (begin := open_braces.pop()) >= 0:
            spans.append((begin, mark.start()))
    # By their beginnings: of a box inside a box, the inner one is the last.
    return sorted(spans)


def tagged(text: str) -> str | None:
    """Returns the content of the last `<answer>` tag that is closed. None if there is none."""
    begin = text.rfind(_TAG, 0, max(text.rfind(_TAG_END), 0))
    return None if begin < 0 else text[begin + len(_TAG) : text.index(_TAG_END, begin)]


def final(output: str) -> str:
    r"""Returns an output's answer: the last `\boxed{}` of its last `<answer>` or of its text, or else all of it.

    Thoughts are left out. An output that ends inside a thought has the answer "".
    """
    text = thoughts.split(output).answer
    if (content := tagged(text)) is not None:
        text = content
    spans = boxes(text)
    return (text[slice(*spans[-1])] if spans else text).strip()


# Numbers --------------------------------------------------------------------------------------------------------------

_MOST_DIGITS, _MOST_EXPONENT = 100, 400
"""Longest number that is read, in characters, and its largest power of ten. A longer number would cost too much."""

_MINUS = "\N{MINUS SIGN}\N{EN DASH}\N{HYPHEN}\N{NON-BREAKING HYPHEN}\N{FULLWIDTH HYPHEN-MINUS}"
_SIGN = f"[-+{_MINUS}]"
# `- 5` is -5 where nothing stands before it that 5 could be subtracted from.
_BEFORE = r"\A|(?<=[=\u2248($\[{])|(?<=[=\u2248]\s)|(?<=[=\u2248]\s\s)|(?<=: )|(?<=\bis )|(?<=\bare )|(?<=\bequals )"
_SPACED = rf"(?:{_BEFORE}){_SIGN}\s"
_APART = r"(?:,\\!\s?|,|\{,\}|\\,|[_\u00a0\u2009\u202f]| (?=\d{3}(?!\d)))"  # what may stand between groups of digits
_TEN = rf"10\s*(?:\^|\*\*)\s*\{{?({_SIGN}?\d+)\}}?"
_ALONE = r"(?<!\w)(?<!\w\.)"  # the digit is part of no word and of no number before it

# Groups: sign; whole part, numerator and denominator of a \frac; exponent of a power of ten; then the whole part of a
# mixed number, digits, decimals, exponent, factor's exponent, denominator of any other number.
_NUMBER = re.compile(
    rf"(?:({_SPACED}|(?<![\w.)\]}}]){_SIGN})(?:\\?[$€£])?)?(?:"
    rf"(?:{_ALONE}(\d{{1,60}}))?\\[cdt]?frac\s*(?:\{{({_SIGN}?\d+)\}}|(\d))\s*(?:\{{(\d+)\}}|(\d))"
    rf"|{_ALONE}{_TEN}"
    rf"|(?:{_ALONE}(?:(?P<mixed>\d{{1,60}}) (?=\d{{1,2}}/\d))?(?P<digits>\d+(?:{_APART}\d+)*(?:\.\d+)?)(?!\.?\d)"
    r"|(?<![\w.])(\.\d+))"
    rf"(?:[eE]({_SIGN}?\d+)|\s*(?:[\u00d7·*x]|\\times|\\cdot)\s*{_TEN})?(?:/(?P<over>\d+))?)"
)
_THOUSANDS = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+")
# Two numbers in brackets, which `math-verify` reads as a pair or an interval.
_PAIR = re.compile(
    rf"(?<=[(\[])(?!{_THOUSANDS.pattern}\b)({_SIGN}?\d{{1,100}}),(\d{{1,100}})(?=\s*(?:\\right\s*)?[)\]])"
)


def last_number(text: str) -> fractions.Fraction | None:
    r"""Returns the last number of a text. None if the text has none, or one that is too long.

    Numbers are `-1,024.5`, `.5`, `1e-5`, `2 \times 10^{-5}`, `1/2`, `1 1/2`, `\frac{1}{2}` and the like. Dates and
    versions such as `15.03.2024` hold none. A single comma that cannot group thousands is a decimal comma, as in
    `math-verify`, but not in `(1,2)` and `[1,2]`. The last item of a list is its last number.
    """
    text = _PAIR.sub(r"\1, \2", text.strip())
    last = collections.deque(_NUMBER.finditer(text), maxlen=1)
    return _value(last[0]) if last else None


def number(text: str) -> fractions.Fraction | None:
    """Returns the value of a text that is a number and nothing else. None for any other text: `1,2` may be a list."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None or (match["digits"] is not None and _ungrouped(match["digits"]) is None):
        return None
    if match["mixed"] and int(match["digits"]) >= int(match["over"]):  # `7 3/2` is two numbers
        return None
    return _value(match)


def _value(match: re.Match[str]) -> fractions.Fraction | None:
    sign, whole_part, up, above, down, below, ten, mixed, digits, dotted, exponent, factor, over = match.groups()
    if any(part and len(part) > _MOST_DIGITS for part in match.groups()):
        return None
    power = int(_plain(ten or exponent or factor or "0"))
    if abs(power) > _MOST_EXPONENT:
        return None
    try:
        if up or above:
            fraction = fractions.Fraction(int(_plain(up or above)), int(down or below))
            size = int(whole_part or 0) + fraction
        else:
            decimals, alone = _last_item(digits) if digits else (dotted or "1", True)
            sign = sign if alone else ""  # it is the first number's
            size = fractions.Fraction(decimals) * fractions.Fraction(10) ** power
            size /= int(over or 1)
            if mixed and size < 1:  # `1 1/2`
                size += int(mixed)
    except ZeroDivisionError:
        return None
    return -size if sign and _plain(sign).strip() == "-" else size


def _plain(text: str) -> str:
    return re.sub(f"[{_MINUS}]", "-", text)


def _ungrouped(digits: str) -> str | None:
    """Returns digits without what stands between groups of thousands. None if it stands elsewhere."""
    before, dot, after = re.sub(_APART, ",", digits).partition(".")
    grouped = "," not in before or _THOUSANDS.fullmatch(before)
    return before.replace(",", "") + dot + after if grouped else None


def _last_item(digits: str) -> tuple[str, bool]:
    """Returns the last of numbers such as `1,2,3` and `1200 350`, and whether it is the only one."""
    if (plain_digits := _ungrouped(digits)) is not None:
        return plain_digits, True
    marked = re.sub(r",\\!\s?|\{,\}", ",", digits)
    item = re.split(r"\\,|[_\u00a0\u2009\u202f ]", marked)[-1]
    if (text := _ungrouped(item)) is None:
        if item.count(",") == 1 and "." not in item:
            text = item.replace(",", ".")
        else:
            text = item = item.rpartition(",")[2]
    return text, len(item) == len(marked)


# Accepted answers -----------------------------------------------------------------------------------------------------


def is_missing(value: object) -> bool:
    """Returns whether a value of a table is no answer: null, NaN, a blank text, an empty list."""
    if isinstance(value, str | list):
        return not (value.strip() if isinstance(value, str) else value)
    return value is None or (isinstance(value, float) and math.isnan(value))


def accepted(payload: Mapping[str, Any]) -> list[str]:
    """Returns all texts that answer a task: its `answer`, which is a text, a number, or a list of them.

    A number is written without an exponent. A whole number of a column of floats is written in both ways: 42 and 42.0.
    """
    texts: list[str] = []
    answer = payload["answer"]
    for item in answer if isinstance(answer, Sequence) and not isinstance(answer, str) else [answer]:
        if isinstance(item, float) and math.isfinite(item):
            texts += [str(int(item))] if item.is_integer() else []
            texts.append(f"{decimal.Decimal(repr(item)):f}")
        else:
            texts.append(str(item))
    return texts


def equal_number(value: fractions.Fraction | None, payload: Mapping[str, Any]) -> bool:
    """Returns whether a number is an accepted answer that is a number, not a text. A float has all its decimals."""
    answer = payload["answer"]
    for item in answer if isinstance(answer, list | tuple) else [answer]:
        if value is not None and isinstance(item, int | float) and not isinstance(item, bool):
            with contextlib.suppress(OverflowError):  # beyond all floats
                if value == item or (isinstance(item, float) and float(value) == item):
                    return True
    return False


def equal(answer: str, payload: Mapping[str, Any]) -> bool:
    """Returns whether a text is an accepted answer. Answers that are numbers are compared as numbers.

    An empty text is never right.
    """
    return bool(answer) and (
        answer in (text.strip() for text in accepted(payload)) or equal_number(number(answer), payload)
    )


def ends_with(answer: str, payload: Mapping[str, Any]) -> bool:
    """Returns whether a text is an accepted answer, or its last number is one that is a number and nothing else."""
    value = last_number(answer)
    numbers = map(number, accepted(payload))
    return equal(answer, payload) or (value is not None and (value in numbers or equal_number(value, payload)))
