"""Measures single parts; launch/benchmark.py measures what a run needs of a machine.

python -m tests.benchmarks [--only=scheduler,planner] [--output=benchmark.json]

relay        weight sync through a weight relay
adapters     bytes and seconds of syncing an adapter, and of syncing all weights
staggered    weight sync into two engines, together and one at a time
resize       a change of the trainer's mesh in one process
moves        a trainer that moves to another process, and a hybrid worker that joins training
drain        rollout while an engine sleeps and wakes
coordinator  CPU time of the coordinator for a request
scheduler    decisions a second, plain and compiled
sandbox      Python calls a second
search       queries of the search tool over a million passages
planner      the search for a plan, by the number of accelerators
machines     the cost model beside published decode steps of real engines
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from support import cli

from absl import flags

from benchmarks import parts, weight_sync
from tests.benchmarks import (
    adapters,
    coordinator,
    drain,
    machines,
    moves,
    planner,
    relay,
    resize,
    sandbox,
    scheduler,
    search,
)

_ROUNDS = flags.DEFINE_integer("rounds", 5, "Measurements of relay, staggered and sandbox.", lower_bound=1)


async def _staggered() -> dict[str, object]:
    """Times a weight sync into two engines, together and one at a time. Chunks have 32 MiB."""
    found: dict[str, object] = {}
    for name, at_once in (("together", 0), ("one_at_a_time", 1)):
        figures = await weight_sync.measure(_ROUNDS.value, engines=2, at_once=at_once, chunk_bytes=32 * 2**20)
        found |= {f"{name}/{key}": value for key, value in figures.items()}
    return found


def _planner() -> dict[str, object]:
    output = parts.OUTPUT.value
    return planner.measure(Path(output).with_suffix(".planner.svg") if output else None)


PARTS: parts.Parts = {
    "relay": lambda: asyncio.run(relay.measure(_ROUNDS.value)),
    "adapters": adapters.measure,
    "staggered": lambda: asyncio.run(_staggered()),
    "resize": resize.measure,
    "moves": lambda: asyncio.run(moves.measure()),
    "drain": lambda: asyncio.run(drain.measure()),
    "coordinator": lambda: asyncio.run(coordinator.measure()),
    "scheduler": scheduler.measure,
    "sandbox": lambda: asyncio.run(sandbox.measure(_ROUNDS.value)),
    "search": lambda: asyncio.run(search.measure()),
    "planner": _planner,
    "machines": machines.measure,
}

if __name__ == "__main__":
    cli.run(parts.main(PARTS))
