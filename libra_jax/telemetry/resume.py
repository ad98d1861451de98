"""Cutting a run's records back to a checkpoint, so that a resumed run writes each step once."""

from __future__ import annotations

import json
import os
from pathlib import Path

from libra_jax import protocols
from libra_jax.telemetry import files, metrics, samples, trace

PARTIAL_SUFFIX = ".partial"


def cut_back(workdir: Path, step: int) -> None:
    """Cuts the records of a run back to a checkpoint, before the resumed run records its first step.

    Kept are records whose `step` is at most `step`, in the numbering of `Recorder.metrics` (-1 keeps none). A record
    of `trace.jsonl` without a step goes with what was written before it, and a line torn by a kill goes. Each file is
    written anew beside the old one and renamed over it, so a kill in here loses nothing, and cutting twice changes
    nothing. TensorBoard needs no cutting: the session's first step voids what it holds from there on. The timeline is
    kept: it shows what the machines did, redone work included.

    Args:
      workdir: the run's folder; missing files are no error.
      step: the last step whose records stay.

    Raises:
      LibraError: a file cannot be read or written anew.
    """
    for name in (
        metrics.METRICS_FILE,
        trace.TRACE_FILE,
        samples.SAMPLES_FILE,
        files.PLANS_FILE,
        files.TRANSITIONS_FILE,
    ):
        try:
            _cut(workdir / name, step)
        except OSError as error:
            raise protocols.LibraError(
                f"{workdir / name} cannot be cut back to step {step} ({error.strerror or error}): see to the disk, and "
                "give the same command again."
            ) from error


def _cut(path: Path, step: int) -> None:
    if not path.exists():
        return
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    keep = True
    with path.open("rb") as old, partial.open("wb") as new:
        for line in old:
            if not line.endswith(b"\n"):
                break
            try:
                recorded = json.loads(line).get("step")
            except (ValueError, AttributeError):
                continue
            if isinstance(recorded, int):
                keep = recorded <= step
            if keep:
                new.write(line)
        new.flush()
        os.fsync(new.fileno())
    os.replace(partial, path)
