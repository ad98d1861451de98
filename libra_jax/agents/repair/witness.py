"""Examines the objects that hidden tests get from tested code, and detects objects that lie about themselves.

A sandbox gets this file as text, so it imports the standard library only. The source of a hidden test is rewritten: its
calls, comparisons and sums go through a `Witness`. A lie is behaviour that no real value has, such as being equal to
two different numbers. A class that compares with a tolerance also behaves this way, so `suites.py` forgives what the
original repository already did. Changed arguments are allowed: a fix may have to change an argument in place, which
looks the same as a function that spoils a test's expected value.
"""

from __future__ import annotations

import ast
import itertools
import operator
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

CALL, COMPARE, BINARY = "__libra_call__", "__libra_compare__", "__libra_binary__"

_BARE = frozenset({"super", "locals", "globals", "vars", "dir", "eval", "exec", "isinstance", "issubclass", "type"})
"""Functions that read their caller's frame, or that read no value. Their calls are not rewritten."""

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "Eq": operator.eq, "NotEq": operator.ne, "Lt": operator.lt, "LtE": operator.le, "Gt": operator.gt,
    "GtE": operator.ge, "In": lambda left, right: left in right, "NotIn": lambda left, right: left not in right,
}  # fmt: skip
_SUMS: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add, "Sub": operator.sub, "Mult": operator.mul, "Div": operator.truediv, "BitAnd": operator.and_,
}  # fmt: skip
_OPERATORS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__contains__", "__sub__", "__rsub__",
              "__iter__", "__abs__")  # fmt: skip
_SWALLOWS = (map, filter, iter)
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_LEAVES, _MOST_ITEMS = 200, 10_000


