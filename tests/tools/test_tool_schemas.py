"""Schemas of tools, which servers write, on arguments, which policies write: neither holds up the event loop."""

import json

import endless
import pytest

from libra_jax.tools import schemas

ENDLESS = "a" * 40 + "!"
PATTERN = "^(a+)+$"


def mismatch(value, **schema):
    assert schemas.problem_of(json.dumps(schema)) == ""
    with endless.broken_off():
        return schemas.mismatch(value, schema, "arguments")


def test_a_pattern_that_backtracks_is_matched_in_linear_time():
    schema = {"properties": {"a": {"type": "string", "pattern": PATTERN}}}
    assert mismatch({"a": "aaa"}, **schema) == ""
    assert mismatch({"a": ENDLESS}, **schema) == f"arguments.a: {ENDLESS!r} does not match '{PATTERN}'"


def test_patterns_of_names_are_matched_in_linear_time():
    schema = {"patternProperties": {PATTERN: {"type": "string"}}, "additionalProperties": False}
    assert mismatch({"aa": "x"}, **schema) == ""
    assert mismatch({"aa": 1}, **schema) == "arguments.aa: 1 is not of type 'string'"
    assert f"({ENDLESS!r} was unexpected)" in mismatch({ENDLESS: 1}, **schema)
    assert "'x' is not of type 'integer'" in mismatch(
        {ENDLESS: "x"}, **{**schema, "additionalProperties": {"type": "integer"}}
    )


def test_what_no_pattern_evaluates_is_found():
    assert mismatch({"b": 1}, properties={"a": {}}, unevaluatedProperties=False)
    patterns = {"patternProperties": {PATTERN: {}}, "unevaluatedProperties": False}
    assert mismatch({ENDLESS: 1}, **patterns) == ""  # left to the tool


@pytest.mark.parametrize("pattern", ["(?=x)y", "(((a{1000}){1000}){1000})"], ids=["looks ahead", "too large"])
def test_a_pattern_that_the_engine_does_not_know_is_left_to_the_tool(pattern):
    schema = {"properties": {"a": {"pattern": pattern}}}
    assert mismatch({"a": "z"}, **schema) == ""
    assert mismatch({"z": 1}, patternProperties={pattern: {"type": "string"}}, additionalProperties=False) == ""


def test_references_that_lead_on_and_on_are_given_up():
    steps = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
    found = mismatch({}, **{"$ref": "#/$defs/d0", "$defs": {**steps, "d40": {}}})
    assert found == "the arguments cannot be checked: their schema's references lead on and on"


def test_a_schema_that_refers_to_itself_is_followed():
    tree = {
        "$ref": "#/$defs/t",
        "$defs": {"t": {"properties": {"below": {"$ref": "#/$defs/t"}, "n": {"type": "integer"}}}},
    }
    assert mismatch({"below": {"below": {"n": 1}}}, **tree) == ""
    assert "is not of type 'integer'" in mismatch({"below": {"below": {"n": "1"}}}, **tree)
