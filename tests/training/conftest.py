"""The small model, sequences for it, and trainers of it. The doubles beside the tests are imported by name."""

import contextlib
import dataclasses
import pathlib
import sys
import types

import jax
import numpy as np
import pytest
import small_model

from libra_jax import config as config_lib
from libra_jax.data import sequences as sequences_lib
from libra_jax.models import config as model_config
from libra_jax.models.hf import hf
from libra_jax.training import learner, state, trainer

sys.path.insert(0, str(pathlib.Path(__file__).parent))


def _run_config(trainer=None, model=None, **groups) -> config_lib.RunConfig:
    """A RunConfig for the small model; `trainer` and `model` are fields of theirs to set."""
    return config_lib.RunConfig(
        rollout=small_model.ROLLOUT,
        trainer=config_lib.TrainerConfig(
            **{"row_tokens": small_model.ROW_TOKENS, "rows_per_micro_batch": 8, **(trainer or {})}
        ),
        model=config_lib.ModelConfig(**{"logits_chunk": 64, **(model or {})}),
        **groups,
    )


def _examples(count: int, seed: int = 0, longest: int = 24) -> list[sequences_lib.Example]:
    """Random sequences, their first tokens a prompt, log-probabilities near uniform, half the tokens on-version."""
    rng = np.random.default_rng(seed)
    vocabulary, made = small_model.VOCABULARY, []
    for index in range(count):
        length = int(rng.integers(4, longest + 1))
        mask_N = np.arange(length) >= 2
        made.append(
            sequences_lib.Example(
                sequence_id=f"s{index}",
                tokens_N=rng.integers(0, vocabulary, length).astype(np.int32),
                mask_N=mask_N,
                behaviour_N=np.where(mask_N, rng.normal(-np.log(vocabulary), 0.1, length), 0).astype(np.float32),
                on_version_N=mask_N & (rng.random(length) < 0.5),
            )
        )
    return made


def _model(shape: model_config.TransformerConfig) -> types.SimpleNamespace:
    """The shape, its host parameters, and makers of configs, sequences and learners."""
    one_device = learner.Learner(_run_config(), shape, jax.devices())
    params = jax.device_get(state.random_params(shape, one_device.layout, 0))

    def make_learner(config: config_lib.RunConfig) -> learner.Learner:
        made = learner.Learner(config, shape, jax.devices())
        made.begin(jax.device_put(params, state.shardings_of(made.layout.state.params)))
        return made

    return types.SimpleNamespace(
        shape=shape,
        params=params,
        config=_run_config,
        examples=_examples,
        learner=make_learner,
        row_tokens=small_model.ROW_TOKENS,
        vocabulary=small_model.VOCABULARY,
    )


@pytest.fixture(scope="session")
def small():
    return _model(small_model.shape())


@pytest.fixture(scope="session")
def sparse():
    """The small model with experts."""
    return _model(small_model.sparse())


@pytest.fixture(scope="session")
def shallow():
    """The small model with one layer: a further one doubles what is compiled, and not all tests look at layers."""
    return _model(dataclasses.replace(small_model.shape(), num_layers=1))


@pytest.fixture(scope="session")
def shallow_sparse():
    """The same with experts."""
    return _model(dataclasses.replace(small_model.sparse(), num_layers=1))


@pytest.fixture(scope="session")
def model_directory(small, tmp_path_factory):
    """The small model, as Hugging Face has it."""
    path = tmp_path_factory.mktemp("model") / "small"
    hf.save(small.params, small.shape, path)
    return str(path)


@contextlib.contextmanager
def running_trainers():
    """Makes and starts trainers of a config; shuts them down in the end."""
    running = []

    def start(config: config_lib.RunConfig, stand_by: bool = False) -> trainer.TrainerActor:
        made = trainer.create(config_lib.to_dict(config), workdir="unused")
        running.append(made)
        made.stand_by() if stand_by else made.start()
        return made

    try:
        yield start
    finally:
        for made in running:
            made.shutdown()


@pytest.fixture
def start_any():
    """Makes trainers of a config, and starts them or lets them stand by."""
    with running_trainers() as start:
        yield start


@pytest.fixture
def start_trainer(small, model_directory, monkeypatch):
    """Makes and starts trainers of the small model."""
    with running_trainers() as start:

        def make(**groups) -> trainer.TrainerActor:
            return start(small.config(model={"path": model_directory}, **{"steps": 10, **groups}))

        yield make


@pytest.fixture(scope="session")
def hybrid_config(small, model_directory):
    """Of a core of 2 x 2 devices with one hybrid worker; both split the tokens of rows over two devices."""
    made = small.config(
        trainer={"data": 2, "context": 2, "rows_per_micro_batch": 4, "row_buckets": (64,), "pack": False},
        model={"path": model_directory},
        optimizer=config_lib.OptimizerConfig(learning_rate=1e-3, eps=1e-6),
        elastic=config_lib.ElasticConfig(hybrid=0, late_min_seconds=120),
        steps=100,
    )
    rollout = dataclasses.replace(made.rollout, tensor_parallel=(1, 1))
    elastic = dataclasses.replace(made.elastic, hybrid=1)
    return dataclasses.replace(made, rollout=rollout, elastic=elastic)


@pytest.fixture(scope="session")
def start_core(hybrid_config, small):
    """Makes and starts trainers."""
    with running_trainers() as start:

        def make() -> trainer.TrainerActor:
            return start(hybrid_config)

        yield make


@pytest.fixture(scope="session")
def pair(start_core):
    """A core, and one that trains alone; tests step both."""
    return start_core(), start_core()
