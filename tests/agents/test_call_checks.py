"""Answers of a sandbox compared with the right results of calls."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax.agents.repair import calls

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, 1.0, -2.0]) | st.sampled_from("ab"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=5,
)


@given(st.lists(JSON, min_size=1, max_size=4), st.lists(JSON, min_size=4, max_size=4))
@settings(max_examples=200)
def test_an_answer_is_right_if_its_json_text_is_equal(expected, answered):
    """The reference is the text: json writes 1, 1.0, true and "1" differently."""
    listed = [calls.Call("m:f", [], value) for value in expected]
    lines = [json.dumps([number, value, None]) for number, value in enumerate(answered)]
    right = calls.judge(listed, "\n".join(["noise", "[1, 2]", "{}", *lines]))
    texts = [json.dumps(one, sort_keys=True) for one in (*expected, *answered)]
    assert list(right.values()) == [texts[n] == texts[n + len(expected)] for n in range(len(expected))]
