"""Runs by which plans are calibrated (launch/calibrate.py): four meshes, instances of two degrees, stages apart.

Each is configs/twin.py's synchronous run, whose steps come again, with the trainer's threads on the first core and
vLLM's worker on the second; of an instance of degree 2, the other worker is on the first, where the trainer waits
meanwhile. Devices of a mesh are parts of a CPU: two of them take turns on the trainer's core.

Expected: about four minutes each on 2 cores, the start and the warm start included.

  python launch/train.py --config=configs/calibrate.py:fsdp --workdir=runs/calibration/fsdp
"""

from configs import twin
from libra_jax import config as libra_config

VARIANTS = {"single": ((1, 1, 1), 1), "fsdp": ((1, 2, 1), 2), "tensor": ((1, 1, 2), 1), "data": ((2, 1, 1), 2)}
"""(data, fsdp, tensor) and the instance's degree. All take micro-batches of eight rows: of four, which fit a CPU's
caches, a row costs a fifth less, and the evaluator has no term for that."""

CYCLES, DISTINCT_STEPS = 6, 4
"""Half of the cycles are fitted to, the others predicted."""


def get_config(variant: str = "single") -> libra_config.RunConfig:
    """The run of `variant`, one of `VARIANTS`."""
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
