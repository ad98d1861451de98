"""A trainer's state on its way: saved and restored, taken over, exported, published, and moved to another mesh."""

import time

import jax
import numpy as np
import pytest
import trainer_doubles as doubles

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.models.hf import hf
from libra_jax.training import trainer
from libra_jax.weights import memfd


def test_a_restored_trainer_trains_on_exactly_as_the_one_that_saved(small, start_trainer, tmp_path):
    first = start_trainer()
    first.train_step(doubles.batch(small, 0, seed=0))
    first.save(str(tmp_path / "state"))
    expected = first.train_step(doubles.batch(small, 1, seed=1))
    first.wait_saved()
    second = start_trainer()
    assert second.restore(str(tmp_path / "state")) == 1
    assert second.train_step(doubles.batch(small, 1, seed=1)) == expected
    for leaf, wanted in zip(doubles.params(second), doubles.params(first), strict=True):
        np.testing.assert_array_equal(leaf, wanted)


def test_a_saved_state_brings_the_count_of_skipped_steps_along_and_a_snapshot_leaves_the_checkpoints_alone(
    small, start_trainer, tmp_path
):
    first = start_trainer(trainer={"max_skipped_steps": 2})
    learner = first.running().learner
    learner.begin(jax.tree.map(lambda leaf: leaf * np.float32(1e36), learner.params))  # their products overflow
    for version in (0, 1):
        first.train_step(doubles.batch(small, version))
    (tmp_path / "file").write_text("")
    with pytest.raises(protocols.LibraError, match="the checkpoint cannot be written"):
        first.snapshot(str(tmp_path / "file" / "snapshot"))
    first.save(str(tmp_path / "state"))
    snapshot = first.snapshot(str(tmp_path / "snapshot"))
    assert snapshot.policy_version == 2
    assert snapshot.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(learner.state))
    first.wait_saved()
    while not first.snapshot_saved():
        time.sleep(0.01)
    for name in ("state", "snapshot"):
        assert first.is_saved(str(tmp_path / name))
        second = start_trainer(trainer={"max_skipped_steps": 2})
        assert second.restore(str(tmp_path / name)) == second.policy_version() == 2
        with pytest.raises(protocols.LibraError, match=r"max_skipped_steps: 3 steps in a row .* not finite"):
            second.train_step(doubles.batch(small, 2))


def test_a_trainer_that_stands_by_compiles_what_another_has_met_and_goes_on_from_its_snapshot(
    small, start_trainer, model_directory, request, tmp_path
):
    first = start_trainer()
    first.train_step(doubles.batch(small))
    config = small.config(model={"path": model_directory}, trainer={"data": 2, "tensor": 2}, steps=10)
    second = trainer.create(config_lib.to_dict(config), workdir="unused")
    request.addfinalizer(second.shutdown)
    assert second.stand_by().mesh["tensor"] == 2
    assert second.shapes() == []
    second.warm(first.shapes())
    assert second.shapes() == first.shapes()
    with pytest.raises(protocols.LibraError, match="holds no state yet"):
        second.train_step(doubles.batch(small))
    first.snapshot(str(tmp_path / "snapshot"))
    while not first.snapshot_saved():
        time.sleep(0.01)
    assert second.restore(str(tmp_path / "snapshot")) == 1
    metrics, wanted = (actor.train_step(doubles.batch(small, 1)) for actor in (second, first))
    assert metrics["loss"] == pytest.approx(wanted["loss"], rel=1e-3)
    assert metrics["compiled_shapes"] == wanted["compiled_shapes"], "nothing was left to compile"


def test_export_writes_what_the_trainer_holds(small, start_trainer, tmp_path):
    actor = start_trainer()
    actor.train_step(doubles.batch(small))
    actor.export(str(tmp_path / "out"))
    loaded = hf.load(tmp_path / "out", small.shape)
    for leaf, wanted in zip(jax.tree.leaves(loaded), doubles.params(actor), strict=True):
        np.testing.assert_array_equal(leaf, wanted)


def test_a_published_snapshot_has_the_trainers_version_and_all_its_tensors(small, start_trainer):
    actor = start_trainer()
    actor.train_step(doubles.batch(small))
    with pytest.raises(protocols.LibraError, match="version 0 cannot be synced: the trainer holds 1"):
        actor.open_weights(0)
    count = actor.open_weights(1)
    chunks = [actor.stage_weights(1, index) for index in range(count)]
    actor.close_weights(1)
    assert {chunk.policy_version for chunk in chunks} == {1}
    names = [entry.name for chunk in chunks for entry in chunk.entries]
    assert "lm_head.weight" in names
    assert len(names) == len(set(names))


def test_a_trainer_goes_from_mesh_to_mesh_and_nothing_it_holds_or_publishes_changes(small, start_trainer, tmp_path):
    made = start_trainer(trainer={"data": 8})
    made.train_step(doubles.batch(small, 0))

    def everything():
        published = [made.stage_weights(1, index) for index in range(made.open_weights(1))]
        leaves = [np.array(leaf) for leaf in jax.tree.leaves(jax.device_get(made.running().learner.state))]
        return [memfd.open_peer(chunk.transport)[: chunk.nbytes] for chunk in published], leaves

    wire, leaves = everything()
    for data, fsdp in [(4, 1), (1, 2), (2, 4)]:
        estimate = made.begin_resize(protocols.MeshSizes(data, fsdp, 1))
        assert estimate.state_bytes == sum(leaf.nbytes for leaf in leaves)
        phases = made.finish_resize(120.0)
        assert phases.moved_bytes == estimate.arriving_bytes
        now, held = everything()
        assert now == wire
        assert all(np.array_equal(a, b) for a, b in zip(held, leaves, strict=True))
    with pytest.raises(
        protocols.ConfigError,
        match=r"rows_per_micro_batch: 8 does not divide over .* = 6 shards; use 6 or 12, or .* of 1, 2, 4 or 8",
    ):
        made.begin_resize(protocols.MeshSizes(6, 1, 1))
    with pytest.raises(protocols.ConfigError, match=r"data 0 x fsdp 1 x tensor 1 cannot be.*must be positive"):
        made.begin_resize(protocols.MeshSizes(0, 1, 1))
    with pytest.raises(protocols.ConfigError, match="is not being changed"):
        made.resize_progress()
    assert np.isfinite(made.train_step(doubles.batch(small, 1))["loss"])


def test_two_resizes_at_once_are_refused_and_one_that_is_cancelled_leaves_room_for_another(small, start_trainer):
    made = start_trainer(trainer={"data": 8})
    made.begin_resize(protocols.MeshSizes(4, 1, 1))
    with pytest.raises(protocols.ConfigError, match=r"cannot become data 2 .* while it becomes data 4"):
        made.begin_resize(protocols.MeshSizes(2, 1, 1))
    made.cancel_resize()
    made.begin_resize(protocols.MeshSizes(2, 1, 1))
    made.finish_resize(120.0)
    made.train_step(doubles.batch(small, 0))
