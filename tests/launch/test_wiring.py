"""What the run is built from: settings reach the rooms that they are for."""

import asyncio
from typing import Any

import pytest

import wiring
from libra_jax import config, protocols


def test_the_clusters_deadlines_are_the_configs(tmp_path, monkeypatch):
    given: dict[str, Any] = {}

    def create(cluster: config.ClusterConfig, **deadlines: float) -> protocols.Cluster:
        given.update(deadlines)
        raise protocols.ConfigError("seen enough")

    monkeypatch.setattr(wiring.cluster, "create", create)
    run = config.RunConfig(
        telemetry=config.TelemetryConfig(console=False, tensorboard=False),
        deadlines=config.DeadlineConfig(cluster_start=7.0, shutdown=8.0),
    )
    with pytest.raises(protocols.ConfigError, match="seen enough"):
        asyncio.run(wiring.train(run, tmp_path))
    assert given == {"start_seconds": 7.0, "shutdown_seconds": 8.0}


def test_a_tokenizer_that_cannot_be_copied_beside_the_trained_weights_is_named(tmp_path):
    source, model = tmp_path / "source", tmp_path / "model"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (model / "tokenizer.json").mkdir(parents=True)
    run = config.RunConfig(task=config.TaskConfig(tokenizer=str(source)))
    with pytest.raises(
        protocols.LibraError, match=r"weights are in .*model, but .*tokenizer\.json could not be copied"
    ):
        wiring._add_tokenizer(run, model)


@pytest.mark.parametrize(
    ("platform", "environment"),
    [
        ("auto", {}),
        ("cpu", {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}),
        ("cuda", {"JAX_PLATFORMS": "cuda,cpu", "CUDA_VISIBLE_DEVICES": "0,1"}),
        ("tpu", {"JAX_PLATFORMS": "tpu,cpu"}),
    ],
)
def test_a_trainer_on_an_accelerator_keeps_the_cpu_backend_that_publication_goes_through(
    platform, environment, tmp_path
):
    run = config.RunConfig(trainer=config.TrainerConfig(platform=platform, fsdp=2))
    assert wiring.trainer_spec(run, tmp_path).environment == environment
