"""Builds a run from its config: places the workers on devices and connects the rooms. Checks come before."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import chat_formats, cpu_rows, observing, worker_specs
from libra_jax.chat import tokenizers
from libra_jax.cluster import create as cluster
from libra_jax.cluster import placement, resolved_run
from libra_jax.coordinator import checkpoint_store, checkpoints, evaluation, fencing, stopping
from libra_jax.coordinator import parts as parts_lib
from libra_jax.coordinator import run as coordinator
from libra_jax.data import dividing
from libra_jax.harness.gateway import fronts
from libra_jax.planning import planner
from libra_jax.planning.costs import costs, hardware, profiles
from libra_jax.planning.forecast import forecast
from libra_jax.planning.search import plans
from libra_jax.rewards import composition
from libra_jax.rewards import teacher as teachers
from libra_jax.rollouts import factories, harness_loop, rollouts, samples
from libra_jax.scheduling import costs as scheduling_costs
from libra_jax.scheduling import registry as schedulers
from libra_jax.telemetry import escapes, files, status
from libra_jax.telemetry import recorder as telemetry
from libra_jax.telemetry.report import report
from libra_jax.tools import toolkit
from libra_jax.utils import checksums


def scheduler(config: config_lib.RunConfig) -> protocols.Scheduler:
    """Makes the run's scheduler, with the costs of its engines and the kinds of its layout.

    Where `rollout.accelerators` names unlike ones, `scheduler.costs` are those of the first; sheets give the others.

    Raises:
      ConfigError: the policy is for simulations only, its buckets do not match the layout, or `scheduler.learnt_from`
        holds nothing to learn from.
    """
    speeds = hardware.speeds(config.rollout.accelerators, "rollout.accelerators")
    run_scheduler = schedulers.create(
        config.scheduler,
        costs=scheduling_costs.LinearCosts(
            config.scheduler.costs,
            speeds={name: scheduling_costs.AcceleratorSpeed(*speed) for name, speed in speeds.items()},
        ),
        seed=config.seed,
        kinds=config.rollout.kinds,
    )
    checkpoints.teach(run_scheduler, config.scheduler.learnt_from)
    return run_scheduler


def reach(config: config_lib.RunConfig) -> int:
    """Returns the maximum number of devices of a mesh that the run's trainer can change to."""
    if config.cluster.backend == "ray" and config.trainer.platform == "cpu":
        # Virtual devices: another process has as many as its mesh needs, at most all that plans lay out.
        return config.trainer.devices + sum(plans.core_degrees(config))
    return config.trainer.devices + config.elastic.spare_devices


def global_planner(run: resolved_run.ResolvedRun) -> planner.GlobalPlanner | None:
    """Makes the run's planner, if `planner.period` requests one.

    The planner lays out the devices of the trainer and of instances that are not hybrid. Without `elastic.resize`, the
    trainer's mesh stays. Beyond the devices of its process, the mesh grows only if other processes find free devices
    while it trains (`reach`).

    Raises:
      ConfigError: the hardware is unknown, or an instance has a degree that plans may not use.
    """
    config, layout = run.config, run.layout
    if not config.planner.period:
        return None
    mesh = config.trainer.data, config.trainer.fsdp, config.trainer.tensor
    model = costs.of_hardware(config.planner.hardware, run.policy, "planner.hardware")
    resize = config.elastic.resize
    setting = forecast.PlanConditions.from_config(
        config,
        model,
        config.trainer.devices + sum(plans.core_degrees(config)),
        mesh=None if resize else mesh,
        reach=reach(config) if resize else None,
        together=None if layout is None else max(host.accelerators for host in layout.hosts),
    )
    forecast.check_layout(config, setting)
    begin = plans.from_config(config, mesh)
    return planner.GlobalPlanner(config.planner, setting, begin, masks=config.task.masks)


async def train(
    run: resolved_run.ResolvedRun,
    workdir: Path,
    tools: toolkit.Toolkit,
    demonstrator: protocols.Demonstrator | None = None,
    *,
    take_fencing_token: Callable[[], fencing.Token | None] = lambda: None,
    at_signal: stopping.AtOnce = lambda _: None,
) -> coordinator.RunSummary:
    """Builds the run on the running event loop, completes it, and writes the report.

    Args:
      run: the run, checked.
      workdir: directory of the run, opened.
      tools: tools that the policy may call, open.
      demonstrator: solves tasks for the warm start; None only if the warm start takes no steps.
      take_fencing_token: takes the run's fencing token in the workdir, which ends any run in there. Called after every
        check that works without workers. A result of None disables fencing.
      at_signal: called at once on SIGINT and SIGTERM.
    """
    run = cpu_rows.sized(run)
    config = run.config
    parts = _parts(run, workdir, tools, demonstrator)
    fencing_token = take_fencing_token()
    with observing.observed(config, workdir, fencing_token) as watcher:
        summary = await _train(run, workdir, parts, fencing_token, watcher, at_signal)
        watcher.end("stopped" if summary.stopped else "done", summary.sentence)
    if config.telemetry.report and not summary.terminated:  # after a scheduler's SIGTERM, there is no time for it
        with stopping.caught(lambda *_: None, at_signal):  # the run is over: another signal must not lose its report
            try:
                print(f"Report: {report.write_report(workdir)}")
            except protocols.DataError as error:  # a run stopped before its start has recorded nothing
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

    specs: parts_lib.WorkerSpecs
    agent: rollouts.Agent
    scheduler: protocols.Scheduler
    planner: planner.GlobalPlanner | None


