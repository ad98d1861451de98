"""Scores rollouts: a weighted sum of the config's reward functions and the environment's own reward.

async with composition.open_scorer(run.reward, cluster, note=print, start_seconds=60.0) as scorer:
    score = await scorer(task, transcript)

A function that raises, hangs or returns an invalid value is called again, up to `reward.retries` times. After that, the
rollout's group is replaced; no failure is scored as zero. If an actor is lost, its calls are repeated one at a time, so
that only the call at fault counts as failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Mapping

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.rewards import actors, scoring
from libra_jax.utils import resolving


@contextlib.asynccontextmanager
async def open_scorer(
    reward: config_lib.RewardConfig,
    cluster: protocols.Cluster,
    *,
    note: Callable[[str], None],
    start_seconds: float,
) -> AsyncIterator[scoring.Scorer | None]:
    """Starts the actors and yields the run's scorer. Yields None if only the environment's own reward counts.

    Args:
      reward: Settings with the functions.
      cluster: Cluster that makes the actors and ends them.
      note: Called with a sentence when an actor is restarted.
      start_seconds: Seconds that an actor may take to start.
    """
    if not reward.functions:
        yield None
        return
    pool = actors.RewardPool(reward, cluster, note, start_seconds)
    try:
        yield ComposedReward(reward, pool, await pool.start())
    finally:
        await pool.close()


class ComposedReward:
    """A `scoring.Scorer`. Belongs to one event loop.

    The metrics of a score are:
      `reward/<name>`: each function's value before its weight.
      `reward/environment`: the environment's own reward.
      `reward/<name>/<metric>`: further numbers of a function.
      `reward_seconds/<name>`: seconds of its last call.

    Args:
      reward: Settings with the functions and their weights.
      pool: Started actors that hold the functions.
      takes_transcript: Whether each function gets the transcript instead of the text, by name.
    """

    def __init__(
        self, reward: config_lib.RewardConfig, pool: actors.RewardPool, takes_transcript: Mapping[str, bool]
    ) -> None:
        self._config = reward
        self._pool = pool
        self._takes_transcript = takes_transcript
        self._functions = reward.parsed()
        self._turns = {name: asyncio.Semaphore(reward.concurrency) for name in self._functions}

    async def __call__(self, task: protocols.Task, transcript: scoring.Transcript) -> scoring.Score:
        """Scores a rollout.

        Raises:
          RewardFailed: A function failed `reward.retries` + 1 times.
          EnvironmentCrashed: The environment's own reward counts, but the environment gave none.
          WorkerLost: Actors were lost so often that the run has to end.
        """
        environment_reward, weight = transcript.environment_reward, self._config.environment_weight
        if weight and environment_reward is None:
            raise protocols.EnvironmentCrashed(
                f"task {task.prompt_id}: the environment gave no finite reward, which counts "
                f"{weight:g} times (config.reward.environment_weight)"
            )
        values = await actors.all_of(self._value(name, task, transcript) for name in self._functions)
        metrics = {key: value for _, call_metrics in values for key, value in call_metrics.items()}
        terms = [self._functions[name].weight * value for name, (value, _) in zip(self._functions, values, strict=True)]
        if environment_reward is not None:
            metrics["reward/environment"] = environment_reward
            terms.append(weight * environment_reward)
        # fsum raises for inf - inf, so infinite terms are sorted out before.
        total = math.fsum(terms) if all(map(math.isfinite, terms)) else math.inf
        if not math.isfinite(total):
            raise protocols.RewardFailed(
                f"config.reward.functions, task {task.prompt_id}: the terms {terms} have no finite sum"
            )
        return scoring.Score(total, metrics)

    async def _value(
        self, name: str, task: protocols.Task, transcript: scoring.Transcript
    ) -> tuple[float, dict[str, float]]:
        """Returns a function's value and the metrics of the call."""
        rollout = transcript if self._takes_transcript[name] else transcript.text
        async with self._turns[name]:
            outcome = await self._call(name, task, rollout)
        further = {f"reward/{name}/{metric}": value for metric, value in outcome.metrics.items()}
        return outcome.value, {
            f"reward/{name}": outcome.value,
            f"reward_seconds/{name}": outcome.seconds,
            **further,
        }

    async def _call(self, name: str, task: protocols.Task, rollout: str | scoring.Transcript) -> actors.RewardOutcome:
        """Calls a function until it succeeds, with at most `reward.retries` failures that are its own."""
        retries_left, alone = self._config.retries, False
        while True:
            blamed = True
            try:
                outcome = await self._pool.ask(name, task, rollout, alone=alone)
                problem = outcome.problem
            except actors.Lost as lost:
                # Several calls may run in a lost actor, and any may be at fault. Only a call that ran alone is blamed.
                blamed, alone, problem = alone, True, str(lost)
            if not problem:
                return outcome
            if blamed and not retries_left:
                function = self._functions[name]
                called = resolving.shown(function.factory, function.arguments)
                subject = f"config.reward.functions.{name} ({called}), task {task.prompt_id}"
                raise protocols.RewardFailed(f"{subject}: it {problem}")
            retries_left -= blamed  # a call that another one brought down costs no try
