"""Outputs that arrive in pieces, up to a stop text: the parts of the stream are the message, in its order."""

import itertools

import property_counts
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax import protocols
from libra_jax.chat import chat_format, output_parsers, tokenizers
from libra_jax.rollouts import outputs

TOKENIZER = tokenizers.CharacterTokenizer()
PIECES = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "[THINK]",
    "[/THINK]",
    "END",
    "EN",
    "ab ",
    "\n",
    "<",
    "E",
)
OUTPUTS = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
STOPS = st.lists(st.sampled_from(["END", "b ", "\n\n", "</think>", "EN", ""]), max_size=2)
KINDS = (protocols.ReasoningDelta, protocols.ContentDelta, protocols.ToolCallDelta)


def calls_between_marks(text, token_ids):
    """Takes text between two marks for a call, and drops white space around the content then."""
    content, begin, call = text.partition("<tool_call>")
    name, end, _ = call.partition("</tool_call>")
    return ("", content.strip(), [protocols.ToolCall("", name, "{}")]) if begin and end else ("", text, [])


def streamed(tokens, cuts, stop, **arguments):
    """The parts of the stream, the message, and the reader."""
    parser = output_parsers.MessageParser(TOKENIZER, **arguments)
    reader = outputs.Reader(chat_format.CharacterFormat(TOKENIZER), parser, stop)
    edges = sorted({0, len(tokens), *(place % (len(tokens) + 1) for place in cuts)})
    deltas = [delta for at, end in itertools.pairwise(edges) for delta in reader.feed(tokens[at:end])]
    rest, message = reader.finish()
    return [*deltas, *rest], message, reader


@given(
    output=OUTPUTS,
    cuts=st.lists(st.integers(0, 99), max_size=6),
    stop=STOPS,
    thinks=st.booleans(),
    opened=st.booleans(),
    read=st.sampled_from([None, calls_between_marks]),
    streams=st.booleans(),
)
@settings(max_examples=property_counts.examples(120, 400))
def test_the_parts_of_a_stream_are_the_message_in_its_order(output, cuts, stop, thinks, opened, read, streams):
    tokens, context = TOKENIZER.encode(output), TOKENIZER.encode("a <think>\n" if opened else "a")
    arguments = {"context": context, "thinks": thinks, "read": read, "streams": streams}
    deltas, message, reader = streamed(tokens, cuts, stop, **arguments)
    kinds = [KINDS.index(type(delta)) for delta in deltas]
    assert kinds == sorted(kinds)
    texts = {kind: "".join(delta.text for delta in deltas if isinstance(delta, kind)) for kind in KINDS[:2]}
    assert texts == {protocols.ReasoningDelta: message.reasoning, protocols.ContentDelta: message.content}
    called = [(delta.call_id, delta.name) for delta in deltas if isinstance(delta, protocols.ToolCallDelta)]
    assert called == [(call.call_id, call.name) for call in message.tool_calls]
    assert streamed(tokens, range(len(tokens)), stop, **arguments)[1] == message
    # The output ends with the character that completes the first stop text.
    ends = [end for text in stop if text and (end := (TOKENIZER.decode(tokens) + text).find(text) + len(text))]
    assert reader.tokens == len(TOKENIZER.encode(TOKENIZER.decode(tokens)[: min(ends, default=len(output))]))


@pytest.mark.parametrize(
    ("output", "reasoning", "content"),
    [
        ("<think>hm END so", "hm ", ""),
        ("<think>hm</think>so END", "hm", "so "),
        ("so <tool_call>END", "", "so <tool_call>"),
    ],
)
def test_a_stop_text_is_left_out_of_thought_and_content(output, reasoning, content):
    for cuts in ((), range(40)):
        _, message, _ = streamed(TOKENIZER.encode(output), cuts, ["END"], thinks=True, read=calls_between_marks)
        assert (message.reasoning, message.content) == (reasoning, content)


def test_a_thought_and_plain_content_stream_as_they_come():
    parser = output_parsers.MessageParser(TOKENIZER, thinks=True, read=calls_between_marks)
    parts = []
    for token in TOKENIZER.encode("<think>hm\n</think>\n\n1 < 2 so<tool_call>"):
        parts += parser.feed([token])
    texts = ["".join(part.text for part in parts if isinstance(part, kind)) for kind in KINDS[:2]]
    assert texts == ["hm\n", "\n\n1 < 2 so"]
