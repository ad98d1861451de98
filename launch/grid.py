"""Expands a sweep into its runs: configs, command-line changes to all runs, and the tried values."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from libra_jax import protocols

MOST_CELLS = 1_000
"""Most settings of one sweep; each is run under every seed."""

SEEDED = "say seeds by --seeds=0,1,2, which the mean and the spread are over"


@dataclass(frozen=True)
class Cell:
    """One entry of the table: a setting that is run under every seed.

    Attributes:
      name: name in the table.
      file: the config file, with its variant behind a colon.
      settings: `--config.` flags of every run.
    """

    name: str
    file: str
    settings: tuple[str, ...] = ()


def taken(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command line into the script's own arguments and the runs' `--config.` flags.

    Args:
      arguments: as `sys.argv`.
    """
    ours = [argument for argument in arguments if not argument.lstrip("-").startswith("config.")]
    return ours, [f"--{argument.lstrip('-')}" for argument in arguments if argument not in ours]


def cells(configs: str, of: str | None, overrides: Sequence[str], sweeps: Sequence[str]) -> list[Cell]:
    """Returns every config with every combination of the tried values.

    Args:
      configs: files, or variants of `of`, separated by commas.
      of: file that has the variants.
      overrides: `--config.` flags of all runs.
      sweeps: fields with their values, as `optimizer.learning_rate=1e-4,3e-4`; several make a product.

    Raises:
      ConfigError: nothing is named, a file is missing, or values cannot be read.
    """
    names = list(dict.fromkeys(name.strip() for name in configs.split(",") if name.strip()))
    if not names:
        raise protocols.ConfigError("--configs: name at least one config file, or with --of one of its variants")
    for override in overrides:
        if override.split("=")[0] == "--config.seed":
            raise protocols.ConfigError(f"--config.seed: {SEEDED}")
    axes = list(map(_axis, sweeps))
    fields = [field for field, _ in axes]
    for field in fields:
        if fields.count(field) > 1 or f"--config.{field}" in [override.split("=")[0] for override in overrides]:
            raise protocols.ConfigError(f"--sweep={field}: is given twice; name all of its values in one flag")
    count = len(names) * math.prod(len(values) for _, values in axes)
    if count > MOST_CELLS:
        raise protocols.ConfigError(f"--sweep: {count:,} combinations are more than {MOST_CELLS:,}; try fewer values")
    made = []
    for name in names:
        file = f"{of}:{name}" if of else name
        path = Path(file.partition(":")[0])
        if path.suffix != ".py" or not path.is_file():
            raise protocols.ConfigError(f"--configs: {path}: no such config file; variants of one file need --of=FILE")
        for values in itertools.product(*(values for _, values in axes)):
            chosen = list(zip(fields, values, strict=True))
            label = ", ".join(f"{_short(field, fields)}={value}" for field, value in chosen)
            settings = (*overrides, *(f"--config.{field}={value}" for field, value in chosen))
            made.append(Cell(f"{name} {label}".strip(), file, settings))
    return made


def _axis(text: str) -> tuple[str, list[str]]:
    """Returns a field and its values."""
    field, equals, values = text.partition("=")
    field = field.strip().removeprefix("--").removeprefix("config.")
    found = list(dict.fromkeys(_split(values)))
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", field) or not found:
        raise protocols.ConfigError(
            f"--sweep: {text!r} names no field and values; they look like --sweep=optimizer.learning_rate=1e-4,3e-4"
        )
    if field == "seed":
        raise protocols.ConfigError(f"--sweep=seed: {SEEDED}")
    if field == "steps":
        raise protocols.ConfigError("--sweep=steps: runs that differ in their steps alone are one run; see --steps")
    return field, found


def _split(text: str) -> Iterator[str]:
    """Yields values between commas; a comma within brackets or quotation marks belongs to its value."""
    part, depth, quote = "", 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth and not quote:
            if part.strip():
                yield part.strip()
            part = ""
        else:
            part += letter
    if depth or quote:
        raise protocols.ConfigError(f"--sweep: {text!r} opens a bracket or a quotation mark that it does not close")
    if part.strip():
        yield part.strip()


def _short(field: str, fields: Sequence[str]) -> str:
    """Returns the field's last part; returns the whole field if another one has the same last part."""
    last = field.rpartition(".")[2]
    return last if [other.rpartition(".")[2] for other in fields].count(last) == 1 else field
