"""What the run is built from: settings reach the rooms that they are for."""

import asyncio
import contextlib
import math
import pathlib
from importlib import metadata
from typing import Any

import pytest

import wiring
from libra_jax import config, protocols
from libra_jax.coordinator import checkpoints


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


@pytest.mark.parametrize(
    ("rollout", "elastic", "trainer", "backend", "sentence"),
    [
        ({"tensor_parallel": (1, 1)}, {"hybrid": 1}, {}, "inprocess", r"elastic\.hybrid: .*cluster\.backend=ray"),
        ({"tensor_parallel": (1, 1)}, {"hybrid": 2}, {}, "ray", r"fewer than elastic\.floor = 1 of the 2 .*"),
        ({"tensor_parallel": (1, 1)}, {"hybrid": 1, "floor": 5}, {}, "ray", r"fewer than elastic\.floor = 5 of the 2"),
        ({"tensor_parallel": (1, 1)}, {"hybrid": 1}, {"platform": "cuda", "fsdp": 2}, "ray", r"2 devices.* has 1;"),
        (
            {"tensor_parallel": (1, 1)},
            {"hybrid": 1, "cores": (0, 0)},
            {},
            "ray",
            r"elastic\.cores: has 2 entries for 1",
        ),
        ({"tensor_parallel": (1, 1), "dtype": "float16"}, {"hybrid": 1}, {}, "ray", r"rollout\.dtype = float16 must"),
        ({}, {"hybrid": -1}, {}, "ray", r"elastic\.hybrid: must not be negative"),
        ({}, {"spare_devices": 1}, {"processes": 2, "data": 2}, "ray", r"elastic\.spare_devices: are one process's"),
        (
            {},
            {},
            {"processes": 2, "data": 2},
            "inprocess",
            r"trainer\.processes: 2 processes need cluster\.backend=ray",
        ),
    ],
)
def test_what_the_elastic_pool_cannot_be_is_refused_by_name(rollout, elastic, trainer, backend, sentence):
    def check() -> None:
        run = config.RunConfig(
            rollout=config.RolloutConfig(**rollout),
            elastic=config.ElasticConfig(**elastic),
            trainer=config.TrainerConfig(**{"platform": "cpu", **trainer}),
            cluster=config.ClusterConfig(backend=backend),
        )
        wiring.replica_specs(run, pathlib.Path())

    with pytest.raises(protocols.ConfigError, match=sentence):
        check()


def test_a_hybrid_workers_replica_is_one_of_the_trainers_on_its_instances_devices(tmp_path):
    run = config.RunConfig(
        rollout=config.RolloutConfig(tensor_parallel=(1, 2)),
        elastic=config.ElasticConfig(hybrid=1),
        trainer=config.TrainerConfig(platform="cuda", data=2, fsdp=2),
        cluster=config.ClusterConfig(backend="ray"),
    )
    (spec,) = wiring.replica_specs(run, tmp_path)
    assert spec.arguments["name"] == "rollout-1"
    assert spec.environment["CUDA_VISIBLE_DEVICES"] == "5,6"
    assert spec.gpus == 0  # its instance has leased them


