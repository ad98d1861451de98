"""Measures tokens a second of the train step, and its ratio over google-tunix's GRPO step on the same model and
shapes."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TypedDict

import numpy as np

from benchmarks import workload
from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.models import config as models_config
from libra_jax.training import trainer

ROWS = 64
PROMPT = 40
COMPLETION = 88
STEPS = 5
DEADLINE_SECONDS = 600.0


class PeerFigures(TypedDict):
    """Output of peer.py."""

    tokens_per_second: float
    version: str


def measure(rounds: int, peer_python: str | None) -> workload.Figures:
    """Times steps on 64 rows of 128 real tokens: one micro-batch, Adam, float32, no rematerialisation, one trajectory a
    row.

    Args:
      rounds: processes of each side, run in turn.
      peer_python: interpreter with google-tunix, or None for our side alone.
    """
    ours: list[float] = []
    peer: list[float] = []
    version = ""
    for _ in range(rounds if peer_python else 1):
        ours.append(_ours())
        if peer_python:
            answer = _peer(peer_python)
            peer.append(answer["tokens_per_second"])
            version = answer["version"]
    figures: dict[str, float | str] = {"tokens_per_second": statistics.median(ours)}
    if peer:
        figures |= {
            "peer_tokens_per_second": statistics.median(peer),
            "ratio_over_peer": statistics.median(a / b for a, b in zip(ours, peer, strict=True)),
            "peer": f"google-tunix {version}",
            "rounds": rounds,
        }
    return figures


def _config() -> configuration.RunConfig:
    length = PROMPT + COMPLETION
    return configuration.RunConfig(
        model=configuration.ModelConfig(attention_chunk=64),  # as in configs/quickstart.py
        rollout=configuration.RolloutConfig(max_context=length, max_tokens=COMPLETION),
        trainer=configuration.TrainerConfig(row_tokens=length, rows_per_micro_batch=ROWS, pack=False),
    )


def _ours() -> float:
    """Returns the median tokens a second of whole `train_step` calls: advantages, packing, gradient, update,
    metrics."""
    with tempfile.TemporaryDirectory() as workdir:
        actor = trainer.create(configuration.to_dict(_config()), workdir)
        actor.start()
        seconds = []
        for step in range(STEPS + 2):
            batch = _batch(step)
            start = time.perf_counter()
            actor.train_step(batch)
            seconds.append(time.perf_counter() - start)
        actor.shutdown()
    # The first two steps are warm-up, as for the peer.
    return ROWS * (PROMPT + COMPLETION) / statistics.median(seconds[2:])


def _batch(step: int) -> protocols.TrainBatch:
    rng = np.random.default_rng(step)
    groups = []
    for group in range(ROWS // 8):
        trajectories = []
        for sample in range(8):
            trajectory = protocols.Trajectory(f"{group}/{sample}", str(group), reward=float(rng.integers(2)))
            trajectory.append_text(rng.integers(2, 128, PROMPT).tolist(), protocols.TokenSource.PROMPT)
            sampled = tuple(rng.integers(2, 128, COMPLETION).tolist())
            trajectory.append_sampled(protocols.TokenDelta(sampled, (-5.0,) * COMPLETION, (step,) * COMPLETION))
            trajectories.append(trajectory)
        groups.append(protocols.Group(group, protocols.Task(str(group), {}), step, trajectories))
    return protocols.TrainBatch(step, tuple(groups))


def _peer(python: str) -> PeerFigures:
    shape = models_config.load_preset(_config().model.preset)
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
        "batch": ROWS,
        "prompt_length": PROMPT,
        "completion_length": COMPLETION,
        "learning_rate": _config().optimizer.learning_rate,
        "steps": STEPS,
    }
    try:
        result = subprocess.run(
            [python, str(Path(__file__).with_name("peer.py"))],
            input=json.dumps(request),
            env={**os.environ, "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")},
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