def _parts(
    run: resolved_run.ResolvedRun,
    workdir: Path,
    tools: toolkit.Toolkit,
    demonstrator: protocols.Demonstrator | None,
) -> _Parts:
    config, engines = run.config, placement.EngineSpecs(run, workdir)
    on_ray = config.cluster.backend == "ray"
    specs = parts_lib.WorkerSpecs(
        trainer=worker_specs.trainer_spec(run, workdir),
        engines=engines.specs(),
        training_sides=worker_specs.training_side_specs(run, workdir),
        relays=worker_specs.relay_specs(run),
        loop_workers=worker_specs.loop_worker_specs(run, workdir),
        make_engine=engines.add,
        make_trainer=functools.partial(worker_specs.trainer_processes, run, workdir) if on_ray else None,
        divide=functools.partial(dividing.divide, config),
    )
    agent = rollouts.Agent(
        tasks=factories.task_source(config.task, config.seed),
        make_environment=factories.environment_factory(config.task, tools),
        tokenizer=chat_formats.policy_tokenizer(config, tools),
        demonstrator=demonstrator,
    )
    profile_copy = workdir / profiles.KEPT_FILE
    if config.planner.profile and profile_copy.exists():  # a resumed run plans as it began, by its own copy
        config = dataclasses.replace(config, planner=dataclasses.replace(config.planner, profile=str(profile_copy)))
        run = dataclasses.replace(run, config=config)
    return _Parts(specs, agent, scheduler(config), global_planner(run))


async def _train(
    run: resolved_run.ResolvedRun,
    workdir: Path,
    parts: _Parts,
    fencing_token: fencing.Token | None,
    watcher: status.RunStatus,
    at_signal: stopping.AtOnce,
) -> coordinator.RunSummary:
    config = run.config
    if fencing_token is not None:
        fencing_token.check()
    profile_copy = workdir / profiles.KEPT_FILE
    if config.planner.profile and config.planner.period and not profile_copy.exists():
        partial = profile_copy.with_suffix(".partial")
        shutil.copyfile(config.planner.profile, partial)
        # Renamed into place, so that a killed start leaves no half copy.
        partial.rename(profile_copy)
    # A killed run's records after its last checkpoint will be repeated, so they go before the recorder opens.
    newest = checkpoint_store.find(workdir)
    damaged = telemetry.cut_back(workdir, newest.step, newest.records)
    surroundings = _surroundings(run, workdir, parts.agent, fencing_token, watcher, damaged, newest.records)
    async with surroundings as (context, agent), teachers.open_teacher(config, agent.tokenizer) as teacher:
        agent = dataclasses.replace(agent, teacher=teacher)
        run_coordinator = coordinator.Coordinator(context, parts.specs, agent, parts.scheduler, parts.planner)
        summary = await run_coordinator.run(at_signal)
        add_files(config, workdir / "model")
    return summary


