"""Graders against pairs with the values of public graders, numbers in any form, and boxes against brute force."""

import asyncio
import collections
import decimal
import json
import logging
import pathlib
import types

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.environments import math, question, search_qa, verifier_worker
from libra_jax.examples.outside import agents_sdk
from libra_jax.rewards import answers
from libra_jax.tools import toolkit

PAIRS = pathlib.Path(__file__).parent / "data" / "grader_pairs.jsonl"
"""Lines with a source, each followed by its pairs: grader, output, accepted answer, value."""


def asked(match, output, answer):
    """The reward of the question environment."""

    async def body():
        environment = question.environment(match=match)
        await environment.reset(protocols.Task("t", {"prompt": "?", "answer": answer}))
        return (await environment.step(output)).reward

    return asyncio.run(body())


def mathematically(monkeypatch):
    """Returns a grader by the math environment, which compares in this process instead of in one of its own."""
    pytest.importorskip("math_verify")
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    class Here(math.verifier.Verifier):
        async def open(self):
            pass

        async def check(self, given, accepted):
            found = verifier_worker.find(given, accepted)
            return math.verifier.Finding(found["right"], found["read"])

    monkeypatch.setattr(math.verifier, "Verifier", Here)

    async def grade(output, answer):
        async with toolkit.Toolkit(config_lib.ToolsConfig(), config_lib.SandboxConfig()) as tools:
            environment = math.environment(tools)
            await environment.reset(protocols.Task("t", {"prompt": "?", "answer": answer}))
            result = await environment.step(output)
            await environment.close()
            return result.reward

    return lambda output, answer: asyncio.run(grade(output, answer))


def searched(output, answer):
    async def body():
        async with toolkit.Toolkit(config_lib.ToolsConfig(), config_lib.SandboxConfig()) as tools:
            environment = search_qa.environment(tools)
            await environment.reset(protocols.Task("t", {"prompt": "?", "answer": answer}))
            return (await environment.step(output)).reward

    return asyncio.run(body())


def test_graders_give_the_values_of_public_graders(monkeypatch):
    graders = {
        "exact": lambda output, answer: asked("exact", output, answer),
        "numeric": lambda output, answer: asked("numeric", output, answer),
        "math": mathematically(monkeypatch),
        "search_qa": searched,
    }
    counts, wrong, source = collections.Counter(), [], ""
    for line in map(json.loads, PAIRS.read_text().splitlines()):
        if isinstance(line, dict):
            source = line["source"]
            continue
        grader, output, answer, value = line
        counts[grader] += 1
        if graders[grader](output, answer) != value:
            wrong.append((source, line))
    assert not wrong, "\n".join(map(repr, wrong))
    assert counts.total() >= 300
    assert min(counts.values()) >= 10


# Numbers --------------------------------------------------------------------------------------------------------------

DECIMALS = st.builds(
    lambda sign, digits, exponent: decimal.Decimal((sign, tuple(map(int, str(digits))), exponent)),
    st.sampled_from((0, 1)),
    st.integers(1, 10**8),
    st.integers(-12, 6),
)
FORMS = {
    "plain": lambda value: f"{value:f}",
    "thousands": lambda value: f"{value:,f}",
    "exponent": lambda value: f"{value:e}",
    "capital": lambda value: f"{value:E}",
    "minus": lambda value: f"{value:f}".replace("-", "\N{MINUS SIGN}"),
    "dot": lambda value: f"{value:f}".replace("0.", ".") if abs(value) < 1 else f"{value:f}",
    "latex": lambda value: "{} \\times 10^{{{}}}".format(*f"{value:e}".split("e")).replace("^{+", "^{"),
    "braces": lambda value: f"{value:,f}".replace(",", "{,}"),
    "fraction": lambda value: "{}/{}".format(*value.as_integer_ratio()),
    "frac": lambda value: "\\frac{{{}}}{{{}}}".format(*value.as_integer_ratio()),
    "dollars": lambda value: f"It costs ${value:,f}.",
}


