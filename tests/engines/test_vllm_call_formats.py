"""Our reading of Hermes calls against vLLM's own parser, which no one here wrote; no engine is started."""

import json

import property_counts
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.entrypoints.openai.chat_completion import protocol
from vllm.tool_parsers import hermes_tool_parser

from libra_jax.chat import formats

WORDS = st.lists(
    st.sampled_from(["<tool_call>", "</think>", '"', "\\", "{", "}", "x", " ", "\n", "é😀"]), max_size=6
).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=5,
)
PLAIN = st.text("ab{}\"' \n<>/", max_size=12)
CALLS = st.lists(st.tuples(st.sampled_from(["search", "édit"]), st.dictionaries(WORDS, VALUES, max_size=2), PLAIN))
REQUEST = protocol.ChatCompletionRequest(messages=[], model="m")


class NoTokenizer:
    """The parser asks for one and then only looks for tokens of the marks in it, of which it may have none."""

    def get_vocab(self):
        return {}


def theirs(text):
    """The calls that vLLM finds in a whole output; none if any is malformed."""
    found = hermes_tool_parser.Hermes2ProToolParser(NoTokenizer()).extract_tool_calls(text, REQUEST)
    return [(call.function.name, json.loads(call.function.arguments)) for call in found.tool_calls]


def theirs_streamed(text, size):
    """The calls of an output that came `size` characters at a time."""
    parser = hermes_tool_parser.Hermes2ProToolParser(NoTokenizer())
    names, arguments = {}, {}
    for at in range(0, len(text), size):
        delta = parser.extract_tool_calls_streaming(
            text[:at], text[: at + size], text[at : at + size], [], [], [], REQUEST
        )
        for part in (delta.tool_calls if delta is not None else None) or []:
            names[part.index] = names.get(part.index, "") + (part.function.name or "")
            arguments[part.index] = arguments.get(part.index, "") + (part.function.arguments or "")
    return [(name, json.loads(arguments[index])) for index, name in names.items()]


def ours(text, size):
    parser = formats.named("hermes").parser([])
    calls = [call for at in range(0, len(text), size) for call in parser.feed(text[at : at + size])]
    calls += parser.finish()
    return [(call.name, call.arguments) for call in calls if not call.problem]


@given(CALLS.filter(bool), st.integers(1, 40))
@settings(max_examples=property_counts.examples(40, 150))
def test_well_formed_outputs_hold_the_calls_that_vllm_finds(calls, size):
    written = [
        f"{text}<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"
        for name, arguments, text in calls
    ]
    text = "".join(written)
    assert ours(text, size) == theirs(text) == [(name, arguments) for name, arguments, _ in calls]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_streamed_outputs_hold_the_calls_that_vllm_finds(size):
    text = (
        'First <tool_call>\n{"name": "search", "arguments": {"query": "a {b}", "page": 2}}\n</tool_call> and '
        '<tool_call>{"name": "python", "arguments": {"code": "print(\\"é\\")"}}</tool_call>.'
    )
    assert ours(text, size) == theirs_streamed(text, size) == theirs(text)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>search(a)</tool_call>",
        '<tool_call>{"name": "search", "arguments": {"query": "a"}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        "no call",
        "",
    ],
)
def test_where_vllm_finds_no_call_there_is_none_for_us(text):
    assert ours(text, 5) == theirs(text) == []
