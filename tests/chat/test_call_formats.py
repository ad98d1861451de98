"""Call formats: what counts as a call, what is told of one that is none, and that streaming changes nothing."""

import json
import re
import time

import property_counts
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from libra_jax import protocols
from libra_jax.chat import formats


def schema(name, required=(), **properties):
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {"type": "object", "properties": properties, "required": list(required)},
        },
    }


TEXT, NUMBER = {"type": "string", "description": "A text."}, {"type": "integer"}
TOOLS = [
    schema("search", ["query"], query=TEXT, page=NUMBER),
    schema("python", ["code"], code=TEXT),
    schema("edit", ["command", "path"], command={"enum": ["view", "create"]}, path=TEXT, text=TEXT, first=NUMBER),
    schema("add", ["a", "b"], a=NUMBER, b=NUMBER, how={"type": "object"}),
    schema("now"),
]


def read(text, name, size=None):
    """The calls of a text, fed in pieces of `size` characters; whole without."""
    size = size or len(text) or 1
    return read_pieces([text[at : at + size] for at in range(0, len(text), size)], name)


def read_pieces(pieces, name):
    parser = formats.named(name).parser(TOOLS)
    return [call for piece in pieces for call in parser.feed(piece)] + list(parser.finish())


def call(name, **arguments):
    return formats.WrittenCall(name, arguments)


def hermes(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


# Streaming ------------------------------------------------------------------------------------------------------------

PIECES = {
    "hermes": [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        '{"name": "search", "arguments": {"query": "a"}}',
        '{"name": "python", "arguments": {"code": "print(\'</tool_call>\')"}}',
        '{"name": "python", "arguments": "{\\"code\\": \\"1\\"}"}',
        '{"name": "x',
        '"}',
        "\\",
        "{",
        "}",
        " text ",
        "\n",
        "é😀\u2028",
        "<",
        "</tool",
        "_call>",
    ],
    "tags": [
        *(f"<{slash}{name}>" for name in ("search", "python", "edit", "add", "now", "b") for slash in ("", "/")),
        *(f"<{slash}{name}>" for name in ("query", "page", "path", "command", "a") for slash in ("", "/")),
        "<think>",
        "</think>",
        '{"path": "a", "command": "view"}',
        "view",
        "1",
        " text ",
        "\n",
        "é😀\u2028",
        "<",
        "</sea",
        "rch>",
    ],
}


@st.composite
def streamed(draw, name):
    """A text, made of what matters to the format, and places where it is cut."""
    text = "".join(draw(st.lists(st.sampled_from(PIECES[name]), max_size=20)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[at:end] for at, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(streamed("hermes"))
@settings(max_examples=property_counts.examples(60, 200))
@example(['<tool_call>{"x', '</tool_call>"', "</tool_call>", "<tool_call>{}</tool_call><tool_call>"])
def test_hermes_is_read_the_same_however_its_text_is_cut(pieces):
    text = "".join(pieces)
    assert read_pieces(pieces, "hermes") == read(text, "hermes") == read(text, "hermes", size=1)


@given(streamed("tags"))
@settings(max_examples=property_counts.examples(60, 200))
@example(["<search>a</search", ">", "<think><add>", "</think>", "<add>"])
def test_tags_are_read_the_same_however_their_text_is_cut(pieces):
    text = "".join(pieces)
    assert read_pieces(pieces, "tags") == read(text, "tags") == read(text, "tags", size=1)


@pytest.mark.parametrize(
    ("name", "text"),
    [("hermes", hermes("search", query="a") + "more"), ("tags", "<search>a</search>more")],
)
def test_a_call_is_known_as_soon_as_it_is_closed(name, text):
    parser = formats.named(name).parser(TOOLS)
    known = [place for place, letter in enumerate(text) if parser.feed(letter)]
    assert known == [text.index("more") - 1]


def test_a_long_output_costs_its_length_whatever_it_holds():
    mark = "</tool_call>"
    texts = ['<tool_call>{"a": "' + mark * 20_000, ("<tool_call>{" + mark) * 10_000, "<tool_call>" + "x" * 200_000]
    began = time.process_time()
    counts = [len(read(text, "hermes", size=40)) for text in texts]
    assert counts == [1, 10_000, 1]
    assert time.process_time() - began < 5.0


# Hermes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (hermes("search", query="a"), [call("search", query="a")]),
        ("First " + hermes("search", query="a") + "\nthen\n" + hermes("now"), [call("search", query="a"), call("now")]),
        (hermes("now") + hermes("now"), [call("now")] * 2),
        ('<tool_call>\n{"name": "now"}\n</tool_call>', [call("now")]),
        (hermes("add", how={"x": [{"y": {"z": "}}"}}]}), [call("add", how={"x": [{"y": {"z": "}}"}}]})]),
        (hermes("search", query="naïve 😀 \u2028"), [call("search", query="naïve 😀 \u2028")]),
        (hermes("python", code="'</tool_call>' '<tool_call>'"), [call("python", code="'</tool_call>' '<tool_call>'")]),
        ("```xml\n" + hermes("now") + "\n```", [call("now")]),
        ('<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', [formats.WrittenCall("now", "{}")]),
        ("<think>" + hermes("now") + "</think>" + hermes("search", query="b"), [call("search", query="b")]),
        ("<think>" + hermes("now"), []),
        ("no call </tool_call> at all", []),
        ("", []),
    ],
)
def test_hermes_calls_are_found(text, calls):
    assert read(text, "hermes") == calls


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>search(a)</tool_call>", "the call is no JSON (Expecting value, character 0)"),
        ('<tool_call>{"name": "a"', "the call was not closed with </tool_call>"),
        ("<tool_call>", "the call was not closed with </tool_call>"),
        ("<tool_call>[]</tool_call>", 'the call must be a JSON object with "name" and "arguments"'),
        ('<tool_call>{"arguments": {}}</tool_call>', 'the call must be a JSON object with "name" and "arguments"'),
        ('<tool_call>{"name": "a", "b": 1}</tool_call>', 'the call must be a JSON object with "name" and "arguments"'),
        ('<tool_call>{"name": "a", "arguments": NaN}</tool_call>', "the call is no JSON (NaN is no number)"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "the call is no JSON (maximum recursion depth exceeded"),
        ('<tool_call>{"name": "a}</tool_call>', "the call is no JSON (Unterminated string starting at, character 9)"),
    ],
)
def test_what_is_no_hermes_call_says_why_in_a_few_words(text, problem):
    (found,) = read(text, "hermes")
    assert found.problem.startswith(problem)
    assert len(found.problem) < 120


