"""Where the rooms meet: places a config on devices, and builds the run from it (`checks` come before)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libra_jax.runs import observing
from libra_jax.cluster import placement

from libra_jax import config as libra_config
from libra_jax import protocols
from libra_jax.agents import factories, samples, tokenizers
from libra_jax.agents.rewards import composition
from libra_jax.agents.tools import toolkit
from libra_jax.cluster import create as cluster
from libra_jax.cluster import hosts, placement
from libra_jax.coordinator import checkpoint_store, checkpoints, context, fencing, signals
from libra_jax.coordinator import run as coordinator
from libra_jax.models import config as model_config
from libra_jax.planning import costs, forecast, planner, plans, profiles
from libra_jax.scheduling import costs as scheduling_costs
from libra_jax.scheduling import registry as schedulers
from libra_jax.telemetry import escapes, files, report, resume, status
from libra_jax.telemetry import recorder as telemetry
from libra_jax.trainer_control import client

TRAINER = "libra_jax.training.trainer:create"
REPLICA = "libra_jax.training.replica:create"
RELAY = "libra_jax.weights.relay:create"


def policy_shape(config: libra_config.RunConfig, *, need_weights: bool) -> model_config.TransformerConfig:
    """The policy's shape: from `model.path` where it is set and there, else from `model.preset`."""
    path = config.model.path
    if path and (need_weights or Path(path).exists()):
        return model_config.read_directory(path)
    return model_config.load_preset(config.model.preset)


def known_shape(config: libra_config.RunConfig) -> model_config.TransformerConfig | None:
    """The policy's shape as far as this machine can know it.

    A `model.path` that is not here has the shape of `model.preset` where the config chose that; None where it did not.
    """
    path, preset = config.model.path, config.model.preset
    if path and not Path(path).exists() and preset == libra_config.ModelConfig().preset:
        return None
    return policy_shape(config, need_weights=False)


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
    host, local = placement.place(config, devices)
    environment = {
        "auto": {},
        "cpu": {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(len(devices) + _spare(config))},
        "cuda": {"JAX_PLATFORMS": "cuda,cpu", "CUDA_VISIBLE_DEVICES": ",".join(map(str, local))},
        "tpu": {"JAX_PLATFORMS": "tpu,cpu"},
    }[platform]
    return protocols.ActorSpec(
        name="trainer",
        factory=TRAINER,
        arguments={"config": libra_config.to_dict(config), "workdir": str(workdir.resolve()), "process": process},
        gpus=len(devices) if platform == "cuda" else 0,
        environment=environment,
        devices=devices,
        host=host,
    )


def _spare(config: libra_config.RunConfig) -> int:
    """Devices that a trainer of one process holds for a larger mesh; several hold those of their mesh alone."""
    return config.elastic.spare_devices if config.trainer.processes == 1 else 0


def trainer_processes(
    config: libra_config.RunConfig, workdir: Path, sizes: protocols.MeshSizes | None = None
) -> client.MakeProcess:
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
    """The training side of each hybrid worker, on its instance's devices, which the instance has leased already."""
    count, trainer = config.elastic.hybrid, config.trainer
    if not count:
        return []
    needed, specs = trainer.fsdp * trainer.tensor, []
    instances = list(enumerate(placement.partition(config).instances))
    for place, (number, devices) in enumerate(instances[-count:]):
        host, local = placement.place(config, devices)
        environment = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(needed)}
        if trainer.platform == "cuda":
            visible = ",".join(map(str, local[:needed]))
            # What the engine needs again when it wakes must go back to the device when it is freed.
            allocator = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            environment = {"JAX_PLATFORMS": "cuda,cpu", "CUDA_VISIBLE_DEVICES": visible, **allocator}
        arguments = {
            "config": libra_config.to_dict(config),
            "workdir": str(workdir.resolve()),
            "name": placement.instance_name(number),
            "cores": config.elastic.cores[place : place + 1],
        }
        specs.append(protocols.ActorSpec(f"replica-{number}", REPLICA, arguments, environment=environment, host=host))
    return specs


def relay_specs(config: libra_config.RunConfig) -> dict[int, protocols.ActorSpec]:
    """The relay of each host, by which published weights come to it; none where all is on one host, or goes by NCCL.

    They reserve no CPU: they wait for the network, and lie beside what has reserved the host's.
    """
    layout = hosts.layout(config)
    if layout is None or config.rollout.transport != "memfd":
        return {}
    # Half of what a bucket may take in all, so that it can be asked for again.
    seconds = config.deadlines.publish / 2
    names = {host.number: f"relay-{host.number}" for host in layout.hosts}
    return {
        host: protocols.ActorSpec(
            name,
            RELAY,
            {"name": name, "link_seconds": seconds, "cluster": config.cluster.address},
            cpus=0.0,
            host=host,
        )
        for host, name in names.items()
    }


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


