"""Makes text safe to show: no character of a model's or tool's text moves the cursor, and settings show no secret.

Every place that prints text uses `visible`: console, status screen, samples, error sentences and logs. The report uses
it too, before HTML's own escapes.

Settings that need a secret take the name of an environment variable (`api_key_env`, `telemetry.token_env`). A secret
may still be given in the clear, for example in a header of an MCP server. Then `config.json`, `--dry_run` and Weights &
Biases get `SECRET` instead (`redacted`). The config file and the command still contain it. Two runs that differ only in
a secret count as the same run. A secret that neither its name nor its form reveals is not found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_HIDDEN = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 and C1 controls but tab and newline: ANSI, OSC and DCS sequences begin with one
    "\u00ad\u061c\u180e\u200b\u200e\u200f"  # soft hyphen, marks of direction, spaces without a width
    "\u2028-\u202e\u2060-\u206f"  # separators of lines, embeddings, overrides and isolates of direction
    "\ufeff\ufff9-\ufffb\ufdd0-\ufdef\ufffe\uffff"  # byte order mark, annotations, what is no character
    "\U000e0000-\U000e0fff"  # tags, which spell out text that no one sees
)
# The two joiners (U+200C, U+200D) are kept: Persian, Indic scripts and emoji need them, and they reorder nothing.
_CONTROLS = re.compile(f"[{_HIDDEN}\ud800-\udfff]")
_CONTROLS_AND_LINES = re.compile(f"[{_HIDDEN}\ud800-\udfff\t\n]")
# Without surrogates: `files.json_line` replaces those when it encodes the text.
_RAW_IN_JSON = re.compile(f"[{_HIDDEN}]")
_NAMED = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


def visible(text: str, *, lines: bool = False) -> str:
    r"""Returns the text with control, bidirectional and invisible characters spelled out, as in `\x1b[2J`.

    Args:
      lines: Whether to keep tabs and newlines. Otherwise the text stays on one line and cannot forge the next one.
    """
    return (_CONTROLS if lines else _CONTROLS_AND_LINES).sub(_spelled, text)


def json_text(text: str) -> str:
    r"""Returns JSON with these characters as JSON's own escapes. It reads back the same, and `cat` shows it safely.

    Args:
      text: A JSON document that keeps characters beyond ASCII as they are.
    """
    # `json` spells them itself if it is told to: those beyond U+FFFF as a pair of UTF-16 units. Without its quotes.
    return _RAW_IN_JSON.sub(lambda match: json.dumps(match.group())[1:-1], text)


def _spelled(match: re.Match[str]) -> str:
    character = match.group()
    code = ord(character)
    if character in _NAMED:
        return _NAMED[character]
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


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
    """Returns the settings as plain values, with `SECRET` instead of secrets.

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


def redacted_settings(values: Mapping[str, object]) -> dict[str, object]:
    """Returns settings by full name (`config.listing.values_of`), with `SECRET` instead of secrets."""
    return {name: redacted(value, name.rpartition(".")[2]) for name, value in values.items()}
