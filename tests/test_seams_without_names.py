"""Nothing crosses a room untyped: no method by name, no dictionary of anything, no callback assigned from outside.

mypy cannot see a wrong call behind any of these three, so that `test_typed_seams` would pass in spite of one.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

ROOMS = ["libra_jax/coordinator", "libra_jax/trainer_control", "libra_jax/build", "libra_jax/hybrid", "launch"]

ACTORS = ["libra_jax/utils/typed_clients.py", "libra_jax/cluster", "libra_jax/protocols", "libra_jax/weights"]
"""Where calls are handed on to other processes."""

PLANTED = {
    "a method by any name": "class Proxy:\n    def __getattr__(self, name):\n        return name",
    "a dictionary of anything": "def state() -> dict[str, Any]:\n    return {}",
    "lines of anything": "async def trace() -> list[dict[str, Any]]:\n    return []",
    "a dictionary of anything, or None": "def read() -> dict[str, Any] | None:\n    return None",
    "a lambda": "engines.changed = lambda: None",
    "a lambda on an own part": "class A:\n    def f(self):\n        self._part.changed = lambda: None",
    "a function": "def load(): ...\nengines.load = load",
    "a nested function": "def wire(engines):\n    async def load(): ...\n    engines.load = load",
    "a bound method": "class A:\n    def f(self, e):\n        e.changed = self.show\n    def show(self): ...",
    "another object's method": "watcher.warn = recorder.note",
    "a partial": "engines.changed = functools.partial(print, 1)",
    "one of two": "a.count, a.changed = 1, lambda: None",
}

ALLOWED = {
    "an own callback": "class A:\n    def __init__(self, told):\n        self._told, self.f = told, lambda: None",
    "a value": "request.instance = placement.instance",
    "the result of a call": "engine.info = client.start()",
    "a property": "class A:\n    @property\n    def size(self): ...\n    def f(self, b):\n        b.size = self.size",
    "a typed record": "def state() -> CoordinatorState:\n    return {}",
    "a mapping that is only read": "def state() -> Mapping[str, float]:\n    return {}",
    "a hook of the interpreter": "def explain(*error): ...\nsys.excepthook = explain",
}


def methods(tree: ast.AST) -> Iterator[str]:
    """Names of the functions and methods of a file that are not properties, and of attributes that hold functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if not any("property" in ast.unparse(decorator) for decorator in node.decorator_list):
                yield node.name
        elif isinstance(node, ast.AnnAssign) and "Callable" in ast.unparse(node.annotation):
            yield ast.unparse(node.target).removeprefix("self.")


def values(tree: ast.AST) -> Iterator[str]:
    """Names of the attributes and properties of a file that hold no functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and "Callable" not in ast.unparse(node.annotation):
            yield ast.unparse(node.target).removeprefix("self.")
        elif isinstance(node, ast.Assign):
            yield from (ast.unparse(target).removeprefix("self.") for target in node.targets)
        elif isinstance(node, ast.FunctionDef) and any("property" in ast.unparse(d) for d in node.decorator_list):
            yield node.name


def is_callable(value: ast.expr, here: set[str], elsewhere: set[str]) -> bool:
    if isinstance(value, ast.Call):
        return ast.unparse(value.func) in ("functools.partial", "partial")
    if isinstance(value, ast.Attribute):
        return value.attr in here | elsewhere
    return isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in here)


def assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Each target of an assignment with its value."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    for target in targets:
        assert isinstance(node, ast.Assign | ast.AnnAssign)
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=True)
        elif node.value is not None:
            yield target, node.value


def untyped(source: str, elsewhere: set[str]) -> list[str]:
    """What a file holds of the three, each with its line.

    Args:
      source: text of the file.
      elsewhere: names of methods of other files.
    """
    tree, found = ast.parse(source), []
    own, here = set(values(tree)), set(methods(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name == "__getattr__":
                found.append(f"{node.lineno}: __getattr__")
            if node.returns is not None and "dict[str, Any]" in ast.unparse(node.returns):
                found.append(f"{node.lineno}: {node.name} -> {ast.unparse(node.returns)}")
        for target, value in assigned(node):
            if not isinstance(target, ast.Attribute) or ast.unparse(target.value) in ("self", "cls", "sys"):
                continue
            if is_callable(value, here - own, elsewhere - own):
                found.append(f"{target.lineno}: {ast.unparse(target)} = {ast.unparse(value)}")
    return found


@pytest.fixture(scope="module")
def elsewhere() -> set[str]:
    """Names that are methods in the library, by which another object's callback may be assigned."""
    trees = [ast.parse(file.read_text()) for file in (ROOT / "libra_jax").rglob("*.py")]
    return set(itertools.chain.from_iterable(map(methods, trees)))


def files_of(room: str) -> list[Path]:
    path = ROOT / room
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    assert files
    return files


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_crosses_a_room_untyped(room, elsewhere):
    found = {str(file.relative_to(ROOT)): untyped(file.read_text(), elsewhere) for file in files_of(room)}
    assert {file: lines for file, lines in found.items() if lines} == {}


@pytest.mark.parametrize("room", ACTORS)
def test_no_room_forwards_calls_by_name(room):
    assert [str(file) for file in files_of(room) if "__getattr__" in file.read_text()] == []


@pytest.mark.parametrize("kind", PLANTED)
def test_each_kind_of_untyped_seam_is_found(kind, elsewhere):
    assert len(untyped(PLANTED[kind], elsewhere)) == 1


@pytest.mark.parametrize("kind", ALLOWED)
def test_what_is_typed_is_let_through(kind, elsewhere):
    assert untyped(ALLOWED[kind], elsewhere) == []