@pytest.mark.parametrize(
    ("platform", "shares", "gpus"),
    [
        ("cpu", [{"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}] * 2, 0),
        ("cuda", [{"JAX_PLATFORMS": "cuda,cpu", "CUDA_VISIBLE_DEVICES": devices} for devices in ("0,1", "2,3")], 2),
    ],
)
def test_each_process_of_a_trainer_has_its_own_share_of_the_devices(platform, shares, gpus, tmp_path):
    mesh = config.TrainerConfig(platform=platform, fsdp=4, processes=2)
    run = config.RunConfig(trainer=mesh, cluster=config.ClusterConfig(backend="ray"))
    wiring._check_processes(run)
    specs = [wiring.trainer_processes(run, tmp_path)(process, 2) for process in range(2)]
    assert [spec.environment for spec in specs] == shares
    assert [spec.arguments["process"] for spec in specs] == [0, 1]
    assert {spec.gpus for spec in specs} == {gpus}


def test_a_trainer_that_is_to_take_over_has_its_own_mesh_processes_and_devices(tmp_path):
    run = config.RunConfig(
        trainer=config.TrainerConfig(platform="cuda", fsdp=2), cluster=config.ClusterConfig(backend="ray")
    )
    make = wiring.trainer_processes(run, tmp_path, protocols.MeshSizes(2, 2, 1))
    spec = make(3, 4)
    assert spec.environment["CUDA_VISIBLE_DEVICES"] == "3"
    mesh = spec.arguments["config"]["trainer"]
    assert (mesh["data"], mesh["fsdp"], mesh["tensor"], mesh["processes"]) == (2, 2, 1, 4)
    with pytest.raises(protocols.ConfigError, match="the mesh's 4 devices do not divide over 3 processes"):
        make(0, 3)


@pytest.mark.parametrize(
    ("trainer", "rollout", "sentence"),
    [
        ({"platform": "auto"}, {}, r"trainer\.platform: auto leaves all .* to each of the 2 processes"),
        ({"platform": "cuda"}, {"transport": "nccl"}, r"rollout\.transport: 'nccl' serves a trainer of one process"),
        ({"platform": "cpu", "cores": (0,)}, {}, r"trainer\.cores: pins one process"),
    ],
)
def test_what_several_trainer_processes_cannot_have_is_refused_by_name(trainer, rollout, sentence):
    run = config.RunConfig(
        trainer=config.TrainerConfig(fsdp=2, processes=2, **trainer),
        rollout=config.RolloutConfig(**rollout),
        cluster=config.ClusterConfig(backend="ray"),
    )
    with pytest.raises(protocols.ConfigError, match=sentence):
        wiring._check_processes(run)


@pytest.mark.parametrize(
    ("platform", "engine", "gpus", "refused"),
    [
        ("auto", "vllm", 8, True),
        ("auto", "vllm", 1, False),  # shared because there is no other
        ("auto", "vllm", 0, False),
        ("auto", "fake", 8, False),
        ("cuda", "vllm", 8, False),
        ("cpu", "vllm", 8, False),
    ],
)
def test_auto_is_refused_where_trainer_and_engines_would_crowd_one_of_several_gpus(
    platform, engine, gpus, refused, monkeypatch
):
    monkeypatch.setattr(wiring, "gpus_found", lambda: gpus)
    run = config.RunConfig(
        trainer=config.TrainerConfig(platform=platform),
        rollout=config.RolloutConfig(engine=engine, tensor_parallel=(1, 1)),
    )
    wiring.validate(run, need_weights=False)
    message = r"first of 8 GPUs; use --config\.trainer\.platform=cuda.*3 in all"
    with pytest.raises(protocols.ConfigError, match=message) if refused else contextlib.nullcontext():
        wiring.validate(run, need_weights=True)


@pytest.mark.parametrize(
    ("plugins", "variables", "found"),
    [
        (["xla_cuda13"], {}, 4),
        (["xla_cuda13"], {"CUDA_VISIBLE_DEVICES": "2,3"}, 2),
        (["xla_cuda13"], {"CUDA_VISIBLE_DEVICES": ""}, 0),
        (["xla_cuda13"], {"JAX_PLATFORMS": "cpu"}, 0),
        (["xla_cuda13"], {"JAX_PLATFORMS": "cuda,cpu"}, 4),
        (["libtpu"], {}, 0),
        ([], {}, 0),  # JAX for CPU on a machine with GPUs
    ],
)
def test_gpus_count_where_jax_would_use_them(plugins, variables, found, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    points = [metadata.EntryPoint(name, "module", "jax_plugins") for name in plugins]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points)
    devices = [pathlib.Path(f"/dev/nvidia{ordinal}") for ordinal in range(4)]
    monkeypatch.setattr(pathlib.Path, "glob", lambda self, pattern: iter(devices))
    assert wiring.gpus_found() == found


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("optimizer.learning_rate", math.nan, "must be a finite number, not nan"),
        ("optimizer.learning_rate", math.inf, "must be a finite number, not inf"),
        ("optimizer.learning_rate", -0.1, "must not be negative, not -0.1"),
        ("warm_start.learning_rate", math.inf, "must be a finite number, not inf"),
        ("warm_start.learning_rate", -0.1, "must not be negative, not -0.1"),
        ("optimizer.beta1", 1.0, "must lie in [0, 1), not 1.0"),
        ("optimizer.beta2", math.nan, "must lie in [0, 1), not nan"),
        ("optimizer.eps", 0.0, "must be positive, not 0.0"),
        ("optimizer.weight_decay", -0.1, "must not be negative, not -0.1"),
        ("optimizer.weight_decay", math.inf, "must be a finite number, not inf"),
        ("optimizer.clip_norm", math.nan, "must be a finite number, not nan"),
        ("algorithm.entropy_coefficient", math.nan, "must be a finite number, not nan"),
        ("algorithm.kl_coefficient", math.inf, "must be a finite number, not inf"),
        ("algorithm.sequence_length_constant", math.inf, "must be a finite number, not inf"),
        ("rollout.temperature", math.inf, "must be a finite number, not inf"),
        ("evaluation.temperature", math.inf, "must be a finite number, not inf"),
        ("rollout.gpu_memory_fraction", 1.5, "must lie in (0, 1], not 1.5"),
        ("coordinator.max_replacements", math.nan, "must be a number, not nan"),
        ("name", "", "must not be empty: it names the default workdir"),
        ("name", "a/b", "must hold no '/', as it names the default workdir, not 'a/b'"),
    ],
)
def test_a_value_that_no_run_could_use_is_refused_naming_its_field(field, value, problem):
    for part in reversed(field.split(".")):
        value = {part: value}
    with pytest.raises(protocols.ConfigError) as caught:
        config.parse(config.RunConfig, value)
    assert str(caught.value) == f"config.{field}: {problem}"


def test_a_context_longer_than_the_models_positions_is_refused():
    run = config.RunConfig(
        rollout=config.RolloutConfig(max_context=4096), trainer=config.TrainerConfig(row_tokens=4096)
    )
    with pytest.raises(protocols.ConfigError, match=r"rollout\.max_context: 4096 exceeds the model's 2048 positions"):
        wiring.validate(run, need_weights=False)


def learnt_in(workdir: pathlib.Path, policy: str) -> config.RunConfig:
    """A run that starts with what another one's scheduler had learnt at its third step."""
    first = wiring.scheduler(config.RunConfig(scheduler=config.SchedulerConfig(policy=policy)))
    first.on_arrival(protocols.RequestInfo("0/0", "0", 0, 10, dispatch_version=0), 0.0)
    first.on_finish("0/0", 700, 1.0)
    written = checkpoints.Checkpoints(workdir, keep=1)
    written.begin(3, {"scheduler": dict(first.snapshot())})
    written.commit(3)
    return config.RunConfig(scheduler=config.SchedulerConfig(learnt_from=(str(workdir),)))


def test_a_run_starts_with_what_the_schedulers_of_others_had_learnt(tmp_path):
    snapshot = wiring.scheduler(learnt_in(tmp_path, "cmlfq")).snapshot()
    assert [700] in [samples for _, _, samples, *_ in snapshot["by_suffix"]["nodes"]]


def test_a_workdir_to_learn_from_must_have_something_to_teach(tmp_path):
    with pytest.raises(protocols.ConfigError, match=r"learnt_from: the scheduler of .* learns nothing"):
        wiring.scheduler(learnt_in(tmp_path, "sticky"))
    run = config.RunConfig(scheduler=config.SchedulerConfig(learnt_from=("runs/none",)))
    with pytest.raises(protocols.ConfigError, match=r"learnt_from: runs/none holds no checkpoint"):
        wiring.scheduler(run)
