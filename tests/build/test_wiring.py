"""What the run is built from: settings reach the rooms that they are for."""

import asyncio
import json
import pathlib
import shutil
from typing import Any

import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import dry_run, preflight, wiring, worker_specs
from libra_jax.cluster import granted, hosts, resolved_run
from libra_jax.coordinator import checkpoints, fencing, parts
from libra_jax.coordinator import run as coordinator
from libra_jax.models import config as model_config
from libra_jax.rewards import scoring
from libra_jax.rollouts import rollouts
from libra_jax.telemetry import files
from libra_jax.tools import toolkit


def resolved(run):
    return resolved_run.resolve(run, need_weights=False)


def test_the_clusters_deadlines_and_hosts_are_the_configs_and_what_it_grants_is_kept(tmp_path, monkeypatch):
    given: dict[str, Any] = {}

    def create(cluster: config_lib.ClusterConfig, **settings: Any) -> protocols.Cluster:
        given.update(settings)
        raise protocols.ConfigError("seen enough")

    monkeypatch.setattr(wiring.cluster, "create", create)
    run = config_lib.RunConfig(
        telemetry=config_lib.TelemetryConfig(console=False, tensorboard=False),
        deadlines=config_lib.DeadlineConfig(cluster_start=7.0, shutdown=8.0),
        cluster=config_lib.ClusterConfig(backend="ray", accelerators_per_host=1),
        trainer=config_lib.TrainerConfig(platform="cuda"),
    )
    with pytest.raises(protocols.ConfigError, match="seen enough"):
        asyncio.run(wiring.train(resolved(run), tmp_path, toolkit.Toolkit(run.tools, run.sandbox)))
    told = given.pop("on_hosts")
    layout = hosts.layout(run)
    assert given == {"start_seconds": 7.0, "shutdown_seconds": 8.0, "layout": layout, "platform": "cuda"}
    nodes = [granted.GrantedNode(f"id-{name}", name, f"10.0.0.{name}", accelerators=("6",)) for name in ("1", "2")]
    told(granted.Granted(layout, tuple(nodes), "GPU"))
    kept = json.loads((tmp_path / "hosts.json").read_text())
    assert [(host["node"], host["role"], host["accelerators"]) for host in kept] == [
        ("1", "training", ["6"]),
        ("2", "rollout", ["6"]),
    ]


def test_hosts_are_not_written_down_by_a_run_that_has_been_taken_over(tmp_path, monkeypatch):
    told: list[Any] = []

    def create(cluster: config_lib.ClusterConfig, **settings: Any) -> protocols.Cluster:
        told.append(settings["on_hosts"])
        raise protocols.ConfigError("seen enough")

    monkeypatch.setattr(wiring.cluster, "create", create)
    run = config_lib.RunConfig(telemetry=config_lib.TelemetryConfig(console=False, tensorboard=False))

    def take_fencing_token() -> fencing.Token:
        return fencing.take(tmp_path, lambda: checkpoints.newest_step(tmp_path))

    tools = toolkit.Toolkit(run.tools, run.sandbox)
    with pytest.raises(protocols.ConfigError, match="seen enough"):
        asyncio.run(wiring.train(resolved(run), tmp_path, tools, take_fencing_token=take_fencing_token))
    take_fencing_token()
    layout = hosts.layout(
        config_lib.RunConfig(cluster=config_lib.ClusterConfig(backend="ray", accelerators_per_host=1))
    )
    nodes = tuple(granted.GrantedNode(f"id-{name}", name, f"10.0.0.{name}", accelerators=("0",)) for name in ("1", "2"))
    told[0](granted.Granted(layout, nodes, "CPU"))
    assert not (tmp_path / "hosts.json").exists()


@pytest.mark.parametrize("field", ["task", "scheduler"])
def test_a_run_that_cannot_be_made_takes_no_token_and_so_ends_no_other(tmp_path, field):
    broken = {
        "task": {"task": config_lib.TaskConfig(source="no_such_module:source")},
        "scheduler": {"scheduler": config_lib.SchedulerConfig(learnt_from=(str(tmp_path / "nothing"),))},
    }[field]
    run = config_lib.RunConfig(telemetry=config_lib.TelemetryConfig(console=False, tensorboard=False), **broken)
    taken: list[int] = []
    with pytest.raises(protocols.ConfigError):
        asyncio.run(
            wiring.train(
                resolved(run),
                tmp_path,
                toolkit.Toolkit(run.tools, run.sandbox),
                take_fencing_token=lambda: taken.append(1),
            )
        )
    assert (taken, list(tmp_path.iterdir())) == ([], [])


