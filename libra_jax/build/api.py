"""Trains, evaluates, simulates and plans: the functions of `import libra_jax`, and launch/train.py's core."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import shutil
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import dry_run, objects, planned, preflight, wiring, workdirs
from libra_jax.cluster import resolved_run
from libra_jax.coordinator import checkpoint_store, evaluation, stopping
from libra_jax.coordinator import run as coordinator
from libra_jax.models.hf import hub
from libra_jax.planning.search import search
from libra_jax.rollouts import factories, record
from libra_jax.simulator import comparison, scripts, settings
from libra_jax.telemetry.report import curve
from libra_jax.tools import toolkit
from libra_jax.utils import deadlines, resolving

T = TypeVar("T")

TRACEBACK_VARIABLE = "LIBRA_JAX_TRACEBACK"
"""Environment variable that keeps the whole traceback of an error."""

LOOK_SECONDS = 1.0
"""Seconds between two reads of the metrics for the live curve."""

END_SECONDS = 120.0
"""Seconds that an interrupted run may take to end its workers."""


@dataclass(frozen=True)
class Trained:
    """The result of a finished run.

    Attributes:
      workdir: directory of the run: `metrics.jsonl`, `samples.jsonl`, `report.html`, checkpoints.
      model: directory of the trained weights in Hugging Face's format.
      summary: steps, rewards by step, held-out accuracies, groups replaced.
    """

    workdir: Path
    model: Path
    summary: coordinator.RunSummary

    @property
    def rewards(self) -> dict[int, float]:
        """Mean reward of each training step in this session."""
        return self.summary.rewards


@dataclass(frozen=True)
class ScoredRollout:
    """One scored rollout of an evaluation.

    Attributes:
      task: name of the task; of given tasks, "tasks-" and the position.
      reward: its score.
      text: what the policy wrote: its outputs, joined by line breaks.
      dialogue: prompt, outputs and tool returns, decoded from the tokens.
    """

    task: str
    reward: float
    text: str
    dialogue: str


@dataclass(frozen=True)
class EvaluationResult:
    """The result of an evaluation.

    Attributes:
      reward: mean reward over the tasks that were scored: the accuracy, if rewards are 0 and 1.
      rollouts: the scored rollouts, in the order of the tasks.
      unscored: number of rollouts whose environment kept crashing. They are left out, never scored zero.
      metrics: means over the rollouts, such as `agent/turns`, and `reward/<name>` of each reward function. With several
        `evaluation.attempts`, also `pass_at_<k>`.
    """

    reward: float
    rollouts: Sequence[ScoredRollout]
    unscored: int
    metrics: Mapping[str, float]


class _Plain(contextlib.ContextDecorator):
    """Shortens the traceback of LibraErrors, whose sentence says what to change."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: types.TracebackType | None
    ) -> None:
        if isinstance(error, protocols.LibraError) and not os.environ.get(TRACEBACK_VARIABLE):
            error.__cause__, error.__suppress_context__ = None, True
            error.__traceback__ = None


async def start(
    named: config_lib.RunConfig,
    run: resolved_run.ResolvedRun,
    *,
    workdir: str | None = None,
    take_over: bool = False,
    allow_changes: Sequence[str] = (),
    on_workdir: Callable[[Path], None] = lambda _: None,
    at_signal: stopping.AtOnce = lambda _: None,
) -> coordinator.RunSummary:
    """Opens the workdir and trains on the running event loop.

    Args:
      named: config as given; the workdir keeps it.
      run: the same run with paths instead of Hugging Face ids (`hub.resolved`), checked.
      workdir: directory of the run; None means the config's own.
      take_over: end a run that lives in the workdir.
      allow_changes: settings that may differ from the run's first start (`changes.allowed_names`).
      on_workdir: called with the workdir.
      at_signal: called at once on SIGINT and SIGTERM.
    """
    config = run.config
    # An environment that cannot be made is reported before anything is written.
    async with (
        toolkit.Toolkit(config.tools, config.sandbox, config.task.call_seconds) as tools,
        factories.demonstrator(config.task, tools, needed=config.warm_start.steps > 0) as demonstrator,
    ):
        try:
            folder = workdirs.open_workdir(named, workdir, take_over=take_over, allow_changes=allow_changes)
            on_workdir(folder)
            return await wiring.train(
                run,
                folder,
                tools,
                demonstrator,
                take_fencing_token=functools.partial(workdirs.take_fencing_token, folder, take_over=take_over),
                at_signal=at_signal,
            )
        finally:  # the next run may use the workdir while libraries still clean up at this process's exit
            workdirs.release(Path(workdir) if workdir else workdirs.default(named))