@given(DECIMALS, st.sampled_from(sorted(FORMS)), st.sampled_from(sorted(FORMS)))
@example(decimal.Decimal("0.00001"), "plain", "exponent")
@example(decimal.Decimal("1000"), "thousands", "plain")
@settings(max_examples=150)
def test_a_number_is_its_value_in_every_form(value, output_form, answer_form):
    output, answer = FORMS[output_form](value), FORMS[answer_form](value)
    assert asked("numeric", output, answer) == 1.0
    assert asked("numeric", output, FORMS[answer_form](value + 1)) == 0.0


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**18), 10**18))
@example(0.00001)
@example(42.0)
@settings(max_examples=60)
def test_an_answer_that_is_a_number_is_compared_by_value(value):
    written = f"{decimal.Decimal(repr(value)):f}"
    assert asked("exact", written, value) == asked("exact", repr(value), [value, "x"]) == 1.0
    if len(written) < 50:
        assert asked("numeric", written, value) == 1.0
    assert asked("exact", f"{decimal.Decimal(repr(value)) + 1:f}1", value) == 0.0


@pytest.mark.parametrize(
    ("match", "output", "answer", "reward"),
    [
        ("numeric", "5", 1e-05, 0.0),
        ("numeric", "5", "1e-05", 0.0),
        ("numeric", "0.12345678901234567891", 0.12345678901234568, 1.0),
        ("numeric", "1/3", 1 / 3, 1.0),
        ("exact", "\\frac{1}{3}", [7, 1 / 3], 1.0),
        ("exact", "0.3333", 1 / 3, 0.0),
        ("numeric", "9e300", 10.0, 0.0),
        ("numeric", "from 3 to 5-3", "3", 1.0),
        ("numeric", "1,2,3", "3", 1.0),
        ("numeric", "1,2,3", "123", 0.0),
        ("exact", "\\boxed{40,41,42}", 42, 0.0),
        ("exact", "\\boxed{1,2}", 1.2, 0.0),
        ("exact", "1200 350", 350, 0.0),
        ("exact", "12_5", [12.5, 5], 0.0),
        ("exact", "\\boxed{10,20,100}", 100, 0.0),
        ("exact", "\\boxed{10,20,100}", 1020100, 0.0),
        ("exact", "1,024.5", 1024.5, 1.0),
        ("exact", "1 000 000", 1000000, 1.0),
        ("exact", "1_000", 1000, 1.0),
        ("numeric", "Prices: 1200 350", "350", 1.0),
        ("numeric", "Prices: 1200 350", "1200.35", 0.0),
        ("numeric", "In 2023 100", "100", 1.0),
        ("numeric", "In 2023\u00a0100", "100", 1.0),
        ("numeric", "resolution 1024 768", "768", 1.0),
        ("numeric", "2023 100.5", "100.5", 1.0),
        ("numeric", "2023 100,5", "100.5", 1.0),
        ("numeric", "1234 5,678", "5678", 1.0),
        ("numeric", "1234_5,6,7", "7", 1.0),
        ("numeric", "12_5", "5", 1.0),
        ("numeric", "-1200 350", "350", 1.0),
        ("numeric", "-1,2,3", "3", 1.0),
        ("numeric", "-1200,5", "-1200.5", 1.0),
        ("numeric", "-1 200", "-1200", 1.0),
        ("numeric", "12\\,5", "5", 1.0),
        ("numeric", "1,2,3.5", "3.5", 1.0),
        ("numeric", "3{,}14", "3.14", 1.0),
        ("numeric", "1 000", "1000", 1.0),
        ("numeric", "1e99999", "1", 0.0),
        ("numeric", "9" * 5000, "9", 0.0),
        ("numeric", "\\boxed{42}. No: \\boxed{\\frac{1}{2}}", "42", 0.0),
        ("numeric", "\\boxed{42}. No: \\boxed{\\frac{1}{2}}", "1/2", 1.0),
        ("exact", "\\boxed{42}. No: \\boxed{\\frac{1}{2}}", "42", 0.0),
        ("exact", "\\boxed{x^{2}}", "x^{2}", 1.0),
        ("exact", "\\boxed{42}, so \\boxed{4", "42", 1.0),
        ("exact", "<answer>\\boxed{42}</answer>", "42", 1.0),
        ("exact", "007", "7", 0.0),
        ("exact", "", "", 0.0),
        ("exact", "<think>\\boxed{42}", "42", 0.0),
        ("numeric", "<think>maybe 42", "42", 0.0),
    ],
)
def test_answers_that_were_read_wrongly(match, output, answer, reward):
    assert asked(match, output, answer) == reward


