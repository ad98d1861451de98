"""A small model's trainer, one or several processes of it, that compiles fast and tells what it holds, bit for bit."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import small_model

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.models import sharding, transformer
from libra_jax.models.hf import hf
from libra_jax.training import learner as learner_lib
from libra_jax.training import trainer


def write_model(path: pathlib.Path) -> str:
    hf.save(transformer.init_params(small_model.shape(), jax.random.key(0), "float32"), small_model.shape(), path)
    return str(path)


def run_config(model: str, sizes: protocols.MeshSizes, processes: int = 1) -> config_lib.RunConfig:
    return config_lib.RunConfig(
        steps=100,
        rollout=small_model.ROLLOUT,
        trainer=config_lib.TrainerConfig(
            row_tokens=small_model.ROW_TOKENS, rows_per_micro_batch=8, processes=processes, **dataclasses.asdict(sizes)
        ),
        model=config_lib.ModelConfig(path=model, logits_chunk=64),
        optimizer=config_lib.OptimizerConfig(name="adam", eps=1e-6, learning_rate=3e-3),
        # Every advantage negative and the clip far away: the loss is a smooth number, fit for a curve.
        algorithm=config_lib.AlgorithmConfig(clip_low=0.99),
        cluster=config_lib.ClusterConfig(backend="ray"),
    )


def maker(model: str, sizes: protocols.MeshSizes, **arguments: Any) -> Any:
    """A `client.MakeProcess` for `sizes` on CPU devices; in this process, its eight are there already."""

    def make(process: int, processes: int) -> protocols.ActorSpec:
        config = run_config(model, sizes, processes)
        return protocols.ActorSpec(
            "trainer",
            "trainer_processes:create",
            {"config": config_lib.to_dict(config), "process": process, **arguments},
            environment={"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(sizes.devices // processes)},
        )

    return make


def create(config: Mapping[str, Any], process: int, stall: str = "") -> Trainer:
    return Trainer(config_lib.parse(config_lib.RunConfig, config), process, stall)


class Trainer(trainer.TrainerActor):
    """With `stall`, its process 1 writes its process id to that file when it is to restore, and never does."""

    def __init__(self, config: config_lib.RunConfig, process: int = 0, stall: str = "") -> None:
        super().__init__(config, process)
        self._stall = stall if process == 1 else ""

    def _open(self) -> learner_lib.Learner:
        opened = super()._open()
        return learner_lib.Learner(opened.config, self._model, jax.devices())

    def pid(self) -> int:
        return os.getpid()

    def restore(self, path: str) -> int:
        if self._stall:
            partial = pathlib.Path(f"{self._stall}.partial")
            partial.write_text(str(os.getpid()))
            partial.rename(self._stall)
            time.sleep(600)
        return super().restore(path)

    def bits(self) -> dict[str, str]:
        """A digest of each leaf of the state: parameters, moments, step and random key."""
        paths, leaves = zip(*jax.tree.leaves_with_path(self.running().learner.state), strict=True)
        with sharding.whole(leaves) as whole:
            found = [hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest() for leaf in whole]
        return dict(zip(map(jax.tree_util.keystr, paths), found, strict=True))


def batch(version: int, seed: int | None = None) -> protocols.TrainBatch:
    """Three groups of four attempts, each with a tool return between two turns."""
    rng = np.random.default_rng(version if seed is None else seed)
    groups = []
    for group in range(3):
        attempts = []
        for index in range(4):
            attempt = protocols.Trajectory(trajectory_id=f"p{group}/{index}", prompt_id=f"p{group}")
            attempt.append_text(rng.integers(0, small_model.VOCABULARY, 3).tolist(), protocols.TokenSource.PROMPT)
            for turn in range(2):
                count = int(rng.integers(2, 6))
                tokens = tuple(rng.integers(0, small_model.VOCABULARY, count).tolist())
                scores = tuple(rng.normal(-np.log(small_model.VOCABULARY), 0.05, count).tolist())
                attempt.append_sampled(protocols.TokenDelta(tokens, scores, (version,) * count))
                if turn == 0:
                    attempt.append_text(rng.integers(0, small_model.VOCABULARY, 2).tolist(), protocols.TokenSource.TOOL)
            attempt.reward = float(index % 2)
            attempts.append(attempt)
        groups.append(protocols.Group(group, protocols.Task(f"p{group}", {}), version, attempts))
    return protocols.TrainBatch(version, tuple(groups))
