"""The settings of a simulated run: those of any run, the simulated cluster, the work, and what breaks."""

from __future__ import annotations

from dataclasses import dataclass, field

from libra_jax import config as configuration
from libra_jax.simulator import faults, workloads, world


@dataclass(frozen=True)
class SimulatedRun(configuration.RunConfig):
    """A run's configuration with three groups more; what `configs/simulate.py` fills in."""

    simulation: world.SimulationConfig = field(default_factory=world.SimulationConfig)
    workload: workloads.WorkloadConfig = field(default_factory=workloads.WorkloadConfig)
    faults: faults.FaultConfig = field(default_factory=faults.FaultConfig)
