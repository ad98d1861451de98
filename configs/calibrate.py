"""Records the runs that launch/calibrate.py calibrates plans by: four meshes, and instances of two degrees.

Each run is the synchronous run of configs/twin.py, whose steps repeat. The two stages are kept apart: the trainer's
threads have the first core, and vLLM's worker has the second. An instance of degree 2 has its other worker on the first
core, where the trainer waits meanwhile. The devices of a mesh are parts of one CPU, so two of them take turns on the
trainer's core.

Expected: about four minutes each on 2 cores, the start and the warm start included.

  python launch/train.py --config=configs/calibrate.py:fsdp --workdir=runs/calibration/fsdp
"""

from configs import twin
from libra_jax import config as config_lib

VARIANTS = {"single": ((1, 1, 1), 1), "fsdp": ((1, 2, 1), 2), "tensor": ((1, 1, 2), 1), "data": ((2, 1, 1), 2)}
"""(data, fsdp, tensor) and the instance's degree. All use micro-batches of eight rows. A row costs a fifth less in a
micro-batch of four, which fits a CPU's caches, and the evaluator has no term for that."""

CYCLES, DISTINCT_STEPS = 6, 4
"""Cycles of a run, and steps in a cycle. The first half of the cycles is fitted to; the other half is predicted."""


def get_config(variant: str = "single") -> config_lib.RunConfig:
    """Returns the run of `variant`, one of `VARIANTS`."""
    if variant not in VARIANTS:
        raise ValueError(f"configs/calibrate.py has {', '.join(VARIANTS)}, not {variant!r}")
    mesh, degree = VARIANTS[variant]
    config = twin.get_config("synchronous")
    config.name = f"calibrate-{variant}"
    config.steps = CYCLES * DISTINCT_STEPS
    config.task.arguments = {**config.task.arguments, "period": DISTINCT_STEPS * config.coordinator.groups_per_step}
    config.trainer.data, config.trainer.fsdp, config.trainer.tensor = mesh
    config.rollout.tensor_parallel = (degree,)
    config.rollout.cores = (1, 0)[:degree]
    return config