class Rewriter(ast.NodeTransformer):
    """Rewrites the calls, comparisons and sums of a test's source, so that they go through a `Witness`."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Rewrites `f(x)`."""
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in _BARE:
            return node
        return ast.copy_location(ast.Call(ast.Name(CALL, ast.Load()), [node.func, *node.args], node.keywords), node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """Rewrites `a == b`. A chain of comparisons stays a chain, but its operands are examined."""
        self.generic_visit(node)
        kind = type(node.ops[0]).__name__
        if len(node.ops) == 1 and kind in _COMPARISONS:
            return self._made(COMPARE, kind, node.left, node.comparators[0], node)
        node.left = self._made(COMPARE, "", node.left, ast.Constant(None), node)
        node.comparators = [self._made(COMPARE, "", one, ast.Constant(None), node) for one in node.comparators]
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """Rewrites `a - b`."""
        self.generic_visit(node)
        kind = type(node.op).__name__
        return self._made(BINARY, kind, node.left, node.right, node) if kind in _SUMS else node

    @staticmethod
    def _made(name: str, kind: str, left: ast.expr, right: ast.expr, place: ast.expr) -> ast.expr:
        call = ast.Call(ast.Name(name, ast.Load()), [ast.Constant(kind), left, right], [])
        return ast.fix_missing_locations(ast.copy_location(call, place))


class Witness:
    """Does the operations that `Rewriter` rewrote, and records the lies that it sees.

    Args:
      workspace: Folder of the tested code.
      tests: Paths of the hidden tests, which are in the same folder.

    Attributes:
      seen: A few words for each lie.
    """

    def __init__(self, workspace: str, tests: set[str]) -> None:
        self._folder, self._tests = workspace.rstrip("/") + "/", tests
        self._operators: dict[type, frozenset[str]] = {}
        self._random = random.SystemRandom()
        self.seen: list[str] = []

    def namespace(self) -> dict[str, Any]:
        """Returns the names that rewritten source needs among its globals."""
        return {CALL: self.call, COMPARE: self.compare, BINARY: self.binary}

    def call(self, function: Any, /, *args: Any, **keywords: Any) -> Any:
        """Calls a function for a test, and examines the arguments if the function is not the tested code."""
        if not self._is_tested(function):
            for place, value in enumerate(args[:3]):
                self.look(value, args[1 - place] if place < 2 <= len(args) else None)
            # These take a StopIteration of the function that they call for the end of their input.
            if any(function is one for one in _SWALLOWS) or getattr(function, "__module__", "") == "itertools":
                kinds = (types.FunctionType, types.MethodType)
                args = tuple(self._loud(value) if isinstance(value, kinds) else value for value in args)
            if getattr(function, "__name__", "") in ("assertIn", "assertNotIn") and len(args) > 1:
                args = (args[0], self._bounded(args[1]), *args[2:])
        return function(*args, **keywords)

    def compare(self, kind: str, left: Any, right: Any) -> Any:
        """Compares two values for a test. Without a kind, returns the left value."""
        self.look(left, right)
        if not kind:
            return left
        self.look(right, left)
        if kind in ("In", "NotIn"):
            right = self._bounded(right)
        return _COMPARISONS[kind](left, right)

    def binary(self, kind: str, left: Any, right: Any) -> Any:
        """Adds, subtracts, multiplies, divides or intersects two values for a test."""
        self.look(left, right)
        self.look(right, left)
        return _SUMS[kind](left, right)

    def look(self, value: Any, other: Any) -> None:
        """Records whether a value, or a value inside it, lies about itself."""
        if type(value) in _PLAIN:
            return
        for leaf in itertools.islice(_leaves(value, 3), _LEAVES):
            own = self._own(type(leaf))
            if own and (lie := self._lie(leaf, other, own)):
                self._see(f"an object of {type(leaf).__name__} {lie}")

    def _see(self, words: str) -> None:
        if words not in self.seen:
            self.seen.append(words)

    def _is_tested(self, function: Any) -> bool:
        function = getattr(function, "__func__", function) if isinstance(function, types.MethodType) else function
        return isinstance(function, types.FunctionType) and self._in_folder(function.__code__)

    def _in_folder(self, code: types.CodeType) -> bool:
        return code.co_filename.startswith(self._folder) and code.co_filename not in self._tests

    def _loud(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function with StopIteration of tested code turned into an error.

        StopIteration would silently end a loop of checks. If the test's own code raises it, it stays StopIteration.
        """

        def called(*args: Any, **keywords: Any) -> Any:
            try:
                return function(*args, **keywords)
            except StopIteration as error:
                last = error.__traceback__
                while last is not None and last.tb_next is not None:
                    last = last.tb_next
                if last is None or not self._in_folder(last.tb_frame.f_code):
                    raise
                raise RuntimeError("the tested code let StopIteration out, which would end a loop") from error

        return called

    def _own(self, kind: type) -> frozenset[str]:
        """Returns the operators that a class defines in tested code, including those that it inherits from there."""
        if kind not in self._operators:
            self._operators[kind] = frozenset(
                name
                for name in _OPERATORS
                if isinstance(found := getattr(kind, name, None), types.FunctionType)
                and self._in_folder(found.__code__)
            )
        return self._operators[kind]

    def _lie(self, value: Any, other: Any, own: frozenset[str]) -> str:
        # A large random number: tested code cannot have prepared an equality for it.
        number = self._random.randint(2**40, 2**60)
        strangers = [object(), number, float(number), str(number), [number], *_altered(other)]
        if own & {"__eq__", "__ne__"}:
            if sum(_true(operator.eq, value, stranger) for stranger in strangers) > 1:
                return "equals values that differ"
            if any(_true(operator.eq, value, one) and _true(operator.ne, value, one) for one in (*strangers, other)):
                return "equals a value and does not"
        for less, more in ((operator.lt, operator.gt), (operator.le, operator.gt), (operator.lt, operator.ge)):
            both = [_true(less, value, one) and _true(more, value, one) for one in strangers]
            if own & {"__lt__", "__gt__", "__le__", "__ge__"} and any(both):
                return "lies before a value and behind it"
        if "__contains__" in own and _true(operator.contains, value, strangers[0]):
            return "contains everything"
        if own & {"__sub__", "__rsub__"} and _true(_same_distance, value, number):
            return "is as near to one number as to another"
        return ""

    def _bounded(self, value: Any) -> Any:
        """Returns an iterator's items as a list, of bounded length. Records an iterator that has more items."""
        if "__iter__" not in self._own(type(value)) and not isinstance(value, types.GeneratorType):
            return value
        if hasattr(type(value), "__contains__"):
            return value
        items = list(itertools.islice(iter(value), _MOST_ITEMS + 1))
        if len(items) > _MOST_ITEMS:
            self._see(f"an iteration of {type(value).__name__} offers more than {_MOST_ITEMS} values to choose from")
        return items


def _same_distance(value: Any, number: int) -> bool:
    return bool(abs(value - number) == abs(value - 3 * number))


def _true(test: Callable[[Any, Any], Any], left: Any, right: Any) -> bool:
    try:
        return bool(test(left, right))
    except Exception:
        return False


def _altered(value: Any) -> list[Any]:
    """Returns the value, and values of the same type that differ from it. Empty for other types."""
    if isinstance(value, bool):
        return [value, not value]
    if isinstance(value, int | float):
        return [value, value + 1, value - 2]
    if isinstance(value, str):
        return [value, value + "~"]
    if type(value) in (list, tuple):
        return [value, type(value)([*value, object()])]
    return []


def _leaves(value: Any, depth: int) -> Iterator[Any]:
    if depth and type(value) in (list, tuple, set, frozenset):
        for item in list(value):
            yield from _leaves(item, depth - 1)
    elif depth and type(value) is dict:
        for item in (*value.keys(), *value.values()):
            yield from _leaves(item, depth - 1)
    elif type(value) not in _PLAIN:
        yield value
