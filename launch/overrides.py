"""Reads a run's config from a command line, or passes its settings on to launch/train.py elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cleartext
from ml_collections import config_flags

from libra_jax import config as libra_config
from libra_jax.planning import plans
from libra_jax.protocols import ConfigError

_OWN = ("cluster.address",)
"""Settings that the launcher decides."""


def values(flag: Any, plan: str | None = None) -> dict[str, Any]:
    """Returns the settings of a real run, as `libra_config.parse` takes them.

    Args:
      flag: the config flag, `flags.FLAGS["config"]`.
      plan: file of launch/plan.py to lay the run out by; None keeps the config's layout.

    Raises:
      ConfigError: the config is a simulation's.
      DataError: the plan cannot be read.
    """
    found: dict[str, Any] = libra_config.to_dict(flag.value)
    if "simulation" in found:
        file = config_flags.get_config_filename(flag)
        raise ConfigError(f"--config={file}: is a config for launch/simulate.py; give it to that script")
    return found if plan is None else plans.applied(found, plans.read(Path(plan)))


def arguments(flag: Any) -> list[str]:
    """Returns the settings that were given beside `--config`, an argument each, in their order.

    Args:
      flag: the config flag, `flags.FLAGS["config"]`.

    Raises:
      ConfigError: a setting looks like a secret, or has several lines.
    """
    found = []
    for name, value in config_flags.get_override_values(flag).items():
        cleartext.refuse(f"--config.{name}", name, value, "let the code read it from a variable of its environment")
        if "\n" in str(value):
            raise ConfigError(f"--config.{name}: a value of several lines cannot be passed on; put it into the file")
        if name not in _OWN:
            found.append(f"--config.{name}={value}")
    return found
