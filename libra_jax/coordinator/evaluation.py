"""Evaluates the policy: one rollout for each held-out task, at the served version, within a run or without one."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.agents import resolving
from libra_jax.coordinator import context, parts, reports, rollouts, stopping


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation.

    Attributes:
      metrics: `evaluation/accuracy` (mean reward over the tasks that were scored), `evaluation/unscored` (tasks whose
        environment kept crashing: they are left out, never scored zero), `evaluation/agent/...` and
        `evaluation/reward/...`.
      rollouts: scored rollouts, in the order of the tasks.
    """

    metrics: dict[str, float]
    rollouts: Sequence[protocols.Trajectory]


async def evaluate(
    config: configuration.RunConfig,
    *,
    runner: rollouts.Rollouts,
    tasks: protocols.TaskSource,
    version: int,
) -> Evaluation:
    """Runs one rollout for each of the first `evaluation.tasks` held-out tasks.

    Args:
      config: the run's configuration (`evaluation`).
      runner: runs one rollout.
      tasks: source of the held-out tasks.
      version: the served version, which becomes part of the rollouts' names.

    Raises:
      EnvironmentCrashed: no task could be scored.
    """
    pairs = []
    for index in range(config.evaluation.tasks):
        with resolving.named(config.task.source, "task.source", f"evaluation_task({index})"):
            task = tasks.evaluation_task(index)
        pairs.append((task, runner.begin(f"{task.prompt_id}/evaluation-{version}", task)))
    work = [
        asyncio.ensure_future(
            runner.run(
                trajectory,
                task,
                group_id=protocols.EVALUATION_GROUP,
                dispatch_version=version,
                temperature=config.evaluation.temperature,
            )
        )
        for task, trajectory in pairs
    ]
    try:
        # One crash must not end the evaluation; any other error does.
        outcomes = [await _crash_of(attempt) for attempt in work]
    finally:
        for attempt in work:
            attempt.cancel()
        await asyncio.gather(*work, return_exceptions=True)
    scored = [trajectory for (_, trajectory), crash in zip(pairs, outcomes, strict=True) if crash is None]
    crashes = [crash for crash in outcomes if crash is not None]
    if not scored:
        raise crashes[0]
    metrics = {
        "evaluation/accuracy": statistics.fmean(reports.rewards_of(scored)),
        "evaluation/unscored": len(crashes),
        **{f"evaluation/{name}": value for name, value in reports.mean_metrics(scored).items()},
    }
    return Evaluation(metrics, scored)


async def evaluate_alone(
    run: context.RunContext,
    specs: context.WorkerSpecs,
    agent: context.Agent,
    scheduler: protocols.Scheduler,
    checkpoint: str | None = None,
) -> Evaluation:
    """Starts the workers of a config, evaluates the trainer's weights, and ends the workers. Trains nothing.

    The trainer takes part because it reads every form of weights, and the engines get theirs by weight sync only.

    Args:
      run: the surroundings; nothing is written into the workdir but logs.
      specs: what the workers are made from.
      agent: what the policy is asked to do.
      scheduler: decides which instance serves a request.
      checkpoint: the trainer's part of a checkpoint; None evaluates the weights of the config's model.

    Raises:
      LibraError: a worker is lost, or no task could be scored.
    """
    limit, ending = run.config.deadlines.shutdown, stopping.Ending()
    crew = parts.Workers(run, specs, ending)
    try:
        await ending.race(crew.start())
        wired = parts.wire(
            run, agent, scheduler, None, make_trainer=specs.make_trainer, workers=crew, ending=ending, state=_no_state
        )
        version = 0 if checkpoint is None else await ending.race(wired.trainer.restore(checkpoint))
        await ending.race(wired.publisher.sync_weights(version))
        run.recorder.status("rollout", "evaluating")
        work = evaluate(run.config, runner=wired.runner, tasks=agent.tasks, version=version)
        return await ending.race(work)
    finally:
        await ending.cancel_background(limit)
        await crew.shut_down(math.inf)  # each worker's own deadline holds; `limit` is that of one


def _no_state() -> NoReturn:
    raise AssertionError("an evaluation takes no checkpoints")


async def _crash_of(attempt: asyncio.Future[None]) -> protocols.EnvironmentCrashed | None:
    try:
        await attempt
    except protocols.EnvironmentCrashed as error:
        return error
    return None
