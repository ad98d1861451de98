"""Runs by which plans are calibrated (launch/calibrate.py): three meshes, instances of two degrees, stages apart.

Each is configs/twin.py's synchronous run, whose steps come again, with the trainer's threads on one core and vLLM's
workers on the other: a stage that waits for the other has its core to itself. Devices of a mesh are parts of a CPU, so
two of them take turns on their core, and so do the two workers of an instance of degree 2.

  python launch/train.py --config=configs/calibrate.py:fsdp --workdir=runs/calibration/fsdp
"""

import ml_collections

from configs import twin

MESHES = {"single": (1, 1, 1), "fsdp": (1, 2, 1), "tensor": (1, 1, 2)}
"""(data, fsdp, tensor) by variant."""

DEGREES = {"single": 1, "fsdp": 2, "tensor": 1}

CYCLES, DISTINCT_STEPS = 6, 4
"""Half of the cycles are fitted to, the others predicted."""


def get_config(variant: str = "single") -> ml_collections.ConfigDict:
    """The run of `variant`: single, fsdp or tensor."""
    if variant not in MESHES:
        raise ValueError(f"configs/calibrate.py has {', '.join(MESHES)}, not {variant!r}")
    config = twin.get_config("synchronous")
    config.name = f"calibrate-{variant}"
    config.steps = CYCLES * DISTINCT_STEPS
    config.task.arguments.period = DISTINCT_STEPS * config.coordinator.groups_per_step
    config.trainer.data, config.trainer.fsdp, config.trainer.tensor = MESHES[variant]
    config.rollout.tensor_parallel = (DEGREES[variant],)
    return config
