"""cuDNN's programs are compiled for few and for many sequences a row; a micro-batch takes the first that suffices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trainer_doubles as doubles

from libra_jax import config as config_lib
from libra_jax.data import packing
from libra_jax.models import feasibility, rows
from libra_jax.models.attention import attention, cudnn_attention

FEW, MOST = 3, 6  # sequences of the small model's rows of 48 tokens


def _by_lengths(q, k, v, segments, starts, lengths):
    """Attention of the sequences that cuDNN is told of."""
    token = jnp.arange(q.shape[1])
    inside_BxMxT = (token >= starts[:, :-1, None]) & (token < (starts[:, :-1] + lengths)[..., None])
    numbers_BxT = (inside_BxMxT * jnp.arange(1, lengths.shape[1] + 1)[:, None]).sum(1)
    return attention.dense(q, k, v, numbers_BxT)


@pytest.fixture
def on_gpu(monkeypatch):
    """Lets trainers take this CPU for a GPU, whose attention is a double of cuDNN's."""
    monkeypatch.setattr(attention, "target", lambda device: feasibility.CompileTarget("gpu", (9, 0)))
    monkeypatch.setattr(feasibility, "choose_attention", lambda *case, **options: "cudnn")
    monkeypatch.setattr(cudnn_attention, "attend", _by_lengths)
    monkeypatch.setattr(rows, "FEW_SEGMENTS", FEW)


def _compiled(learner):
    return [(name, shapes[packing.LENGTHS].shape[1]) for name, shapes in learner.programs.shapes]


def _step(small, config, loss):
    packed = packing.pack(small.examples(40), config.trainer)
    extras = packed.scatter(list(np.random.default_rng(0).normal(size=40)))
    learner = small.learner(config)
    metrics = learner.update(loss, packed, 0.1, [{"advantages": array} if loss == "policy" else {} for array in extras])
    return learner, metrics, [np.array(leaf) for leaf in jax.tree.leaves(learner.params)]


@pytest.mark.parametrize(
    ("trainer", "loss"), [({"data": 2}, "supervised"), ({"fsdp": 2, "context": 2}, "policy")], ids=["data", "context"]
)
def test_programs_for_few_and_for_many_sequences_add_up_to_the_same_step(small, request, trainer, loss):
    config = small.config(
        trainer={**trainer, "rows_per_micro_batch": 2}, optimizer=config_lib.OptimizerConfig(name="sgd")
    )
    _, wanted, wanted_params = _step(small, config, loss)
    request.getfixturevalue("on_gpu")
    learner, metrics, params = _step(small, config, loss)
    assert sorted(_compiled(learner)) == [(loss, FEW), (loss, MOST)]
    assert metrics == pytest.approx(wanted, rel=1e-4)
    for leaf, other in zip(params, wanted_params, strict=True):
        np.testing.assert_allclose(leaf, other, atol=1e-6)


def test_programs_for_many_sequences_compile_beside_the_first_steps(small, on_gpu, start_trainer):
    actor = start_trainer(algorithm=config_lib.AlgorithmConfig(kl_coefficient=0.1))
    learner = actor.running().learner
    assert _compiled(learner)[0] == ("policy", FEW)
    assert learner.ahead.wait(120.0)
    assert sorted(_compiled(learner)) == [(name, most) for name in ("policy", "score") for most in (FEW, MOST)]
    with doubles.compilations() as seen:
        metrics = actor.train_step(doubles.batch(small))
    assert metrics["train/compile_seconds"] == 0
    assert not [name for name, _ in seen if "step" in name or "score" in name]
    assert metrics["compiled_shapes"] == 4


def test_only_cudnn_has_several_programs_for_rows_of_one_length(small, request):
    config = small.config(trainer={"row_buckets": (64,)})
    learner = small.learner(config)
    assert learner.inputs.row_shapes() == [(48, MOST), (64, 8)]
    assert packing.LENGTHS not in learner.inputs.empty("policy")
    request.getfixturevalue("on_gpu")
    assert small.learner(config).inputs.row_shapes() == [(48, FEW), (48, MOST), (64, FEW), (64, 8)]
    alone = small.config(trainer={"row_buckets": (64,), "pack": False})
    assert small.learner(alone).inputs.row_shapes() == [(48, 1), (64, 1)]
