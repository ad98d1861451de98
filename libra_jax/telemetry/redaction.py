"""Keeps secrets out of what a run writes and prints of its settings.

Settings that need a secret take the name of an environment variable (`api_key_env`, `telemetry.token_env`). Where one
is given in the clear all the same, as in a header of an MCP server, `config.json`, `--dry_run` and Weights & Biases get
`SECRET` in its place; the config file and the command still show the secret. A run whose secret differs counts as the
same run. A secret that neither its name nor its form gives away is not found.
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
"""What a field with a secret is called, at its end: not `max_tokens`, `tokenizer` or `token_env`."""

_VALUES = re.compile(
    r"\b(hf_\w{20,}|sk-[\w-]{16,}|gh[opsur]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}"
    r"|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|ya29\.[\w-]{10,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}"
    r"|[Bb]earer [\w.~+/-]{8,}=*|(?<=://)[^/\s:@]+:[^/\s@]+(?=@))"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*"
)
"""How those of the usual services begin, JSON web tokens, private keys, and passwords in addresses."""

_REFERENCE = re.compile(r"(\w+ )?\$\{(env:)?[A-Za-z_]\w*\}")
"""Names an environment variable, as `Bearer ${MY_TOKEN}`: nothing secret by itself."""


def redacted(values: Any, name: str = "") -> Any:
    """Returns the settings as plain values, with `SECRET` in place of secrets.

    Args:
      values: nested mappings, lists and plain values.
      name: of the field that holds them.
    """
    if isinstance(values, Mapping):
        return {key: redacted(value, str(key)) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(redacted(value, name) for value in values)
    if not isinstance(values, str) or not values or _REFERENCE.fullmatch(values):
        return values
    return SECRET if _NAMES.search(name) else _VALUES.sub(SECRET, values)
