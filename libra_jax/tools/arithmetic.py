"""A calculator that is safe to give to a policy: exact, bounded, and without `eval`."""

from __future__ import annotations

import ast
import fractions
import json
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.chat import thoughts

TOOL = "calculator"
SIMPLIFIER = "simplifier"
"""Name of the tool that does one operation and returns the remaining expression."""

FAILED = "error"
"""Answer to a calculation that fails. The failing tool's return begins with it too."""

_ALLOWED = re.compile(r"[0-9+\-*/(). ]+")
_LARGEST = 10**30
_LARGEST_EXPONENT = 16
_OPERATORS: dict[type[ast.operator], Callable[[fractions.Fraction, fractions.Fraction], fractions.Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class CalculationFailed(Exception):
    """A calculation failed. The message is a few words for the policy."""


def evaluate(expression: str, max_characters: int = 120) -> fractions.Fraction:
    """Returns the exact value of an expression of numbers, `+ - * / **` and parentheses.

    Args:
      expression: Expression, for example "12*(345-6)".
      max_characters: Largest length. A longer expression fails.

    Raises:
      CalculationFailed: The text is too long or not an expression, divides by zero, or has a number over 30 digits.
    """
    expression = expression.strip()
    if len(expression) > max_characters:
        raise CalculationFailed("too long")
    # Without letters, the parser can find only numbers, operators and parentheses.
    if not _ALLOWED.fullmatch(expression):
        raise CalculationFailed("not an expression")
    try:
        tree = ast.parse(expression, mode="eval")
        return _value(tree.body, expression)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CalculationFailed("not an expression") from error


def _value(node: ast.expr, expression: str) -> fractions.Fraction:
    if isinstance(node, ast.Constant):
        # Reads the source text of a decimal, not its float, so that 0.1 stays exact.
        value = fractions.Fraction(ast.get_source_segment(expression, node) or "")
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand, expression)
        value = -value if isinstance(node.op, ast.USub) else value
    elif isinstance(node, ast.BinOp):
        left, right = _value(node.left, expression), _value(node.right, expression)
        power = isinstance(node.op, ast.Pow)
        # Checked before computing, because a power such as 9**9**9 would take forever.
        if power and (right.denominator != 1 or abs(right) > _LARGEST_EXPONENT):
            raise CalculationFailed("power too large")
        if (left == 0 and right < 0) if power else (isinstance(node.op, ast.Div) and right == 0):
            raise CalculationFailed("division by zero")
        if not power and type(node.op) not in _OPERATORS:
            raise CalculationFailed("not an expression")
        value = fractions.Fraction(left ** int(right)) if power else _OPERATORS[type(node.op)](left, right)
    else:
        raise CalculationFailed("not an expression")
    if abs(value.numerator) > _LARGEST or value.denominator > _LARGEST:
        raise CalculationFailed("number too large")
    return value


def simplify(expression: str, max_characters: int) -> tuple[str, bool]:
    """Does one operation: the leftmost of those whose operands are both numbers.

    Args:
      expression: Expression, for example "12*(345-6)".
      max_characters: Largest length. A longer expression fails.

    Returns:
      The remaining expression ("12*339"), and whether it is the final value. It is final if one operation was left. It
      is also final if the operation's value is a fraction, because no shorter expression can express it.

    Raises:
      CalculationFailed: The expression has no value; see `evaluate`.
    """

    def is_number(node: ast.expr) -> bool:
        return isinstance(node, ast.Constant) or (isinstance(node, ast.UnaryOp) and is_number(node.operand))

    expression = expression.strip()
    # First, because an expression without a value must fail before any part of it is returned.
    value = evaluate(expression, max_characters)
    operations = [node for node in ast.walk(ast.parse(expression, mode="eval")) if isinstance(node, ast.BinOp)]
    inner = [node for node in operations if is_number(node.left) and is_number(node.right)]
    # A lone number or one operation leaves nothing to simplify.
    if len(operations) < 2:
        return str(value), True
    # The leftmost one, so that an expression always simplifies in the same way.
    first = min(inner, key=lambda node: node.col_offset)
    result = _value(first, expression)
    if result.denominator != 1:
        return str(value), True
    assert first.end_col_offset is not None
    before, after = expression[: first.col_offset].rstrip(), expression[first.end_col_offset :].lstrip()
    # Parentheses around the replaced operation hold a single number now.
    while before.endswith("(") and after.startswith(")"):
        before, after = before[:-1].rstrip(), after[1:].lstrip()
    return before + (str(result) if result >= 0 else f"({result})") + after, False


def carry_out(expression: str, max_characters: int, *, stepwise: bool = False) -> protocols.ToolReturn:
    """Returns the tool's return for an expression: its value ("42", "-7/3"), or "error: " and the reason.

    Args:
      expression: Requested expression.
      max_characters: Largest length. A longer expression fails.
      stepwise: Do one operation at a time. While several are left, the return comes from the simplifier.
    """
    try:
        if not stepwise:
            return protocols.ToolReturn(TOOL, "success", str(evaluate(expression, max_characters)))
        result, done = simplify(expression, max_characters)
        return protocols.ToolReturn(TOOL if done else SIMPLIFIER, "success", result)
    except CalculationFailed as failure:
        return protocols.ToolReturn(TOOL, "failure", f"{FAILED}: {failure}")


def answer_call(output: str, max_characters: int, *, stepwise: bool = False) -> protocols.ToolReturn | None:
    """Runs the calculator for a model output, ignoring its thinking. Returns None if the output calls no tool.

    A call is `<tool_call>12*3</tool_call>`, or there a JSON object with `arguments.expression`, as chat models write
    it. An ill-formed call, or several calls, are a failure of the tool.
    """
    text = thoughts.split(output).answer
    if "<tool_call>" not in text and "</tool_call>" not in text:
        return None
    expression: Any = None
    call, _, rest = text.partition("<tool_call>")[2].partition("</tool_call>")
    if text.count("<tool_call>") == text.count("</tool_call>") == 1 and len(call) + len(rest) < len(text):
        expression = call.strip()
        if expression.startswith("{"):
            try:
                expression = json.loads(expression)["arguments"]["expression"]
            except (ValueError, KeyError, TypeError, RecursionError):
                expression = None
    if not isinstance(expression, str):
        return protocols.ToolReturn(TOOL, "failure", f"{FAILED}: bad call")
    return carry_out(expression, max_characters, stepwise=stepwise)


class Calculator:
    """The calculator as a tool of `config.tools`. Evaluates an expression exactly.

    Args:
      max_characters: Largest length of an expression. A longer expression fails.
    """

    name = TOOL
    description = (
        "Gives the exact value of an expression of numbers, + - * / ** and parentheses: a whole number, or a fraction "
        "in its lowest terms."
    )
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "For example 12*(345-6)."}},
        "required": ["expression"],
        "additionalProperties": False,
    }
    eager = True  # no side effects: a call may begin before the output that makes it has ended

    def __init__(self, max_characters: int = 120) -> None:
        good = isinstance(max_characters, int) and max_characters > 0
        config_lib.check(good, "tools.arguments.calculator.max_characters", f"must be positive, not {max_characters!r}")
        self._max_characters = max_characters

    async def call(self, arguments: Mapping[str, Any]) -> protocols.ToolReturn:
        return carry_out(arguments["expression"], self._max_characters)
