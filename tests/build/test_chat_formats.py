"""The chat format that a run's settings name."""

import sys
import types

import chat_templates
import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import chat_formats
from libra_jax.chat import chat_format, tokenizers
from libra_jax.tools import toolkit

CALL = '<tool_call>\n{"name": "search", "arguments": {"q": 1}}\n</tool_call>'
TOOLS = (protocols.ToolSpec("search"),)
ASKED = (protocols.Message("user", "q"),)


def message(form, tokenizer, text, context=""):
    parser = form.parser(TOOLS, tokenizer.encode(context))
    parser.feed(tokenizer.encode(text))
    return parser.finish()[1]


@pytest.fixture(scope="module")
def thinks(tmp_path_factory):
    return tokenizers.load(chat_templates.save(tmp_path_factory.mktemp("thinks"), chat_templates.THINKS))


def test_the_templates_parsers_are_the_default(thinks):
    form = chat_formats.make(thinks, config_lib.GatewayConfig())
    read = message(form, thinks, "<think>hm</think>so" + CALL)
    assert (read.reasoning, read.content, read.tool_calls[0].arguments) == ("hm", "so", '{"q": 1}')
    assert form.render(ASKED, ())[-1] == thinks.encode("\n")[0]


def test_the_parts_of_a_stream_come_in_the_order_of_the_message(thinks):
    parser = chat_formats.make(thinks, config_lib.GatewayConfig()).parser(TOOLS, ())
    tokens = thinks.encode("<think>\nhm \n</think>\n\nThe answer is 51. TERMINATE")
    deltas = [delta for token in tokens for delta in parser.feed([token])]
    rest, read = parser.finish()
    parts = [(type(delta), delta.text) for delta in (*deltas, *rest)]
    kinds = [kind for kind, _ in parts]
    assert kinds == sorted(kinds, key=(protocols.ReasoningDelta, protocols.ContentDelta).index)
    assert "".join(text for kind, text in parts if kind is protocols.ContentDelta) == read.content
    assert (read.reasoning, read.content) == ("\nhm \n", "\n\nThe answer is 51. TERMINATE")


HEADER = "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("context", "output", "reasoning", "content", "calls"),
    [
        (HEADER, f"<think>maybe {CALL}", f"maybe {CALL}", "", 0),
        (HEADER, f"<think>hm</think>so<think>maybe {CALL}", "hm", f"so<think>maybe {CALL}", 0),
        (f"{HEADER}<think>\n", f"maybe {CALL}</think>{CALL}", f"maybe {CALL}", "", 1),
        (f"{HEADER}<think>\n", "<think>hm</think>so", "hm", "so", 0),
        (f"{HEADER}<think>\n", "maybe 42", "maybe 42", "", 0),
        (f"{HEADER}<think>\n\n</think>\n\n", "so", "", "so", 0),
        (HEADER, "so", "", "so", 0),
    ],
)
def test_thoughts_are_read_by_their_marks_and_the_context(thinks, context, output, reasoning, content, calls):
    read = message(chat_formats.make(thinks, config_lib.GatewayConfig()), thinks, output, context)
    assert (read.reasoning, read.content, len(read.tool_calls)) == (reasoning, content, calls)


def test_no_parser_leaves_all_in_the_text(thinks):
    form = chat_formats.make(thinks, config_lib.GatewayConfig(tool_parser="none", reasoning_parser="none"))
    assert message(form, thinks, "<think>hm</think>so" + CALL).content == "<think>hm</think>so" + CALL


def test_each_parser_can_be_chosen_alone(thinks):
    form = chat_formats.make(thinks, config_lib.GatewayConfig(reasoning_parser="none"))
    read = message(form, thinks, "hm" + CALL)
    assert (read.content, len(read.tool_calls)) == ("hm", 1)
    read = message(form, thinks, "hm" + CALL, f"{HEADER}<think>\n")
    assert (read.content, len(read.tool_calls)) == (f"<think>\nhm{CALL}", 0)


