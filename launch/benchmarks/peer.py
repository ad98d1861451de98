"""Measures the peer for `benchmark.py --peer_python`: google-tunix's GRPO train step on a Qwen3 of a given shape.

Runs under an interpreter that has google-tunix, reads one JSON object on standard input and writes one to standard
output. So the two projects never share an environment. Upstream: tunix.rl.algo_core.grpo_loss_fn, run by the jitted
train step of tunix.sft.peft_trainer.PeftTrainer; a fixed seed draws weights and batch.

Input: `model` (tunix ModelConfig fields), `prompt_length` and `completion_lengths` (tokens; tunix pads
completions to the longest one), `learning_rate`, `steps`. Output: `seconds` (the median step's), `loss`, `version`.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from collections.abc import Mapping
from typing import Any


def measure(request: Mapping[str, Any]) -> Mapping[str, object]:
    """Times the train step; the first two steps (compilation, donation settling) are not counted."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx
    from tunix.models.qwen3 import model as qwen3
    from tunix.rl import algo_core, common
    from tunix.rl.grpo import grpo_learner
    from tunix.sft import peft_trainer

    model = qwen3.Qwen3(qwen3.ModelConfig(**request["model"]), rngs=nnx.Rngs(0))
    algorithm = grpo_learner.GRPOConfig(beta=0.0, loss_agg_mode="token-mean", num_generations=8, num_iterations=1)
    algorithm.temperature = 1.0  # set by its learner from the rollout config

    def loss(model: Any, train_example: Any, algo_config: Any) -> Any:
        return algo_core.grpo_loss_fn(model, train_example, algo_config, pad_id=0, eos_id=1)

    trainer = peft_trainer.PeftTrainer(
        model,
        optax.adamw(request["learning_rate"]),
        peft_trainer.TrainingConfig(eval_every_n_steps=1_000_000, max_steps=1_000_000),
    )
    trainer.with_loss_fn(loss, has_aux=True)
    trainer.with_gen_model_input_fn(lambda example: {"train_example": example, "algo_config": algorithm})
    train_step, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=True)

    rng = np.random.default_rng(0)
    lengths = np.array(request["completion_lengths"])
    rows, prompt, completion = len(lengths), request["prompt_length"], int(lengths.max())
    vocabulary = request["model"]["vocab_size"]
    example = common.TrainExample(
        prompt_ids=jnp.asarray(rng.integers(2, vocabulary, (rows, prompt)), jnp.int32),
        prompt_mask=jnp.ones((rows, prompt), jnp.int32),
        completion_ids=jnp.asarray(rng.integers(2, vocabulary, (rows, completion)), jnp.int32),
        completion_mask=jnp.asarray(np.arange(completion) < lengths[:, None], jnp.int32),
        advantages=jnp.asarray(rng.standard_normal(rows), jnp.float32),
        ref_per_token_logps=None,
        old_per_token_logps=jnp.full((rows, completion), -5.0, jnp.float32),
    )
    seconds = []
    for _ in range(request["steps"] + 2):
        start = time.perf_counter()
        value, _, _ = train_step(example)
        jax.block_until_ready(value)
        seconds.append(time.perf_counter() - start)
    return {
        "seconds": sorted(seconds[2:])[len(seconds[2:]) // 2],
        "loss": float(value),
        "version": importlib.metadata.version("google-tunix"),
    }


if __name__ == "__main__":
    json.dump(measure(json.load(sys.stdin)), sys.stdout)
