"""A calculator that is safe to give to a policy: exact, bounded, and without `eval`."""

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
"""Name of the tool that does one operation and returns the remaining expression."""

FAILED = "error"
"""Answer to a calculation that fails. The failing tool's return begins with it too."""

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
    # Checked before computing, because a power such as 9**9**9 would take forever.
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
    """Returns the tool's answer to an expression: its value ("42", "-7/3"), or "error: " and the reason."""
    try:
        return "success", str(evaluate(expression, max_characters))
    except CalculationFailed as failure:
        return "failure", f"{FAILED}: {failure}"


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
    # Parentheses around the replaced operation hold a single number now.
    while before.endswith("(") and after.startswith(")"):
        before, after = before[:-1].rstrip(), after[1:].lstrip()
    return before + (str(result) if result >= 0 else f"({result})") + after, False


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) or (isinstance(node, ast.UnaryOp) and _is_number(node.operand))


def carry_out(expression: str, max_characters: int, *, stepwise: bool) -> protocols.ToolReturn:
    """Returns the tool's return for an expression.

    Args:
      expression: Requested expression.
      max_characters: Largest length. A longer expression fails.
      stepwise: Do one operation at a time. While several are left, the return comes from the simplifier.
    """
    status, content = calculate(expression, max_characters)
    if stepwise and status == "success":
        left, done = simplify(expression, max_characters)
        return protocols.ToolReturn(TOOL if done else SIMPLIFIER, status, left)
    return protocols.ToolReturn(TOOL, status, content)


def read_call(output: str) -> str | None:
    """Returns the expression that an output asks the calculator for. None if the output calls no tool.

    A call is `<tool_call>12*3</tool_call>`, or there a JSON object with `arguments.expression`, as chat models write
    it.

    Raises:
      CalculationFailed: The output holds an ill-formed call, or several calls.
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
    """Runs the calculator for a model output, ignoring its thinking. Returns None if the output calls no tool."""
    try:
        expression = read_call(output.rpartition("</think>")[2])
    except CalculationFailed as failure:
        return protocols.ToolReturn(TOOL, "failure", f"{FAILED}: {failure}")
    return None if expression is None else carry_out(expression, max_characters, stepwise=stepwise)
