"""Builds the command of a set of benchmarks: chooses the parts, prints their figures as JSON and a table, and writes
them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from support import cli

from absl import flags
from rich import console, table

from libra_jax import protocols

Parts = Mapping[str, Callable[[], Mapping[str, object]]]
"""Name of each part, and its measurement, which returns figures by name."""

SCRIPT = sys.argv[0]  # the flags belong to the script, so that --help shows them

OUTPUT = flags.DEFINE_string(
    "output", None, "File for the JSON, beside standard output; pictures lie beside it.", module_name=SCRIPT
)


def main(known: Parts) -> Callable[[], None]:
    """Defines --only and returns the `main` of a script that measures these parts."""
    only = flags.DEFINE_list("only", list(known), "Which parts to measure.", module_name=SCRIPT)

    def measure() -> None:
        for name in only.value:
            if name not in known:
                raise protocols.ConfigError(f"--only: {name!r} is not one of {', '.join(known)}")
        if OUTPUT.value:
            cli.check_output(Path(OUTPUT.value))
        results = {name: known[name]() for name in only.value}
        text = json.dumps(results, indent=2)
        print(text)
        rows = table.Table("part", "figure", "value")
        for part, figures in results.items():
            for figure, value in figures.items():
                rows.add_row(part, figure, f"{value:,.3f}" if isinstance(value, float) else str(value))
        console.Console().print(rows)
        if OUTPUT.value:
            Path(OUTPUT.value).write_text(text)

    return measure
