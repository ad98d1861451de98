"""Keeps secrets out of what others can read: manifests, scripts, command lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from libra_jax.protocols import ConfigError
from libra_jax.telemetry import redaction


def refuse(flag: str, name: str, value: Any, instead: str) -> None:
    """Refuses a value that looks like a secret, by its name or by itself; the error does not repeat it.

    Args:
      flag: it was given with.
      name: of the variable or field.
      value: its value; of a mapping, each entry's.
      instead: what to do, for the error.

    Raises:
      ConfigError: it does.
    """
    if isinstance(value, Mapping):
        for key, entry in value.items():
            refuse(flag, f"{name}.{key}", entry, instead)
        return
    if redaction.redacted(value, name) != value:
        raise ConfigError(f"{flag}: the value of {name} looks like a secret, and others could read it; {instead}")
