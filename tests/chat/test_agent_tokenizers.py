"""Tokenizers: text round trips, and chat templates that are applied to increments only."""

import property_counts
import pytest
from chat_templates import save
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.chat import tokenizers
from libra_jax.examples import calculator

CHARACTER = tokenizers.CharacterTokenizer()
MARKS = ("<tool_call>", "</tool_call>")

# ChatML as Qwen3 writes it: tool returns inside a user turn, consecutive ones together; thinking kept only after the
# last question; an empty thinking block in front of a closing assistant turn.
QWEN = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set body = m.content.split('</think>')[-1].lstrip('\\n') -%}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content else '' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > ns.last and (loop.last or thought) -%}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- body + '<|im_end|>\\n' -}}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- else -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def test_tokens_that_are_no_characters_read_as_replacements():
    assert CHARACTER.decode([ord("a"), 127, 128, 151_935, -1]) == "a" + 4 * "\ufffd"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return tokenizers.load(save(tmp_path_factory.mktemp("qwen"), QWEN))


# The character tokenizer ----------------------------------------------------------------------------------------------


def test_the_character_vocabulary_has_128_tokens_and_one_stop_token():
    assert CHARACTER.vocab_size == 128
    assert len(CHARACTER.stop_token_ids) == 1
    assert len({CHARACTER.pad_token_id, *CHARACTER.stop_token_ids, *CHARACTER.encode("<tool_call></tool_call>")}) == 4


@given(st.lists(st.sampled_from([*MARKS, *map(chr, range(32, 127)), "\n"])).map("".join))
def test_printable_text_and_call_marks_survive_a_round_trip(text):
    tokens = CHARACTER.encode(text)
    assert CHARACTER.decode(tokens) == text
    plain = text
    for mark in MARKS:
        plain = plain.replace(mark, "")
    assert len(tokens) == len(plain) + text.count("<tool_call>") + text.count("</tool_call>")


@settings(max_examples=property_counts.examples(30, 100))
@given(st.text())
def test_any_text_becomes_tokens_of_the_vocabulary_and_none_that_forge_a_turn(text):
    tokens = CHARACTER.encode(text + "<|im_end|><|tool|>")
    assert all(0 <= token < 128 for token in tokens)
    forging = {0, 1, 2, 3, 4, 5}
    assert not forging & set(tokens)
    assert CHARACTER.encode("\t\u00e9\u4e2d") == [127] * 3


def test_every_token_decodes():
    assert all(len(CHARACTER.decode([token])) >= 1 for token in range(128))


def test_a_message_costs_two_tokens_and_the_generation_prompt_one():
    messages = [protocols.Message("tool", "42"), protocols.Message("user", "go")]
    tokens = CHARACTER.render(messages, first=False, generation_prompt=True)
    assert CHARACTER.decode(tokens) == "<|tool|>42<|im_end|><|user|>go<|im_end|><|assistant|>"
    assert len(tokens) == 2 + 2 + 2 + 2 + 1


def test_an_unknown_role_is_named():
    with pytest.raises(protocols.DataError, match="no role 'pad'"):
        CHARACTER.render([protocols.Message("pad", "")], first=True, generation_prompt=False)


# Hugging Face ---------------------------------------------------------------------------------------------------------


def test_increments_put_together_are_what_the_template_renders_in_one_go(qwen):
    """Token for token, on a dialogue whose turns do not think; the model's own tokens are appended, not rendered."""
    outputs = ["<tool_call>12*34</tool_call>", "408"]
    returned = [protocols.Message("tool", "408")]
    asked = [protocols.Message("system", "s"), protocols.Message("user", "q")]
    tokens = qwen.render(asked, first=True, generation_prompt=True)
    tokens += [*qwen.encode(outputs[0]), qwen.stop_token_ids[0]]
    tokens += qwen.render(returned, first=False, generation_prompt=True)
    tokens += [*qwen.encode(outputs[1]), qwen.stop_token_ids[0]]
    tokens += qwen.render([protocols.Message("user", "more")], first=False, generation_prompt=True)
    assert qwen.decode(tokens) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
        "<tool_call>12*34</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n408\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        "408<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    )
    whole = [
        *({"role": message.role, "content": message.content} for message in asked),
        {"role": "assistant", "content": outputs[0]},
        {"role": "tool", "content": "408"},
        {"role": "assistant", "content": outputs[1]},
        {"role": "user", "content": "more"},
    ]
    text = qwen.hugging_face.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
    assert tokens == qwen.encode(text)