async def train_async(
    config: config_lib.RunConfig,
    *,
    environment: objects.MakeEnvironment | None = None,
    reward: objects.RewardFunction | None = None,
    tasks: objects.Tasks | None = None,
    workdir: str | Path | None = None,
    allow_changes: Sequence[str] = (),
    on_workdir: Callable[[Path], None] = lambda _: None,
) -> Trained:
    """Trains a policy on the running event loop; otherwise as `train`. A cancelled call ends the run's workers."""
    with _Plain():
        named = objects.with_objects(config, environment, reward, tasks)
        resolution = hub.resolved(named, download=True)
        if resolution.problems:
            raise protocols.DataError("; ".join(resolution.problems))
        run = preflight.validate(resolution.config, need_weights=True)
        # On a thread, because a caller's event loop goes on meanwhile.
        await deadlines.off_loop(dry_run.try_rewards, resolution.config)
        preflight.warn(run)
        folders: list[Path] = []

        def note(folder: Path) -> None:
            folders.append(folder)
            on_workdir(folder)

        place = None if workdir is None else str(workdir)
        summary = await start(named, run, workdir=place, allow_changes=tuple(allow_changes), on_workdir=note)
        return Trained(folders[0], folders[0] / "model", summary)


@_Plain()
def train(
    config: config_lib.RunConfig,
    *,
    environment: objects.MakeEnvironment | None = None,
    reward: objects.RewardFunction | None = None,
    tasks: objects.Tasks | None = None,
    workdir: str | Path | None = None,
    allow_changes: Sequence[str] = (),
) -> Trained:
    """Trains a policy and returns when the run has ended; in a notebook, the cell shows the reward's curve meanwhile.

    Called again with the same config and objects, a run goes on from its last checkpoint. A script calls this under
    `if __name__ == "__main__":`, because vLLM's processes import the script again.

    Args:
      config: the run's configuration. Objects below replace what its names stand for.
      environment: class or function that makes a fresh environment (`protocols.Environment`). Without it, given tasks
        are questions with an `answer`, scored by exact match.
      reward: function of (task, text) or (task, transcript) that scores a rollout instead of the environment. To add
        to the environment's score, add `transcript.environment_reward`.
      tasks: mappings with a `prompt`, 5% of which are held out, or a `protocols.TaskSource`.
      workdir: the run's directory; None: `runs/<name>-<hash of config>`.
      allow_changes: settings in which the run may go on otherwise than it began, such as "optimizer.learning_rate".

    Returns:
      The workdir, the directory of the trained weights, and rewards by step.

    Raises:
      LibraError: something is wrong with the run; one sentence names the field, file or worker.
    """

    folders: list[Path] = []
    live_curve = curve.Curve()
    return _blocking(
        lambda: train_async(
            config,
            environment=environment,
            reward=reward,
            tasks=tasks,
            workdir=workdir,
            allow_changes=allow_changes,
            on_workdir=folders.append,
        ),
        "interrupted: the run's workers are being ended; call train again to go on from the last checkpoint.",
        look=lambda: live_curve.look(folders[0]) if folders else None,
    )


