"""Warm start and evaluation: supervised steps before reinforcement learning, and rollouts of the held-out tasks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.chat import tokenizers
from libra_jax.coordinator import parts, public, reports, scores, stopping
from libra_jax.rollouts import factories, rollouts
from libra_jax.utils import resolving

FIRST_TASK = 1_000_000_000
"""Position of the first demonstrated task. It is far beyond the tasks that a run trains on, and never held out."""


class WarmStart:
    """Takes supervised steps on demonstrations.

    Args:
      config: the run's configuration (`warm_start`).
      agent: its demonstrator solves the tasks; it may be missing only if the config asks for no steps.

    Attributes:
      taken: number of steps taken, including steps that the target loss made unnecessary.
    """

    def __init__(self, config: config_lib.RunConfig, agent: rollouts.Agent) -> None:
        config_lib.check(
            agent.demonstrator is not None or config.warm_start.steps == 0,
            "warm_start.steps",
            f"must be 0, because the environment {resolving.shown(config.task.environment)} offers no demonstrations",
        )
        self._limits = config.warm_start
        self._names = config.task
        self._tasks = factories.demonstrated_tasks(config, agent.tasks)
        self._agent = agent
        self.taken = 0

    async def run(
        self,
        step: Callable[[list[protocols.Trajectory]], Coroutine[Any, Any, Mapping[str, float]]],
        ending: stopping.RunScope,
        status: Callable[[str], None],
    ) -> dict[str, float]:
        """Takes the remaining steps. Stops between two steps if the run is to end.

        Args:
          step: takes one step on the trainer.

        Returns:
          The last step's metrics under `warm_start/`; empty if no step was left.
        """
        metrics: Mapping[str, float] = {}
        if self.taken < self._limits.steps:
            status(f"warm start {self.taken}/{self._limits.steps}, compiling its programs first")
        while self.taken < self._limits.steps:
            first = FIRST_TASK + self.taken * self._limits.batch_size
            batch, demonstrator, tokenizer = [], self._agent.demonstrator, self._agent.tokenizer
            # The constructor has refused a config that asks for steps without one.
            assert demonstrator is not None
            for index in range(first, first + self._limits.batch_size):
                with resolving.named(self._names.source, "task.source", f"task({index})"):
                    task = self._tasks.task(index)
                subject = f"the demonstration of {task.prompt_id}"
                try:
                    with resolving.named(self._names.environment, "task.environment", subject):
                        batch.append(tokenizers.demonstration_trajectory(task.copy(), demonstrator, tokenizer))
                except (protocols.DataError, protocols.EnvironmentCrashed, protocols.ConfigError) as error:
                    # One bad task must not end the run. A batch of nothing else does.
                    if index + 1 == first + self._limits.batch_size and not batch:
                        raise
                    status(f"warm start leaves out {subject}: {error}")
            metrics = await ending.race(step(batch), through_stop=True)
            self.taken += 1
            loss = metrics.get("loss", math.inf)
            status(f"warm start {self.taken}/{self._limits.steps}, loss {loss:.4f}")
            if loss <= self._limits.target_loss:
                status(f"warm start ended after {self.taken} steps: loss {loss:.4f} reached its target")
                # Counts the remaining steps as taken, so that a resumed run does not take them.
                self.taken = self._limits.steps
            ending.check()
        return {f"warm_start/{name}": value for name, value in metrics.items()}


# Evaluation -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation.

    Attributes:
      metrics: `evaluation/accuracy` (mean reward over the tasks that were scored), `evaluation/unscored` (rollouts
        whose environment kept crashing: they are left out, never scored zero), `evaluation/pass_at_<k>` if tasks have
        several attempts, `evaluation/agent/...` and `evaluation/reward/...`.
      rollouts: scored rollouts, in the order of the tasks.
      scores: rewards of each task's attempts, in the order of the tasks.
    """

    metrics: dict[str, float]
    rollouts: Sequence[protocols.Trajectory]
    scores: Sequence[scores.TaskScores]


def distinct(tasks: Sequence[protocols.Task], status: Callable[[str], None]) -> list[protocols.Task]:
    """Returns the tasks in their order, each payload once, and says how many tasks that leaves out.

    A source with few held-out tasks gives them again and again; repeated, they would weigh more, and cost more.
    """
    different: dict[str, protocols.Task] = {}
    for task in tasks:
        different.setdefault(
            json.dumps(task.payload, sort_keys=True, default=str) if task.payload else task.prompt_id, task
        )
    # Passes over the same tasks name what they repeat. An environment may tell other tasks apart by their ids.
    names = {task.prompt for task in tasks}
    if len(different) < len(names):
        status(
            f"evaluating {len(different):,} of {len(names):,} tasks, because the others have the same payloads; if "
            "they differ, give their payloads a field that does, such as a seed"
        )
    return list(different.values())


