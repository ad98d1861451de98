"""Saved states come back bit for bit, on other meshes too, and what is not whole is refused with a sentence."""

import dataclasses
import errno
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
import small_model
import trainer_doubles as doubles

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.data import packing
from libra_jax.models.hf import hf
from libra_jax.training import checkpoints

MESHES = {"one": {}, "split": {"fsdp": 2, "tensor": 2, "context": 2}}


@pytest.fixture(scope="module")
def learners(small):
    return {
        name: small.learner(small.config(trainer=mesh, algorithm=config_lib.AlgorithmConfig(kl_coefficient=0.1)))
        for name, mesh in MESHES.items()
    }


@pytest.fixture
def checkpointer():
    made = checkpoints.Checkpointer()
    yield made
    made.close()


def _step(small, learner, seed):
    config = small.config()
    packed = packing.pack(small.examples(6, seed), config.trainer)
    return learner.update("supervised", packed, 1e-3)


def _assert_equal(tree, wanted):
    assert jax.tree.structure(tree) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(tree), wanted)


@pytest.mark.parametrize(
    ("saved_on", "restored_on"), [("one", "one"), ("split", "split"), ("split", "one"), ("one", "split")]
)
def test_a_state_comes_back_bit_for_bit_on_any_mesh_while_training_goes_on(
    small, learners, checkpointer, tmp_path, saved_on, restored_on
):
    source, target = learners[saved_on], learners[restored_on]
    source.begin()
    _step(small, source, 1)
    wanted = jax.tree.map(np.array, jax.device_get(source.state))
    checkpointer.save(str(tmp_path / "a"), source.state)
    _step(small, source, 2)  # donates every buffer that is being saved
    checkpointer.wait()
    restored = checkpointer.restore(str(tmp_path / "a"), target.layout.state)
    _assert_equal(restored, wanted)
    for leaf, place in zip(jax.tree.leaves(restored), jax.tree.leaves(target.layout.state), strict=True):
        assert leaf.sharding == place.sharding
    if saved_on == restored_on:
        after = jax.tree.map(np.array, jax.device_get(source.state))
        target.state = restored
        _step(small, target, 2)
        _assert_equal(target.state, after)


