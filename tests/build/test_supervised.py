"""Supervised fine-tuning on a table of chats: what it learns, writes and refuses."""

import json
import os

import numpy as np
import pytest
import torch
import transformers

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import supervised
from libra_jax.chat import tokenizers


@pytest.fixture
def config(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))  # the tuning sets variables for JAX
    made = config_lib.RunConfig()
    made.name, made.trainer.platform = "chats", "cpu"
    made.trainer.row_tokens = made.rollout.max_context = 128
    made.rollout.max_tokens = 40
    made.optimizer.learning_rate, made.optimizer.warmup_steps = 3e-3, 4
    return made


def _chats(path, count=120):
    with path.open("w") as file:
        for number in range(count):
            word = "abcdefgh"[number % 8] * 3
            turns = [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": word}]
            file.write(json.dumps({"messages": turns}) + "\n")
    return str(path)


def test_tuning_lowers_the_held_out_loss_which_transformers_confirms(config, tmp_path):
    data = _chats(tmp_path / "chats.jsonl")
    asked = supervised.TuningRequest(data, tmp_path / "out", epochs=2, batch_size=16, holdout=0.1)
    config.optimizer.learning_rate = 1e-2
    told = []
    metrics = supervised.tune(config, asked, told.append)
    assert len(metrics) == round(2 * 108 / 16)
    losses = [item["held_out_loss"] for item in metrics if "held_out_loss" in item]
    assert losses[-1] < 0.5 * losses[0]
    assert [json.loads(line)["step"] for line in (tmp_path / "out/metrics.jsonl").open()] == list(range(1, 15))
    assert "12 held out" in told[0]
    # The same chats by the model that was written, in another library.
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out/model", dtype=torch.float32)
    everything = supervised.chats(data, tokenizers.CharacterTokenizer())
    order = np.random.default_rng(config.seed).permutation(len(everything))
    total = count = 0.0
    for index in order[:12]:
        tokens, mask = everything[index].token_ids, np.array(everything[index].loss_mask)
        with torch.no_grad():
            chances = torch.log_softmax(model(torch.tensor([tokens])).logits[0], -1)
        for at in np.flatnonzero(mask):
            total, count = total - float(chances[at - 1, tokens[at]]), count + 1
    assert losses[-1] == pytest.approx(total / count, rel=1e-4)
    with pytest.raises(protocols.ConfigError, match=r"--output: .* holds a model already"):
        supervised.tune(config, asked)


def test_an_adapter_is_tuned_whatever_the_config_says_of_reinforcement_learning(config, tmp_path):
    config.model.lora.rank, config.model.lora.sync = 4, "merge"
    # Neither a warm start nor an objective of the run takes part.
    config.warm_start.steps, config.algorithm.kl_coefficient = 50, 0.1
    asked = supervised.TuningRequest(
        _chats(tmp_path / "chats.jsonl", 32), tmp_path / "out", epochs=2, batch_size=8, holdout=0
    )
    metrics = supervised.tune(config, asked, lambda text: None)
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert (tmp_path / "out/model/adapter/adapter_config.json").exists()


def test_several_trainer_processes_are_refused_by_name(config, tmp_path):
    config.cluster.backend, config.trainer.processes, config.trainer.data = "ray", 2, 2
    asked = supervised.TuningRequest(_chats(tmp_path / "chats.jsonl"), tmp_path / "out")
    with pytest.raises(protocols.ConfigError, match=r"trainer.processes: fine-tuning runs in one process, not 2"):
        supervised.tune(config, asked)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"messages": "hello"}, "line 1: messages must be a list of"),
        ({"messages": [{"role": "user"}]}, "line 1: messages must be a list of"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "line 1: a dialogue must begin with a prompt"),
        ({"messages": [{"role": "user", "content": "a"}]}, "line 1: .* have an answer of the assistant"),
        ({"chat": []}, "messages"),
    ],
)
def test_a_malformed_chat_is_refused_by_its_row(config, tmp_path, row, sentence):
    (tmp_path / "bad.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(protocols.DataError, match=sentence):
        supervised.tune(config, supervised.TuningRequest(str(tmp_path / "bad.jsonl"), tmp_path / "out"))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"epochs": 0.0}, "--epochs: must be positive, not 0"),
        ({"batch_size": 0}, "--batch_size: must be positive, not 0"),
        ({"holdout": 1.0}, r"--holdout: must be in \[0, 1\), not 1"),
        ({"batch_size": 500}, "--batch_size: 500 chats of 114 that are not held out"),
    ],
)
def test_an_unusable_flag_is_refused_by_name(config, tmp_path, fields, sentence):
    data = _chats(tmp_path / "chats.jsonl")
    with pytest.raises(protocols.ConfigError, match=sentence):
        supervised.tune(config, supervised.TuningRequest(data, tmp_path / "out", **fields))
