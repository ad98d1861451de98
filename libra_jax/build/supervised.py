"""Supervised fine-tuning on a table of chats, by the trainer, packing and tokenizer of a run.

The loss is the cross entropy of the assistant's tokens, its stop tokens included, at temperature 1. The chats are
rendered as a rollout renders them, so the tuned model continues the tokens that it will see in a rollout.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import cpu_rows, wiring, worker_specs
from libra_jax.chat import messages as message_forms
from libra_jax.chat import tokenizers
from libra_jax.cluster import resolved_run
from libra_jax.models.hf import hub
from libra_jax.utils import tables

if TYPE_CHECKING:
    from libra_jax.data import packing
    from libra_jax.training import learner as learner_lib

COLUMN = "messages"
METRICS = "metrics.jsonl"
MODEL = "model"


@dataclass(frozen=True)
class TuningRequest:
    """What a fine-tuning is asked to do.

    Attributes:
      data: table of chats (JSONL, Parquet, CSV or a folder), with a column `messages` of {"role", "content"}.
      output: folder for the model and the metrics.
      epochs: passes over the training chats.
      batch_size: chats of a step.
      holdout: share of the chats that are held out, 0 to below 1.
    """

    data: str
    output: Path
    epochs: float = 1.0
    batch_size: int = 32
    holdout: float = 0.05


def chats(path: str, tokenizer: protocols.Tokenizer) -> list[protocols.Trajectory]:
    """Reads and renders the chats of a table.

    Raises:
      DataError: the table cannot be read or is empty, or a chat is malformed; the message names its row.
    """
    trajectories = []
    for row in tables.rows(path, wanted=(COLUMN,), of="chats"):
        value = tables.value(row, COLUMN)
        try:
            messages = [message_forms.from_dict(item) for item in value]
        except (TypeError, protocols.DataError) as error:
            raise protocols.DataError(
                f'{row.where}: {COLUMN} must be a list of {{"role": ..., "content": ...}}, not {value!r:.80}; {error}'
            ) from error
        try:
            trajectories.append(tokenizers.dialogue_trajectory(f"chat {row.number}", messages, tokenizer))
        except protocols.DataError as error:
            raise protocols.DataError(f"{row.where}: {error}") from error
    if not trajectories:
        raise protocols.DataError(f"{path}: holds no chat")
    return trajectories


def tune(
    config: config_lib.RunConfig, request: TuningRequest, status: Callable[[str], None] = print
) -> list[Mapping[str, float]]:
    """Fine-tunes the config's model, writes it as a Hugging Face directory, and returns the metrics of each step.

    The learning rate follows `optimizer.schedule` over the steps of this call. The config's `steps` do not count.

    Raises:
      ConfigError: a field or a flag has an unusable value, or a chat is longer than the longest row.
      DataError: the model or the data cannot be read.
      LibraError: the devices fail, or the loss is not finite for `trainer.max_skipped_steps` steps in a row.
    """
    for name, right, value in (
        ("epochs", 0 < request.epochs < math.inf, request.epochs),
        ("batch_size", request.batch_size > 0, request.batch_size),
        ("holdout", 0 <= request.holdout < 1, request.holdout),
    ):
        if not right:
            requirement = "in [0, 1)" if name == "holdout" else "positive"
            raise protocols.ConfigError(f"--{name}: must be {requirement}, not {value}")
    if (request.output / MODEL).exists():
        raise protocols.ConfigError(f"--output: {request.output} holds a model already; give another folder")
    resolution = hub.resolved(config, download=True)
    if resolution.problems:
        raise protocols.DataError("; ".join(resolution.problems))
    config = resolution.config
    everything = chats(request.data, tokenizers.create(config.task, config.model.path))
    rng = np.random.default_rng(config.seed)
    order = rng.permutation(len(everything))
    holdout_count = round(request.holdout * len(everything))
    holdout = [everything[i] for i in order[:holdout_count]]
    trained = [everything[i] for i in order[holdout_count:]]
    if len(trained) < request.batch_size:
        raise protocols.ConfigError(
            f"--batch_size: {request.batch_size} chats of {len(trained)} that are not held out; lower it, or --holdout"
        )
    if config.trainer.processes > 1:
        raise protocols.ConfigError(
            f"config.trainer.processes: fine-tuning runs in one process, not {config.trainer.processes}; set it to 1"
        )
    # What comes before and beside reinforcement learning has no part in this.
    config = dataclasses.replace(
        config,
        warm_start=dataclasses.replace(config.warm_start, steps=0),
        algorithm=config_lib.AlgorithmConfig(),
        critic=config_lib.CriticConfig(),
    )
    run = cpu_rows.sized(resolved_run.resolve(config, need_weights=True))
    config = run.config
    steps = max(1, round(request.epochs * len(trained) / request.batch_size))
    # Read by JAX when it is first used, so before the training modules are imported.
    os.environ.update(worker_specs.trainer_spec(run, request.output).environment)
    from libra_jax.data import batch as batch_lib
    from libra_jax.data import sequences as sequences_lib
    from libra_jax.training import optimizer, trainer

    # No rollouts follow, and no objective but this one: the optimizer starts fresh, and stays.
    actor = trainer.create(config_lib.to_dict(config), str(request.output))
    request.output.mkdir(parents=True, exist_ok=True)
    schedule = optimizer.schedule(config.optimizer, steps)
    records: list[Mapping[str, float]] = []
    try:
        # Not `start`, which compiles the programs of the policy's objective.
        info, running = actor.stand_by(), actor.running()
        running.begin()
        learner = running.learner
        learner.compile("supervised")
        status(f"{info.parameters:,} parameters on {info.device_kind}; {len(trained)} chats, {len(holdout)} held out")
        picked = _batches(trained, request.batch_size, steps, rng)
        held_out = batch_lib.pack(config, sequences_lib.examples(holdout, 0, learner.model)) if holdout else None
        skipped, start = 0, time.monotonic()
        with (request.output / METRICS).open("w") as file:
            for step, batch in enumerate(picked, 1):
                packed = batch_lib.pack(config, sequences_lib.examples(batch, 0, learner.model))
                metrics = learner.update("supervised", packed, float(schedule(step - 1)))
                skipped = skipped + 1 if metrics["skipped"] else 0
                if skipped > config.trainer.max_skipped_steps:
                    raise protocols.LibraError(
                        f"{skipped} steps in a row were not finite; lower optimizer.learning_rate or look at the data"
                    )
                if step == steps or step % max(1, steps // 20) == 0:
                    if held_out is not None:
                        metrics["held_out_loss"] = _loss(learner, held_out)
                    seconds_left = (time.monotonic() - start) / step * (steps - step)
                    holdout_note = f", held out {metrics['held_out_loss']:.4f}" if holdout else ""
                    status(f"step {step}/{steps}, loss {metrics['loss']:.4f}{holdout_note}, {seconds_left:.0f} s left")
                records.append({"step": step, **metrics})
                file.write(json.dumps(records[-1]) + "\n")
                file.flush()
        actor.export(str(request.output / MODEL))
        wiring.add_files(config, request.output / MODEL)
    finally:
        actor.shutdown()
    return records


def _batches(
    chosen: Sequence[protocols.Trajectory], size: int, steps: int, rng: np.random.Generator
) -> list[list[protocols.Trajectory]]:
    """Returns batches that take every chat once before any is taken twice."""
    epochs = -(-steps * size // len(chosen))
    order = np.concatenate([rng.permutation(len(chosen)) for _ in range(epochs)])
    return [[chosen[index] for index in order[start : start + size]] for start in range(0, steps * size, size)]


def _loss(learner: learner_lib.Learner, packed: packing.Packed) -> float:
    """Returns the mean cross entropy of the held-out chats."""
    indices = range(len(packed.micro_batches))
    sums, _ = learner.sums("supervised", learner.policy, packed, [{} for _ in indices], indices)
    return float(sums.loss) / float(sums.count)
