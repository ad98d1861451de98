"""Names the subject of a simulated run in every answer: model, machine, layout and lengths."""

from __future__ import annotations

import collections
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libra_jax.simulator import comparison, settings, workloads

TASKS, SAMPLES = 64, 16
"""Tasks over the whole run, and rollouts of each task, that lengths are read from."""


@dataclass(frozen=True)
class Subject:
    """Model, machine and lengths of a simulated run.

    Attributes:
      model: name of the model preset.
      hardware: name of the hardware sheet.
      train_devices: accelerators that train.
      instances: number of rollout instances by tensor-parallel degree.
      workload: name of the workload, or of the trace's file.
      lengths: lengths of a sample of the workload.
    """

    model: str
    hardware: str
    train_devices: int
    instances: dict[int, int]
    workload: str
    lengths: workloads.Summary

    @classmethod
    def of_run(cls, run: settings.SimulatedRun) -> Subject:
        """Returns the subject of a run that `comparison.prepare` has checked."""
        tasks = run.steps * run.coordinator.groups_per_step
        sampled = range(0, tasks, max(1, tasks // TASKS))
        lengths = workloads.summarise(comparison.workload(run), sampled, min(SAMPLES, run.coordinator.group_size))
        instances = dict(sorted(collections.Counter(run.rollout.tensor_parallel).items()))
        trace, simulation = run.workload.trace, run.simulation
        name = Path(trace).name if trace else run.workload.shape
        return cls(simulation.model, simulation.hardware, simulation.train_devices, instances, name, lengths)

    @property
    def machine(self) -> str:
        """Clause with model, hardware and layout."""
        count = self.train_devices + sum(degree * number for degree, number in self.instances.items())
        layout = ", ".join(f"{number} of degree {degree}" for degree, number in self.instances.items())
        return f"{self.model} on {count:,} {self.hardware}: {self.train_devices:,} train, instances {layout}"

    @property
    def work(self) -> str:
        """Clause with the workload and its lengths."""
        return f"{self.workload}: {self.lengths}"

    def as_json(self) -> dict[str, Any]:
        """Returns the subject as plain values."""
        return dataclasses.asdict(self)
