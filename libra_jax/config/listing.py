"""Lists a config's settings for help and docs: meanings are the comments beside fields, constraints their metadata."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import io
import textwrap
import tokenize
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, NamedTuple, cast, get_type_hints

from libra_jax.config.fields import constraint_of, default_of, described

WIDTH = 110


class Setting(NamedTuple):
    """One setting.

    Attributes:
      name: full name, such as `optimizer.learning_rate`.
      default: default value as Python writes it.
      meaning: comment of the field, on one line.
      constraint: the values that the field takes, in words; empty if its type says all.
    """

    name: str
    default: str
    meaning: str
    constraint: str


def listing(config_type: type[Any], word: str = "", values: Mapping[str, object] | None = None) -> str:
    """Returns the settings whose name or meaning holds a word, with their values, two lines or more each.

    A setting of exactly this name comes first. A value that differs from the default has the default beside it.

    Args:
      config_type: dataclass of a config.
      word: text to look for, in any case; empty lists all settings.
      values: values by full name, as `values_of` returns them; None lists the defaults.
    """
    found = [
        setting for setting in settings(config_type) if word.lower() in f"{setting.name} {setting.meaning}".lower()
    ]
    found.sort(key=lambda setting: setting.name.lower() != word.lower())
    indent = " " * 6
    lines = []
    for setting in found:
        value = setting.default if values is None else repr(values[setting.name])
        beside = "" if value == setting.default else f"   # default: {setting.default}"
        lines.append(f"--config.{setting.name}={value}{beside}")
        for text in (setting.meaning, setting.constraint):
            lines += textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
    return "\n".join(lines)


def values_of(config: Any, prefix: str = "") -> dict[str, object]:
    """Returns the value of every setting of a config by its full name."""
    found: dict[str, object] = {}
    for item in dataclasses.fields(config):
        value, name = getattr(config, item.name), prefix + item.name
        found |= values_of(value, f"{name}.") if dataclasses.is_dataclass(value) else {name: value}
    return found


def changed(config_type: type[Any], values: Mapping[str, object]) -> dict[str, object]:
    """Returns those of `values_of` that differ from their defaults."""
    defaults = {setting.name: setting.default for setting in settings(config_type)}
    return {name: value for name, value in values.items() if repr(value) != defaults[name]}


def settings(config_type: type[Any], prefix: str = "") -> Iterator[Setting]:
    """Yields every setting of a config, nested ones with their full names."""
    kinds, meanings = get_type_hints(config_type), _meanings(cast(Hashable, config_type))  # which mypy does not see
    for item in dataclasses.fields(config_type):
        kind, name = kinds[item.name], prefix + item.name
        if dataclasses.is_dataclass(kind):
            yield from settings(cast("type[Any]", kind), f"{name}.")
            continue
        made, constraint = default_of(item), described(constraint_of(item))
        default = "(required)" if made is dataclasses.MISSING else repr(made)
        yield Setting(name, default, meanings.get(item.name, ""), constraint)


@functools.cache
def _meanings(config_type: type[Any]) -> dict[str, str]:
    """Returns the meaning of each field: the comment beside or above the field."""
    found: dict[str, str] = {}
    # Base classes first, so that a class's own meaning of a field wins.
    for base in reversed(config_type.__mro__[:-1]):
        if dataclasses.is_dataclass(base):
            found |= _commented(textwrap.dedent(inspect.getsource(base)))
    return found


def _commented(source: str) -> dict[str, str]:
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    lines = source.splitlines()
    body = cast(ast.ClassDef, ast.parse(source).body[0]).body
    found = {}
    for node in body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        above: list[str] = []
        line = node.lineno - 1
        while line in comments and lines[line - 1].lstrip().startswith("#"):
            above.insert(0, comments[line])
            line -= 1
        inside = [
            comments[line] for line in range(node.lineno, (node.end_lineno or node.lineno) + 1) if line in comments
        ]
        if above or inside:
            found[node.target.id] = " ".join([*above, *inside])
    return found