@contextlib.asynccontextmanager
async def _surroundings(
    run: resolved_run.ResolvedRun,
    workdir: Path,
    agent: rollouts.Agent,
    fencing_token: fencing.Token | None = None,
    watcher: status.RunStatus | None = None,
    damaged: Sequence[str] = (),
    records: protocols.Records | None = None,
) -> AsyncIterator[tuple[parts_lib.CoordinatorContext, rollouts.Agent]]:
    """Opens the recorder, the cluster and the reward. Yields the run's context, and the agent with its reward.

    `damaged` has sentences about what is damaged or missing among the workdir's records, and `records` those that the
    checkpoint counted.
    """
    config = run.config
    guard = files.always if fencing_token is None else fencing_token.may_write
    clock = asyncio.get_running_loop().time
    recorder = telemetry.create(config, workdir, clock, guard=guard, watcher=watcher, records=records)
    if watcher is not None:
        watcher.recorder = recorder
    # Before the cluster starts: the lines are gone already, so a start that fails must have named them.
    for sentence in damaged:
        recorder.note(sentence)
    limits = config.deadlines
    actors = cluster.create(
        config.cluster,
        start_seconds=limits.cluster_start,
        shutdown_seconds=limits.shutdown,
        layout=run.layout,
        platform=config.trainer.platform,
        on_hosts=functools.partial(placement.record, workdir, recorder.note, guard),
    )
    rewards = contextlib.AsyncExitStack()
    try:
        # Loop workers score the rollouts that they run.
        reward_config = config_lib.RewardConfig() if config.rollout.loop_workers else config.reward
        composed = composition.open_scorer(reward_config, actors, note=recorder.note, start_seconds=limits.reward_start)
        reward = await rewards.enter_async_context(composed)
        texts = samples.Samples(config.telemetry.samples, config.seed, agent.tokenizer)
        context = parts_lib.CoordinatorContext(
            config, actors, recorder, workdir, fencing=fencing_token, samples=texts, export=workdir / "model"
        )
        host = harness_loop.SessionResources(
            # Its processes start with the first session, so a run without harnesses has none.
            gateway=fronts.Fronts(context, model=config.name),
            make_form=lambda: chat_formats.make(agent.tokenizer, config.gateway),
            strict=config.gateway.strict,
        )
        yield context, dataclasses.replace(agent, reward=reward, host=host)
    finally:
        await rewards.aclose()
        await actors.shutdown()
        recorder.close()


async def evaluate(
    run: resolved_run.ResolvedRun, workdir: Path, tools: toolkit.Toolkit, checkpoint: str | None = None
) -> tuple[evaluation.Evaluation, protocols.Tokenizer]:
    """Evaluates a model on held-out tasks, on the running event loop. Returns the rollouts, and what decodes them.

    Args:
      run: a run without hybrid workers, plans or a warm start.
      workdir: folder of the workers' logs.
      tools: tools that the policy may call, open.
      checkpoint: the trainer's part of a checkpoint; None evaluates `model.path`.
    """
    parts = _parts(run, workdir, tools, None)
    async with _surroundings(run, workdir, parts.agent) as (context, agent):
        result = await evaluation.evaluate_alone(context, parts.specs, agent, parts.scheduler, checkpoint)
    return result, parts.agent.tokenizer


async def serve(
    run: resolved_run.ResolvedRun,
    workdir: Path,
    tools: toolkit.Toolkit,
    *,
    checkpoint: str | None,
    secret: str,
    ready: Callable[[protocols.Endpoint], None],
) -> None:
    """Serves a model at the gateway's address, on the running event loop, until SIGINT or SIGTERM.

    Args:
      run: a run without hybrid workers, plans or a warm start.
      workdir: folder of the workers' logs.
      tools: tools of the config, open.
      checkpoint: the trainer's part of a checkpoint; None serves `model.path`.
      secret: key of the clients; empty: a random one.
      ready: called with the address once it is served.
    """
    parts = _parts(run, workdir, tools, None)
    async with _surroundings(run, workdir, parts.agent) as (context, agent):
        # Requests come to this process, whose gateway they know.
        specs = dataclasses.replace(parts.specs, loop_workers=())
        await evaluation.serve_alone(
            context, specs, agent, parts.scheduler, checkpoint=checkpoint, secret=secret, ready=ready
        )


TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "chat_template.*")

GENERATION_FILES = ("generation_config.json",)
"""Stop tokens and sampling settings. Without them, other programs may generate past the end of a turn."""


def add_files(config: config_lib.RunConfig, model: Path) -> None:
    """Copies the tokenizer's files and the original model's generation config into the exported model.

    Raises:
      LibraError: a file cannot be copied. The training is done, and the message says which files are missing.
    """
    tokenizer = "" if config.task.tokenizer == "character" else config.task.tokenizer or config.model.path
    for folder, patterns in ((tokenizer, TOKENIZER_FILES), (config.model.path, GENERATION_FILES)):
        if not folder or not Path(folder).is_dir() or not model.is_dir():
            continue
        for file in (file for pattern in patterns for file in Path(folder).glob(pattern)):
            try:
                shutil.copy2(file, model)
                if (model / checksums.SEAL).exists():
                    checksums.seal_folder(model, [file.name])
            except (OSError, ValueError) as error:
                raise protocols.LibraError(
                    f"The trained weights are in {model}, but {file} could not be copied there "
                    f"({getattr(error, 'strerror', None) or error}): copy {', '.join(patterns)} yourself to load that "
                    "directory."
                ) from error
    generation = model / GENERATION_FILES[0]
    # The exported config.json lists no stop tokens.
    if model.is_dir() and not generation.exists() and (ends := tokenizers.listed_ends(config.model.path)):
        generation.write_text(json.dumps({"eos_token_id": ends}) + "\n")
        if (model / checksums.SEAL).exists():
            checksums.seal_folder(model, [generation.name])
