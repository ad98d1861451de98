"""The `--config.` settings of a command line, to be given to launch/train.py elsewhere."""

from __future__ import annotations

from typing import Any

import cleartext
from ml_collections import config_flags

from libra_jax.protocols import ConfigError

_OWN = ("cluster.address",)
"""Settings that a launcher decides."""


def arguments(flag: Any) -> list[str]:
    """The settings that were given beside `--config`, an argument each, in their order; without secrets.

    Args:
      flag: the config flag, `flags.FLAGS["config"]`.

    Raises:
      ConfigError: one looks like a secret, or is of several lines.
    """
    found = []
    for name, value in config_flags.get_override_values(flag).items():
        plain = value.to_dict() if hasattr(value, "to_dict") else value
        cleartext.refuse(f"--config.{name}", name, plain, "let the code read it from a variable of its environment")
        if "\n" in str(plain):
            raise ConfigError(f"--config.{name}: a value of several lines cannot be passed on; put it into the file")
        if name not in _OWN:
            found.append(f"--config.{name}={plain}")
    return found