async def evaluate(
    config: config_lib.RunConfig,
    *,
    runner: rollouts.RolloutRunner,
    tasks: protocols.TaskSource,
    version: int,
    status: Callable[[str], None] = lambda _: None,
) -> Evaluation:
    """Runs `evaluation.attempts` rollouts for each of the first `evaluation.tasks` held-out tasks, each task once.

    Args:
      config: the run's configuration (`evaluation`).
      tasks: source of the held-out tasks.
      version: the served version, which becomes part of the rollouts' names.

    Raises:
      EnvironmentCrashed: no task could be scored.
    """
    settings, attempts, candidates = config.evaluation, [], []
    for index in range(settings.tasks):
        with resolving.named(config.task.source, "task.source", f"evaluation_task({index})"):
            candidates.append(tasks.evaluation_task(index))
    chosen = distinct(candidates, status)
    for index, task in enumerate(chosen):
        for attempt in range(settings.attempts):
            name = f"{task.prompt_id}/evaluation-{version}" + (f"-{attempt}" if attempt else "")
            attempts.append((index, task, runner.begin(name, task)))
    completed_count = 0

    async def attempted(task: protocols.Task, trajectory: protocols.Trajectory) -> None:
        nonlocal completed_count
        group = protocols.EVALUATION_GROUP
        await runner.run(protocols.RolloutOrder(trajectory, task, group, version, settings.temperature))
        completed_count += 1
        status(f"evaluating version {version}, {completed_count:,} of {len(attempts):,} rollouts")

    # All begin together, once every task could be read.
    work = [asyncio.ensure_future(attempted(task, trajectory)) for _, task, trajectory in attempts]
    trajectories: list[protocols.Trajectory] = []
    crashes: list[protocols.EnvironmentCrashed] = []
    results = [scores.TaskScores(task.prompt_id, ()) for task in chosen]
    try:
        for (index, _, trajectory), rollout in zip(attempts, work, strict=True):
            one = results[index]
            # One crash must not end the evaluation; any other error does.
            try:
                await rollout
            except protocols.EnvironmentCrashed as crash:
                crashes.append(crash)
                results[index] = dataclasses.replace(one, unscored=one.unscored + 1)
            else:
                trajectories.append(trajectory)
                if trajectory.reward is not None:
                    results[index] = dataclasses.replace(one, rewards=(*one.rewards, trajectory.reward))
    finally:
        for rollout in work:
            rollout.cancel()
        await asyncio.gather(*work, return_exceptions=True)
    if not trajectories:
        raise crashes[0]
    metrics = {"evaluation/accuracy": scores.mean_reward(results), "evaluation/unscored": float(len(crashes))}
    for k in scores.usual_k(settings.attempts) if settings.attempts > 1 else ():
        if (value := scores.mean_pass_at(results, k, settings.threshold)) is not None:
            metrics[f"evaluation/pass_at_{k}"] = value
    metrics |= {f"evaluation/{name}": value for name, value in reports.mean_metrics(trajectories).items()}
    return Evaluation(metrics, trajectories, results)


@contextlib.asynccontextmanager
async def loaded(
    run: parts.CoordinatorContext,
    specs: parts.WorkerSpecs,
    agent: rollouts.Agent,
    scheduler: protocols.Scheduler,
    checkpoint: str | None = None,
) -> AsyncIterator[tuple[parts.RunParts, int]]:
    """Starts the workers of a config, gives the engines the trainer's weights, and ends the workers. Trains nothing.

    The trainer takes part because it reads every form of weights, and the engines get theirs by weight sync only.

    Args:
      run: what the parts of the run share; nothing is written into the workdir but logs.
      checkpoint: the trainer's part of a checkpoint; None takes the weights of the config's model.

    Yields:
      The parts of the run, and the policy version that is served.
    """

    def no_state() -> NoReturn:
        raise AssertionError("without training, there are no checkpoints")

    ending, workers = run.scope, parts.RunWorkers(run, specs)
    try:
        await ending.race(workers.start())
        wired = parts.wire(run, agent, scheduler, None, workers=workers, state=no_state)
        version = 0 if checkpoint is None else await ending.race(wired.trainer.restore(checkpoint))
        await ending.race(wired.weight_sync.sync_weights(version))
        yield wired, version
    finally:
        await ending.cancel_background(run.config.deadlines.shutdown)
        # Each worker's own deadline holds.
        await workers.shut_down(math.inf)


async def evaluate_alone(
    run: parts.CoordinatorContext,
    specs: parts.WorkerSpecs,
    agent: rollouts.Agent,
    scheduler: protocols.Scheduler,
    checkpoint: str | None = None,
) -> Evaluation:
    """Evaluates the trainer's weights, or a checkpoint's, with workers of its own. See `loaded` for the arguments."""
    async with loaded(run, specs, agent, scheduler, checkpoint) as (wired, version):
        run.recorder.status("rollout", "evaluating")
        work = evaluate(
            run.config,
            runner=wired.runner,
            tasks=agent.tasks,
            version=version,
            status=lambda text: run.recorder.status("rollout", text),
        )
        return await run.scope.race(work)


async def serve_alone(
    run: parts.CoordinatorContext,
    specs: parts.WorkerSpecs,
    agent: rollouts.Agent,
    scheduler: protocols.Scheduler,
    *,
    checkpoint: str | None,
    secret: str,
    ready: Callable[[protocols.Endpoint], None],
) -> None:
    """Serves the trainer's weights, or a checkpoint's, until SIGINT or SIGTERM. See `loaded` for the other arguments.

    Args:
      secret: key of the clients; empty: a random one.
      ready: called with the address once it is served.
    """
    host = agent.host
    if host is None:
        raise protocols.LibraError("The agent has no gateway to serve by.")
    async with loaded(run, specs, agent, scheduler, checkpoint) as (wired, version):
        limits = factories.limits(run.config, run.config.evaluation.temperature)
        interface = public.Public(wired.streams, await host.form(), limits, version, strict=host.strict)
        endpoint = await host.gateway.open(interface, secret)
        stop = asyncio.Event()
        with stopping.caught(lambda *_: stop.set()):
            ready(endpoint)
            await run.scope.race(stop.wait())
        await host.gateway.close(endpoint)