def test_the_character_tokenizers_calls_stay_in_the_text_by_default():
    tokenizer = tokenizers.CharacterTokenizer()
    assert message(chat_formats.make(tokenizer, config_lib.GatewayConfig()), tokenizer, CALL).content == CALL
    form = chat_formats.make(tokenizer, config_lib.GatewayConfig(tool_parser="hermes"))
    assert message(form, tokenizer, CALL).tool_calls[0].name == "search"


def test_an_unknown_parser_is_a_sentence_about_the_setting(thinks):
    with pytest.raises(protocols.ConfigError, match=r"config\.gateway\.tool_parser: .* did you mean 'hermes'"):
        chat_formats.make(thinks, config_lib.GatewayConfig(tool_parser="hermes_"))
    with pytest.raises(protocols.ConfigError, match=r'gateway\.reasoning_parser: must not be empty; "none"'):
        config_lib.GatewayConfig(reasoning_parser="")


def test_a_missing_vllm_is_a_sentence_about_the_setting(thinks, monkeypatch):
    monkeypatch.setitem(sys.modules, "libra_jax.engines.vllm_parsers", None)
    monkeypatch.delattr("libra_jax.engines.vllm_parsers", raising=False)
    with pytest.raises(protocols.ConfigError, match="vLLM cannot be imported"):
        chat_formats.make(thinks, config_lib.GatewayConfig())


def test_a_tokenizer_of_another_kind_is_refused():
    class Other:
        vocab_size = 1

    with pytest.raises(protocols.DataError, match="a Other has no chat format"):
        chat_formats.make(Other(), config_lib.GatewayConfig())


COUNTS = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + (messages|length|string) + m.content + '<|im_end|>' -}}"
    "{%- endfor -%}"
)
"""Writes the number of messages into each, so that each request is a context of its own."""


class Drives:
    """A harness."""

    async def run(self, task, endpoint):
        return protocols.Outcome(0.0)

    async def close(self):
        pass


def test_a_harness_takes_a_template_that_the_native_loop_refuses(tmp_path, monkeypatch):
    folder, tools = (
        chat_templates.save(tmp_path, COUNTS),
        toolkit.Toolkit(config_lib.ToolsConfig(), config_lib.SandboxConfig()),
    )

    def run(environment):
        task = config_lib.TaskConfig(tokenizer=folder, environment=environment)
        return config_lib.RunConfig(task=task)

    with pytest.raises(protocols.DataError, match="not incremental"):
        chat_formats.policy_tokenizer(run("libra_jax.examples.calculator:environment"), tools)
    module = types.ModuleType("harness_of_a_test")
    module.factory = Drives
    monkeypatch.setitem(sys.modules, "harness_of_a_test", module)
    tokenizer = chat_formats.policy_tokenizer(run("harness_of_a_test:factory"), tools)
    form = chat_formats.make(tokenizer, config_lib.GatewayConfig())
    assert tokenizer.decode(form.render(ASKED, ())) == "<|im_start|>user1q<|im_end|>"
    output = protocols.Message("assistant", "a")
    assert form.extend([*ASKED, output, protocols.Message("tool", "r")], 2, ()) is None


@pytest.mark.parametrize(
    ("name", "header", "parsers"),
    [
        ("THINKS", "<|im_start|>assistant\n", ("hermes", "marks")),
        ("PLAIN", "<|im_start|>assistant\n", ("hermes", "")),
        ("NAMES", "<|im_start|>assistant\n", ("hermes", "")),
        ("PARTS", "", ("", "")),
        ("OPENS", "<|im_start|>assistant\n<think>\n", ("", "marks")),
    ],
)
def test_a_template_tells_the_parsers_that_are_certain(name, header, parsers):
    assert chat_format.parsers_of(getattr(chat_templates, name), header) == parsers


def test_calls_in_xml_and_after_header_marks_are_told_apart():
    xml = "{{ '<tool_call>\\n<function=' + name + '>' }}"
    llama = "{{ '<|start_header_id|>' }}{{ '{\"name\": ' + name + ', \"parameters\": ' }}"
    glm = "{{ '<tool_call>' }}<arg_key>\"arguments\""
    assert [chat_format.parsers_of(template, "").tool for template in (xml, llama, glm)] == [
        "qwen3_xml",
        "llama3_json",
        "",
    ]
