"""Trainers of adapters through their protocol: checkpoints, warm start, exports, hybrid workers."""

import dataclasses
import json
import shutil
import threading

import hybrid_doubles
import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import safetensors.numpy
import torch
import trainer_doubles as doubles
import transformers

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.data import sequences as sequences_lib
from libra_jax.models import config as model_config
from libra_jax.models import transformer
from libra_jax.models.adapters import adapters, lora
from libra_jax.models.hf import hf
from libra_jax.planning.costs import costs
from libra_jax.training import base as base_lib
from libra_jax.training import checkpoints, training_side
from libra_jax.weights import receiver

ADAM = config_lib.OptimizerConfig(learning_rate=1e-2)
LORA = config_lib.LoraConfig(rank=4, alpha=8.0)


def _on_host(tree):
    return [np.array(leaf) for leaf in jax.tree.leaves(jax.device_get(tree))]


def _assert_equal(tree, wanted):
    for leaf, other in zip(_on_host(tree), _on_host(wanted), strict=True):
        np.testing.assert_array_equal(leaf, other)


@pytest.fixture
def start(small, model_directory, start_any):
    """Makes and starts trainers of adapters on the small model; `path` is another base."""

    def made(path=model_directory, given=LORA, stand_by=False, **groups):
        model = {"path": str(path), "lora": given}
        config = small.config(model=model, optimizer=ADAM, **{"steps": 10, **groups})
        rollout = dataclasses.replace(config.rollout, checksum=True)
        return start_any(dataclasses.replace(config, rollout=rollout), stand_by)

    return made


def _saved(actor, path):
    actor.save(str(path))
    actor.wait_saved()
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def test_a_restored_trainer_goes_on_as_if_it_had_not_ended(small, start, model_directory, tmp_path):
    actor = start()
    actor.train_step(doubles.batch(small))
    nbytes = _saved(actor, tmp_path / "saved")
    base = actor.running().learner.state.base
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(base))
    assert base_lib.digest(base) == json.loads((tmp_path / "saved" / checkpoints.HOST).read_text())["base"]
    actor.train_step(doubles.batch(small, version=1, seed=1))
    again = start(stand_by=True)
    assert again.restore(str(tmp_path / "saved")) == 1
    again.train_step(doubles.batch(small, version=1, seed=1))
    _assert_equal(again.running().learner.state, actor.running().learner.state)

    other = shutil.copytree(model_directory, tmp_path / "other")
    tensors = safetensors.numpy.load_file(other / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + np.float32(1e-6)
    safetensors.numpy.save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(protocols.DataError, match=r"trained on weights with digest .*other holds"):
        start(path=other, stand_by=True).restore(str(tmp_path / "saved"))
    # The same state with its base is larger by at least half of the base's bytes, compressed.
    whole = checkpoints.Checkpointer()
    whole.save(str(tmp_path / "whole"), actor.running().learner.state)
    whole.close()
    assert nbytes + held / 2 < sum(file.stat().st_size for file in (tmp_path / "whole").rglob("*") if file.is_file())


def test_a_warm_start_trains_the_base_and_is_saved_with_it(small, start, tmp_path):
    warm = config_lib.WarmStartConfig(steps=4, learning_rate=1e-2)
    sequences = [item for group in doubles.batch(small).groups for item in group.trajectories]
    actor = start(warm_start=warm)
    losses = [actor.warm_start_step(sequences)["loss"] for _ in range(2)]
    _saved(actor, tmp_path / "halfway")
    losses += [actor.warm_start_step(sequences)["loss"] for _ in range(2)]
    assert losses[3] < losses[0]
    warmed = _on_host(actor.running().warming.params)
    actor.open_weights(0)
    assert actor.running().warming is None
    _assert_equal(actor.running().learner.state.base, warmed)
    with pytest.raises(protocols.LibraError, match="warm start comes before training"):
        actor.warm_start_step(sequences)
    _saved(actor, tmp_path / "warmed")
    actor.train_step(doubles.batch(small))
    _assert_equal(actor.running().learner.state.base, warmed)
    # No directory but the export's own holds the weights under the adapter.
    actor.export(str(tmp_path / "policy"))
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "policy" / "adapter")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    tokens = torch.arange(small.vocabulary)[None]
    np.testing.assert_allclose(adapted(tokens).logits.detach(), merged(tokens).logits.detach(), atol=1e-5)

    again = start(warm_start=warm, stand_by=True)
    again.restore(str(tmp_path / "warmed"))
    again.train_step(doubles.batch(small))
    _assert_equal(again.running().learner.state, actor.running().learner.state)
    # The moments of a warm start are not saved, so only its weights are the same.
    again.restore(str(tmp_path / "halfway"))
    assert again.running().warming is not None
    metrics = again.warm_start_step(sequences)
    assert metrics["loss"] < losses[1]
    # The learner that took the step tells of it, and has gradients of all weights.
    assert metrics["train/compile_seconds"] > 0
    multiplied = model_config.multiplied_parameter_count(small.shape)
    lengths = [item.columns for item in sequences_lib.examples(sequences, 0, small.shape)]
    assert metrics["train/flops"] == costs.train_flops(small.shape, multiplied, lengths)


