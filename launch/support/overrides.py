"""Reads the settings given beside --config, passes them on, and refuses secrets and settings that nothing reads."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ml_collections import config_flags

from libra_jax import config as config_lib
from libra_jax.cluster import hosts
from libra_jax.planning.search import plans
from libra_jax.protocols import ConfigError
from libra_jax.telemetry import escapes

_OWN = ("cluster.address",)
"""Settings that the launcher decides."""


Overrides = Mapping[str, object]
"""Values by the name of their setting."""


def config(flag: Any, plan: str | None = None, cluster: Overrides = MappingProxyType({})) -> config_lib.RunConfig:
    """Returns the checked config of a real run.

    Args:
      flag: the config flag, `flags.FLAGS["config"]`.
      plan: file of launch/plan.py to lay the run out by; None keeps the config's layout.
      cluster: settings of `config.cluster` that the launcher decides.

    Raises:
      ConfigError: a setting is wrong or the plan's to decide, or the config is a simulation's.
      DataError: the plan cannot be read.
    """
    found = config_lib.to_dict(flag.value)
    if "simulation" in found:
        file = config_flags.get_config_filename(flag)
        raise ConfigError(f"--config={file}: is a config for launch/simulate.py; give it to that script")
    if plan is not None:
        refuse_planned(fields(flag), plan)
        found = plans.applied(found, plans.read(Path(plan)))
    found["cluster"].update(cluster)
    made = config_lib.parse(config_lib.RunConfig, found)
    if plan is not None:
        _check_hosts(made, plans.accelerators(Path(plan)))
    return made


def refuse_planned(names: Collection[str], plan: str) -> None:
    """Refuses fields of the command line that a plan decides.

    Args:
      names: from `fields`.
      plan: file of the plan.

    Raises:
      ConfigError: the plan decides a field; the message names it.
    """
    for name in sorted(names):
        if _within(name, plans.FIELDS):
            raise ConfigError(f"--config.{name}: the plan decides it; leave it out, or --plan={plan}")


def _check_hosts(config: config_lib.RunConfig, accelerators: int) -> None:
    """Raises ConfigError if a plan takes more hosts than hold its accelerators."""
    layout, each = hosts.layout(config), config.cluster.accelerators_per_host
    if layout is not None and accelerators and len(layout.hosts) > -(-accelerators // each):
        raise ConfigError(
            f"--plan: {accelerators} accelerators are {-(-accelerators // each)} hosts of {each} "
            f"(config.cluster.accelerators_per_host), and this plan takes {len(layout.hosts)}, because no host both "
            "trains and rolls out; plan in whole hosts: launch/plan.py with "
            f"--config.cluster.accelerators_per_host={each}"
        )


def arguments(flag: Any) -> list[str]:
    """Returns the settings that were given beside `--config`, an argument each, in their order.

    Args:
      flag: the config flag, `flags.FLAGS["config"]`.

    Raises:
      ConfigError: a setting looks like a secret, or has several lines.
    """
    found = []
    for name, value in config_flags.get_override_values(flag).items():
        refuse_secret(f"--config.{name}", name, value, "let the code read it from a variable of its environment")
        if "\n" in str(value):
            raise ConfigError(f"--config.{name}: a value of several lines cannot be passed on; put it into the file")
        if name not in _OWN:
            found.append(f"--config.{name}={value}")
    return found


def fields(flag: Any) -> frozenset[str]:
    """Returns the fields of the config that the command line sets.

    Args:
      flag: the config flag, `flags.FLAGS["config"]`.
    """
    return frozenset(config_flags.get_override_values(flag))


def refuse_unread(names: Collection[str], *, script: str, read: Collection[str], instead: Mapping[str, str]) -> None:
    """Refuses fields that the command would ignore.

    Args:
      names: from `fields`.
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
      names: from `fields`.
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


def refuse_secret(flag: str, name: str, value: Any, instead: str) -> None:
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
            refuse_secret(flag, f"{name}.{key}", entry, instead)
        return
    if escapes.redacted(value, name) != value:
        raise ConfigError(f"{flag}: the value of {name} looks like a secret, and others could read it; {instead}")
