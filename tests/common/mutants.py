"""Mutants of a function, as in mutation testing: inputs that tell them from it leave little room for a wrong one.

A mutant has one small change: another comparison, operator or bound, a constant off by one, a dropped call or branch,
swapped arguments, or a variable that is cut, clamped, rounded or rid of repeats first.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterator
from typing import Any

_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
_DISTORTIONS = (
    "abs({})", "int({})", "round({})", "({} or 1)", "min({}, 999)", "max({}, -99)", "{} % 60", "{}[:7]", "{}[1:]",
    "any({})", "sum({})", "sorted({})", "list(dict.fromkeys({}))", "{}.lower()", "{}.strip()", "{}.strip(' ')",
)  # fmt: skip


def _changes(node: Any) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(left, [_], [right]):
            yield from (ast.Compare(left, [other()], [right]) for other in _COMPARISONS)
        case ast.BinOp(left, _, right):
            yield from (left, right, *(ast.BinOp(left, other(), right) for other in _OPERATORS))
        case ast.Constant(int(value)):
            yield from (ast.Constant(other) for other in (0, value - 1, value + 1, 10 * value))
        case ast.Call(called, arguments):
            yield from arguments[:1] or [called.value]
            yield ast.Call(called, arguments[::-1], [])
        case ast.Slice(lower, upper):
            yield from (ast.Slice(None, upper), ast.Slice(lower, None))
        case ast.IfExp(_, body, alternative):
            yield from (body, alternative)
        case ast.If():
            yield ast.Pass()
        case ast.Name(name, ast.Load()) if not hasattr(builtins, name):
            yield from (ast.parse(text.format(name), mode="eval").body for text in _DISTORTIONS)


def mutants(source: str, name: str) -> Iterator[Callable[..., Any]]:
    """Yields the mutants of a function. Some may be equal to it."""
    tree = ast.parse(source)
    for parent in list(ast.walk(tree)):
        fields = vars(parent)
        for holder in (fields, *(value for value in fields.values() if isinstance(value, list))):
            for key, node in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
                for change in _changes(node):
                    holder[key] = change
                    namespace: dict[str, Any] = {}
                    exec(compile(ast.fix_missing_locations(tree), "mutant", "exec"), namespace)
                    yield namespace[name]
                holder[key] = node