def planned_devices(config: libra_config.RunConfig) -> int:
    """Devices that plans lay out: the trainer's, and those of the instances that are not hybrid."""
    return config.trainer.devices + sum(plans.core_degrees(config))


def reach(config: libra_config.RunConfig) -> int:
    """Devices, at most, of a mesh that the run's trainer can change to."""
    if config.cluster.backend == "ray" and config.trainer.platform == "cpu":
        return planned_devices(config)  # they are virtual: other processes have as many as their mesh needs
    return config.trainer.devices + config.elastic.spare_devices


def global_planner(
    config: libra_config.RunConfig, shape: model_config.TransformerConfig
) -> planner.GlobalPlanner | None:
    """The run's planner, if `planner.period` asks for one.

    It lays out the devices of the trainer and of the instances that are not hybrid; without `elastic.resize` the
    trainer's mesh stays. Beyond what its process holds, the mesh grows only where other processes find devices free
    while it trains (`reach`).

    Raises:
      ConfigError: there is no such hardware, or an instance has a degree that plans may not use.
    """
    if not config.planner.period:
        return None
    mesh = config.trainer.data, config.trainer.fsdp, config.trainer.tensor
    model = costs.of_hardware(config.planner.hardware, shape, "planner.hardware")
    resize = config.elastic.resize
    setting = forecast.Setting.of_run(
        config,
        model,
        planned_devices(config),
        mesh=None if resize else mesh,
        reach=reach(config) if resize else None,
        together=placement.together(config),
    )
    forecast.check_layout(config, setting)
    return planner.GlobalPlanner(config.planner, setting, plans.of_run(config, mesh), masks=config.task.masks)


def _by_kept_profile(config: libra_config.RunConfig, workdir: Path) -> libra_config.RunConfig:
    """The run goes by its own copy of `planner.profile`, if it has one: resumed, it plans by what it began with."""
    kept = workdir / profiles.KEPT_FILE
    if not config.planner.profile or not kept.exists():
        return config
    return dataclasses.replace(config, planner=dataclasses.replace(config.planner, profile=str(kept)))


def _keep_profile(config: libra_config.RunConfig, workdir: Path) -> None:
    """Gives the run its copy of `planner.profile`."""
    kept = workdir / profiles.KEPT_FILE
    if config.planner.profile and config.planner.period and not kept.exists():
        partial = kept.with_suffix(".partial")
        shutil.copyfile(config.planner.profile, partial)
        partial.rename(kept)


async def train(
    config: libra_config.RunConfig,
    workdir: Path,
    tools: toolkit.Toolkit,
    demonstrator: protocols.Demonstrator | None = None,
    *,
    take_epoch: Callable[[], fencing.Epoch | None] = lambda: None,
    at_signal: signals.AtOnce = lambda _: None,
) -> coordinator.RunSummary:
    """Builds the run on the running event loop, carries it to its end, and writes the report.

    Args:
      config: the run's configuration.
      workdir: the run's directory, opened.
      tools: what the policy may call, open.
      demonstrator: solves tasks for the warm start; None only where it takes no steps.
      take_epoch: takes the run's own in the workdir, which ends whatever runs in there: once all that may be wrong
        with this one, and that can be known without workers, is known. None: nobody else can be in there.
      at_signal: told of SIGINT and SIGTERM at once.
    """
    parts = _parts(config, workdir, tools, demonstrator)
    epoch = take_epoch()
    with observing.observed(config, workdir, epoch) as watcher:
        summary = await _train(config, workdir, parts, epoch, watcher, at_signal)
        watcher.end("stopped" if summary.stopped else "done", summary.sentence)
    if config.telemetry.report and not summary.terminated:  # a scheduler leaves no time for it
        with signals.caught(lambda *_: None, at_signal):  # the run is over: one signal more does not lose its report
            try:
                print(f"Report: {report.write_report(workdir)}")
            except protocols.DataError as error:  # a run stopped before it began has recorded nothing
                print(escapes.visible(f"No report: {error}"))
    return summary