def test_a_call_after_one_that_left_a_string_open_is_read_still():
    first, second = read('<tool_call>{"name": "a}</tool_call> and ' + hermes("search", query="b"), "hermes")
    assert "Unterminated string" in first.problem
    assert second == call("search", query="b")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
WORDS = st.lists(
    st.sampled_from(["<tool_call>", "</tool_call>", "</", '"', "\\", "x", " ", "\n"]) | st.characters(), max_size=8
).map("".join)


@given(WORDS.filter(bool), st.dictionaries(WORDS, VALUES | WORDS, max_size=3))
@settings(max_examples=property_counts.examples(40, 100))
def test_hermes_reads_back_any_call_that_it_writes(name, arguments):
    written = formats.named("hermes").write(name, arguments)
    assert read(f"text{written}{written}", "hermes") == [formats.WrittenCall(name, arguments)] * 2


# Tags -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("<search>when was Ada born</search>", [call("search", query="when was Ada born")]),
        ("<search> a </search> b <search>\n\nc\n</search>", [call("search", query=" a "), call("search", query="\nc")]),
        ("<python>\nif a < b:\n    print('<b>')\n</python>", [call("python", code="if a < b:\n    print('<b>')")]),
        ("<search>\n<query>a</query> <page>2</page>\n</search>", [call("search", query="a", page=2)]),
        ("<search><query>a</search>", [call("search", query="<query>a")]),
        ('<search>{"query": "a"}</search>', [call("search", query='{"query": "a"}')]),
        ("<search></search>", [call("search", query="")]),
        ("<edit><path>\n\na\n</path><command>view</command></edit>", [call("edit", path="\na", command="view")]),
        ("<edit><text></text>x</text></edit>", [call("edit", text="</text>x")]),
        ("<edit><text><path></path></text><path>p</path></edit>", [call("edit", text="<path></path>", path="p")]),
        ("<edit><first>one</first><path>2</path></edit>", [call("edit", first="one", path="2")]),
        ('<edit>{"path": "a", "command": "view"}</edit>', [call("edit", path="a", command="view")]),
        ('<add>{"a": 1, "b": 2}</add>', [call("add", a=1, b=2)]),
        ('<add><a>1</a><b>-2</b><how>{"x": null}</how></add>', [call("add", a=1, b=-2, how={"x": None})]),
        ("<now></now><now>\n</now>", [call("now"), call("now")]),
        ("<b>bold</b> <i>text</i> </search> <searching>x</searching>", []),
        ("<think><search>a</search></think><search>b</search>", [call("search", query="b")]),
        ("<python><search>a</search></python>", [call("python", code="<search>a</search>")]),
        ("```\n<now></now>\n```", [call("now")]),
    ],
)
def test_tags_of_tools_are_calls(text, calls):
    assert read(text, "tags") == calls


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<search>a", "the call was not closed with </search>"),
        ("<add>1 + 2</add>", "between <add> and </add> must be <a>...</a><b>...</b>, or a JSON object"),
        (
            "<edit>view a</edit>",
            "between <edit> and </edit> must be <command>...</command><path>...</path>, or a JSON object",
        ),
        ("<now>please</now>", "between <now> and </now> must be nothing, or a JSON object"),
    ],
)
def test_what_is_no_call_in_tags_says_how_one_is_written(text, problem):
    (found,) = read(text, "tags")
    assert found.problem == problem


