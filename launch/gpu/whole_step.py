"""Speed of whole training steps: the trainer's own `train_step` over trajectories whose lengths are long-tailed."""

from __future__ import annotations

import statistics
import time

import jax
import numpy as np

from gpu import rows, shapes
from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.coordinator import reports
from libra_jax.models import config as model_config
from libra_jax.planning.costs import hardware
from libra_jax.training import trainer

GROUPS, GROUP_SIZE = 8, 8
PROMPT = 512
TYPICAL, SPREAD = 1200.0, 1.0
"""Median of the sampled tokens, and standard deviation of their logarithm: a mean of about 2,000."""

ROW = 16_384
"""Tokens of a row, and of the longest trajectory."""

DRY_MODEL = "Qwen3-0.6B"
DRY_SHARED = DRY_MODEL, 2_048, "shared"

WARM_UP, STEPS = 1, 3
"""Steps before the first timed one, and timed steps."""


def measure(bench: rows.Bench, preset: str, prompt: int = PROMPT, share: str = "") -> rows.Outcome:
    """Measures steps from trajectories to new parameters: advantages, packing, gradients, Adam and metrics.

    Args:
      bench: where it runs.
      preset: name of the model's shape.
      prompt: tokens of each prompt.
      share: "shared" computes the prompt of a group once (`trainer.share_prompt`).
    """
    if bench.tiny and (preset, prompt, share) not in ((DRY_MODEL, PROMPT, ""), DRY_SHARED):
        raise rows.LeftOut("a dry run measures one such case alone, with a smaller model")
    preset = "libra-tiny" if bench.tiny else preset
    row = shapes.tokens(bench, ROW)
    config = config_lib.RunConfig(
        model=config_lib.ModelConfig(preset=preset, compute_dtype=shapes.dtype(bench)),
        rollout=config_lib.RolloutConfig(max_context=row, max_tokens=row // 2),
        trainer=config_lib.TrainerConfig(
            platform="cpu" if bench.tiny else "cuda",
            row_tokens=row,
            rows_per_micro_batch=1,
            share_prompt=bool(share),
        ),
    )
    vocabulary = model_config.load_preset(preset).vocab_size
    actor = trainer.create(config_lib.to_dict(config), bench.scratch)
    actor.start()
    try:
        took, found = [], {}
        for step in range(WARM_UP + STEPS):
            batch = _batch(bench, step, vocabulary, row, prompt)
            began = time.perf_counter()
            found = actor.train_step(batch)
            took.append(time.perf_counter() - began)
    finally:
        actor.shutdown()
    seconds = statistics.median(took[WARM_UP:])
    known = hardware.peak_flops(jax.devices(bench.platform)[0].device_kind)
    speed = reports.training_speed(found, took[-1], known)
    figures: dict[str, rows.Value] = {
        "trajectories": GROUPS * GROUP_SIZE,
        "tokens": int(found["tokens/processed"]),
        "row": row,
        "padding": found["padding_fraction"],
        "first_seconds": took[0],
        "seconds": seconds,
        "tokens_per_second": speed["train/tokens_per_second"],
    }
    figures["tokens_shared"] = int(found.get("tokens/shared", 0))
    if "train/mfu" in speed:
        figures["mfu"] = speed["train/mfu"]
    norm = found["grad_norm"]
    return rows.Outcome(figures, "" if 0.0 < norm < float("inf") else f"the gradient's norm is {norm}")


def _batch(bench: rows.Bench, step: int, vocabulary: int, row: int, prompt: int) -> protocols.TrainBatch:
    rng = np.random.default_rng(step)
    prompt, typical = shapes.tokens(bench, prompt), TYPICAL / (shapes.SMALLER if bench.tiny else 1)
    groups = []
    for group in range(GROUPS):
        trajectories, asked = [], rng.integers(0, vocabulary, prompt).tolist()
        for sample in range(GROUP_SIZE):
            count = int(np.clip(rng.lognormal(np.log(typical), SPREAD), 2, row - prompt))
            trajectory = protocols.Trajectory(f"{group}/{sample}", str(group), reward=float(sample % 2))
            trajectory.append_text(asked, protocols.TokenSource.PROMPT)
            sampled = tuple(rng.integers(0, vocabulary, count).tolist())
            uniform = -float(np.log(vocabulary))
            trajectory.append_sampled(protocols.TokenDelta(sampled, (uniform,) * count, (step,) * count))
            trajectories.append(trajectory)
        groups.append(protocols.Group(group, protocols.Task(str(group), {}), step, trajectories))
    return protocols.TrainBatch(step, tuple(groups))
