"""Where the rooms meet: checks a config, places it on devices, and builds the run from it."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import functools
import json
import os
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import placement

from libra_jax import config as libra_config
from libra_jax import protocols
from libra_jax.agents import factories, tokenizers
from libra_jax.cluster import create as cluster
from libra_jax.coordinator import checkpoints, process_set, signals
from libra_jax.coordinator import run as coordinator
from libra_jax.models import config as model_config
from libra_jax.planning import costs, planner, plans, profiles
from libra_jax.rollout import logprob_contract
from libra_jax.scheduling import costs as scheduling_costs
from libra_jax.scheduling import registry as schedulers
from libra_jax.telemetry import metrics, report, resume
from libra_jax.telemetry import recorder as telemetry

TRAINER = "libra_jax.training.trainer:create"
REPLICA = "libra_jax.training.replica:create"

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM 0.32 serves on CPU (vllm/v1/attention/backends/cpu_attn.py): others die at their first token."""


def policy_shape(config: libra_config.RunConfig, *, need_weights: bool) -> model_config.TransformerConfig:
    """The policy's shape: from `model.path` where it is set and there, else from `model.preset`."""
    path = config.model.path
    if path and (need_weights or Path(path).exists()):
        return model_config.read_directory(path)
    return model_config.load_preset(config.model.preset)


def validate(config: libra_config.RunConfig, *, need_weights: bool) -> None:
    """Checks what can be checked before any worker starts.

    Raises:
      LibraError: with one sentence naming the field or file.
    """
    shape = policy_shape(config, need_weights=need_weights)
    logprob_contract.check(config.rollout, config.algorithm)
    if config.cluster.backend == "inprocess":  # elsewhere the cores are those of another host
        libra_config.check_cores(config.trainer.cores, "trainer.cores")
        libra_config.check_cores(config.rollout.cores, "rollout.cores")
    model_config.check_mesh(shape, {"fsdp": config.trainer.fsdp, "tensor": config.trainer.tensor})
    for degree in config.rollout.tensor_parallel:
        model_config.check_tensor_parallel(shape, degree)
    if config.rollout.engine == "vllm" and config.trainer.platform == "cpu" and shape.head_dim not in CPU_HEAD_SIZES:
        raise protocols.ConfigError(
            f"config.model: vLLM's CPU attention has no kernel for the model's head_dim {shape.head_dim}; it has "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}"
        )
    if need_weights:  # a dry run may be on another machine
        _check_sharing(config)
    _check_processes(config)
    replica_specs(config, Path())
    _check_attention(config, shape)
    if config.rollout.max_context > shape.max_position_embeddings:
        raise protocols.ConfigError(
            f"config.rollout.max_context: {config.rollout.max_context} exceeds the model's "
            f"{shape.max_position_embeddings} positions; lower it or use another model"
        )
    if need_weights and config.model.path and not any(Path(config.model.path).glob("*.safetensors")):
        raise protocols.DataError(f"{config.model.path}: holds no *.safetensors; give a directory with the weights")
    if need_weights or not config.task.path or Path(config.task.path).exists():
        source = factories.task_source(config.task, config.seed)
        with factories.named(config.task.source, "task.source", "task(0)"):
            source.task(0)
    scheduler(config)
    global_planner(config, shape)
    factories.environment_factory(config.task)
    factories.reward(config.task)
    _check_character_tokenizer(config, shape)
    if need_weights:
        tokenizer = tokenizers.create(config.task, config.model.path)
        if tokenizer.vocab_size > shape.vocab_size:
            raise protocols.ConfigError(
                f"config.task.tokenizer: its {tokenizer.vocab_size} tokens do not fit the model's vocabulary "
                f"of {shape.vocab_size}; choose the tokenizer the model was made with"
            )


def _check_character_tokenizer(config: libra_config.RunConfig, shape: model_config.TransformerConfig) -> None:
    """It has a character for each of its tokens and no more: of a larger vocabulary, a model could sample the rest."""
    size = tokenizers.CharacterTokenizer.vocab_size
    if config.task.tokenizer == "character" and shape.vocab_size != size:
        raise protocols.ConfigError(
            f"config.task.tokenizer: 'character' has {size} tokens and the model's vocabulary {shape.vocab_size}; give "
            "--config.task.tokenizer= (empty: the model's own) or a Hugging Face directory"
        )


