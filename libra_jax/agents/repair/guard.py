"""Detects changes that tested code makes in its tests' process: to Python's own functions, and to those of the tests.

A sandbox gets this file as text, so it imports the standard library only. It detects ordinary tampering, but it cannot
be certain: code in the same process can undo a change before a check, or change the guard itself.
"""

from __future__ import annotations

import ast
import builtins
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

WATCHED = ("builtins", "sys", "contextlib", "functools", "types", "traceback", "operator", "copy",
           "unittest", "unittest.case", "unittest.loader", "unittest.result", "unittest.suite")  # fmt: skip
"""Modules whose functions decide the outcome of a test."""

_MISSING = object()


class _Kept(NamedTuple):
    """One name and its original meaning.

    `holder[name]` was `value`. If the value was a function, it had `code`, and `defaults` are the ids of its defaults
    and globals.
    """

    label: str
    holder: Mapping[str, Any]
    name: str
    value: Any
    code: types.CodeType | None
    defaults: tuple[Any, ...]

    def changed(self) -> bool:
        """Returns whether the name is bound to something else, or the function has other code."""
        if self.holder.get(self.name, _MISSING) is not self.value:
            return True
        return self.code is not None and (_code(self.value) is not self.code or _defaults(self.value) != self.defaults)


def _function(value: Any) -> types.FunctionType | None:
    value = getattr(value, "__func__", value) if isinstance(value, staticmethod | classmethod) else value
    return value if isinstance(value, types.FunctionType) else None


def _code(value: Any) -> types.CodeType | None:
    function = _function(value)
    return None if function is None else function.__code__


def _defaults(value: Any) -> tuple[Any, ...]:
    function = _function(value)
    if function is None:
        return ()
    # Ids and not values: comparing values could run methods of the tested code.
    return (id(function.__defaults__), id(function.__kwdefaults__), id(function.__globals__))


class Names(NamedTuple):
    """The names that a module's source binds at its top level.

    Attributes:
      modules: Names that `import` binds to modules of the standard library, with the module.
      members: Names that `from ... import` binds to members of the standard library, with module and member.
      others: Names that are bound in any other way.
    """

    modules: Mapping[str, str]
    members: Mapping[str, tuple[str, str]]
    others: frozenset[str]

    def imported(self) -> set[str]:
        """Returns the modules of the standard library that the source imports."""
        return {*self.modules.values(), *(module for module, _ in self.members.values())}


def names_of(tree: ast.Module) -> Names:
    """Returns the names that a module's top level binds. Functions and classes bind only their own name."""
    modules: dict[str, str] = {}
    members: dict[str, tuple[str, str]] = {}
    others: set[str] = set()
    for node in _top_level(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.split(".")[0]
                target, full = (alias.asname, alias.name) if alias.asname else (root, root)
                if root in sys.stdlib_module_names:
                    modules[target] = full
                else:
                    others.add(target)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name == "*":
                    continue
                if not node.level and (node.module or "").split(".")[0] in sys.stdlib_module_names:
                    members[alias.asname or alias.name] = (node.module or "", alias.name)
                else:
                    others.add(alias.asname or alias.name)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            others.add(node.name)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            others.add(node.id)
    return Names(modules, members, frozenset(others))


def _top_level(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _top_level(child)


class Guard:
    """Remembers the state of modules, and reports what has changed."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._modules: dict[str, types.ModuleType] = {}
        self._tests: list[tuple[types.ModuleType, Names]] = []
        self._builtins = dict(vars(builtins))
        self._members: dict[tuple[str, str], Any] = {}

    def watch(self, module: types.ModuleType) -> None:
        """Remembers a module's functions and classes, and the functions of the classes that it defines."""
        self._modules[module.__name__] = module
        for name, value in list(vars(module).items()):
            if callable(value) or isinstance(value, types.ModuleType):
                self._keep(f"{module.__name__}.{name}", vars(module), name, value)
            if isinstance(value, type) and value.__module__ == module.__name__:
                for member, inner in list(vars(value).items()):
                    if _function(inner) is not None or isinstance(inner, property):
                        self._keep(f"{module.__name__}.{name}.{member}", vars(value), member, inner)

    def _keep(self, label: str, holder: Mapping[str, Any], name: str, value: Any) -> None:
        self._kept.append(_Kept(label, holder, name, value, _code(value), _defaults(value)))

    def expect(self, names: Names) -> None:
        """Remembers what the standard library currently has for the names that a test module will import."""
        for module, member in names.members.values():
            found = sys.modules.get(module)
            if found is not None and hasattr(found, member):
                self._members[module, member] = getattr(found, member)

    def watch_tests(self, module: types.ModuleType, names: Names) -> None:
        """Remembers a test module that has just been executed."""
        self._tests.append((module, names))
        for name, value in list(vars(module).items()):
            if isinstance(value, types.FunctionType) and value.__module__ == module.__name__:
                self._keep(f"{module.__name__}.{name}", vars(module), name, value)
            elif isinstance(value, type) and value.__module__ == module.__name__:
                for member, inner in list(vars(value).items()):
                    if _function(inner) is not None:
                        self._keep(f"{module.__name__}.{name}.{member}", vars(value), member, inner)

    def changes(self) -> list[str]:
        """Returns a few words for each change. Empty if nothing has changed."""
        found = [f"{kept.label} was replaced" for kept in self._kept if kept.changed()]
        for name, module in self._modules.items():
            if sys.modules.get(name) is not module:
                found.append(f"the module {name} was replaced")
        for module, names in self._tests:
            found += [f"{module.__name__} got another {name!r}" for name in self._foreign(module, names)]
        return found

    def _foreign(self, module: types.ModuleType, names: Names) -> Iterator[str]:
        """Yields Python's own names that mean something else in a test module, without its source saying so."""
        held = vars(module)
        if not any(held.get("__builtins__") is one for one in (vars(builtins), builtins)):
            yield "__builtins__"
        for name in held.keys() - names.others:
            value = held[name]
            if name in names.modules:
                good = value is self._modules.get(names.modules[name], value)
            elif name in names.members:
                good = value is self._members.get(names.members[name], value)
            elif name in self._builtins and not name.startswith("__"):
                good = value is self._builtins[name]
            else:
                continue
            if not good:
                yield name
