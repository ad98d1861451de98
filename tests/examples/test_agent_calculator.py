"""The calculator: exact against Python's own arithmetic, safe, and with the same task mix throughout."""

import ast
import asyncio
import fractions
import re

import property_counts
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax import protocols
from libra_jax.examples import calculator
from libra_jax.tools import arithmetic

NUMBERS = st.integers(0, 9999).map(str)


def combine(parts):
    pairs = st.tuples(parts, st.sampled_from("+-*/"), parts).map("".join)
    return pairs | pairs.map(lambda text: f"({text})") | parts.map(lambda text: f"-({text})")


EXPRESSIONS = st.recursive(NUMBERS, combine, max_leaves=8)


def with_pythons_fractions(expression):
    """Python's own parser and operators, every number a Fraction."""
    return eval(re.sub(r"\d+", r"F(\g<0>)", expression), {"F": fractions.Fraction})


@given(EXPRESSIONS)
def test_the_value_is_what_pythons_own_fractions_give(expression):
    try:
        expected = with_pythons_fractions(expression)
    except ZeroDivisionError:
        with pytest.raises(arithmetic.CalculationFailed, match="division by zero"):
            arithmetic.evaluate(expression)
        return
    if len(expression) > 120:
        with pytest.raises(arithmetic.CalculationFailed, match="too long"):
            arithmetic.evaluate(expression)
    else:
        assert arithmetic.evaluate(expression) == expected


@given(st.integers(-20, 20), st.integers(-6, 6))
def test_small_powers_are_exact(base, exponent):
    expression = f"({base})**({exponent})"
    if base == 0 and exponent < 0:
        with pytest.raises(arithmetic.CalculationFailed, match="division by zero"):
            arithmetic.evaluate(expression)
    else:
        assert arithmetic.evaluate(expression) == fractions.Fraction(base) ** exponent


@given(st.text(max_size=60) | st.text("0123456789+-*/(). ", max_size=60))
@settings(max_examples=property_counts.examples(100, 300))
def test_no_text_makes_the_calculator_do_anything_but_answer_or_fail(text):
    told = arithmetic.carry_out(text, 60)
    status, content = told.status, told.content
    assert status in ("success", "failure")
    assert (status == "failure") == content.startswith("error: ")
    assert len(content) < 80
    if status == "success":
        ast.parse(text.strip(), mode="eval")


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("9**9**9", "power too large"),
        ("999999999**16", "number too large"),
        ("2**(1/2)", "power too large"),
        ("0777", "not an expression"),
        ("1(2)", "not an expression"),
        ("7//2", "not an expression"),
        ("1,000", "not an expression"),
        ("__import__('os')", "not an expression"),
        ("", "not an expression"),
        ("(" * 60 + "1" + ")" * 60, "too long"),
    ],
)
def test_what_is_out_of_bounds_fails_with_a_reason(expression, problem):
    with pytest.raises(arithmetic.CalculationFailed, match=problem):
        arithmetic.evaluate(expression)


def test_decimals_are_exact():
    assert arithmetic.evaluate("0.1+0.2", 20) == fractions.Fraction(3, 10)
    assert arithmetic.evaluate("1.5*4", 20) == 6


@pytest.mark.parametrize(
    ("expression", "left"),
    [
        ("(12-3)*(4+5)", "9*(4+5)"),
        ("((101+10)*2)-300", "(111*2)-300"),
        ("3-(4-9)", "3-(-5)"),
        ("2-3-4", "(-1)-4"),
        ("2**3**2", "2**9"),
        (" ( 3 + 4 ) * 2 ", "7* 2"),
    ],
)
def test_one_operation_at_a_time_is_the_first_of_the_innermost_ones(expression, left):
    assert arithmetic.simplify(expression, 120) == (left, False)


