"""Measures tokens a second of the train step, and its ratio over google-tunix's GRPO step on the same model.

Two batches of 64 trajectories: `padded`, where each has 128 tokens, and `real`, with the lengths of a quickstart's
first step. There tunix pads each to the longest prompt and the longest completion of the batch, and ours are packed.
Only tokens of trajectories count, padding does not.

Both sides have a malloc with huge pages (`libra_jax.build.huge_pages`). The peer is measured without, too, and its
faster setting counts.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import numpy as np

from benchmarks import workload
from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import cpu_rows, huge_pages
from libra_jax.cluster import resolved_run
from libra_jax.models import config as models_config
from libra_jax.training import trainer

ROWS = 64
PROMPT = 40
COMPLETION = 88
STEPS = 5
DEADLINE_SECONDS = 600.0

REAL_PROMPT = 23
"""Tokens of each prompt in the batch of real lengths."""

# fmt: off
REAL_COUNTS = {
    23: 1, 24: 4, 25: 4, 26: 10, 27: 3, 28: 1, 29: 5, 30: 7, 31: 2, 32: 1, 33: 1, 34: 2, 35: 9, 36: 1, 37: 1,
    40: 1, 42: 1, 43: 1, 45: 1, 46: 1, 47: 1, 51: 1, 54: 1, 64: 1, 70: 1, 79: 1, 91: 1,
}
# fmt: on
"""Number of rollouts by their tokens after the prompt, tool returns included: every eighth of step 1, by length."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Lengths of a batch.

    Attributes:
      prompt: tokens of each prompt.
      completions: tokens after the prompt, of each trajectory.
      trainer: how our side packs them.
    """

    prompt: int
    completions: Sequence[int]
    trainer: config_lib.TrainerConfig

    @property
    def tokens(self) -> int:
        """Tokens of all trajectories."""
        return self.prompt * len(self.completions) + sum(self.completions)


BATCHES = {
    "padded": Batch(
        PROMPT,
        (COMPLETION,) * ROWS,
        config_lib.TrainerConfig(platform="cpu", row_tokens=PROMPT + COMPLETION, pack=False),
    ),
    "real": Batch(
        REAL_PROMPT,
        tuple(length for length, count in REAL_COUNTS.items() for _ in range(count)),
        config_lib.TrainerConfig(platform="cpu", row_tokens=256),
    ),
}


class PeerFigures(TypedDict):
    """Output of peer.py."""

    seconds: float
    version: str


def measure(rounds: int, peer_python: str | None) -> workload.Figures:
    """Times steps of Adam in float32 without rematerialisation.

    Args:
      rounds: processes of each side, run in turn.
      peer_python: interpreter with google-tunix, or None for our side alone.
    """
    figures: dict[str, float | str] = {"allocator": os.environ.get(huge_pages.VARIABLE) or "malloc's defaults"}
    for name, batch in BATCHES.items():
        ours: list[float] = []
        peer: dict[str, list[float]] = {"": [], "plain_": []}
        for _ in range(rounds if peer_python else 1):
            ours.append(batch.tokens / _ours(batch))
            if peer_python:
                for setting, found in peer.items():
                    answer = _peer(peer_python, batch, plain=bool(setting))
                    found.append(batch.tokens / answer["seconds"])
                    figures["peer"] = f"google-tunix {answer['version']}"
        figures[f"{name}/tokens_per_second"] = statistics.median(ours)
        if peer_python:
            for setting, found in peer.items():
                figures[f"{name}/{setting}peer_tokens_per_second"] = statistics.median(found)
            best = max(peer.values(), key=statistics.median)
            figures[f"{name}/ratio_over_peer"] = statistics.median(a / b for a, b in zip(ours, best, strict=True))
            figures["rounds"] = rounds
    return figures


def config(batch: Batch) -> config_lib.RunConfig:
    """Returns the configuration of our side, with the rows that a run of it would have."""
    length = batch.prompt + max(batch.completions)
    made = config_lib.RunConfig(
        model=config_lib.ModelConfig(attention_chunk=64),  # as in configs/quickstart.py
        rollout=config_lib.RolloutConfig(max_context=length, max_tokens=max(batch.completions)),
        trainer=batch.trainer,
    )
    return cpu_rows.sized(resolved_run.resolve(made, need_weights=False)).config


def _ours(batch: Batch) -> float:
    """Returns the median seconds of whole `train_step` calls: advantages, packing, gradient, update, metrics."""
    with tempfile.TemporaryDirectory() as workdir:
        actor = trainer.create(config_lib.to_dict(config(batch)), workdir)
        actor.start()
        seconds = []
        for step in range(STEPS + 2):
            groups = _groups(batch, step)
            start = time.perf_counter()
            actor.train_step(groups)
            seconds.append(time.perf_counter() - start)
        actor.shutdown()
    # The first two steps are warm-up, as for the peer.
    return statistics.median(seconds[2:])


def _groups(batch: Batch, step: int) -> protocols.TrainBatch:
    rng = np.random.default_rng(step)
    order = rng.permutation(len(batch.completions))
    groups = []
    for group in range(ROWS // 8):
        trajectories = []
        for sample in range(8):
            length = batch.completions[order[8 * group + sample]]
            trajectory = protocols.Trajectory(f"{group}/{sample}", str(group), reward=float(rng.integers(2)))
            trajectory.append_text(rng.integers(2, 128, batch.prompt).tolist(), protocols.TokenSource.PROMPT)
            sampled = tuple(rng.integers(2, 128, length).tolist())
            trajectory.append_sampled(protocols.TokenDelta(sampled, (-5.0,) * length, (step,) * length))
            trajectories.append(trajectory)
        groups.append(protocols.Group(group, protocols.Task(str(group), {}), step, trajectories))
    return protocols.TrainBatch(step, tuple(groups))


def _peer(python: str, batch: Batch, *, plain: bool) -> PeerFigures:
    made = config(batch)
    shape = models_config.load_preset(made.model.preset)
    request = {
        "model": {
            "num_layers": shape.num_layers,
            "vocab_size": shape.vocab_size,
            "embed_dim": shape.hidden_size,
            "hidden_dim": shape.intermediate_size,
            "num_heads": shape.num_heads,
            "head_dim": shape.head_dim,
            "num_kv_heads": shape.num_kv_heads,
            "rope_theta": int(shape.rope.theta),
            "norm_eps": shape.rms_norm_eps,
            "use_tied_embedding": shape.tie_word_embeddings,
        },
        "prompt_length": batch.prompt,
        "completion_lengths": list(batch.completions),
        "learning_rate": made.optimizer.learning_rate,
        "steps": STEPS,
    }
    environment = {**os.environ, "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")}
    if plain:
        environment.pop(huge_pages.VARIABLE, None)
    try:
        result = subprocess.run(
            [python, str(Path(__file__).with_name("peer.py"))],
            input=json.dumps(request),
            env=environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise protocols.ConfigError(f"--peer_python: {python} did not run the peer's step: {error}") from error
    if result.returncode:
        reason = result.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise protocols.ConfigError(f"--peer_python: {python} failed, is google-tunix installed in it? {reason[0]}")
    figures: PeerFigures = json.loads(result.stdout.strip().splitlines()[-1])
    return figures
