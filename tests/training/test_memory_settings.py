"""Settings that save a device's memory: what they keep where, and that training is the same."""

import jax
import numpy as np
import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.data import packing
from libra_jax.training import checkpoints, resize, state


def _learner(small, *, steps=3, optimizer=None, model=None, trainer=None):
    """A learner on 2 x 2 devices after some steps."""
    config = small.config(
        trainer={"fsdp": 2, "tensor": 2, **(trainer or {})},
        model=model,
        optimizer=config_lib.OptimizerConfig(learning_rate=1e-2, **(optimizer or {})),
    )
    made = small.learner(config)
    _train(small, made, steps)
    return made


def _train(small, made, steps, first=0):
    for seed in range(first, first + steps):
        examples = small.examples(10, seed)
        packed = packing.pack(examples, made.config.trainer)
        values = np.random.default_rng(seed).normal(size=10)
        made.update("policy", packed, 1e-2, [{"advantages": array} for array in packed.scatter(list(values))])


def _assert_equal(made, wanted):
    leaves = zip(jax.tree.leaves(made.state), jax.tree.leaves(wanted.state), strict=True)
    for leaf, other in leaves:
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(other))


def _kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


def test_offloaded_moments_live_on_the_host_and_change_no_bit(small):
    plain, offloaded = _learner(small), _learner(small, optimizer={"offload": True})
    assert _kinds(offloaded.state.opt_state) == {state.HOST, "device"}, "counters stay on the devices"
    moments = [leaf for leaf in jax.tree.leaves(offloaded.state.opt_state) if leaf.ndim]
    assert {leaf.sharding.memory_kind for leaf in moments} == {state.HOST}
    assert _kinds(offloaded.state.params) == {"device"}
    _assert_equal(offloaded, plain)


def test_offloaded_moments_survive_a_resize_and_a_checkpoint(small, tmp_path):
    plain, offloaded = _learner(small, steps=2), _learner(small, steps=2, optimizer={"offload": True})
    smaller, _ = resize.MeshChange(offloaded, protocols.MeshSizes(1, 2, 1), jax.devices()).take_over(120)
    assert state.HOST in _kinds(smaller.state.opt_state)
    saver = checkpoints.Checkpointer()
    try:
        saver.save(str(tmp_path / "a"), smaller.state)
        saver.wait()
        restored = saver.restore(str(tmp_path / "a"), smaller.layout.state)
    finally:
        saver.close()
    for leaf, place in zip(jax.tree.leaves(restored), jax.tree.leaves(smaller.layout.state), strict=True):
        assert leaf.sharding == place.sharding
    smaller.state = restored
    _train(small, smaller, 1, first=2)
    _train(small, plain, 1, first=2)
    for leaf, other in zip(jax.tree.leaves(smaller.params), jax.tree.leaves(plain.params), strict=True):
        np.testing.assert_allclose(np.asarray(leaf), np.asarray(other), atol=1e-5)


def test_layer_inputs_on_the_host_change_no_bit(small):
    _assert_equal(_learner(small, model={"remat": "offload"}), _learner(small, model={"remat": "full"}))


def test_sums_in_bfloat16_take_half_the_bytes_and_round(small):
    plain, half = _learner(small, steps=1), _learner(small, steps=1, trainer={"accumulation_dtype": "bfloat16"})
    assert {leaf.dtype.name for leaf in jax.tree.leaves(half.layout.accumulator.gradients)} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(half.params)} == {"float32"}
    moved = [
        np.abs(np.asarray(leaf) - np.asarray(other)).max()
        for leaf, other in zip(jax.tree.leaves(half.params), jax.tree.leaves(plain.params), strict=True)
    ]
    assert 0 < max(moved) < 0.02, "a step of Adam is at most the learning rate, and at most twice it apart from another"
    with pytest.raises(Exception, match=r"config\.trainer\.accumulation_dtype: .*float16"):
        config_lib.TrainerConfig(accumulation_dtype="float16")