@pytest.mark.parametrize(("expression", "value"), [("12*3", "36"), ("-5", "-5"), ("7/3", "7/3"), ("(1/3)*6", "2")])
def test_the_last_operation_and_one_that_leaves_a_fraction_give_the_value(expression, value):
    assert arithmetic.simplify(expression, 120) == (value, True)


@given(EXPRESSIONS)
def test_simplifying_keeps_the_value_and_ends_there(expression):
    try:
        value = arithmetic.evaluate(expression, 10_000)
    except arithmetic.CalculationFailed:
        with pytest.raises(arithmetic.CalculationFailed):
            arithmetic.simplify(expression, 10_000)
        return
    for _ in range(len(expression) + 1):
        expression, done = arithmetic.simplify(expression, 10_000)
        assert arithmetic.evaluate(expression, 10_000) == value
        if done:
            break
    assert (done, expression) == (True, str(value))


def test_a_call_may_be_plain_or_json_and_may_follow_text():
    assert arithmetic.answer_call("42", 60) is None
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+2"}}\n</tool_call>'
    for output in ("let me see <tool_call> 1+2 </tool_call>", call):
        answer = arithmetic.answer_call(output, 60)
        assert (answer.tool, answer.status, answer.content) == ("calculator", "success", "3")


@pytest.mark.parametrize(
    "inside", ['{"name": "calculator"}', '{"arguments": {"expression": 3}}', "{", '{"arguments": 1}']
)
def test_a_json_call_that_is_not_well_formed_is_a_failed_call(inside):
    answer = arithmetic.answer_call(f"<tool_call>{inside}</tool_call>", 60)
    assert (answer.tool, answer.status, answer.content) == ("calculator", "failure", "error: bad call")


# Tasks ----------------------------------------------------------------------------------------------------------------


def shape(task):
    """A pattern stands for an expression: numbers and signs only by kind."""
    return re.sub(r"\d+", "n", task.payload["expression"])


def test_every_batch_of_consecutive_tasks_has_the_same_mix():
    source = calculator.task_source(seed=5)
    batches = [[source.task(32 * batch + place) for place in range(32)] for batch in range(6)]
    solvable = [sorted(shape(task) for task in batch if task.payload["answer"] != "error") for batch in batches]
    assert all(mix == solvable[0] for mix in solvable)
    assert len(set(solvable[0])) >= 12
    for batch in batches:
        failures = [arithmetic.carry_out(task.payload["expression"], 16).content for task in batch]
        failed = sorted(text for text in failures if text.startswith("error"))
        assert failed == ["error: division by zero", "error: too long"]


def test_tasks_depend_on_seed_and_index_only_and_their_ids_are_unique():
    source, again = calculator.task_source(seed=5), calculator.task_source(seed=5)
    assert [source.task(index) for index in (9, 3, 700)] == [again.task(index) for index in (9, 3, 700)]
    assert source.task(3).payload != calculator.task_source(seed=6).task(3).payload
    tasks = [make(index) for make in (source.task, source.evaluation_task) for index in range(200)]
    assert len({task.prompt_id for task in tasks}) == 400


def test_with_a_period_the_same_expressions_come_again_under_new_names():
    source, plain = calculator.task_source(seed=5, period=6), calculator.task_source(seed=5)
    assert [source.task(index).payload for index in range(18)] == [plain.task(i % 6).payload for i in range(18)]
    assert len({source.task(index).prompt_id for index in range(18)}) == 18
    assert source.evaluation_task(40) == plain.evaluation_task(40)
    assert {source.task(index).prompt for index in range(18)} == {plain.task(index).prompt_id for index in range(6)}
    assert len(source) == 6
    assert not hasattr(plain, "__len__")
    with pytest.raises(protocols.ConfigError, match="period: -1 must be 0"):
        calculator.task_source(period=-1)


def test_the_answers_are_pythons():
    source = calculator.task_source(seed=11)
    for index in range(160):
        payload = source.task(index).payload
        if payload["answer"] != "error":
            assert fractions.Fraction(payload["answer"]) == with_pythons_fractions(payload["expression"])
            assert "/" not in payload["answer"]