async def score(
    config: config_lib.RunConfig, checkpoint: checkpoint_store.Stored | None = None
) -> tuple[evaluation.Evaluation, protocols.Tokenizer]:
    """Evaluates on the running event loop. Returns the scores, and the tokenizer that decodes the rollouts.

    Args:
      config: configuration with names instead of objects; nothing but its evaluation takes place.
      checkpoint: checkpoint whose weights are evaluated; None evaluates those of `config.model`.
    """
    run = _without_training(config)
    config = run.config
    await deadlines.off_loop(dry_run.try_rewards, config)
    # Removed only after success: the error of a lost worker names its log in there.
    folder = Path(tempfile.mkdtemp(prefix="libra-evaluate-"))
    async with toolkit.Toolkit(config.tools, config.sandbox, config.task.call_seconds) as tools:
        result = await wiring.evaluate(run, folder, tools, _trainer_part(checkpoint))
    shutil.rmtree(folder, ignore_errors=True)
    return result


async def serve(
    config: config_lib.RunConfig,
    checkpoint: checkpoint_store.Stored | None,
    *,
    secret: str,
    ready: Callable[[protocols.Endpoint], None],
) -> None:
    """Serves a model on the running event loop until SIGINT or SIGTERM.

    Args:
      config: configuration of a run. Its model, its engines and its gateway take part, and no task, tool or reward.
      checkpoint: checkpoint whose weights are served; None serves those of `config.model`.
      secret: key of the clients; empty: a random one.
      ready: called with the address once it is served.
    """
    # The machine that serves need not have what the run trained on.
    task = config_lib.TaskConfig(tokenizer=config.task.tokenizer)
    bare = dataclasses.replace(config, task=task, tools=config_lib.ToolsConfig(), reward=config_lib.RewardConfig())
    run = _without_training(bare)
    config = run.config
    folder = Path(tempfile.mkdtemp(prefix="libra-serve-"))
    async with toolkit.Toolkit(config.tools, config.sandbox, config.task.call_seconds) as tools:
        await wiring.serve(run, folder, tools, checkpoint=_trainer_part(checkpoint), secret=secret, ready=ready)
    shutil.rmtree(folder, ignore_errors=True)


def _without_training(config: config_lib.RunConfig) -> resolved_run.ResolvedRun:
    """Returns a checked run of the same policy and engines with local paths. No hybrid worker or plan takes part."""
    config = dataclasses.replace(
        config,
        elastic=config_lib.ElasticConfig(),
        planner=config_lib.PlannerConfig(),
        warm_start=config_lib.WarmStartConfig(),
        telemetry=dataclasses.replace(config.telemetry, tensorboard=False, wandb_project=""),
    )
    located = hub.resolved(config, download=True)
    if located.problems:
        raise protocols.DataError("; ".join(located.problems))
    return preflight.validate(located.config, need_weights=True)


def tell_skipped(newest: checkpoint_store.NewestCheckpoint) -> None:
    """Warns of damaged checkpoints, and names the older one that takes their place."""
    for sentence in newest.skipped:
        print(f"warning: {sentence} The one at step {newest.step} takes its place.", file=sys.stderr)


def _trainer_part(checkpoint: checkpoint_store.Stored | None) -> str | None:
    return None if checkpoint is None else str(checkpoint.manifest.parent / checkpoint.record["trainer"])


