"""Checks of functions by calls: a sandbox runs the policy's code and returns values, and this process compares them.

The sandbox gets a function's name and its arguments, and never the expected value. It answers in JSON, whose values
have plain types here: no object of the policy takes part in a comparison. So nothing in the sandbox has to be trusted.
A policy that forges an answer still has to know the right value.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from libra_jax import protocols

_CALLER = pathlib.Path(__file__).with_name("caller.py").read_text()
_NONE = object()


@dataclass(frozen=True)
class ExpectedCall:
    """A call of a function, with its right result.

    Attributes:
      function: Name of the function, "package.module:function".
      arguments: Positional arguments, of JSON's types.
      value: Right return value, of JSON's types.
      raises: Name of the exception class that is right instead of a value. Empty: the call must return.
      by_value: Whether a number may be an int or a float.
    """

    function: str
    arguments: Sequence[Any]
    value: Any = None
    raises: str = field(default="", kw_only=True)
    by_value: bool = field(default=False, kw_only=True)


def read(listed: Sequence[Mapping[str, Any]], where: str) -> tuple[ExpectedCall, ...]:
    """Returns the calls that a task lists as mappings. `where` is the place of the list, for errors."""
    for call in listed:
        good = isinstance(call, Mapping) and isinstance(call.get("arguments"), list | tuple)
        if not (good and ":" in str(call.get("function")) and ("value" in call) != ("raises" in call)):
            raise protocols.DataError(
                f'{where}: a call must be {{"function": "module:name", "arguments": [...], "value": ...}}, with '
                f'"raises" instead of "value" for an exception, not {call!r:.80}'
            )
    if not listed:
        raise protocols.DataError(f"{where} must hold one call at least")
    # Through JSON, which turns tuples into lists: a sandbox's answer has no tuples.
    calls = tuple(ExpectedCall(**call) for call in json.loads(json.dumps([dict(call) for call in listed])))
    for one in calls:
        if not same(one.value, one.value):
            raise protocols.DataError(f"{where}: no answer equals NaN, so {one.function!r} cannot be called for it")
    return calls


def code(calls: Sequence[ExpectedCall], most_bytes: int) -> str:
    """Returns the code that a sandbox runs. It holds no expected value."""
    request = {
        "calls": [(call.function, call.arguments) for call in calls],
        "most_bytes": most_bytes // (len(calls) + 1) - 100,
    }
    # Not with the workspace on the path: a module of the repository's own may have the name of a standard one.
    return f"import json, sys\ndel sys.path[0]\nexec({_CALLER!r})\nmain(json.loads({json.dumps(request)!r}))\n"


def judge(calls: Sequence[ExpectedCall], answers: str) -> dict[str, bool]:
    """Returns which calls had the right result, by number. A call without an answer failed.

    The answers are the sandbox's output, one line of JSON a call. They are not trusted.
    """
    results: dict[int, tuple[Any, Any]] = {}
    for line in answers.splitlines():
        try:
            number, value, raised = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            continue
        # Of several answers to one call only the last counts: a list of guesses would hold the right one.
        if type(number) is int:
            results[number] = (value, raised)
    right = {}
    for number, call in enumerate(calls):
        value, raised = results.get(number, (_NONE, None))
        if call.raises:
            right[str(number)] = same(raised, call.raises)
        else:
            right[str(number)] = raised is None and same(value, call.value, call.by_value)
    return right


def same(value: Any, expected: Any, by_value: bool = False) -> bool:
    """Returns whether two values of JSON's types are equal. Floats may differ by rounding.

    Their types must be equal, except that an int may stand for a float and the reverse if `by_value`.
    """
    if type(value) is not type(expected):
        return by_value and {type(value), type(expected)} == {int, float} and bool(value == expected)
    if isinstance(expected, float):
        # Leaves room for some thousand roundings of 1e-16 each, and is less than the cents of a billion.
        return value == expected or math.isclose(value, expected, rel_tol=1e-12)
    if isinstance(expected, list):
        return len(value) == len(expected) and all(same(*pair, by_value) for pair in zip(value, expected, strict=True))
    if isinstance(expected, dict):
        return value.keys() == expected.keys() and all(same(value[key], expected[key], by_value) for key in expected)
    return bool(value == expected)
