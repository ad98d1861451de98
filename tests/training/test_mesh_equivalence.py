"""Every way of splitting over data, fsdp, tensor and context trains the same policy as one device."""

import itertools

import jax
import numpy as np
import pytest

from libra_jax import config as config_lib
from libra_jax.data import packing
from libra_jax.models import transformer
from libra_jax.training import learner as learner_lib
from libra_jax.training import state, step

ALL = [split for split in itertools.product((1, 2, 4, 8), repeat=3) if np.prod(split) <= 8]
QUICK = [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2), (1, 2, 2, 2)]
OTHERS = [*(split for split in ALL if split not in QUICK), (1, 1, 1, 2)]
SPLITS = [*QUICK, *(pytest.param(split, marks=pytest.mark.drill) for split in OTHERS)]
SPARSE_QUICK = [(1, 8, 1), (1, 2, 2, 2)]
SPARSE_OTHERS = [(1, 1, 2), (2, 2, 2), (1, 2, 1), (1, 4, 1), (1, 4, 2), (4, 2, 1)]
SPARSE_SPLITS = [*SPARSE_QUICK, *(pytest.param(split, marks=pytest.mark.drill) for split in SPARSE_OTHERS)]
LOOPED = [(2, 2, 2), (1, 2, 2, 2)]
"""Splits on which the layers are a loop, as on GPUs and TPUs. Elsewhere a CPU has these few one after the other."""

STEPS = 20
RATE = 1e-2
# Every advantage negative and the clip far away: the loss is a smooth positive number that falls, fit for a curve.
ALGORITHM = config_lib.AlgorithmConfig(clip_low=0.99)
ADAM = config_lib.OptimizerConfig(name="adam", eps=1e-6)
SGD = config_lib.OptimizerConfig(name="sgd", clip_norm=0.0)


def _batches(small, config):
    """The same eight sequences, several a row and one a row, as (packed, extras)."""
    examples = small.examples(8, longest=20)
    advantages = np.random.default_rng(1).uniform(-1.5, -0.5, len(examples))
    made = []
    for pack in (True, False):
        trainer = config_lib.TrainerConfig(**{**config_lib.to_dict(config.trainer), "pack": pack})
        packed = packing.pack(examples, trainer)
        made.append((packed, [{"advantages": array} for array in packed.scatter(list(advantages))]))
    return made


def _train(small, split):
    """Gradients, parameters after one SGD step, and the loss curve, of both batches on one mesh."""
    with pytest.MonkeyPatch.context() as patch:
        if split in LOOPED:
            patch.setattr(transformer, "UNROLLED_LAYERS", 0)
        return _trained(small, split)


def _trained(small, split):
    trainer = dict(zip(("data", "fsdp", "tensor", "context"), split, strict=False))
    config = small.config(trainer=trainer, algorithm=ALGORITHM, optimizer=ADAM)
    adam = small.learner(config)
    sgd = small.learner(small.config(trainer=trainer, algorithm=ALGORITHM, optimizer=SGD))
    results = []
    for packed, extras in _batches(small, config):
        assert len(packed.micro_batches) == 1
        assert (packed.micro_batches[0].segments.max() > 1) == (len(results) == 0)
        arrays = adam.programs.put({**vars(packed.micro_batches[0]), **extras[0]})
        zeros = adam.programs.zeros()
        sums, _ = adam.programs.grad_step(step.POLICY, adam.params, zeros, arrays)
        gradients = jax.device_get(sums.gradients)
        sgd.begin()
        stepped, _, _ = sgd.programs.apply_step(sgd.state, sums, 0.1)
        after = jax.device_get(stepped.params)
        sgd.begin(jax.device_put(small.params, state.shardings_of(sgd.layout.state.params)))
        adam.begin(jax.device_put(small.params, state.shardings_of(adam.layout.state.params)))
        curve = [adam.update(step.POLICY, packed, RATE, extras)["loss"] for _ in range(STEPS)]
        adam.begin(jax.device_put(small.params, state.shardings_of(adam.layout.state.params)))
        results.append((gradients, after, np.array(curve)))
    assert len(adam.programs.shapes) == 1
    return results


@pytest.fixture(scope="module")
def one_device(small):
    return _train(small, (1, 1, 1))[0]


@pytest.fixture(scope="module")
def sparse_on_one_device(sparse):
    return _train(sparse, (1, 1, 1))[0]


def _assert_close(tree, reference, bound):
    """Every entry within `bound` of the largest entry of its leaf in the reference."""
    for (path, leaf), wanted in zip(jax.tree.leaves_with_path(tree), jax.tree.leaves(reference), strict=True):
        error = np.abs(leaf - wanted).max() / np.abs(wanted).max()
        assert error <= bound, f"{jax.tree_util.keystr(path)}: {error}"


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS, ids=lambda split: "x".join(map(str, split)))
def test_gradients_sgd_step_and_loss_curve_agree_with_one_device(small, one_device, split):
    _compare(_train(small, split), one_device)


@pytest.mark.slow
@pytest.mark.parametrize("split", SPARSE_SPLITS, ids=lambda split: "x".join(map(str, split)))
def test_experts_split_over_devices_train_as_those_of_one_device(sparse, sparse_on_one_device, split):
    _compare(_train(sparse, split), sparse_on_one_device)


def _compare(results, one_device):
    gradients, after, curve = one_device
    assert curve[-1] < 0.8 * curve[0]
    for got_gradients, got_after, got_curve in results:
        _assert_close(got_gradients, gradients, 1e-5)
        _assert_close(got_after, after, 1e-5)
        np.testing.assert_allclose(got_curve, curve, rtol=1e-3)


def test_initial_parameters_are_the_same_on_every_mesh(small):
    learner = learner_lib.Learner(small.config(trainer={"data": 2, "fsdp": 2, "tensor": 2}), small.shape, jax.devices())
    params = state.random_params(small.shape, learner.layout, 0)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(params), small.params)