async def evaluate_async(
    config: config_lib.RunConfig,
    *,
    model: str | Path | None = None,
    environment: objects.MakeEnvironment | None = None,
    reward: objects.RewardFunction | None = None,
    tasks: objects.Tasks | None = None,
) -> EvaluationResult:
    """Scores a model on the running event loop; otherwise as `evaluate`. A cancelled call ends the workers."""
    with _Plain():
        named = objects.with_objects(config, environment, reward, tasks, holdout=1.0)
        checkpoint = None
        if model is not None and (Path(model) / checkpoint_store.FOLDER).is_dir():
            # It reads and verifies whole files, which would freeze a notebook's event loop.
            finding = deadlines.off_loop(workdirs.newest, Path(model))
            seconds = named.deadlines.checkpoint
            newest = await deadlines.within(seconds, finding, f"The reading of {model}", "checkpoint")
            if newest.stored is None:
                raise protocols.DataError(f"model: {model} holds no checkpoint yet; name a run that has written one")
            tell_skipped(newest)
            checkpoint = newest.stored
        elif model is not None:
            named = dataclasses.replace(named, model=dataclasses.replace(named.model, path=str(model)))
        result, tokenizer = await score(named, checkpoint)
        rollouts = [
            ScoredRollout(
                rollout.prompt_id,
                rollout.reward or 0.0,
                record.policy_text(tokenizer, rollout),
                tokenizer.decode(rollout.token_ids),
            )
            for rollout in result.rollouts
        ]
        metrics = {name.removeprefix("evaluation/"): value for name, value in result.metrics.items()}
        return EvaluationResult(metrics["accuracy"], rollouts, int(metrics["unscored"]), metrics)


@_Plain()
def evaluate(
    config: config_lib.RunConfig,
    *,
    model: str | Path | None = None,
    environment: objects.MakeEnvironment | None = None,
    reward: objects.RewardFunction | None = None,
    tasks: objects.Tasks | None = None,
) -> EvaluationResult:
    """Scores a model on tasks and returns when all are scored. Trains and saves nothing.

    Each task gets `evaluation.attempts` rollouts. The engines, the tools and the limits are those of the config;
    `evaluation.temperature` is 0 unless it is set. A script calls this under `if __name__ == "__main__":`.

    Args:
      config: the run's configuration. Objects below replace what its names stand for.
      model: what to score: a Hugging Face id, a directory of weights such as `Trained.model`, or the workdir of a run
        of this config, whose newest checkpoint counts. None: the config's model.
      environment: as in `train`.
      reward: as in `train`.
      tasks: mappings with a `prompt`, all of which are scored, or a `protocols.TaskSource`, whose first
        `evaluation.tasks` held-out tasks are. None: those of `task.source`.

    Returns:
      The mean reward, each rollout with its reward and text, and means of further metrics.

    Raises:
      LibraError: the model or the tasks cannot be used, a worker is lost, or no task could be scored.
    """
    return _blocking(
        lambda: evaluate_async(config, model=model, environment=environment, reward=reward, tasks=tasks),
        "interrupted: the evaluation's workers are being ended; call evaluate again to begin it again.",
    )


def _blocking(
    work: Callable[[], Coroutine[Any, Any, T]], interrupted: str, look: Callable[[], None] = lambda: None
) -> T:
    """Runs a coroutine to its end. If this thread already runs an event loop (a notebook's does), on another thread.

    Args:
      work: makes the coroutine.
      interrupted: sentence for Ctrl-C.
      look: called every `LOOK_SECONDS` on this thread while another one works.
    """
    try:
        asyncio.get_running_loop()
        looped = True
    except RuntimeError:
        looped = False
    # asyncio.run handles Ctrl-C only on the main thread.
    if threading.current_thread() is threading.main_thread() and not looped:
        try:
            with resolving.contain_task_exits():
                return asyncio.run(work())
        except KeyboardInterrupt:
            print(interrupted, file=sys.stderr)
            raise
    loop = asyncio.new_event_loop()
    working: list[asyncio.Task[T]] = []

    def on_thread() -> T:
        with resolving.contain_task_exits(), asyncio.Runner(loop_factory=lambda: loop) as runner:

            async def noted() -> T:
                task = asyncio.current_task()
                assert task is not None
                working.append(task)
                return await work()

            return runner.run(noted())

    with futures.ThreadPoolExecutor(1, thread_name_prefix="libra-run") as pool:
        future = pool.submit(on_thread)
        try:
            while not future.done():
                # A short wait keeps this thread responsive to Ctrl-C, and sets the pace of the curve.
                futures.wait([future], timeout=LOOK_SECONDS)
                look()
        except KeyboardInterrupt:
            print(interrupted, file=sys.stderr)
            # Cancelling lets the workers end; the thread itself cannot be interrupted.
            if working:
                loop.call_soon_threadsafe(working[0].cancel)
            futures.wait([future], timeout=END_SECONDS)
            raise
        return future.result()