def test_no_held_out_expression_is_ever_trained_on_under_any_seed():
    held_out = {calculator.task_source().evaluation_task(index).payload["expression"] for index in range(800)}
    trained = {
        calculator.task_source(seed=s).task(index).payload["expression"] for s in range(4) for index in range(800)
    }
    assert not held_out & trained
    assert len(held_out) > 700


def test_guessing_is_hopeless():
    """No answer is common among the solvable tasks, and hardly any can be read off its expression."""
    source = calculator.task_source(seed=2)
    payloads = [source.task(index).payload for index in range(960)]
    solvable = [payload for payload in payloads if payload["answer"] != "error"]
    answers = [payload["answer"] for payload in solvable]
    assert max(answers.count(answer) for answer in answers) <= 10
    copied = [payload for payload in solvable if payload["answer"] in re.findall(r"\d+", payload["expression"])]
    assert len(copied) <= 0.02 * len(solvable)


def test_levels_choose_the_patterns_and_a_wrong_one_is_named():
    plain = calculator.task_source(levels=("plain",))
    shapes = {shape(plain.task(index)) for index in range(160) if plain.task(index).payload["answer"] != "error"}
    assert shapes == {"n+n", "n-n", "n*n", "n/n"}
    with pytest.raises(protocols.ConfigError, match=r"levels: \['hard'\] must name some of plain, mixed, nested"):
        calculator.task_source(levels=("hard",))
    with pytest.raises(protocols.ConfigError, match=r"max_characters: 40 must lie in"):
        calculator.task_source(max_characters=40)
    with pytest.raises(protocols.ConfigError, match="the calculator reads no file"):
        calculator.task_source(path="tasks.jsonl")


@given(st.integers(16, 18), st.integers(0, 2000))
@settings(max_examples=property_counts.examples(40, 100))
def test_every_solvable_expression_fits_and_every_overlong_one_does_not(max_characters, index):
    task = calculator.task_source(seed=1, max_characters=max_characters).task(index)
    failing = index % 16 == 15
    assert (task.payload["answer"] == "error") == failing
    assert failing or len(task.payload["expression"]) <= max_characters


def test_what_is_copied_lies_at_a_constant_distance():
    source, environment = calculator.task_source(seed=1), calculator.environment()
    dialogues = [environment.demonstration(source.task(index)) for index in range(320)]
    assert {len(prompt.content) for prompt, *_ in dialogues} == {20}
    answered = [returned for *_, returned, answer in dialogues if answer.content != "error"]
    assert {len(returned.content) for returned in answered} == {8}


STEPWISE = {"stepwise": True, "return_width": 20}


def test_stepwise_every_operation_is_a_call_and_the_tools_name_tells_if_the_answer_follows():
    source, environment = calculator.task_source(seed=1), calculator.environment(**STEPWISE)
    for index in range(320):
        task = source.task(index)
        _, *messages, answer = environment.demonstration(task)
        expression, calls = task.payload["expression"], messages[::2]
        asyncio.run(environment.reset(task))
        steps = [asyncio.run(environment.step(call.content)).tool_returns[0] for call in calls]
        assert [step.content for step in steps] == [message.content for message in messages[1::2]]
        assert [step.tool for step in steps] == ["simplifier"] * (len(steps) - 1) + ["calculator"]
        assert {len(step.content) for step in steps if step.status == "success"} <= {20}
        assert asyncio.run(environment.step(answer.content)).reward == 1.0
        if answer.content != "error":
            assert len(calls) == len(re.findall(r"[-+*/]", expression))
            assert steps[-1].content.strip() == answer.content


def test_a_system_message_comes_first():
    environment = calculator.environment(system="Use the tool.")
    messages = asyncio.run(environment.reset(calculator.task_source().task(0)))
    assert [message.role for message in messages] == ["system", "user"]
    assert environment.demonstration(calculator.task_source().task(0))[0] == messages[0]
