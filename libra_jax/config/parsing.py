"""Turns settings into nested plain values, and those into frozen settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

from libra_jax.config.checks import check
from libra_jax.config.group import coerced, freeze, nearest, now
from libra_jax.protocols import ConfigError

T = TypeVar("T")


def checked(config: T) -> T:
    """Returns a frozen copy of settings whose fields a config file has set, with every value checked.

    Raises:
      ConfigError: a value is of the wrong type, out of range, or at odds with another; the message names the field.
    """
    return parse(type(config), to_dict(config))


def to_dict(config: Any) -> dict[str, Any]:
    """A dataclass tree as nested plain dicts (tuples kept)."""
    return {
        item.name: to_dict(value) if dataclasses.is_dataclass(value := getattr(config, item.name)) else value
        for item in dataclasses.fields(config)
    }


def parse(cls: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """Builds the group of settings `cls` from nested mappings, checks every value, and freezes the result.

    Raises:
      ConfigError: a field is unknown (the nearest name is offered), of the wrong type, or out of range.
    """
    types = get_type_hints(cls)
    known = {item.name for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            hint = now(f"{prefix}{name}") or nearest(name, known, prefix)
            raise ConfigError(f"config.{prefix}{name}: no such field; {hint}")
        kind = types[name]
        if dataclasses.is_dataclass(kind):
            check(isinstance(value, Mapping), f"{prefix}{name}", "must be a group of fields")
            arguments[name] = parse(kind, value, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            value = coerced(value, kind, f"config.{prefix}{name}", getattr(cls, name, None))
            arguments[name] = dict(value) if isinstance(value, Mapping) else value  # a frozen config shares nothing
    return freeze(cls(**arguments))