def _check_sharing(config: libra_config.RunConfig) -> None:
    """`auto` leaves every worker all of the machine's GPUs, so trainer and engines would all be on the first one."""
    found = gpus_found()
    if config.trainer.platform == "auto" and config.rollout.engine == "vllm" and found > 1:
        total = placement.partition(config).total
        raise protocols.ConfigError(
            f"config.trainer.platform: auto would put the trainer and every engine on the first of {found} GPUs; use "
            f"--config.trainer.platform=cuda, where each has its own ({total} in all), or cpu"
        )


def _check_processes(config: libra_config.RunConfig) -> None:
    """What a trainer of several processes needs beyond devices that divide (`TrainerConfig` says that)."""
    trainer = config.trainer
    if trainer.processes == 1:
        return
    if trainer.platform == "auto":
        raise protocols.ConfigError(
            f"config.trainer.platform: auto leaves all of the machine's devices to each of the {trainer.processes} "
            "processes of trainer.processes; name the platform: cpu, cuda or tpu"
        )
    if config.rollout.transport != "memfd":
        raise protocols.ConfigError(
            f"config.rollout.transport: {config.rollout.transport!r} serves a trainer of one process, and "
            f"trainer.processes is {trainer.processes}; use 'memfd'"
        )
    if trainer.cores:
        raise protocols.ConfigError(
            f"config.trainer.cores: pins one process, and trainer.processes is {trainer.processes}; leave it empty"
        )


