"""A run without a data set: a shape with random weights writes text of long-tailed lengths, and the reward is a coin.

It measures where a run's time goes: nothing useful is learned. One output in a thousand tokens ends, because that
share of the vocabulary are end tokens, so lengths are nearly geometric. `runs` writes the tokenizer.

  python launch/train.py --config=launch/gpu/random_text.py:Qwen3-0.6B,1 --config.task.tokenizer=FOLDER
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.environments import dialogue
from libra_jax.rollouts import splits
from libra_jax.tools import toolbox, toolkit

DRY = "dry"
"""Argument of the config for a machine without a GPU: a tiny character model, and two small steps."""

ENDS = 150
"""End tokens of the vocabulary of 151,936: about one token in a thousand."""

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def get_config(arguments: str = DRY) -> config_lib.RunConfig:
    """Returns the run of "PRESET,STALENESS", such as "Qwen3-1.7B,1"; or the dry run."""
    config = config_lib.RunConfig()
    config.name = "random_text"
    config.task.source = "gpu.random_text:task_source"
    config.task.environment = "gpu.random_text:environment"
    config.task.environment_arguments = {}
    config.task.cut_off = "zero"  # outputs that the limit cuts are trained, too: they are the long tail
    config.checkpoint.every = 0
    config.evaluation.every = 0
    if arguments == DRY:
        config.steps = 2
        config.model.preset = "libra-tiny"
        config.rollout.max_context, config.rollout.max_tokens = 128, 32
        config.trainer.platform = "cpu"
        config.trainer.row_tokens, config.trainer.rows_per_micro_batch = 128, 4
        config.coordinator.groups_per_step, config.coordinator.group_size = 4, 2
        return config
    preset, _, staleness = arguments.partition(",")
    config.steps = 5
    config.model.preset = preset
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "dots"
    config.rollout.slots = 256
    config.rollout.max_context, config.rollout.max_tokens = 4096, 3072
    config.rollout.dtype = "bfloat16"
    config.rollout.transport = "ipc"
    config.rollout.enforce_eager = False
    config.rollout.gpu_memory_fraction = 0.35
    config.trainer.platform = "auto"  # the engine shares the first GPU; "cuda" would give each a GPU of its own
    config.trainer.row_tokens, config.trainer.rows_per_micro_batch = 8192, 1
    config.algorithm.correction = "truncated"
    config.optimizer.learning_rate = 1e-6
    config.coordinator.groups_per_step, config.coordinator.group_size = 32, 8
    config.coordinator.max_staleness = int(staleness or 0)
    return config


def task_source(path: str = "", seed: int = 0) -> splits.Tasks:
    """Returns tasks whose prompts are random words."""
    del path
    return splits.generated("random_text", seed, _draw)


def _draw(index: int, rng: random.Random) -> tuple[str, Mapping[str, object]]:
    prompt = " ".join(f"{rng.randrange(1000)}" for _ in range(8))
    return f"{index} {prompt}", {"prompt": prompt}


async def _coin(task: protocols.Task, answer: str, box: toolbox.Toolbox) -> float:
    """Returns 0 or 1 by a hash, so that a group's rewards differ, and a run repeats. An empty output gets 0."""
    del task, box
    return float(bool(answer) and hashlib.sha256(answer.encode()).digest()[0] & 1)


def environment(tools: toolkit.Toolkit) -> dialogue.Dialogue:
    """Returns an environment that asks once, and scores by a coin."""
    return dialogue.Dialogue(tools, dialogue.posed, _coin)


def write_tokenizer(folder: Path, vocabulary: int, ends: int = ENDS) -> None:
    """Writes a byte-level tokenizer whose remaining entries are words, the last `ends` of them end tokens.

    Args:
      folder: folder to write `tokenizer.json`, its config and `generation_config.json` into.
      vocabulary: entries, as many as the model's.
      ends: entries that end an output.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words = [f"word{number}" for number in range(vocabulary - len(letters) - len(special))]
    entries = {entry: number for number, entry in enumerate([*letters, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=entries, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    described: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    end_ids: Sequence[int] = [vocabulary - 1, *range(len(entries) - ends, len(entries))]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end_ids}))
