"""The settings of a simulated run: those of any run, and groups for the cluster, the workload and the faults."""

from __future__ import annotations

from dataclasses import dataclass, field

from libra_jax import config as config_lib
from libra_jax.simulator import faults, workloads, world

COUNTS: dict[str, str] = {
    "planner.hardware": "simulation.hardware",
    "model.preset": "simulation.model",
    "model.path": "simulation.model",
    "trainer.data": "simulation.train_mesh",
    "trainer.fsdp": "simulation.train_mesh",
    "trainer.tensor": "simulation.train_mesh",
    "task.source": "workload.shape",
    "task.path": "workload.trace",
}
"""Fields of a real run, and the field that counts in a simulated run instead."""

IGNORED = (
    *COUNTS,
    "model.compute_dtype",
    "model.param_dtype",
    "model.attention",
    "gateway",
    "optimizer",
    "reward",
    "sandbox",
    "telemetry",
    "tools",
    "task.arguments",
    "task.environment",
    "task.environment_arguments",
    "task.tokenizer",
    "trainer.context",
    "trainer.platform",
)
"""Fields and groups that no simulated run reads."""


@dataclass
@config_lib.group("")
class SimulatedRun(config_lib.RunConfig):
    """A run's configuration with three more groups; `configs/simulate.py` fills it in."""

    simulation: world.SimulationConfig = field(default_factory=world.SimulationConfig)
    workload: workloads.WorkloadConfig = field(default_factory=workloads.WorkloadConfig)
    faults: faults.FaultConfig = field(default_factory=faults.FaultConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Set here, these fields would change nothing, and the user would believe that another machine was simulated.
        config_lib.check(
            self.trainer.context == 1,
            "trainer.context",
            f"simulated training has no context axis, and it says {self.trainer.context}; set it to 1",
        )
        plain = config_lib.RunConfig()
        for name in ("planner.hardware", "model.preset", "model.path"):
            group, _, leaf = name.partition(".")
            value = getattr(getattr(self, group), leaf)
            config_lib.check(
                value == getattr(getattr(plain, group), leaf),
                name,
                f"a simulated run does not read it, and it says {value!r}; config.{COUNTS[name]} counts: set that",
            )
