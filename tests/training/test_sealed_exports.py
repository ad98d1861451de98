"""Damage to an exported model is refused by whatever reads the file, and a lost seal is said."""

import dataclasses
import itertools
import pathlib
import random
import shutil

import chat_templates
import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import wiring
from libra_jax.chat import tokenizers
from libra_jax.cluster import resolved_run
from libra_jax.models.adapters import adapters, peft
from libra_jax.models.hf import hf
from libra_jax.training import running, trainer

LORA = config_lib.LoraConfig(rank=2)


@pytest.fixture(scope="module")
def export(small, model_directory, tmp_path_factory):
    """An exported model with its adapter, tokenizer and generation config."""
    source = tmp_path_factory.mktemp("source") / "model"
    shutil.copytree(model_directory, source)
    chat_templates.save(source, chat_templates.PLAIN)
    (source / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    config = small.config(model={"path": str(source), "lora": LORA})
    actor = trainer.create(config_lib.to_dict(config), workdir="unused")
    actor.start()
    path = tmp_path_factory.mktemp("export") / "model"
    actor.export(str(path))
    actor.shutdown()
    task = config_lib.TaskConfig(tokenizer="")
    wiring.add_files(dataclasses.replace(config, task=task), path)
    return path


def flip(data, chance):
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]


DAMAGES = {
    "flipped bit": flip,
    "two thirds": lambda data, chance: data[: len(data) * 2 // 3],
    "zeroed page": lambda data, chance: bytes(min(4096, len(data))) + data[4096:],
    "swapped halves": lambda data, chance: data[len(data) // 2 :] + data[: len(data) // 2],
    "emptied": lambda data, chance: b"",
    "deleted": None,
}


def readers(path, shape):
    """The readers of each file of an export."""
    with_adapter = adapters.adapted(shape, LORA)
    of_policy = config_lib.ModelConfig(path=str(path))
    small_files = [
        lambda: running.model_shape(of_policy),
        lambda: resolved_run.resolve(config_lib.RunConfig(model=of_policy), need_weights=True),
        lambda: tokenizers.load(str(path)),
        lambda: hf.load(path, shape),
    ]
    return {
        "model.safetensors": small_files[-1:],
        "adapter/adapter_model.safetensors": [lambda: peft.load(path / "adapter", with_adapter, None)],
        "adapter/adapter_config.json": [lambda: peft.load(path / "adapter", with_adapter, None)],
        "libra_files.json": small_files,
    } | dict.fromkeys(("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"), small_files)


def test_damage_to_any_file_of_an_export_is_refused_by_its_readers(export, small, tmp_path):
    files = [str(file.relative_to(export)) for file in sorted(export.rglob("*")) if file.is_file()]
    assert set(files) == readers(export, small.shape).keys()
    tokenizers.load(str(export))
    for number, (file, damage) in enumerate(itertools.product(files, DAMAGES)):
        if (file, damage) == ("libra_files.json", "deleted"):
            continue
        copy = pathlib.Path(shutil.copytree(export, tmp_path / str(number)))
        data, change = (copy / file).read_bytes(), DAMAGES[damage]
        if change is None:
            (copy / file).unlink()
        else:
            (copy / file).write_bytes(change(data, random.Random(number)))
        for read in readers(copy, small.shape)[file]:
            with pytest.raises(protocols.DataError, match=pathlib.Path(file).name):
                read()


def test_a_lost_seal_of_an_export_is_said(export, small, tmp_path, caplog):
    copy = pathlib.Path(shutil.copytree(export, tmp_path / "copy"))
    (copy / "libra_files.json").unlink()
    hf.load(copy, small.shape)
    assert "copy: its seal libra_files.json is missing" in caplog.text
