"""Keeps secrets out of what others can read: manifests, scripts, command lines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from libra_jax.protocols import ConfigError

_NAMES = re.compile(
    r"(^|[._-])(token|secret|password|passwd|passphrase|credentials?|api_?key|access_?key|private_?key|secret_?key)$",
    re.IGNORECASE,
)
"""What a variable or field of a secret is called, at its end: not `max_tokens`, `tokenizer` or `token_env`."""

_VALUES = re.compile(
    r"\b(hf_\w{20,}|sk-[\w-]{16,}|gh[opsur]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}"
    r"|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|ya29\.[\w-]{10,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|://[^/\s:@]+:[^/\s@]+@"
)
"""How those of the usual services begin, JSON web tokens, private keys, and passwords in addresses."""


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
    named = isinstance(value, str) and bool(value) and _NAMES.search(name)
    if named or _VALUES.search(str(value)):
        raise ConfigError(f"{flag}: the value of {name} looks like a secret, and others could read it; {instead}")
