"""Cuts a run's records back to a checkpoint, so that a resumed run writes each step once."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from libra_jax import protocols
from libra_jax.telemetry import files, metrics, samples, trace

PARTIAL_SUFFIX = ".partial"


TOLD = 3
"""Number of damaged lines of a file that are named. Further ones are counted."""


def cut_back(workdir: Path, step: int) -> list[str]:
    """Cuts the records of a run back to a checkpoint, before the resumed run records its first step.

    Records whose `step` is at most `step` are kept, in the numbering of `Recorder.metrics` (-1 keeps none). A record of
    `trace.jsonl` without a step goes with the record before it. Torn lines are removed. Damaged lines are removed and
    named, because their numbers are not the recorded ones. Of the changed settings, only damaged lines are removed.

    A new file is written beside each old one and renamed over it. So a kill in between loses nothing, and cutting twice
    changes nothing. TensorBoard needs no cut, because the session's first step voids later events. The timeline is
    kept, because it shows what the machines did, including repeated work.

    Args:
      workdir: Folder of the run. Missing files are not errors.
      step: Last step whose records stay.

    Returns:
      A sentence for each file that was damaged.

    Raises:
      LibraError: A file cannot be read or replaced.
    """
    told = []
    for name, last in (
        (metrics.METRICS_FILE, step),
        (trace.TRACE_FILE, step),
        (samples.SAMPLES_FILE, step),
        (files.PLANS_FILE, step),
        (files.TRANSITIONS_FILE, step),
        (files.CONFIG_HISTORY_FILE, sys.maxsize),
    ):
        try:
            damaged = _cut(workdir / name, last)
        except OSError as error:
            raise protocols.LibraError(
                f"{workdir / name} cannot be cut back to step {step} ({error.strerror or error}): see to the disk, and "
                "give the same command again."
            ) from error
        if damaged:
            further = f", and {len(damaged) - TOLD} further lines" if len(damaged) > TOLD else ""
            lines = ", ".join(f"line {number} ({why})" for number, why in damaged[:TOLD])
            told.append(f"{workdir / name} was damaged, and these lines are removed: {lines}{further}.")
    return told


def _cut(path: Path, step: int) -> list[tuple[int, str]]:
    """Cuts one file. Returns the numbers of its damaged lines, and what is wrong with each."""
    if not path.exists():
        return []
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    keep, damaged = True, []
    with path.open("rb") as old, partial.open("wb") as new:
        for number, line in enumerate(old, start=1):
            if not line.endswith(b"\n"):
                if not files.torn(line):
                    damaged.append((number, "its end is damaged"))
                break
            if why := files.damage(line):
                damaged.append((number, why))
                continue
            recorded = json.loads(line).get("step")
            if isinstance(recorded, int):
                keep = recorded <= step
            if keep:
                new.write(line)
        new.flush()
        # On disk before the rename, or a power failure could leave an empty file behind the name.
        os.fsync(new.fileno())
    os.replace(partial, path)
    return damaged
