"""Our reading of thoughts against vLLM's reasoning parsers, which no one here wrote; no engine is started."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.entrypoints.openai.chat_completion import protocol
from vllm.reasoning import ReasoningParserManager

from libra_jax.chat import thoughts

REQUEST = protocol.ChatCompletionRequest(messages=[], model="m")
FURTHER = ("<tool_call>", "</tool_call>", "<response>", "</response>", "<0x0A>", "<|channel>", "<|im_start|>")
VOCABULARY = (*thoughts.MARKS, *thoughts.MARKS.values(), *FURTHER, *map(chr, range(128)))

SEVERAL = ("deepseek_v4", "deepseek_v41", "glm45", "glm47", "ling3", "plamo3")
"""Parsers that read several thoughts in an output; to others, a later one is content."""

BEGINS = ("deepseek_r1", "qwen3", "kimi_k2", "minimax_m2", "mimo", "step3p5", "seed_oss", "nemotron_v3", *SEVERAL)
"""Parsers for which an output may begin inside of a thought."""

ONE = ("ernie45", "holo2", "hy_v4", "kimi_k3", "minicpmv", "minimax_m3", "granite_thinking_parser", *BEGINS)
"""Parsers that read an output by its marks alone, with nothing else around them."""


class Tokenizer:
    """A tokenizer of characters and marks. Parsers look for the tokens of their marks in it."""

    all_special_ids, all_special_tokens, chat_template = (), (), ""

    def get_vocab(self):
        return {text: number for number, text in enumerate(dict.fromkeys(VOCABULARY))}

    def encode(self, text, add_special_tokens=False):
        return [self.get_vocab()[letter] for letter in text]

    def decode(self, tokens, **_):
        return ""


def made(name):
    return ReasoningParserManager.get_reasoning_parser(name)(Tokenizer())


def marks(name):
    """The marks of a parser, from vLLM; Gemma 4 writes a word after its opening mark, which ours has."""
    parser = made(name)
    begin = {"<|channel>": "<|channel>thought"}.get(parser.reasoning_start_str, parser.reasoning_start_str)
    return begin, parser.reasoning_end_str


def theirs(name, output):
    reasoning, content = made(name).extract_reasoning(output, REQUEST)
    return reasoning or "", content or ""


def test_the_marks_are_those_of_vllms_parsers():
    known = {}
    for name in ReasoningParserManager.list_registered():
        try:
            begin, end = marks(name)
        except Exception:  # needs further tokens, or has none
            continue
        if begin and name not in ("inkling", "k2_horizon"):  # its closing mark ends all parts; its marks are settings
            known[begin] = end
    assert len(known) >= 6
    assert known.items() <= thoughts.MARKS.items()


PLAIN = st.lists(st.sampled_from(["a", " ", "\n", "42", "<", "so", "\\boxed{7}"]), max_size=4).map("".join)


def same(ours, theirs, mark):
    """Whether two readings are the same. Parsers may drop white space, and opening marks inside a thought."""
    squeezed = [["".join(text.replace(mark, "").split()) for text in parts] for parts in (ours, theirs)]
    return squeezed[0] == squeezed[1]


@pytest.mark.parametrize("name", ONE)
@given(thought=st.lists(PLAIN, min_size=1, max_size=2), answer=PLAIN, closed=st.booleans())
@settings(max_examples=25)
def test_thought_and_answer_are_those_of_vllms_parsers(name, thought, answer, closed):
    begin, end = marks(name)
    output = begin.join(["", *thought]) + (end + answer if closed else "")
    assert same(thoughts.split(output), theirs(name, output), begin)
    if name in BEGINS and closed and len(thought) == 1:
        # The mark that the context has, or that the model has left out.
        assert same(thoughts.split(output.removeprefix(begin)), theirs(name, output.removeprefix(begin)), begin)


@pytest.mark.parametrize("name", SEVERAL)
@given(parts=st.lists(st.tuples(PLAIN, PLAIN), min_size=1, max_size=3), last=st.none() | PLAIN)
@settings(max_examples=25)
def test_several_thoughts_are_those_of_vllms_parsers(name, parts, last):
    begin, end = marks(name)
    output = "".join(begin + thought + end + answer for thought, answer in parts) + (begin + last if last else "")
    assert same(thoughts.split(output), theirs(name, output), begin)
