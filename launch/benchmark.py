"""Ratios measured in one run: rollout through the coordinator, weight bridge, train step, calls in a sandbox, searches
in a corpus; and what a whole publication, one by a relay, a resize of the trainer's mesh, its moves to other processes,
an engine that sleeps and wakes, the coordinator, the scheduler and the search for a plan cost.

  python launch/benchmark.py [--peer_python=PATH] [--only=rollout,scheduler] [--output=benchmark.json]

Each ratio's two sides alternate in the same process, or in two processes that run in turn, so that a machine whose
speed drifts slows both; medians are compared. `--peer_python` is an interpreter with google-tunix, in an environment
of its own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import absent_modules  # noqa: F401 (see there)
from absl import flags
from rich import console, table

import cli
from benchmarks import (
    bridge,
    coordinator,
    drain,
    moves,
    planner,
    publication,
    relay,
    resize,
    rollout,
    sandbox,
    scheduler,
    search,
    train,
)
from libra_jax import protocols

_ROUNDS = flags.DEFINE_integer(
    "rounds", 5, "Alternations of the two sides; the shorter a round, the more of them are made of it.", lower_bound=1
)
_PEER = flags.DEFINE_string("peer_python", None, "Interpreter with google-tunix; without it that ratio is left out.")
_OUTPUT = flags.DEFINE_string("output", None, "File for the JSON, beside standard output; pictures lie beside it.")

PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "rollout": lambda: asyncio.run(rollout.measure(3 * _ROUNDS.value)),
    "bridge": lambda: bridge.measure(6 * _ROUNDS.value),
    "publication": lambda: asyncio.run(publication.measure(_ROUNDS.value)),
    "relay": lambda: asyncio.run(relay.measure(_ROUNDS.value)),
    "train": lambda: train.measure(_ROUNDS.value, _PEER.value),
    "resize": resize.measure,
    "moves": lambda: asyncio.run(moves.measure()),
    "drain": lambda: asyncio.run(drain.measure()),
    "coordinator": lambda: asyncio.run(coordinator.measure()),
    "scheduler": scheduler.measure,
    "sandbox": lambda: asyncio.run(sandbox.measure(_ROUNDS.value)),
    "search": lambda: asyncio.run(search.measure()),
    "planner": lambda: planner.measure(Path(_OUTPUT.value).with_suffix(".planner.svg") if _OUTPUT.value else None),
}

_ONLY = flags.DEFINE_list("only", list(PARTS), "Which parts to measure.")


def main() -> None:
    for name in _ONLY.value:
        if name not in PARTS:
            raise protocols.ConfigError(f"--only: {name!r} is not one of {', '.join(PARTS)}")
    if _OUTPUT.value:
        cli.check_output(Path(_OUTPUT.value))
    results = {name: PARTS[name]() for name in _ONLY.value}
    text = json.dumps(results, indent=2)
    print(text)
    rows = table.Table("part", "figure", "value")
    for part, figures in results.items():
        for figure, value in figures.items():
            rows.add_row(part, figure, f"{value:,.3f}" if isinstance(value, float) else str(value))
    console.Console().print(rows)
    if _OUTPUT.value:
        with open(_OUTPUT.value, "w") as file:
            file.write(text)


if __name__ == "__main__":
    cli.run(main)
