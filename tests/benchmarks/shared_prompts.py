"""Measures training steps on CPUs with and without `trainer.share_prompt`: docs/results/flow.md.

python -m tests.benchmarks.shared_prompts --prompt=256   # two minutes
"""

from __future__ import annotations

import statistics
import tempfile
import time

import numpy as np
from absl import app, flags

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import cpu_rows
from libra_jax.cluster import resolved_run
from libra_jax.training import trainer

_PROMPT = flags.DEFINE_integer("prompt", 256, "Tokens of a prompt.", lower_bound=1)
GROUPS, GROUP_SIZE = 8, 8
ANSWER, ROW = 128, 2048
WARM_UP, STEPS = 2, 5


def batch(step: int, prompt: int) -> protocols.TrainBatch:
    """Returns groups of one prompt each, with answers of long-tailed lengths."""
    rng, groups = np.random.default_rng(step), []
    for number in range(GROUPS):
        tokens, trajectories = rng.integers(2, 128, prompt).tolist(), []
        for sample in range(GROUP_SIZE):
            count = int(np.clip(rng.lognormal(np.log(ANSWER), 0.5), 8, 3 * ANSWER))
            trajectory = protocols.Trajectory(f"{number}/{sample}", str(number), reward=float(sample % 2))
            trajectory.append_text(tokens, protocols.TokenSource.PROMPT)
            sampled = tuple(rng.integers(2, 128, count).tolist())
            trajectory.append_sampled(protocols.TokenDelta(sampled, (-5.0,) * count, (step,) * count))
            trajectories.append(trajectory)
        groups.append(protocols.Group(number, protocols.Task(str(number), {}), step, trajectories))
    return protocols.TrainBatch(step, tuple(groups))


def measure(prompt: int, share: bool) -> tuple[int, float]:
    """Returns the tokens that a step computes, and the median seconds of a step."""
    config = config_lib.RunConfig(
        model=config_lib.ModelConfig(attention_chunk=64),  # as in configs/quickstart.py
        rollout=config_lib.RolloutConfig(max_context=ROW, max_tokens=ROW // 2),
        trainer=config_lib.TrainerConfig(platform="cpu", row_tokens=ROW, share_prompt=share),
    )
    config = cpu_rows.sized(resolved_run.resolve(config, need_weights=False)).config
    seconds, metrics = [], {}
    with tempfile.TemporaryDirectory() as workdir:
        actor = trainer.create(config_lib.to_dict(config), workdir)
        actor.start()
        for step in range(WARM_UP + STEPS):
            begin, groups = time.perf_counter(), batch(step, prompt)
            metrics = actor.train_step(groups)
            seconds.append(time.perf_counter() - begin)
        actor.shutdown()
    return int(metrics["tokens/processed"]), statistics.median(seconds[WARM_UP:])


def main(_: list[str]) -> None:
    for share in (True, False):
        tokens, seconds = measure(_PROMPT.value, share)
        print(f"prompt {_PROMPT.value}, share_prompt={share}: {tokens} tokens computed, {seconds:.2f} s a step")


if __name__ == "__main__":
    app.run(main)