def test_two_tool_returns_in_a_row_are_one_increment(qwen):
    messages = [protocols.Message("tool", "1"), protocols.Message("tool", "2")]
    text = qwen.decode(qwen.render(messages, first=False, generation_prompt=True))
    assert text == (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_demonstration_under_a_hugging_face_template_trains_on_the_assistants_tokens_only(qwen):
    task = calculator.task_source(seed=1).task(0)
    shown = tokenizers.demonstration_trajectory(task, calculator.environment(), qwen)
    trained = [token for token, mask in zip(shown.token_ids, shown.loss_mask, strict=True) if mask]
    expression, answer = task.payload["expression"], task.payload["answer"]
    assert qwen.decode(trained) == f"<tool_call>{expression}</tool_call><|im_end|>{answer}<|im_end|>"


def test_the_stop_tokens_are_the_templates_end_of_turn_and_the_models_end_of_text(tmp_path):
    base = tokenizers.load(save(tmp_path, QWEN, eos="<|endoftext|>"))
    assert [base.decode([token]) for token in base.stop_token_ids] == ["<|im_end|>", "<|endoftext|>"]


def test_a_template_that_counts_turns_is_refused_as_not_incremental(tmp_path):
    counting = (
        "{%- for m in messages -%}{{- '<|im_start|>' + m.role + (messages|length|string) + m.content + '<|im_end|>' -}}"
        "{%- endfor -%}"
    )
    with pytest.raises(protocols.DataError, match="not incremental"):
        tokenizers.load(save(tmp_path, counting))


def test_a_template_that_is_not_incremental_still_renders_whole_dialogues(tmp_path):
    counting = (
        "{%- for m in messages -%}{{- '<|im_start|>' + m.role + (messages|length|string) + m.content + '<|im_end|>' -}}"
        "{%- endfor -%}"
    )
    loaded = tokenizers.load(save(tmp_path, counting), incremental=False)
    asked = [protocols.Message("user", "hi")]
    whole = loaded.render(asked, first=True, generation_prompt=True)
    assert loaded.decode(whole) == "<|im_start|>user1hi<|im_end|>"
    assert loaded.dialogue(asked) == loaded.decode(whole)
    with pytest.raises(protocols.DataError, match="not incremental"):
        loaded.render(asked, first=False, generation_prompt=True)
    folder = save(tmp_path, counting)
    assert tokenizers.create(config_lib.TaskConfig(tokenizer=""), folder, incremental=False).vocab_size > 256
    with pytest.raises(protocols.DataError, match="not incremental"):
        tokenizers.create(config_lib.TaskConfig(tokenizer=""), folder)


def test_a_template_that_ends_turns_in_plain_text_is_refused(tmp_path):
    plain = "{%- for m in messages -%}{{- m.role + ': ' + m.content + '\\n' -}}{%- endfor -%}"
    with pytest.raises(protocols.DataError, match="does not end an assistant turn with a special token"):
        tokenizers.load(save(tmp_path, plain))


def test_a_role_that_the_template_refuses_is_named(tmp_path):
    strict = (
        "{%- for m in messages -%}{%- if m.role not in ['user', 'assistant'] -%}{{- raise_exception('no such role') -}}"
        "{%- endif -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endfor -%}"
    )
    loaded = tokenizers.load(save(tmp_path, strict))
    with pytest.raises(protocols.DataError, match=r"refuses a dialogue with the roles .*tool \(no such role\)"):
        loaded.render([protocols.Message("tool", "1")], first=False, generation_prompt=True)


def test_bad_directories_end_in_one_sentence(tmp_path):
    with pytest.raises(protocols.DataError, match="no such tokenizer directory"):
        tokenizers.load(str(tmp_path / "absent"))
    with pytest.raises(protocols.DataError, match="no chat template"):
        tokenizers.load(save(tmp_path / "untemplated", ""))
    broken = tmp_path / "broken"
    save(broken, QWEN)
    (broken / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(protocols.DataError, match="cannot be loaded") as caught:
        tokenizers.load(str(broken))
    assert "\n" not in str(caught.value)


def test_the_config_names_the_tokenizer(tmp_path):
    assert isinstance(tokenizers.create(config_lib.TaskConfig(), ""), tokenizers.CharacterTokenizer)
    folder = save(tmp_path / "model", QWEN)
    assert tokenizers.create(config_lib.TaskConfig(tokenizer=""), folder).vocab_size > 256
    with pytest.raises(protocols.ConfigError, match=r"config\.task\.tokenizer: is empty and so is model\.path"):
        tokenizers.create(config_lib.TaskConfig(tokenizer=""), "")
    with pytest.raises(protocols.ConfigError, match="did you mean 'character'"):
        tokenizers.create(config_lib.TaskConfig(tokenizer="charcter"), "")


def test_a_tokenizer_that_never_stops_writes_the_template_all_the_same():
    class NeverStops(tokenizers.CharacterTokenizer):
        stop_token_ids: tuple[int, ...] = ()

    messages = [protocols.Message("user", "1+1")]
    plain = tokenizers.CharacterTokenizer().render(messages, first=True, generation_prompt=True)
    assert NeverStops().render(messages, first=True, generation_prompt=True) == plain


def test_an_end_token_beyond_the_vocabulary_makes_no_word_a_control_token(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 99999]}')
    loaded = tokenizers.load(save(tmp_path / "tokenizer", QWEN), model_path=str(tmp_path))
    assert loaded._controls.cut("None of these", "user") == "None of these"
    assert loaded._controls.cut("<|im_end|>", "user") != "<|im_end|>"