@_Plain()
def simulate(
    config: settings.SimulatedRun, *, policies: Sequence[str] = ("cmlfq",), seeds: Sequence[int] = (0,), jobs: int = 1
) -> comparison.Comparison:
    """Simulates a cluster in virtual time under one scheduling policy or several.

    Args:
      config: the simulated run, such as `configs.simulate.get_config()` returns.
      policies: names of scheduling policies.
      seeds: one simulated run each, of every policy.
      jobs: runs simulated at a time, a process each.

    Returns:
      Step times, throughput and shares by policy and seed, and a bound that no policy can beat.

    Raises:
      ConfigError: a setting is out of range, or nothing can be compared.
    """

    objects.need(config, settings.SimulatedRun, "libra_jax.simulator.settings.SimulatedRun")
    run = comparison.prepare(config_lib.checked(config), policies)
    # A thread of its own: the simulator runs an event loop of virtual time, a thread runs only one loop, and a
    # notebook's thread has one already.
    with futures.ThreadPoolExecutor(1, thread_name_prefix="libra-simulation") as pool:
        compared = pool.submit(comparison.compare, run, policies, seeds, jobs=jobs, progress=lambda _: None)
        return compared.result()


async def simulate_async(
    config: settings.SimulatedRun, *, policies: Sequence[str] = ("cmlfq",), seeds: Sequence[int] = (0,), jobs: int = 1
) -> comparison.Comparison:
    """Simulates while the caller's event loop goes on; otherwise as `simulate`. A cancelled call is not interrupted."""
    return await asyncio.to_thread(simulate, config, policies=policies, seeds=seeds, jobs=jobs)


@_Plain()
def plan(
    *,
    hardware: str,
    model: str,
    accelerators: int,
    workload: str | None = None,
    generated_tokens: float | tuple[float, float] | None = None,
    turns: int | None = None,
    payload_tokens: int | None = None,
    prompt_tokens: int | None = None,
    config: config_lib.RunConfig | None = None,
) -> search.DeviceSplit:
    """Plans how many accelerators train and how many roll out, and in which layouts.

    Args:
      hardware: name of an accelerator's sheet, such as "h100".
      model: name of a preset, such as "Qwen3-8B".
      accelerators: number to split.
      workload: "swe", "search" or "math".
      generated_tokens: mean of a rollout, or its mean and P90; None: as the workload has.
      turns: model outputs of a rollout.
      payload_tokens: tokens that a tool returns.
      prompt_tokens: tokens of a prompt.
      config: batches and limits; None: 32 prompts of 16 rollouts a step, one version ahead, contexts of any length.

    Returns:
      The split with the shortest training step: its mesh, its rollout instances by degree, and predicted seconds.

    Raises:
      ConfigError: there is no such hardware, model or workload, or nothing fits.
    """
    if config is None:  # the batches and limits of configs/simulate.py
        config = settings.SimulatedRun()
        config.steps = 16  # over which lengths drift
        config.model.remat = "full"  # otherwise a row of the longest context fits no device
        config.rollout.max_context, config.rollout.max_tokens = 131_072, 65_536
        config.trainer.row_tokens, config.trainer.rows_per_micro_batch = 131_072, 1
        batch = config.coordinator
        batch.groups_per_step, batch.group_size, batch.max_staleness = 32, 16, 1
    generated: scripts.LogNormal | float | None
    generated = scripts.LogNormal.fitted(*generated_tokens) if isinstance(generated_tokens, tuple) else generated_tokens
    request = planned.PlanRequest(
        hardware=hardware,
        model=model,
        accelerators=accelerators,
        workload=workload,
        lengths=scripts.RequestedLengths(generated, turns, payload_tokens, prompt_tokens),
    )
    case = planned.case(config_lib.to_dict(config), request)
    return case.searched().best(case.devices)
