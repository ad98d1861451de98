"""A calculator that is safe to hand to a policy: exact, bounded, and without `eval`."""

from __future__ import annotations

import ast
import fractions
import json
import operator
import re
from collections.abc import Callable

from libra_jax import protocols

TOOL = "calculator"
SIMPLIFIER = "simplifier"
"""The tool that carries out one operation and returns what is left of the expression."""

FAILED = "error"
"""What a failed calculation's answer is, and how its tool return begins."""

_ALLOWED = re.compile(r"[0-9+\-*/(). ]+")
_LARGEST = 10**30
_LARGEST_EXPONENT = 16
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_OPERATORS: dict[type[ast.operator], Callable[[fractions.Fraction, fractions.Fraction], fractions.Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class CalculationFailed(Exception):
    """The tool's failure: its message is a few words for the policy to read."""


def evaluate(expression: str, max_characters: int = 120) -> fractions.Fraction:
    """The exact value of an arithmetic expression of numbers, `+ - * / **` and parentheses.

    Args:
      expression: e.g. "12*(345-6)".
      max_characters: a longer expression fails.

    Raises:
      CalculationFailed: too long, not an expression, a division by zero, or a number of more than 30 digits.
    """
    expression = expression.strip()
    if len(expression) > max_characters:
        raise CalculationFailed("too long")
    if not _ALLOWED.fullmatch(expression):
        raise CalculationFailed("not an expression")
    try:
        tree = ast.parse(expression, mode="eval")
        return _value(tree.body, expression)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CalculationFailed("not an expression") from error


def _value(node: ast.expr, expression: str) -> fractions.Fraction:
    if isinstance(node, ast.Constant):
        return _bounded(fractions.Fraction(ast.get_source_segment(expression, node) or ""))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand, expression)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, expression), _value(node.right, expression)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if isinstance(node.op, ast.Div) and right == 0:
            raise CalculationFailed("division by zero")
        if type(node.op) in _OPERATORS:
            return _bounded(_OPERATORS[type(node.op)](left, right))
    raise CalculationFailed("not an expression")


def _power(base: fractions.Fraction, exponent: fractions.Fraction) -> fractions.Fraction:
    if exponent.denominator != 1 or abs(exponent) > _LARGEST_EXPONENT:
        raise CalculationFailed("power too large")
    if base == 0 and exponent < 0:
        raise CalculationFailed("division by zero")
    return _bounded(fractions.Fraction(base ** int(exponent)))


def _bounded(value: fractions.Fraction) -> fractions.Fraction:
    if abs(value.numerator) > _LARGEST or value.denominator > _LARGEST:
        raise CalculationFailed("number too large")
    return value


def calculate(expression: str, max_characters: int) -> tuple[protocols.ToolStatus, str]:
    """What the tool says to an expression: its value ("42", "-7/3"), or "error: " and why."""
    try:
        return "success", str(evaluate(expression, max_characters))
    except CalculationFailed as failure:
        return "failure", f"{FAILED}: {failure}"


def simplify(expression: str, max_characters: int) -> tuple[str, bool]:
    """Carries out one operation: the first of the innermost ones.

    Args:
      expression: e.g. "12*(345-6)".
      max_characters: a longer expression fails.

    Returns:
      What is left ("12*339"), and if that is the expression's value. It is where one operation was left, and where the
      operation's own value is no whole number: there is no shorter way to write it.

    Raises:
      CalculationFailed: the expression has no value; see `evaluate`.
    """
    expression = expression.strip()
    value = evaluate(expression, max_characters)
    operations = [node for node in ast.walk(ast.parse(expression, mode="eval")) if isinstance(node, ast.BinOp)]
    inner = [node for node in operations if _is_number(node.left) and _is_number(node.right)]
    if len(operations) < 2:
        return str(value), True
    first = min(inner, key=lambda node: node.col_offset)
    result = _value(first, expression)
    if result.denominator != 1:
        return str(value), True
    assert first.end_col_offset is not None
    before, after = expression[: first.col_offset].rstrip(), expression[first.end_col_offset :].lstrip()
    while before.endswith("(") and after.startswith(")"):
        before, after = before[:-1].rstrip(), after[1:].lstrip()
    return before + (str(result) if result >= 0 else f"({result})") + after, False


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) or (isinstance(node, ast.UnaryOp) and _is_number(node.operand))


def carry_out(expression: str, max_characters: int, *, stepwise: bool) -> protocols.ToolReturn:
    """What the tool returns for an expression.

    Args:
      expression: what was asked for.
      max_characters: a longer expression fails.
      stepwise: one operation at a time: while several are left, the return is the simplifier's.
    """
    status, content = calculate(expression, max_characters)
    if stepwise and status == "success":
        left, done = simplify(expression, max_characters)
        return protocols.ToolReturn(TOOL if done else SIMPLIFIER, status, left)
    return protocols.ToolReturn(TOOL, status, content)


def read_call(output: str) -> str | None:
    """The expression that a model output asks the calculator for; None for an output that calls no tool.

    A call is `<tool_call>12*3</tool_call>`, or a JSON object there with `arguments.expression`, as chat models write.

    Raises:
      CalculationFailed: the output holds a call that is not well-formed, or several.
    """
    if "<tool_call>" not in output and "</tool_call>" not in output:
        return None
    calls = _CALL.findall(output)
    if len(calls) != 1 or output.count("<tool_call>") != 1 or output.count("</tool_call>") != 1:
        raise CalculationFailed("bad call")
    call: str = calls[0].strip()
    if not call.startswith("{"):
        return call
    try:
        expression = json.loads(call)["arguments"]["expression"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CalculationFailed("bad call") from error
    if not isinstance(expression, str):
        raise CalculationFailed("bad call")
    return expression


def answer_call(output: str, max_characters: int, *, stepwise: bool = False) -> protocols.ToolReturn | None:
    """Runs the calculator for a model output, its thinking left aside; None where the output calls no tool."""
    try:
        expression = read_call(output.rpartition("</think>")[2])
    except CalculationFailed as failure:
        return protocols.ToolReturn(TOOL, "failure", f"{FAILED}: {failure}")
    return None if expression is None else carry_out(expression, max_characters, stepwise=stepwise)
