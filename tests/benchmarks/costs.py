"""Measures what each call costs the coordinator on this machine, for `launch/scale.py --costs=FILE`.

  python -m tests.benchmarks.costs --output=mine.json [--simulate=48,1024]   # minutes; starts Ray

With --simulate, the coordinator's load in simulated runs of these sizes is measured too, and compared with what the
costs predict.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import sys
from pathlib import Path
from typing import Any

from support import cli

from absl import flags

from libra_jax import protocols
from libra_jax.planning import scale
from tests.benchmarks import calls, simulated_load

SMALLEST = 48
"""Accelerators of the layout in configs/simulate.py."""

_ROUNDS = flags.DEFINE_integer("rounds", 5, "Measurements of each cost, of which the median counts.", lower_bound=1)
_SIMULATE = flags.DEFINE_list("simulate", [], "Sizes, from 48 on, at which the coordinator's load is simulated, too.")
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.", required=True)


def main() -> None:
    if not all(size.isdecimal() and int(size) >= SMALLEST for size in _SIMULATE.value):
        raise protocols.ConfigError(f"--simulate: {','.join(_SIMULATE.value)!r} are no sizes of {SMALLEST} or more")
    cli.check_output(Path(_OUTPUT.value))
    measured = calls.measure(_ROUNDS.value, _progress)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    record: dict[str, Any] = {"date": today, **calls.as_values(measured)}
    if _SIMULATE.value:
        record["simulated"] = [_simulated(measured, size) for size in sorted(map(int, _SIMULATE.value))]
    Path(_OUTPUT.value).write_text(json.dumps(record, indent=2) + "\n")
    print(f"wrote {_OUTPUT.value}")


def _simulated(measured: calls.Measured, accelerators: int) -> dict[str, Any]:
    """A simulated coordinator's CPU time, and what its calls should have taken."""
    _progress(f"a simulated coordinator's load with {accelerators:,} accelerators")
    load = simulated_load.measure(accelerators, min(16, max(1, round(2_048 / accelerators))))
    embedded, decisions = measured.embedded, measured.costs.decisions
    # The costs of a turn were measured with one live request; more of them make its two decisions dearer.
    more = scale.grown(decisions, 2 * load.requests / load.steps) - scale.grown(decisions, 1)
    predicted = load.requests * embedded["request"] + load.deltas * embedded["delta"]
    predicted += load.turns * (embedded["turn"] + 2.0 * max(0.0, more))
    off = {"predicted_seconds": predicted, "error": predicted / load.coordinator_seconds - 1.0}
    return {**dataclasses.asdict(load), **off}


def _progress(text: str) -> None:
    print(f"measuring: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    cli.run(main)