def test_an_export_is_read_by_others_starts_a_run_and_is_what_merge_sends(small, start, model_directory, tmp_path):
    actor = start(given=dataclasses.replace(LORA, sync="merge"))
    for version in range(2):
        actor.train_step(doubles.batch(small, version=version))
    actor.export(str(tmp_path / "policy"))
    tokens = torch.arange(small.vocabulary)[None]
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "policy", attn_implementation="eager")
    base = transformers.AutoModelForCausalLM.from_pretrained(model_directory, attn_implementation="eager")
    with torch.no_grad():
        before, wanted = base(tokens).logits.numpy(), merged(tokens).logits.numpy()
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "policy" / "adapter")(tokens).logits.numpy()
    policy, shape = actor.running().learner.policy, adapters.adapted(small.shape, LORA)
    array = jnp.asarray(tokens.numpy(), jnp.int32)
    hidden = transformer.forward(policy, shape, transformer.ComputeOptions(), array, array, jnp.ones_like(array))
    ours = hidden @ transformer.unembedding(policy, shape)
    assert np.abs(wanted - before).max() > 1e-2
    np.testing.assert_allclose(adapted, ours, atol=1e-5)
    np.testing.assert_allclose(merged(tokens).logits.detach().numpy(), ours, atol=1e-5)

    exported = dataclasses.replace(LORA, path=str(tmp_path / "policy" / "adapter"))
    _assert_equal(start(given=exported).running().learner.params, actor.running().learner.params)

    # With `merge`, a weight sync sends the exported weights.
    received = receiver.Receiver(small.shape, actor.running().learner.layout.state.base)
    received.start(2)
    for index in range(actor.open_weights(2)):
        received.load(actor.stage_weights(2, index))
    _assert_equal(received.finish(2)[0], hf.load(tmp_path / "policy", small.shape))
    received.close()


def test_a_hybrid_worker_adds_its_share_and_keeps_the_base(hybrid_config, start_any):
    mesh = dataclasses.replace(hybrid_config.trainer, data=1, row_buckets=())
    model = dataclasses.replace(hybrid_config.model, lora=LORA)
    config = dataclasses.replace(hybrid_config, model=model, trainer=mesh)
    core, alone = start_any(config), start_any(config)
    side = training_side.create(config_lib.to_dict(config), "unused", "r")
    side.start()

    def remote(verb, *arguments):
        getattr(side, verb)(*arguments)

    hybrid_doubles.publish(core, 0, remote)
    first = jax.tree.leaves(lora.split(side._params)[1])
    hybrid_doubles.admit(core, remote, 1)
    batch, given = hybrid_doubles.batch(0), [hybrid_doubles.share()]
    helper = threading.Thread(target=side.contribute, args=(batch, given))
    helper.start()
    metrics = core.train_step(batch, given)
    helper.join(60)
    alone.train_step(batch)
    assert metrics["shares/late"] == metrics["shares/refused"] == 0
    assert metrics["shares/micro_batches"] > 0
    for ours, wanted in zip(hybrid_doubles.params(core), hybrid_doubles.params(alone), strict=True):
        np.testing.assert_allclose(ours, wanted, atol=1e-5)
    hybrid_doubles.publish(core, 1, remote)
    _assert_equal(side._params, core.running().learner.policy)
    # The second version brought the adapter alone.
    second = jax.tree.leaves(lora.split(side._params)[1])
    assert all(one is other for one, other in zip(first, second, strict=True))
    side.shutdown()