def test_the_runs_scorer_is_made_of_the_configs_functions_and_weights(tmp_path, monkeypatch):
    scores: list[scoring.Score] = []

    class Scoring:
        def __init__(
            self, run: parts.CoordinatorContext, specs: parts.WorkerSpecs, agent: rollouts.Agent, *_: Any
        ) -> None:
            self.reward = agent.reward

        async def run(self, at_signal: Any) -> coordinator.RunSummary:
            assert self.reward is not None
            transcript = scoring.Transcript("five!", environment_reward=1.0)
            scores.append(await self.reward(protocols.Task("t", {}), transcript))
            return coordinator.RunSummary()

    monkeypatch.setattr(wiring.coordinator, "Coordinator", Scoring)
    length = {"factory": "reward_functions:counting", "weight": 0.1, "arguments": {"factor": 2.0}}
    run = config_lib.RunConfig(
        reward=config_lib.RewardConfig(functions={"length": length}, environment_weight=3.0),
        telemetry=config_lib.TelemetryConfig(console=False, tensorboard=False, report=False),
    )
    asyncio.run(wiring.train(resolved(run), tmp_path, toolkit.Toolkit(run.tools, run.sandbox)))
    assert [score.reward for score in scores] == [pytest.approx(4.0)]


def test_a_run_writes_as_many_samples_as_the_config_says(tmp_path, monkeypatch):
    made: list[Any] = []

    class Reading:
        def __init__(self, run: parts.CoordinatorContext, *_: Any) -> None:
            assert run.samples is not None
            rollouts = [protocols.Trajectory(f"p/{n}", "p", reward=0.0) for n in range(9)]
            made.append(run.samples.of_evaluation(1, rollouts))

        async def run(self, at_signal: Any) -> coordinator.RunSummary:
            return coordinator.RunSummary()

    monkeypatch.setattr(wiring.coordinator, "Coordinator", Reading)
    run = config_lib.RunConfig(
        telemetry=config_lib.TelemetryConfig(console=False, tensorboard=False, report=False, samples=5),
    )
    asyncio.run(wiring.train(resolved(run), tmp_path, toolkit.Toolkit(run.tools, run.sandbox)))
    assert [len(records) for records in made] == [5]


def test_a_tokenizer_that_cannot_be_copied_beside_the_trained_weights_is_named(tmp_path):
    source, model = tmp_path / "source", tmp_path / "model"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (model / "tokenizer.json").mkdir(parents=True)
    run = config_lib.RunConfig(task=config_lib.TaskConfig(tokenizer=str(source)))
    with pytest.raises(
        protocols.LibraError, match=r"weights are in .*model, but .*tokenizer\.json could not be copied"
    ):
        wiring.add_files(run, model)


