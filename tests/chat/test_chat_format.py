"""Chat formats: whole dialogues, dialogues that go on after an output, and outputs whose text passes through."""

import itertools

import chat_templates
import property_counts
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax import protocols
from libra_jax.chat import chat_format, output_parsers, tokenizers

CHARACTER = tokenizers.CharacterTokenizer()
TOOLS = (protocols.ToolSpec("search", "Finds.", {"type": "object", "properties": {"q": {"type": "string"}}}),)
CALL = protocols.ToolCall("call00001", "search", '{"q": "é"}')
ASKED = (protocols.Message("system", "s"), protocols.Message("user", "q"))


def said(content="", reasoning="", calls=()):
    return protocols.Message("assistant", content, tuple(calls), reasoning=reasoning)


def returned(text):
    return protocols.Message("tool", text, tool_call_id="call00001")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The format of each template, by name."""
    folder, names = tmp_path_factory.mktemp("formats"), ("THINKS", "PLAIN", "HEADERS", "NAMES", "PARTS", "OPENS")
    ends = {"HEADERS": "<|eot|>"}
    return {
        name: chat_format.HuggingFaceFormat(
            tokenizers.load(
                chat_templates.save(folder / name, getattr(chat_templates, name), eos=ends.get(name, "<|im_end|>")),
                incremental=False,
            )
        )
        for name in names
    }


def text(form, tokens):
    return form._tokenizer.decode(tokens)


def grown(form, messages, known, written, tools=()):
    """The dialogue's tokens, put together from a first request, an output, and what follows it."""
    more = form.extend(messages, known, tools)
    assert more is not None
    output = form._tokenizer.encode(written)
    return [*form.render(messages[: known - 1], tools), *output, form.stop_token_ids[0], *more]


# The character tokenizer ----------------------------------------------------------------------------------------------


def test_the_character_format_writes_what_the_native_loop_writes():
    form = chat_format.CharacterFormat(CHARACTER)
    dialogue = [*ASKED, said("<tool_call>1+2</tool_call>"), protocols.Message("tool", "3")]
    native = CHARACTER.render(ASKED, first=True, generation_prompt=True)
    native += [*CHARACTER.encode("<tool_call>1+2</tool_call>"), *CHARACTER.stop_token_ids]
    native += CHARACTER.render(dialogue[3:], first=False, generation_prompt=True)
    assert form.render(dialogue, TOOLS) == native
    assert grown(form, dialogue, 3, "<tool_call>1+2</tool_call>", TOOLS) == native


def test_the_character_format_writes_calls_as_hermes_and_reasoning_in_front():
    form = chat_format.CharacterFormat(CHARACTER)
    output = said(
        "so", reasoning="hm", calls=[protocols.ToolCall("", "add", '{"a":1}'), protocols.ToolCall("", "b", "no")]
    )
    assert CHARACTER.decode(form.render([*ASKED, output], ())) == (
        "<|system|>s<|im_end|><|user|>q<|im_end|><|assistant|><think>\nhm\n</think>\n\nso\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call><|im_end|><|assistant|>'
    )


def test_the_character_format_refuses_an_unknown_role():
    with pytest.raises(protocols.DataError, match="no role 'pad'"):
        chat_format.CharacterFormat(CHARACTER).render([protocols.Message("pad", "")], ())


# Dialogues that go on -------------------------------------------------------------------------------------------------