@dataclass(frozen=True)
class _Parts:
    """What a run's coordinator is given, as far as making it changes nothing in the workdir.

    Attributes:
      specs: what the workers are made from.
      agent: what the policy is asked to do; its reward is opened later.
      scheduler: decides which instance serves a request.
      planner: decides who trains and who rolls out; None if `planner.period` is 0.
    """

    specs: context.WorkerSpecs
    agent: context.Agent
    scheduler: protocols.Scheduler
    planner: planner.GlobalPlanner | None


def _parts(
    config: libra_config.RunConfig,
    workdir: Path,
    tools: toolkit.Toolkit,
    demonstrator: protocols.Demonstrator | None,
) -> _Parts:
    shape = policy_shape(config, need_weights=True)
    engines = placement.Engines(config, shape, workdir)
    on_ray = config.cluster.backend == "ray"
    specs = context.WorkerSpecs(
        trainer=trainer_spec(config, workdir),
        engines=engines.specs(),
        training_sides=replica_specs(config, workdir),
        relays=relay_specs(config),
        make_engine=engines.add,
        make_trainer=functools.partial(trainer_processes, config, workdir) if on_ray else None,
    )
    agent = context.Agent(
        tasks=factories.task_source(config.task, config.seed),
        make_environment=factories.environment_factory(config.task, tools),
        tokenizer=tokenizers.create(config.task, config.model.path),
        demonstrator=demonstrator,
    )
    return _Parts(specs, agent, scheduler(config), global_planner(_by_kept_profile(config, workdir), shape))


async def _train(
    config: libra_config.RunConfig,
    workdir: Path,
    parts: _Parts,
    epoch: fencing.Epoch | None,
    watcher: status.RunStatus,
    at_signal: signals.AtOnce,
) -> coordinator.RunSummary:
    loop = asyncio.get_running_loop()
    if epoch is not None:
        epoch.check()
    _keep_profile(config, workdir)
    # What a killed run recorded after its last checkpoint will be done again, so it goes before the recorder opens.
    damaged = resume.cut_back(workdir, checkpoint_store.find(workdir).step)
    guard = files.always if epoch is None else epoch.may_write
    recorder = telemetry.create(config, workdir, loop.time, guard=guard, watcher=watcher)
    watcher.warn = recorder.note
    for sentence in damaged:
        recorder.note(sentence)
    limits = config.deadlines
    actors = cluster.create(
        config.cluster,
        start_seconds=limits.cluster_start,
        shutdown_seconds=limits.shutdown,
        layout=hosts.layout(config),
        platform=config.trainer.platform,
        told=functools.partial(placement.record, workdir, recorder.note, guard),
    )
    rewards = contextlib.AsyncExitStack()
    try:
        composed = composition.opened(config.reward, actors, note=recorder.note, start_seconds=limits.reward_start)
        reward = await rewards.enter_async_context(composed)
        texts = samples.Samples(config.telemetry.samples, config.seed, parts.agent.tokenizer)
        around = context.RunContext(config, actors, recorder, workdir, epoch, texts, export=workdir / "model")
        agent = dataclasses.replace(parts.agent, reward=reward)
        run = coordinator.Coordinator(around, parts.specs, agent, parts.scheduler, parts.planner)
        summary = await run.run(at_signal)
        _add_files(config, workdir / "model")
    finally:
        await rewards.aclose()
        await actors.shutdown()
        recorder.close()
    return summary


TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "chat_template.*")

GENERATION_FILES = ("generation_config.json",)
"""Stop tokens and sampling settings, without which others that load the export may generate past a turn's end."""


def _add_files(config: libra_config.RunConfig, model: Path) -> None:
    """Copies the tokenizer's files and the original model's generation config beside the exported weights.

    Raises:
      LibraError: a file cannot be copied; the training is done, and the message says what is missing.
    """
    if config.task.tokenizer != "character":
        _copy(Path(config.task.tokenizer or config.model.path), TOKENIZER_FILES, model)
    if config.model.path:
        _copy(Path(config.model.path), GENERATION_FILES, model)


def _copy(source: Path, patterns: Sequence[str], model: Path) -> None:
    if not source.is_dir() or not model.is_dir():
        return
    for pattern in patterns:
        for file in source.glob(pattern):
            try:
                shutil.copy2(file, model)
            except OSError as error:
                raise protocols.LibraError(
                    f"The trained weights are in {model}, but {file} could not be copied there "
                    f"({error.strerror or error}): copy {', '.join(patterns)} yourself to load that directory."
                ) from error
