"""Groups of settings: dataclasses that a config file fills in and that the run then holds frozen."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any, TypeVar, get_type_hints

from libra_jax.protocols import ConfigError

T = TypeVar("T")

_FROZEN = "_frozen"
"""Entry of a group's `__dict__` that says that no field may be set any more."""


def group(cls: type[T]) -> type[T]:
    """Makes a dataclass a group of settings: its fields can be set until `freeze`, and other names never.

    The attribute check is added here and not in a base class, because mypy accepts any name on a class whose
    `__setattr__` it can see. So a mistyped field of a config file is an error for mypy and at run time.

    Raises (when a field is set):
      ConfigError: the group has no such field; the message offers the nearest name.
      dataclasses.FrozenInstanceError: the run has begun with these settings.
    """
    hints = get_type_hints(cls)
    names = [item.name for item in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for item in dataclasses.fields(cls):  # type: ignore[arg-type]
        item.type = hints[item.name]  # ml_collections reads the type here and needs it resolved

    def set_field(self: Any, name: str, value: Any) -> None:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"its fields are {', '.join(sorted(names))}"
            raise ConfigError(f"{cls.__name__} has no field {name!r}; {hint}")
        if self.__dict__.get(_FROZEN):
            raise dataclasses.FrozenInstanceError(f"{cls.__name__}.{name}: settings are frozen once they are read")
        object.__setattr__(self, name, value)

    cls.__setattr__ = set_field  # type: ignore[method-assign]
    return cls


def freeze(config: T) -> T:
    """Freezes a group and all groups within it, and returns it."""
    for item in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            freeze(value)
    config.__dict__[_FROZEN] = True
    return config
