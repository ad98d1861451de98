"""Refuses settings of the command line that a command does not read; names the setting that counts instead."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ml_collections import config_flags

from libra_jax.protocols import ConfigError


def given(flag: Any) -> frozenset[str]:
    """Returns the fields of the config that the command line sets.

    Args:
      flag: the config flag, `flags.FLAGS["config"]`.
    """
    return frozenset(config_flags.get_override_values(flag))


def refuse(names: Collection[str], *, script: str, read: Collection[str], instead: Mapping[str, str]) -> None:
    """Refuses fields that the command would ignore.

    Args:
      names: from `given`.
      script: name of the command.
      read: fields and groups of fields that the command reads.
      instead: by field or group, the field that counts in its place.

    Raises:
      ConfigError: a field is not read; the message names it.
    """
    refuse_ignored(names, script=script, ignored=[name for name in names if not _within(name, read)], instead=instead)


def refuse_ignored(
    names: Collection[str], *, script: str, ignored: Collection[str], instead: Mapping[str, str]
) -> None:
    """Refuses fields that the command is known to ignore.

    Args:
      names: from `given`.
      script: name of the command.
      ignored: fields and groups of fields that the command ignores.
      instead: by field or group, the field that counts in its place.

    Raises:
      ConfigError: a field is ignored; the message names it.
    """
    for name in sorted(names):
        if not _within(name, ignored):
            continue
        counts = [field for field in instead if _within(name, (field,))]
        advice = f"config.{instead[counts[0]]} counts; set that" if counts else "leave it out"
        raise ConfigError(f"--config.{name}: launch/{script} does not read it; {advice}")


def _within(name: str, fields: Collection[str]) -> bool:
    return any(name == field or name.startswith(f"{field}.") for field in fields)