RUN = """
import sys, types
sys.path[:0] = sys.argv[3:]
import json, pathlib, numpy, trainer_doubles
from libra_jax.training import trainer
small = types.SimpleNamespace(vocabulary=16)
folder, begins = pathlib.Path(sys.argv[1]), not pathlib.Path(sys.argv[1], "saved").exists()
actor = trainer.create(json.loads(sys.argv[2]), "unused")
actor.start() if begins else actor.stand_by()
if begins:
    actor.train_step(trainer_doubles.batch(small))
    actor.save(str(folder / "saved"))
    actor.wait_saved()
    print("saved", flush=True)
else:
    actor.restore(str(folder / "saved"))
for version in range(1, 3 if not begins else 1000):
    actor.train_step(trainer_doubles.batch(small, version=version, seed=version))
numpy.savez(folder / "ended.npz", *trainer_doubles.params(actor))
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_experts_on_split_rows_train_on_alike_after_kill_9(sparse, start_any, tmp_path):
    hf.save(sparse.params, sparse.shape, tmp_path / "model")
    config = sparse.config(trainer=MESHES["split"], model={"path": str(tmp_path / "model")}, steps=1000)
    whole = start_any(config)
    for version in range(3):
        whole.train_step(doubles.batch(sparse, version=version, seed=version))
    folders = [str(pathlib.Path(module.__file__).parent) for module in (doubles, small_model)]
    command = [sys.executable, "-c", RUN, str(tmp_path), json.dumps(config_lib.to_dict(config)), *folders]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "saved\n"
        child.kill()  # somewhere in the steps after the checkpoint
    assert child.returncode == -signal.SIGKILL
    subprocess.run(command, check=True, timeout=120)
    with np.load(tmp_path / "ended.npz") as ended:
        for leaf, wanted in zip(ended.values(), doubles.params(whole), strict=True):
            np.testing.assert_array_equal(leaf, wanted)


@pytest.fixture(scope="module")
def saved(learners, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "whole"
    writer = checkpoints.Checkpointer()
    learners["one"].begin()
    writer.save(str(path), learners["one"].state, {"skipped_in_a_row": 0})
    writer.close()
    return path


def _missing(path):
    shutil.rmtree(path)


def _truncated(path):
    largest = max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


def _lost_file(path):
    (path / "manifest.ocdbt").unlink()


def _flipped_bit(path):
    largest = max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)


def _flipped_host_state(path):
    file = path / checkpoints.HOST
    file.write_text(file.read_text().replace("0", "1"))


def _cut_short(path):
    (path / checkpoints.SEAL).unlink()


def _damaged_seal(path):
    (path / checkpoints.SEAL).write_text('{"a": ')


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (_missing, "no such checkpoint directory"),
        (_truncated, r"has \d+ bytes instead of \d+; the checkpoint is damaged"),
        (_flipped_bit, "is damaged .its checksum is not the one it was written with"),
        (_flipped_host_state, "libra_host.json is damaged"),
        (_lost_file, "manifest.ocdbt is missing"),
        (_cut_short, "its save was cut short"),
        (_damaged_seal, "is damaged; use an earlier checkpoint"),
    ],
)
def test_what_is_not_whole_is_refused_with_one_sentence(learners, checkpointer, saved, tmp_path, damage, sentence):
    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    damage(copy)
    with pytest.raises(protocols.DataError, match=sentence) as raised:
        checkpointer.restore(str(copy), learners["one"].layout.state)
    assert "\n" not in str(raised.value)


def test_a_state_that_is_not_finite_is_neither_saved_nor_restored(learners, checkpointer, tmp_path, monkeypatch):
    learner = learners["one"]
    learner.begin()
    spoilt = dataclasses.replace(learner.state, params=jax.tree.map(lambda leaf: leaf * np.inf, learner.state.params))
    with pytest.raises(protocols.CheckpointFailed, match="not finite"):
        checkpointer.save(str(tmp_path / "a"), spoilt)
    assert not (tmp_path / "a").exists()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "is_finite", lambda _: True)
        checkpointer.save(str(tmp_path / "a"), spoilt)
        checkpointer.wait()
    with pytest.raises(protocols.DataError, match=r"not finite .* go on from the one before"):
        checkpointer.restore(str(tmp_path / "a"), learner.layout.state)


def test_a_checkpoint_of_another_optimizer_is_refused(small, checkpointer, saved):
    other = small.learner(small.config(optimizer=config_lib.OptimizerConfig(name="sgd")))
    with pytest.raises(protocols.DataError, match="does not hold a train state of this model and optimizer") as raised:
        checkpointer.restore(str(saved), other.layout.state)
    assert "\n" not in str(raised.value)


def test_a_whole_checkpoint_is_not_overwritten_and_a_cut_short_one_is(learners, checkpointer, saved, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    with pytest.raises(protocols.LibraError, match="holds a checkpoint already"):
        checkpointer.save(str(copy), learners["one"].state)
    (copy / checkpoints.SEAL).unlink()
    checkpointer.save(str(copy), learners["one"].state)
    checkpointer.wait()
    checkpointer.restore(str(copy), learners["one"].layout.state)


def test_a_place_that_cannot_be_written_is_one_sentence(learners, checkpointer, tmp_path):
    (tmp_path / "file").write_text("")

    def save_and_wait():
        checkpointer.save(str(tmp_path / "file" / "a"), learners["one"].state)
        checkpointer.wait()

    before = set(threading.enumerate())
    with pytest.raises(protocols.LibraError, match="the checkpoint cannot be written") as raised:
        save_and_wait()
    assert "\n" not in str(raised.value)
    assert set(threading.enumerate()) <= before, "no thread is left that the interpreter would wait for at its end"


def test_a_disk_that_refuses_during_a_save_brings_one_sentence_and_no_trace(
    learners, checkpointer, tmp_path, monkeypatch, caplog
):
    real = os.makedirs

    def refuse(path, *rest, **more):
        if "orbax-checkpoint-tmp" in str(path):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        real(path, *rest, **more)

    monkeypatch.setattr(os, "makedirs", refuse)
    checkpointer.save(str(tmp_path / "a"), learners["one"].state)
    with pytest.raises(protocols.CheckpointFailed, match="Read-only file system") as raised:
        checkpointer.wait()
    assert "\n" not in str(raised.value)
    assert "Traceback" not in caplog.text


CHILD = """
import sys
import jax, jax.numpy as jnp
from libra_jax.training import checkpoints, state
def make(value):
    return state.TrainState(jnp.int32(value), {"w": jnp.full((4096, 4096), float(value))}, (), jnp.zeros(2, jnp.uint32))
writer = checkpoints.Checkpointer()
for value in range(1, 100):
    writer.save(f"{sys.argv[1]}/{value}", make(value))
    print(value, flush=True)
    writer.wait()
"""


@pytest.mark.multiprocess
def test_a_save_killed_half_way_leaves_the_one_before_usable(checkpointer, tmp_path):
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for line in child.stdout:
        if int(line) == 3:  # the third save has begun; the second is durable
            child.kill()
            break
    child.wait()
    child.stdout.close()
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def place(*shape, dtype=np.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=one)

    structure = checkpoints.state_lib.TrainState(
        place(dtype=np.int32), {"w": place(4096, 4096)}, (), place(2, dtype=np.uint32)
    )
    restored = checkpointer.restore(str(tmp_path / "2"), structure)
    assert int(restored.step) == 2
    assert float(restored.params["w"].min()) == float(restored.params["w"].max()) == 2.0
    with pytest.raises(protocols.DataError):
        checkpointer.restore(str(tmp_path / "3"), structure)
