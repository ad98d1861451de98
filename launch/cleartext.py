"""Keeps secrets out of files and command lines that others can read: manifests, scripts, command lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from libra_jax.protocols import ConfigError
from libra_jax.telemetry import redaction


def refuse(flag: str, name: str, value: Any, instead: str) -> None:
    """Refuses a value that looks like a secret, by its name or its content; the error does not repeat the value.

    Args:
      flag: flag that gave the value.
      name: name of the variable or field.
      value: the value; of a mapping, each entry is checked.
      instead: advice for the error message.

    Raises:
      ConfigError: the value looks like a secret.
    """
    if isinstance(value, Mapping):
        for key, entry in value.items():
            refuse(flag, f"{name}.{key}", entry, instead)
        return
    if redaction.redacted(value, name) != value:
        raise ConfigError(f"{flag}: the value of {name} looks like a secret, and others could read it; {instead}")