def closes(name, arguments):
    return any(mark in str(value) for key, value in arguments.items() for mark in (f"</{name}>", f"</{key}>"))


MARKUP = st.lists(
    st.sampled_from(["<query>", "<path>", "</path>", "<text>", "</edit>", "{", '"', "x", " ", "\n"]), max_size=8
).map("".join)
EDITS = st.fixed_dictionaries(
    {"command": st.sampled_from(["view", "create"]), "path": MARKUP},
    optional={"text": MARKUP, "first": st.integers()},
)


@given(st.tuples(st.just("python"), st.fixed_dictionaries({"code": MARKUP})) | st.tuples(st.just("edit"), EDITS))
@settings(max_examples=property_counts.examples(50, 150))
def test_tags_read_back_any_call_that_they_write(written):
    name, arguments = written
    tags = formats.named("tags")
    if closes(name, arguments):
        with pytest.raises(ValueError, match="which would close it"):
            tags.write(name, arguments)
    else:
        assert read(f"text {tags.write(name, arguments)} text", "tags") == [formats.WrittenCall(name, arguments)]


# What the policy is told ----------------------------------------------------------------------------------------------


def test_a_schema_that_is_true_or_false_is_no_text():
    tool = schema("note", ["body"], body={"anyOf": [True, {"type": "string"}]}, odd={"oneOf": [False]})
    (read,) = formats.named("tags").parser([tool]).feed("<note>3</note>")
    assert read == call("note", body="3")


def test_the_instructions_of_tags_show_how_each_tool_is_called():
    told = formats.named("tags").instructions(TOOLS)
    assert "`<search>query</search>`: Does search.\n- query (string): A text.\n- page (integer, optional)" in told
    assert "`<search><query>...</query><page>...</page></search>`" in told
    assert "`<edit><command>...</command><path>...</path></edit>`" in told
    assert '- command (one of ["view", "create"])' in told
    shown = re.findall(r"^`(.*?)`", told, re.MULTILINE)
    assert [found.name for text in shown for found in read(text, "tags")] == ["search", "python", "edit", "add", "now"]


def test_the_instructions_of_hermes_hold_the_schemas_as_qwens_template_does():
    told = formats.named("hermes").instructions(TOOLS)
    inside = told.partition("<tools>\n")[2].partition("\n</tools>")[0]
    assert [json.loads(line) for line in inside.splitlines()] == TOOLS


def test_a_format_that_is_none_is_refused():
    with pytest.raises(protocols.ConfigError, match=r"config\.tools\.format"):
        formats.named("xml")