@given(
    st.lists(st.integers(1, 99) | st.integers(1000, 99999), min_size=3, max_size=5),
    st.sampled_from((",", "{,}", "\\,", "_", " ", "\u00a0", "\u202f", ", ")),
)
@example([2023, 1024, 768], " ")
@settings(max_examples=60)
def test_neighbours_are_no_number_and_the_last_one_counts(numbers, mark):
    text = mark.join(map(str, numbers))
    assert asked("numeric", text, numbers[-1]) == 1.0
    joined = [int("".join(map(str, numbers))), float(f"{numbers[-2]}.{numbers[-1]}")]
    assert asked("exact", text, [numbers[-1], *joined]) == asked("numeric", text, joined) == 0.0


@pytest.mark.parametrize(
    ("answer", "accepted", "reward"),
    [("42", 42, 1.0), ("0.50", 0.5, 1.0), ("b", ["a", "b"], 1.0), ("42", 420, 0.0), (None, 42, 0.0), ("None", 42, 0.0)],
)
def test_the_agents_sdks_answer_is_compared_by_value(answer, accepted, reward):
    run = types.SimpleNamespace(verdict={"answer": answer}, task=protocols.Task("t", {"answer": accepted}))
    assert agents_sdk.score(run) == reward


ENDS = [  # output, accepted answer, value: what the texts say, by plain arithmetic
    ("9:30", "10:30", 0),
    ("10:30", "10:30", 1),
    ("1999-01-06", "2024-05-06", 0),
    ("London 5", "Paris 5", 0),
    ("Paris 5", "Paris 5", 1),
    ("1, 2, 3", "9, 8, 3", 0),
    ("[3,2]", "[1,2]", 0),
    ("x^2+3", "x^3+3", 0),
    ("v1.2.3", "1.3.3", 0),
    ("It costs $1,000.", "1000", 1),
    ("the total is 7 apples", 7, 1),
    ("so 0.00001", 1e-05, 1),
    ("about 5", ["five", "5"], 1),
    ("about 6", ["five", "5"], 0),
    ("nothing", "5", 0),
    ("", "5", 0),
    *((text, gold, int(gold == -5)) for gold in (-5, 5) for text in ("x = - 5", "x =- 5", "- 5", "$- 5$", "(- 5)")),
    *(
        (text, gold, int(gold == -5))
        for gold in (-5, 5)
        for text in ("-5", "\u22125", "\u20135", "\u20115", "x = \u2013 5")
    ),
    *(
        (text, gold, int(gold == 5))
        for gold in (-5, 5)
        for text in ("8-5", "8\u20135", "8 - 5", "x = 8 - 5", "8 \u2013 5")
    ),
    *(
        (text, gold, int(gold == -5))
        for gold in (-5, 5)
        for text in ("The answer is - 5", "Temperature: - 5", "x equals - 5.")
    ),
    ("Steps:\n- 5", 5, 1),
    ("1 1/2", "1/2", 0),
    ("it takes 1 1/2 hours", 1.5, 1),
    ("-1 1/2", -1.5, 1),
    ("12 345/5", 2469, 1),
    ("10 20/5", 4, 1),
    ("5 4/2 in all", 2, 1),
    *((text, gold, 0) for text, gold in (("1.2.3", 1.2), ("15.03.2024", 15.03), ("192.168.0.1", 192.168))),
    ("it is 3.5.", 3.5, 1),
    ("(1,2)", 1.2, 0),
    ("(1,2)", 2, 1),
    ("\\left[1,2\\right]", 1.2, 0),
    ("1,2", 1.2, 1),  # as math-verify reads it
    ("(1,234)", 1234, 1),
    ("(2,74 kg)", 2.74, 1),
]


