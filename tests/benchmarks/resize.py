"""What a live resize of the trainer's mesh costs: wall time of the same steps with one and without."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from libra_jax import protocols

DEVICES = 4
LARGE, SMALL = (1, 4, 1), (1, 2, 1)
"""The two meshes, as (data, fsdp, tensor)."""

STEPS_BEFORE, STEPS_AFTER = 4, 4
DEADLINE_SECONDS = 1_200.0


def measure() -> dict[str, Any]:
    """A model of 105 M parameters goes from four devices to two and back while it trains, in a process of its own.

    `stall_*` is the wall time of all steps from the resize's beginning to the last of four after it, minus that of as
    many plain steps: compilation beside training included.
    """
    root = Path(__file__).resolve().parents[2]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "launch"), os.environ.get("PYTHONPATH", "")]),
    }
    try:
        result = subprocess.run(
            [sys.executable, "-m", "tests.benchmarks.resize"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise protocols.DeadlineMissed(f"the resize was not over after {DEADLINE_SECONDS:g} s") from error
    if result.returncode:
        reason = result.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise protocols.LibraError(f"the resize could not be measured: {reason[0]}")
    return json.loads(result.stdout.strip().splitlines()[-1])


def _child() -> dict[str, Any]:
    import jax

    from libra_jax import config as config_lib
    from libra_jax.data import packing
    from libra_jax.data import sequences as sequences_lib
    from libra_jax.models import config as model_config
    from libra_jax.training import learner as learner_lib
    from libra_jax.training import resize, state
    from libra_jax.training import step as step_lib
    from tests.benchmarks import models

    shape = models.hundred_million()
    data, fsdp, tensor = LARGE
    config = config_lib.RunConfig(
        rollout=config_lib.RolloutConfig(max_context=128, max_tokens=64),
        trainer=config_lib.TrainerConfig(data=data, fsdp=fsdp, tensor=tensor, row_tokens=128, rows_per_micro_batch=4),
    )
    learner = learner_lib.Learner(config, shape, jax.devices())
    learner.begin(state.random_params(shape, learner.layout, 0))
    rng = np.random.default_rng(0)
    examples = [
        sequences_lib.Example(
            sequence_id=str(index),
            tokens_N=rng.integers(0, shape.vocab_size, 128).astype(np.int32),
            mask_N=np.arange(128) >= 32,
            behaviour_N=np.full(128, -9.7, np.float32),
            on_version_N=np.ones(128, bool),
        )
        for index in range(8)
    ]
    packed = packing.pack(examples, config.trainer)
    extras = [{"advantages": array} for array in packed.scatter([1.0, -1.0] * 4)]

    def step() -> float:
        began = time.perf_counter()
        learner.update(step_lib.POLICY, packed, 1e-5, extras)
        return time.perf_counter() - began

    step()
    figures: dict[str, Any] = {
        "parameters": model_config.parameter_count(shape),
        "copy_gb_per_second": _copy_rate(),
    }
    for name, sizes in (("shrink", SMALL), ("grow", LARGE)):
        plain = statistics.median(step() for _ in range(STEPS_BEFORE))
        began, steps, gaps = time.perf_counter(), 0, []
        change = resize.MeshChange(learner, protocols.MeshSizes(*sizes), jax.devices())
        while not change.progress.ready:
            gaps.append(step())
            steps += 1
        moving = time.perf_counter()
        learner, phases = change.take_over(DEADLINE_SECONDS)
        gaps.append(time.perf_counter() - moving + step())
        steps += 1
        after = [step() for _ in range(STEPS_AFTER - 1)]
        steps += len(after)
        total = time.perf_counter() - began
        figures |= {
            f"{name}_step_before_s": plain,
            f"{name}_step_after_s": statistics.median(after),
            f"{name}_steps_while_compiling": steps - STEPS_AFTER,
            f"{name}_stall_s": total - (steps - STEPS_AFTER) * plain - STEPS_AFTER * statistics.median(after),
            f"{name}_longest_step_s": max(gaps),
            f"{name}_compile_s": phases.compile_seconds,
            f"{name}_move_s": phases.move_seconds,
            f"{name}_moved_mb": phases.moved_bytes / 1e6,
            f"{name}_peak_extra_mb": change.estimate.peak_bytes / 1e6,
        }
        figures[f"{name}_stall_steps"] = figures[f"{name}_stall_s"] / max(plain, figures[f"{name}_step_after_s"])
    return figures


def _copy_rate() -> float:
    """GB/s of a plain copy in this process's memory."""
    source = np.ones(2**28, np.uint8)
    target = np.empty_like(source)
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - began)
    return source.nbytes / statistics.median(seconds[1:]) / 1e9


if __name__ == "__main__":
    print(json.dumps(_child()))
