"""Thoughts in the native loop: calls in them are not run, by whichever side the opening mark was written."""

import dataclasses

import chat_templates
import dialogue_doubles
import loop_doubles as doubles
import property_counts
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax import protocols
from libra_jax.chat import formats, tokenizers
from libra_jax.environments import question
from libra_jax.tools import arithmetic

LONG = dataclasses.replace(doubles.LIMITS, max_tokens=200, max_context=900)
CALL = "<look>a</look>"


def looked(output, *, eager, tokenizer):
    """Texts of the calls that an output's tool has got, and the text that the environment has read."""
    look, texts = dialogue_doubles.Clocked(eager=eager), []

    async def score(task, output, box):
        texts.append(output)
        return 1.0

    environment = dialogue_doubles.make(look, score=score)
    dialogue_doubles.attempt([output, "</think>done"], environment, tokenizer=tokenizer, limits=LONG)
    return look.ended, texts


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    ("output", "calls"),
    [
        (f"maybe {CALL}", []),
        (f"maybe {CALL}</think>no", []),
        (f"maybe <look>b</look></think>{CALL}", ["a"]),
        (f"<think>again {CALL}</think>no", []),
        (f"hm</think>so<think>{CALL}", []),
    ],
)
def test_a_call_in_a_thought_that_the_template_opens_is_not_run(output, calls, eager):
    assert looked(output, eager=eager, tokenizer=doubles.OpensThoughts())[0] == calls


def test_environments_read_the_mark_that_the_template_wrote():
    assert looked("maybe 42", eager=False, tokenizer=doubles.OpensThoughts())[1] == ["<think>\nmaybe 42"]
    assert looked("maybe 42", eager=False, tokenizer=doubles.TOKENIZER)[1] == ["maybe 42"]


def test_the_mark_of_the_template_is_no_token_of_the_output():
    async def step(output):
        return protocols.StepResult(done=True, reward=1.0)

    tokenizer = doubles.OpensThoughts()
    trajectory, _ = doubles.attempt(["hm</think>x"], environment=doubles.Probe(step), tokenizer=tokenizer)
    sampled = [token for token, counts in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if counts]
    assert tokenizer.decode(sampled) == "hm</think>x<|im_end|>"


@pytest.mark.parametrize("name", ["hermes", "tags"])
@pytest.mark.parametrize(
    ("begin", "end"),
    [("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"), ("<|channel>thought\n", "<channel|>")],
)
def test_a_call_in_a_thought_of_any_model_is_no_call(name, begin, end):
    form = formats.named(name)
    schema = {"properties": {"q": {"type": "string"}}, "required": ["q"]}
    parser = form.parser([{"function": {"name": "search", "parameters": schema}}])
    call = form.write("search", {"q": "a"})
    assert [*parser.feed(f"{begin}{call}{end}so"), *parser.finish()] == []
    assert len(parser.feed(call)) == 1


@pytest.mark.parametrize(
    "output", ["<think><tool_call>1+1</tool_call>", "<think>a</think>so<think><tool_call>1+1</tool_call>"]
)
def test_the_calculator_is_not_called_in_a_thought_that_goes_on(output):
    assert arithmetic.answer_call(output, 20) is None
    assert arithmetic.answer_call(f"{output}</think><tool_call>1+1</tool_call>", 20).content == "2"


TEXTS = st.lists(st.sampled_from([CALL, "<think>", "</think>", "x"]), max_size=5).map("".join)


@given(TEXTS, st.booleans())
@settings(max_examples=property_counts.examples(25, 60))
def test_a_template_that_opens_the_thought_is_as_a_policy_that_does(output, eager):
    calls, _ = looked(output, eager=eager, tokenizer=doubles.OpensThoughts())
    assert calls == looked(f"<think>\n{output}", eager=eager, tokenizer=doubles.TOKENIZER)[0]


@pytest.mark.parametrize(("output", "reward"), [("maybe 42", 0.0), ("maybe 7</think>so 42", 1.0), ("42</think>", 0.0)])
def test_a_thought_that_the_template_opens_is_not_graded(output, reward):
    task = protocols.Task("t", {"prompt": "q", "answer": "42"})
    environment = question.QuestionEnvironment(match="numeric")
    trajectory, _ = doubles.attempt([output], task=task, environment=environment, tokenizer=doubles.OpensThoughts())
    assert trajectory.reward == reward


@pytest.mark.parametrize(
    ("template", "content", "trained"),
    [
        ("OPENS", "42", "\n</think>\n\n42<|im_end|>"),
        ("OPENS", "hm</think>42", "hm</think>42<|im_end|>"),
        ("THINKS", "42", "42<|im_end|>"),
        ("KEEPS", "42", "\n</think>\n\n42<|im_end|>"),
    ],
)
def test_a_demonstrations_answer_stands_outside_of_the_thought(template, content, trained, tmp_path):
    # One that writes its opening mark in front of earlier outputs, too.
    begun = "('<think>\\n' if m.role == 'assistant' else '') + m.content"
    keeps = chat_templates.OPENS.replace("m.content", begun)
    source = getattr(chat_templates, template, keeps)
    tokenizer = tokenizers.load(chat_templates.save(tmp_path, source))
    dialogue = [protocols.Message("user", "q"), protocols.Message("assistant", content)]
    shown = tokenizers.dialogue_trajectory("demonstration", dialogue, tokenizer)
    pairs = zip(shown.token_ids, shown.loss_mask, strict=True)
    assert tokenizer.decode([token for token, counts in pairs if counts]) == trained