def gpus_found() -> int:
    """NVIDIA GPUs that JAX would use of its own accord; found without JAX, which must not touch devices here."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    plugins = {plugin.name for plugin in metadata.entry_points(group="jax_plugins")}
    if (platforms and "cuda" not in platforms.split(",")) or not any("cuda" in name for name in plugins):
        return 0
    there = len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return there if visible is None else min(there, len([name for name in visible.split(",") if name.strip()]))


def _check_attention(config: libra_config.RunConfig, shape: model_config.TransformerConfig) -> None:
    """What the trainer would find out when it compiles for a row length, where the config says its platform."""
    platform = {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}.get(config.trainer.platform)
    if platform is None:
        return
    for tokens in (config.trainer.row_tokens, *config.trainer.row_buckets):
        model_config.choose_attention(
            config.model.attention, platform, tokens, shape.head_dim, config.model.compute_dtype
        )


def open_workdir(config: libra_config.RunConfig, workdir: str | None) -> Path:
    """Makes the workdir and writes `config.json`; refuses one that belongs to another config.

    How many steps a run takes may change from one start to the next, but not to fewer than it has taken.

    Raises:
      ConfigError: the workdir's config differs; the fields are named.
    """
    path = Path(workdir or f"runs/{config.name}-{libra_config.digest(config)}")
    try:
        return _open(path, config)
    except OSError as error:
        raise protocols.ConfigError(
            f"--workdir={path} cannot be used ({error.strerror or error}); choose a folder that can be written"
        ) from error


def _open(path: Path, config: libra_config.RunConfig) -> Path:
    existed = path.exists()
    if existed:  # locked before it is read; a refused config leaves no new folder behind
        _lock(path)
    resolved = json.loads(json.dumps(libra_config.to_dict(config), default=list))
    stored_file = path / "config.json"
    if stored_file.exists():
        stored = _stored(stored_file)
        _check_same_run(path, stored, resolved)
        if stored == resolved:
            return path
    if not existed:
        path.mkdir(parents=True, exist_ok=True)
        _lock(path)
    partial = stored_file.with_suffix(".partial")
    partial.write_text(json.dumps(resolved, indent=2))
    partial.rename(stored_file)
    return path


def _stored(file: Path) -> dict[str, Any]:
    try:
        stored = json.loads(file.read_text())
        if isinstance(stored, dict) and {"task", "rollout"} <= stored.keys():  # any run's; not a model's config.json
            return stored
        problem = f"it holds {stored!r:.40}"
    except ValueError as error:
        problem = str(error)
    raise protocols.ConfigError(
        f"--workdir={file.parent}: its {file.name} is not the settings of a run ({problem}); put back the file as the "
        "run wrote it, or use another workdir"
    )


def _check_same_run(path: Path, stored: dict[str, Any], resolved: dict[str, Any]) -> None:
    steps, taken = resolved["steps"], checkpoints.newest_step(path)
    differing = _differences({**stored, "steps": steps}, resolved)
    if differing:
        raise protocols.ConfigError(
            f"--workdir={path} belongs to another config: {'; '.join(differing)}. "
            "Use another workdir, or the old settings"
        )
    if not resolved["checkpoint"]["every"] and taken < 1:
        recorded = max(metrics.read(path / metrics.METRICS_FILE), default=0)
        if recorded > 0:
            raise protocols.ConfigError(
                f"--workdir={path} holds {recorded} steps of a run that saves nothing (config.checkpoint.every is 0): "
                "it cannot go on, and a new one would take its place; use another --workdir, or move that one away"
            )
    if steps < taken:
        raise protocols.ConfigError(
            f"config.steps: {steps} is fewer than the {taken} steps that the run in {path} has taken; give more to "
            "go on, or use another --workdir"
        )


def _lock(workdir: Path) -> None:
    """Holds the workdir for as long as this process lives: two runs in it would cut each other's records back."""
    descriptor = os.open(workdir / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise protocols.ConfigError(
            f"--workdir={workdir} is in use by a run that has not ended; wait for it, or use another workdir"
        ) from None


def _differences(stored: Any, resolved: Any, name: str = "config") -> list[str]:
    if not (isinstance(stored, dict) and isinstance(resolved, dict)):
        return [] if stored == resolved else [f"{name} is {stored!r} there and {resolved!r} here"]
    keys = dict.fromkeys([*stored, *resolved])
    return [sentence for key in keys for sentence in _differences(stored.get(key), resolved.get(key), f"{name}.{key}")]


def trainer_spec(config: libra_config.RunConfig, workdir: Path, process: int = 0) -> protocols.ActorSpec:
    """The trainer actor, or one process of it, on the devices that `trainer.platform` names.

    JAX trains on the first platform of JAX_PLATFORMS; its CPU backend is where weights go on their way to the engines.

    Args:
      config: the run's configuration; with another mesh in it, that of a trainer that is to take over.
      workdir: the run's directory.
      process: which of `trainer.processes`; each has the next equal share of the devices.
    """
    whole = placement.partition(config).trainer
    each = len(whole) // config.trainer.processes
    devices = whole[process * each : (process + 1) * each]
    platform = config.trainer.platform
    environment = {
        "auto": {},
        "cpu": {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(len(devices) + _spare(config))},
        "cuda": {"JAX_PLATFORMS": "cuda,cpu", "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))},
        "tpu": {"JAX_PLATFORMS": "tpu,cpu"},
    }[platform]
    return protocols.ActorSpec(
        name="trainer",
        factory=TRAINER,
        arguments={"config": libra_config.to_dict(config), "workdir": str(workdir.resolve()), "process": process},
        gpus=len(devices) if platform == "cuda" else 0,
        environment=environment,
        devices=devices,
    )


def _spare(config: libra_config.RunConfig) -> int:
    """Devices that a trainer of one process holds for a larger mesh; several hold those of their mesh alone."""
    return config.elastic.spare_devices if config.trainer.processes == 1 else 0


def trainer_processes(
    config: libra_config.RunConfig, workdir: Path, sizes: protocols.MeshSizes | None = None
) -> process_set.MakeProcess:
    """How the processes of the run's trainer are made, or of one on another mesh that is to take over.

    Args:
      config: the run's configuration.
      workdir: the run's directory.
      sizes: of the mesh; None is the config's.
    """
    mesh = dataclasses.asdict(sizes) if sizes is not None else {}

    def make(process: int, processes: int) -> protocols.ActorSpec:
        trainer = dataclasses.replace(config.trainer, **mesh, processes=processes)
        return trainer_spec(dataclasses.replace(config, trainer=trainer), workdir, process)

    return make


def replica_specs(config: libra_config.RunConfig, workdir: Path) -> list[protocols.ActorSpec]:
    """The training side of each hybrid worker, on its instance's devices, which the instance has leased already.

    Raises:
      ConfigError: a replica's mesh, the trainer's without its replicas, has more devices than the instance.
    """
    count, trainer = config.elastic.hybrid, config.trainer
    if config.elastic.resize and not config.planner.period:
        raise protocols.ConfigError(
            "config.elastic.resize: plans change the mesh, and there are none; set planner.period"
        )
    if config.elastic.spare_devices and trainer.platform != "cpu":
        raise protocols.ConfigError(
            f"config.elastic.spare_devices: on {trainer.platform} a trainer's process holds its mesh's devices alone; "
            "set it to 0, and a larger mesh is in other processes (cluster.backend=ray)"
        )
    if not count:
        return []
    if trainer.platform not in ("cpu", "cuda") or config.cluster.address:
        raise protocols.ConfigError(
            "config.elastic.hybrid: hybrid workers are on the trainer's host, with trainer.platform cpu or cuda and an "
            "empty cluster.address"
        )
    if config.cluster.backend != "ray":
        raise protocols.ConfigError(
            "config.elastic.hybrid: a replica is a JAX process of its own; hybrid workers need "
            "--config.cluster.backend=ray"
        )
    needed, specs = trainer.fsdp * trainer.tensor, []
    instances = list(enumerate(placement.partition(config).instances))
    for place, (number, devices) in enumerate(instances[-count:]):
        on_gpu = trainer.platform == "cuda"
        if on_gpu and needed > len(devices):
            raise protocols.ConfigError(
                f"config.elastic.hybrid: a replica is one of the trainer's (fsdp {trainer.fsdp} x tensor "
                f"{trainer.tensor}: {needed} devices), and hybrid instance {number} has {len(devices)}; make it wider"
            )
        environment = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(needed)}
        if on_gpu:
            visible = ",".join(map(str, devices[:needed]))
            # What the engine needs again when it wakes must go back to the device when it is freed.
            allocator = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            environment = {"JAX_PLATFORMS": "cuda,cpu", "CUDA_VISIBLE_DEVICES": visible, **allocator}
        arguments = {
            "config": libra_config.to_dict(config),
            "workdir": str(workdir.resolve()),
            "name": placement.instance_name(number),
            "cores": config.elastic.cores[place : place + 1],
        }
        specs.append(protocols.ActorSpec(f"replica-{number}", REPLICA, arguments, environment=environment))
    return specs


def scheduler(config: libra_config.RunConfig) -> protocols.Scheduler:
    """The run's scheduler, with the costs of its engines and the degrees of its layout.

    Raises:
      ConfigError: the policy is for simulations only, its buckets do not fit the layout, or there is nothing to learn
        where `scheduler.learnt_from` says.
    """
    made = schedulers.create(
        config.scheduler,
        costs=scheduling_costs.LinearCosts(config.scheduler.costs, transfers=config.rollout.kv_transfer != "none"),
        seed=config.seed,
        degrees=config.rollout.tensor_parallel,
    )
    checkpoints.teach(made, config.scheduler.learnt_from)
    return made


def global_planner(
    config: libra_config.RunConfig, shape: model_config.TransformerConfig
) -> planner.GlobalPlanner | None:
    """The run's planner, if `planner.period` asks for one.

    It lays out the devices of the trainer and of the instances that are not hybrid; without `elastic.resize` the
    trainer's mesh stays.

    Raises:
      ConfigError: there is no such hardware, or an instance has a degree that plans may not use.
    """
    if not config.planner.period:
        return None
    mesh = config.trainer.data, config.trainer.fsdp, config.trainer.tensor
    model = costs.of_hardware(config.planner.hardware, shape, "planner.hardware")
    elastic, rollout = config.elastic, config.rollout
    hybrid = sum(rollout.tensor_parallel[len(rollout.tensor_parallel) - elastic.hybrid :])
    setting = planner.Setting.of_run(
        config,
        model,
        placement.partition(config).total - hybrid,
        mesh=None if elastic.resize else mesh,
        reach=config.trainer.devices + elastic.spare_devices if elastic.resize else None,
    )
    planner.check_layout(config, setting)
    return planner.GlobalPlanner(config.planner, setting, plans.of_run(config, mesh))


def _keeping_profile(config: libra_config.RunConfig, workdir: Path) -> libra_config.RunConfig:
    """The run goes by its own copy of `planner.profile`: resumed, it plans by what it began with."""
    if not config.planner.profile or not config.planner.period:
        return config
    kept = workdir / profiles.KEPT_FILE
    if not kept.exists():
        partial = kept.with_suffix(".partial")
        shutil.copyfile(config.planner.profile, partial)
        partial.rename(kept)
    return dataclasses.replace(config, planner=dataclasses.replace(config.planner, profile=str(kept)))


async def train(
    config: libra_config.RunConfig, workdir: Path, demonstrator: protocols.Demonstrator | None = None
) -> None:
    """Builds the run on the running event loop, carries it to its end, and writes the report.

    Args:
      config: the run's configuration.
      workdir: the run's directory, opened.
      demonstrator: solves tasks for the warm start; None only where it takes no steps.
    """
    shape = policy_shape(config, need_weights=True)
    loop = asyncio.get_running_loop()
    # What a killed run recorded after its last checkpoint will be done again, so it goes before the recorder opens.
    resume.cut_back(workdir, checkpoints.newest_step(workdir))
    recorder = telemetry.create(config, workdir, loop.time)
    limits = config.deadlines
    actors = cluster.create(config.cluster, start_seconds=limits.cluster_start, shutdown_seconds=limits.shutdown)
    engines = placement.Engines(config, shape, workdir)
    on_ray = config.cluster.backend == "ray"
    try:
        run = coordinator.Coordinator(
            config,
            cluster=actors,
            trainer_spec=trainer_spec(config, workdir),
            make_trainer=functools.partial(trainer_processes, config, workdir) if on_ray else None,
            replica_specs=replica_specs(config, workdir),
            engine_specs=engines.specs(),
            tasks=factories.task_source(config.task, config.seed),
            make_environment=factories.environment_factory(config.task),
            demonstrator=demonstrator,
            tokenizer=tokenizers.create(config.task, config.model.path),
            scheduler=scheduler(config),
            recorder=recorder,
            workdir=workdir,
            reward=factories.reward(config.task),
            export=workdir / "model",
            planner=global_planner(_keeping_profile(config, workdir), shape),
            make_engine=engines.add,
        )
        await run.run()
        _add_tokenizer(config, workdir / "model")
    finally:
        await actors.shutdown()
        recorder.close()
    if config.telemetry.report:
        with signals.caught(lambda: None):  # the run is over: one signal more does not lose its report
            try:
                print(f"Report: {report.write_report(workdir)}")
            except protocols.DataError as error:  # a run stopped before it began has recorded nothing
                print(f"No report: {error}")


def _add_tokenizer(config: libra_config.RunConfig, model: Path) -> None:
    """Copies the tokenizer's files beside the exported weights, so that the directory can be loaded as `model.path`.

    Raises:
      LibraError: a file cannot be copied; the training is done, and the message says what is missing.
    """
    source = Path(config.task.tokenizer or config.model.path)
    if config.task.tokenizer != "character" and source.is_dir() and model.is_dir():
        for pattern in ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "chat_template.*"):
            for file in source.glob(pattern):
                try:
                    shutil.copy2(file, model)
                except OSError as error:
                    raise protocols.LibraError(
                        f"The trained weights are in {model}, but {file} could not be copied there "
                        f"({error.strerror or error}): copy the tokenizer's files yourself to load that directory."
                    ) from error