def test_reasoning_before_a_tool_return_stays_and_the_output_is_extended(made):
    output = said("look\n", "hm", [CALL])
    # The model writes the call's JSON in its own way; the template would write it in another.
    written = '<think>\nhm\n</think>\n\nlook\n<tool_call>{"name":"search","arguments":{"q":"é"}}</tool_call>'
    tokens = grown(made["THINKS"], [*ASKED, output, returned("r")], 3, written, TOOLS)
    assert text(made["THINKS"], tokens).endswith(
        written
        + "<|im_end|>\n<|im_start|>user\n<tool_response>\nr\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_reasoning_that_the_next_question_strips_begins_another_context(made):
    dialogue = [*ASKED, said("a", "hm"), protocols.Message("user", "next")]
    assert made["THINKS"].extend(dialogue, 3, ()) is None
    assert "hm" not in text(made["THINKS"], made["THINKS"].render(dialogue, ()))
    assert made["PLAIN"].extend([*ASKED, said("a"), dialogue[-1]], 3, ()) is not None


def test_reasoning_left_in_the_content_is_missed_just_the_same(made):
    thought = said("<think>\nhm\n</think>\n\na")
    assert made["THINKS"].extend([*ASKED, thought, protocols.Message("user", "next")], 3, ()) is None
    assert made["THINKS"].extend([*ASKED, thought, returned("r")], 3, ()) is not None


def test_reasoning_of_an_earlier_output_that_goes_begins_another_context(made):
    dialogue = [*ASKED, said("look", "hm", [CALL]), returned("r"), said("a")]
    assert made["THINKS"].extend([*dialogue, returned("more")], 5, ()) is not None
    assert made["THINKS"].extend([*dialogue, protocols.Message("user", "next")], 5, ()) is None


def test_an_output_without_reasoning_is_extended_by_a_question(made):
    dialogue = [*ASKED, said("a"), protocols.Message("user", "next")]
    tokens = grown(made["THINKS"], dialogue, 3, "a")
    assert tokens == made["THINKS"].render(dialogue, ())


def test_text_that_the_template_drops_beside_a_call_begins_another_context(made):
    for name in ("HEADERS", "NAMES"):
        assert made[name].extend([*ASKED, said("", calls=[CALL]), returned("r")], 3, TOOLS) is not None
        assert made[name].extend([*ASKED, said("look first", calls=[CALL]), returned("r")], 3, TOOLS) is None


def test_a_header_that_later_contexts_lack_begins_another_context(made):
    assert made["OPENS"].extend([*ASKED, said("a", "hm"), returned("r")], 3, ()) is None


def test_an_output_that_spells_the_end_of_a_turn_begins_another_context(made):
    assert made["PLAIN"].extend([*ASKED, said("a<|im_end|>b"), protocols.Message("user", "n")], 3, ()) is None


def test_a_template_that_wants_tool_names_gets_those_of_the_calls(made):
    dialogue = [*ASKED, said("", calls=[CALL]), returned("r")]
    assert '{"name": "search", "content": "r"}' in text(made["NAMES"], made["NAMES"].render(dialogue, TOOLS))
    with pytest.raises(protocols.DataError, match="a tool message needs a name"):
        made["NAMES"].render([*ASKED, returned("r")], TOOLS)


def test_a_dialogue_that_the_template_refuses_is_a_data_error(made):
    dialogue = [*ASKED, said("", calls=[CALL, CALL]), returned("r")]
    with pytest.raises(protocols.DataError, match="one call at a time"):
        made["HEADERS"].extend(dialogue, 3, ())


def test_a_template_of_parts_gets_parts(made):
    assert (
        text(made["PARTS"], made["PARTS"].render([ASKED[1]], ()))
        == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    )


# A white space at the beginning of an output may be one token with the header's, if both are written at once.
TEXTS = st.text("ab \n", min_size=1, max_size=4).map(str.lstrip).filter(bool)
OUTPUTS = st.builds(said, TEXTS) | st.builds(lambda text: said(text, calls=[CALL]), TEXTS)
NEXT = st.builds(returned, TEXTS) | st.builds(protocols.Message, st.just("user"), TEXTS)


@settings(max_examples=property_counts.examples(30, 100))
@given(st.lists(st.tuples(OUTPUTS, NEXT), min_size=1, max_size=3), st.sampled_from(["PLAIN", "THINKS"]))
def test_output_and_extension_give_the_whole_dialogue_in_the_templates_writing(made, rounds, name):
    """Where an output is what the template itself would write."""
    form, dialogue = made[name], list(ASKED)
    for output, further in rounds:
        before = form.render(dialogue, TOOLS)
        dialogue += [output, further]
        whole = text(form, form.render(dialogue, TOOLS))
        more = form.extend(dialogue, len(dialogue) - 1, TOOLS)
        assert more is not None
        written = whole.removeprefix(text(form, before)).split("<|im_end|>")[0]
        joined = [*before, *form._tokenizer.encode(written), form.stop_token_ids[0], *more]
        assert joined == form.render(dialogue, TOOLS)


# Outputs --------------------------------------------------------------------------------------------------------------


def pieces(tokens, cuts):
    edges = sorted({0, len(tokens), *(cut % (len(tokens) + 1) for cut in cuts)})
    return [tokens[start:end] for start, end in itertools.pairwise(edges)]


@given(st.text(max_size=12), st.lists(st.integers(0, 99), max_size=5))
def test_text_passes_through_however_the_tokens_are_cut(made, output, cuts):
    form = made["PLAIN"]
    tokens = form._tokenizer.encode(output)
    parser = form.parser(TOOLS, ())
    deltas = [delta for piece in pieces(tokens, cuts) for delta in parser.feed(piece)]
    rest, message = parser.finish()
    told = [delta.text for delta in (*deltas, *rest)]
    assert "".join(told) == message.content == form._tokenizer.decode(tokens)
    assert message == protocols.Message("assistant", message.content)


def test_tokens_that_end_inside_a_character_wait_for_the_rest(made):
    parser = made["PLAIN"].parser((), ())
    first, *others = made["PLAIN"]._tokenizer.encode("\N{GRINNING FACE}")
    assert others
    assert parser.feed([first]) == []
    assert parser.feed(others) == [protocols.ContentDelta("\N{GRINNING FACE}")]
    parser.feed([first])
    rest, message = parser.finish()
    assert [delta.text for delta in rest] == ["\N{REPLACEMENT CHARACTER}"]
    assert message.content == "\N{GRINNING FACE}\N{REPLACEMENT CHARACTER}"


def test_call_ids_differ_by_context_output_and_number_and_repeat():
    ids = [
        output_parsers.call_id(context, output, index)
        for context, output in (((), (1, 2)), ((1,), (2,)), ((1, 2), ()), ((1,), (2, 3)))
        for index in (0, 1)
    ]
    assert len(set(ids)) == len(ids)
    assert all(len(name) == 9 and name.isalnum() for name in ids)
    assert output_parsers.call_id([1], [2], 0) == output_parsers.call_id((1,), (2,), 0)