def test_an_export_keeps_the_generation_config_of_the_model_it_came_from(tmp_path):
    source, model = tmp_path / "source", tmp_path / "model"
    for folder in (source, model):
        folder.mkdir()
    (source / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (source / "model.safetensors").write_text("weights")
    for tokenizer in ("", "character"):
        run = config_lib.RunConfig(
            model=config_lib.ModelConfig(path=str(source)), task=config_lib.TaskConfig(tokenizer=tokenizer)
        )
        wiring.add_files(run, model)
        assert [file.name for file in model.iterdir()] == ["generation_config.json"]
        assert (model / "generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()
        (model / "generation_config.json").unlink()


def test_an_export_lists_the_end_tokens_of_a_model_without_generation_config(tmp_path):
    source, model = tmp_path / "source", tmp_path / "model"
    for folder in (source, model):
        folder.mkdir()
    (source / "config.json").write_text('{"eos_token_id": [1, 2]}')
    run = config_lib.RunConfig(model=config_lib.ModelConfig(path=str(source)))
    wiring.add_files(run, model)
    assert json.loads((model / "generation_config.json").read_text()) == {"eos_token_id": [1, 2]}


ON_CPUS = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


@pytest.mark.parametrize(
    ("platform", "environment"),
    [
        ("auto", {}),
        ("cpu", ON_CPUS),
        ("cuda", {"JAX_PLATFORMS": "cuda,cpu", "CUDA_VISIBLE_DEVICES": "0,1", "XLA_CLIENT_MEM_FRACTION": "0.8"}),
        ("tpu", {"JAX_PLATFORMS": "tpu,cpu"}),
    ],
)
def test_a_trainer_on_an_accelerator_keeps_the_cpu_backend_that_publication_goes_through(
    platform, environment, tmp_path
):
    run = config_lib.RunConfig(trainer=config_lib.TrainerConfig(platform=platform, fsdp=2, memory_fraction=0.8))
    assert worker_specs.trainer_spec(resolved(run), tmp_path).environment == environment


def test_a_share_of_gpu_memory_that_the_user_set_is_left_alone(monkeypatch, tmp_path):
    # JAX refuses to start if its old and its new variable are both set.
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    run = config_lib.RunConfig(trainer=config_lib.TrainerConfig(platform="cuda"))
    assert "XLA_CLIENT_MEM_FRACTION" not in worker_specs.trainer_spec(resolved(run), tmp_path).environment


def test_a_hybrid_workers_replica_is_one_of_the_trainers_on_its_instances_devices(tmp_path):
    run = config_lib.RunConfig(
        rollout=config_lib.RolloutConfig(tensor_parallel=(1, 2)),
        elastic=config_lib.ElasticConfig(hybrid=1),
        trainer=config_lib.TrainerConfig(platform="cuda", data=2, fsdp=2),
        cluster=config_lib.ClusterConfig(backend="ray"),
    )
    (spec,) = worker_specs.training_side_specs(resolved(run), tmp_path)
    assert spec.arguments["name"] == "rollout-1"
    assert spec.environment["CUDA_VISIBLE_DEVICES"] == "5,6"
    assert "XLA_CLIENT_MEM_FRACTION" not in spec.environment  # it reserves nothing of what its engine needs
    assert spec.gpus == 0  # its instance has leased them


@pytest.mark.parametrize(
    ("platform", "shares", "gpus"),
    [
        ("cpu", [ON_CPUS] * 2, 0),
        (
            "cuda",
            [
                {"JAX_PLATFORMS": "cuda,cpu", "CUDA_VISIBLE_DEVICES": devices, "XLA_CLIENT_MEM_FRACTION": "0.9"}
                for devices in ("0,1", "2,3")
            ],
            2,
        ),
    ],
)
def test_each_process_of_a_trainer_has_its_own_share_of_the_devices(platform, shares, gpus, tmp_path):
    mesh = config_lib.TrainerConfig(platform=platform, fsdp=4, processes=2)
    run = config_lib.RunConfig(trainer=mesh, cluster=config_lib.ClusterConfig(backend="ray"))
    preflight._check_placement(resolved(run), here=False)
    specs = [worker_specs.trainer_processes(resolved(run), tmp_path)(process, 2) for process in range(2)]
    assert [spec.environment for spec in specs] == shares
    assert [spec.arguments["process"] for spec in specs] == [0, 1]
    assert {spec.gpus for spec in specs} == {gpus}


def test_a_trainer_that_is_to_take_over_has_its_own_mesh_processes_and_devices(tmp_path):
    run = config_lib.RunConfig(
        trainer=config_lib.TrainerConfig(platform="cuda", fsdp=2), cluster=config_lib.ClusterConfig(backend="ray")
    )
    make = worker_specs.trainer_processes(resolved(run), tmp_path, protocols.MeshSizes(2, 2, 1))
    spec = make(3, 4)
    assert spec.environment["CUDA_VISIBLE_DEVICES"] == "3"
    mesh = spec.arguments["config"]["trainer"]
    assert (mesh["data"], mesh["fsdp"], mesh["tensor"], mesh["processes"]) == (2, 2, 1, 4)
    with pytest.raises(protocols.ConfigError, match="the mesh's 4 devices do not divide over 3 processes"):
        make(0, 3)


@pytest.mark.parametrize(
    ("platform", "backend", "reach", "told"),
    [
        ("cpu", "ray", 5, "at most 5 devices; above 3, in other processes"),
        ("cpu", "inprocess", 3, "at most 3 devices in the trainer's process"),
        ("cuda", "ray", 2, "at most 2 devices in the trainer's process"),
        ("auto", "ray", 2, "at most 2 devices in the trainer's process"),
    ],
)
def test_plans_may_grow_the_trainer_beyond_its_process_where_others_find_devices_free(platform, backend, reach, told):
    run = config_lib.RunConfig(
        trainer=config_lib.TrainerConfig(platform=platform, data=2),
        rollout=config_lib.RolloutConfig(tensor_parallel=(1, 2, 4)),
        elastic=config_lib.ElasticConfig(hybrid=1, resize=True, spare_devices=int(platform == "cpu")),
        cluster=config_lib.ClusterConfig(backend=backend),
    )
    assert wiring.reach(run) == reach
    assert told in dry_run._elastic(run)[-1]


@pytest.mark.parametrize(("instances", "degrees"), [((2, 2), (1, 2, 4)), ((2, 2, 2, 2), (1, 2, 4, 8)), ((1,), (1, 2))])
def test_plans_have_no_instance_wider_than_what_the_cluster_grants_the_run_on_one_host(instances, degrees):
    """Of hosts of eight, of which the run takes two to train and so many as its instances have to roll out."""
    run = config_lib.RunConfig(
        trainer=config_lib.TrainerConfig(platform="cuda", data=2, rows_per_micro_batch=2),
        rollout=config_lib.RolloutConfig(tensor_parallel=instances),
        planner=config_lib.PlannerConfig(period=1, hardware="h100"),
        cluster=config_lib.ClusterConfig(backend="ray", accelerators_per_host=8),
    )
    made = wiring.global_planner(resolved_run.ResolvedRun(run, model_config.load_preset("Qwen3-1.7B")))
    assert made is not None
    assert made._setting.degrees == degrees


RECORDS = {"run": "aaaa", "counts": {}}


def learnt_in(workdir: pathlib.Path, policy: str) -> config_lib.RunConfig:
    """A run that starts with what another one's scheduler had learnt at its third step."""
    first = wiring.scheduler(config_lib.RunConfig(scheduler=config_lib.SchedulerConfig(policy=policy)))
    first.on_arrival(protocols.RequestInfo("0/0", "0", 0, 10, dispatch_version=0), 0.0)
    first.on_finish("0/0", 700, 1.0)
    written = checkpoints.Checkpoints(workdir, keep=1)
    written.write(3, checkpoints.encode({"scheduler": dict(first.snapshot()), "records": RECORDS})).mkdir()
    written.commit(3)
    return config_lib.RunConfig(scheduler=config_lib.SchedulerConfig(learnt_from=(str(workdir),)))


def test_a_run_starts_with_what_the_schedulers_of_others_had_learnt(tmp_path):
    snapshot = wiring.scheduler(learnt_in(tmp_path, "cmlfq")).snapshot()
    assert [700] in [samples for _, _, samples, *_ in snapshot["by_suffix"]["nodes"]]


def test_nothing_is_learnt_from_a_checkpoint_of_another_run(tmp_path):
    run = learnt_in(tmp_path, "cmlfq")
    for name in ("aaaa", "bbbb"):
        (tmp_path / "status.json").write_bytes(files.json_line({"records": {"run": name, "counts": {}}}))
        if name == "aaaa":
            wiring.scheduler(run)
            continue
        with pytest.raises(protocols.DataError, match="it is of the run aaaa instead of bbbb"):
            wiring.scheduler(run)
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").symlink_to("checkpoints")
    with pytest.raises(protocols.DataError, match=r"checkpoints cannot be listed \(Too many levels"):
        wiring.scheduler(run)


def test_a_workdir_to_learn_from_must_have_something_to_teach(tmp_path):
    with pytest.raises(protocols.ConfigError, match=r"learnt_from: the scheduler of .* learns nothing"):
        wiring.scheduler(learnt_in(tmp_path, "sticky"))
    run = config_lib.RunConfig(scheduler=config_lib.SchedulerConfig(learnt_from=("runs/none",)))
    with pytest.raises(protocols.ConfigError, match=r"learnt_from: runs/none holds no checkpoint"):
        wiring.scheduler(run)


def test_each_host_of_a_run_laid_out_over_several_has_a_relay_whose_links_leave_time_to_ask_again():
    run = config_lib.RunConfig(
        rollout=config_lib.RolloutConfig(tensor_parallel=(1, 1)),
        cluster=config_lib.ClusterConfig(backend="ray", accelerators_per_host=1),
        deadlines=config_lib.DeadlineConfig(weight_sync=100.0),
    )
    specs = worker_specs.relay_specs(resolved(run))
    assert {host: (spec.name, spec.host, spec.cpus) for host, spec in specs.items()} == {
        host: (f"relay-{host}", host, 0.0) for host in range(3)
    }
    assert {spec.arguments["link_seconds"] for spec in specs.values()} == {50.0}
    assert worker_specs.relay_specs(resolved(config_lib.RunConfig())) == {}
