"""Answers of a sandbox compared with the right results of calls."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax import protocols
from libra_jax.rewards.repair import caller, calls

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, 1.0, -2.0]) | st.sampled_from("ab"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=5,
)


@given(st.lists(JSON, min_size=1, max_size=4), st.lists(JSON, min_size=4, max_size=4))
@settings(max_examples=200)
def test_an_answer_is_right_if_its_json_text_is_equal(expected, answered):
    """The reference is the text: json writes 1, 1.0, true and "1" differently."""
    listed = [calls.ExpectedCall("m:f", [], value) for value in expected]
    lines = [json.dumps([number, value, None]) for number, value in enumerate(answered)]
    right = calls.judge(listed, "\n".join(["noise", "[1, 2]", "{}", *lines]))
    texts = [json.dumps(one, sort_keys=True) for one in (*expected, *answered)]
    assert list(right.values()) == [texts[n] == texts[n + len(expected)] for n in range(len(expected))]


@pytest.mark.parametrize(
    ("answer", "expected", "equal", "equal_by_value"),
    [
        (3, 3.0, False, True),
        ([25.0], [25], False, True),
        (True, 1, False, False),
        (10**400, 1.0, False, False),
        (0.1 + 0.2, 0.3, True, True),
        (-0.0, 0.0, True, True),
        (1700000000.0, 1700000000.75, False, False),
        (123456789.0, 123456789.02, False, False),
    ],
)
def test_numbers_are_equal_to_the_last_roundings(answer, expected, equal, equal_by_value):
    lines = json.dumps([0, answer, None])
    for by_value, right in ((False, equal), (True, equal_by_value)):
        assert calls.judge([calls.ExpectedCall("m:f", [], expected, by_value=by_value)], lines) == {"0": right}


@pytest.mark.parametrize("value", [math.nan, [{"a": math.nan}]])
def test_a_call_whose_right_result_is_nan_is_refused(value):
    with pytest.raises(protocols.DataError, match="row 3: no answer equals NaN"):
        calls.read([{"function": "m:f", "arguments": [], "value": value}], "row 3")


CALLED = {
    "def f(x): raise ValueError": "ValueError",
    "f = int": "ValueError",
    "import functools\ndef g(x, y): raise ValueError\n@functools.wraps(g)\ndef f(x): return g(x, 1)": "ValueError",
    "f = 5": None,
    "def f(): pass": None,
    "def f(x, y): pass": None,
    "": None,
    "(": None,
    "raise ValueError": None,
}


@pytest.mark.parametrize(("source", "raised"), CALLED.items())
def test_only_a_call_that_reaches_the_function_raises(source, raised, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    module = f"called_{abs(hash(source))}"
    (tmp_path / f"{module}.py").write_text(source)
    try:
        answer = json.loads(caller._answer(0, f"{module}:f", ["a"]))
    except BaseException:
        answer = [0, None, None]  # the caller goes on with the next call
    assert answer == [0, None, raised]
