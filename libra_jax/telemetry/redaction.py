"""Removes secrets from the settings that a run writes and prints.

Settings that need a secret take the name of an environment variable (`api_key_env`, `telemetry.token_env`). A secret
may still be given in the clear, for example in a header of an MCP server. Then `config.json`, `--dry_run` and Weights &
Biases get `SECRET` instead. The config file and the command still contain it. Two runs that differ only in a secret
count as the same run. A secret that neither its name nor its form reveals is not found.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

SECRET = "<secret>"

_NAMES = re.compile(
    r"(^|[._-])(token|secret|password|passwd|passphrase|credentials?|api[_-]?key|access[_-]?key|private[_-]?key|secret[_-]?key"
    r"|authorization|cookie)$",
    re.IGNORECASE,
)
"""Pattern of the end of a field's name that holds a secret. Does not match `max_tokens`, `tokenizer` or `token_env`."""

_VALUES = re.compile(
    r"\b(hf_\w{20,}|sk-[\w-]{16,}|gh[opsur]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}"
    r"|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|ya29\.[\w-]{10,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}"
    r"|[Bb]earer [\w.~+/-]{8,}=*|(?<=://)[^/\s:@]+:[^/\s@]+(?=@))"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*"
)
"""Pattern of the keys of common services, of JSON web tokens, private keys, and passwords in addresses."""

_REFERENCE = re.compile(r"(\w+ )?\$\{(env:)?[A-Za-z_]\w*\}")
"""Pattern of a reference to an environment variable, such as `Bearer ${MY_TOKEN}`. It is not secret itself."""


def redacted(values: Any, name: str = "") -> Any:
    """Returns the settings as plain values, with `SECRET` in place of secrets.

    Args:
      values: Nested mappings, lists and plain values.
      name: Name of the field that holds the values.
    """
    if isinstance(values, Mapping):
        return {key: redacted(value, str(key)) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(redacted(value, name) for value in values)
    if not isinstance(values, str) or not values or _REFERENCE.fullmatch(values):
        return values
    return SECRET if _NAMES.search(name) else _VALUES.sub(SECRET, values)