@pytest.mark.parametrize(("output", "answer", "value"), ENDS)
def test_a_text_ends_with_an_answer_that_is_one_number(output, answer, value):
    assert answers.ends_with(output, {"answer": answer}) == value


def test_texts_end_with_the_numbers_of_public_graders():
    pairs = [line for line in map(json.loads, PAIRS.read_text().splitlines()) if isinstance(line, list)]
    pairs = [pair for pair in pairs if pair[0] == "numeric" and answers.number(pair[2]) is not None]
    assert len(pairs) >= 40
    wrong = [pair for pair in pairs if answers.ends_with(answers.final(pair[1]), {"answer": pair[2]}) != pair[3]]
    assert not wrong, wrong


@given(
    st.lists(st.integers(0, 59), min_size=2, max_size=3),
    st.lists(st.integers(0, 59), min_size=1, max_size=2),
    st.sampled_from((":", "-", "/2/", ", ", " to ", "x")),
)
@example([10, 30], [9], ":")
@settings(max_examples=60)
def test_neighbours_of_an_answer_of_several_numbers_are_wrong(numbers, first, mark):
    gold = mark.join(f"{number:02}" for number in numbers)
    near = mark.join(f"{number:02}" for number in [*first, numbers[-1]])
    assert answers.ends_with(near, {"answer": gold}) == (near == gold)


@given(st.integers(1, 10**6), st.sampled_from("-\u2212\u2013\u2011"), st.sampled_from(("", "x = ", "x=", "(", "$")))
@settings(max_examples=60)
def test_a_sign_before_a_space_counts_where_a_number_begins(number, sign, before):
    for space in ("", " "):
        text = f"{before}{sign}{space}{number}"
        assert [answers.ends_with(text, {"answer": value}) for value in (-number, number)] == [True, False]
    assert answers.ends_with(f"{before}7 {sign} {number}", {"answer": number})


# Boxes ----------------------------------------------------------------------------------------------------------------


def by_counting(text):
    """The content of the last box with balanced braces, by Hendrycks MATH's count of braces from each box on."""
    for begin in reversed([place for place in range(len(text)) if text.startswith("\\boxed{", place)]):
        depth = 0
        for place in range(begin, len(text)):
            depth += (text[place] == "{") - (text[place] == "}")
            if text[place] == "}" and depth == 0:
                return text[begin + len("\\boxed{") : place].strip()
    return None


@given(
    st.lists(st.sampled_from(["\\boxed{", "{", "}", "}", "\\frac", "x", "4 ", "y^{2}", "\n"]), max_size=14).map("".join)
)
@settings(max_examples=200)
def test_the_last_balanced_box_is_the_answer(text):
    content = by_counting(text)
    if content:
        assert asked("exact", text, content) == 1.0
    if content is not None:
        assert asked("exact", text, f"{content}!") == 0.0


@pytest.mark.parametrize("text", ["7 3/2", "5 4/2", "1 2/2", "-10 4/2", "3 12/12"])
def test_a_whole_number_before_an_improper_fraction_is_no_single_number(text):
    assert answers.number(text) is None
    assert not answers.equal(text, {"answer": 2})
    assert not answers.equal(text, {"answer": "3/2"})
