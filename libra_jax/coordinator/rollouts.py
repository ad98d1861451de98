"""Runs one rollout under the run's rules.

A crash of the environment counts as a failure of infrastructure, so its rollout is retried from the start.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.agents import factories, resolving
from libra_jax.agents import loop as agent_loop
from libra_jax.agents.rewards import scoring
from libra_jax.coordinator import dispatch

MakeTrajectory = Callable[[str, str, float], protocols.Trajectory]


def make_trajectory(trajectory_id: str, prompt_id: str, start_seconds: float) -> protocols.Trajectory:
    """Returns an empty trajectory for a real run."""
    return protocols.Trajectory(trajectory_id, prompt_id, start_seconds=start_seconds)


class Rollouts:
    """Runs rollouts, each in a fresh environment.

    Args:
      config: the run's configuration (`task`, `rollout`).
      dispatcher: the source of sampled tokens.
      make_environment: returns a fresh environment at each call.
      tokenizer: the policy's tokenizer.
      reward: scores rollouts. None keeps the environments' own rewards.
      make_trajectory: makes an empty trajectory from its id, its prompt's id and its start in event-loop seconds.
      note: takes a sentence for each of the first crashes that are retried. It also takes one if a rollout could not
        resume after a restart of the run.
    """

    def __init__(
        self,
        config: configuration.RunConfig,
        *,
        dispatcher: dispatch.Dispatcher,
        make_environment: Callable[[], protocols.Environment],
        tokenizer: protocols.Tokenizer,
        reward: scoring.Scorer | None,
        make_trajectory: MakeTrajectory,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._make_environment = make_environment
        self._tokenizer = tokenizer
        self._reward = reward
        self._make_trajectory = make_trajectory
        self._note = note
        self._noted = False
        self._crashes = resolving.FirstFew(note)
        self._voids: collections.Counter[str] = collections.Counter()

    def take_voids(self) -> collections.Counter[str]:
        """Returns the number of rollouts that crashed since the last call, by prompt id."""
        taken, self._voids = self._voids, collections.Counter()
        return taken

    def begin(self, trajectory_id: str, task: protocols.Task) -> protocols.Trajectory:
        """Returns an empty trajectory for the task, started now."""
        return self._make_trajectory(trajectory_id, task.prompt_id, asyncio.get_running_loop().time())

    async def run(
        self,
        trajectory: protocols.Trajectory,
        task: protocols.Task,
        *,
        group_id: int,
        dispatch_version: int,
        temperature: float,
    ) -> None:
        """Runs the rollout until it has a reward, from the trajectory's present position.

        Raises:
          EnvironmentCrashed: the environment or its factory crashed `task.environment_retries` + 1 times, or the reward
            failed as often as the config allows.
        """
        limits, retries = factories.limits(self._config, temperature), self._config.task.environment_retries
        for retry in range(retries + 1):
            if retry:  # exponential backoff; the rollout holds no engine slot meanwhile
                await asyncio.sleep(self._config.task.retry_seconds * 2.0 ** (retry - 1))
            # A rollout restored from a checkpoint may have its reward already.
            if trajectory.reward is not None:
                return
            self._dispatcher.open(trajectory.trajectory_id, group_id, dispatch_version)
            try:
                await agent_loop.run_attempt(
                    trajectory=trajectory,
                    task=task,
                    environment=self._environment(),
                    tokenizer=self._tokenizer,
                    sampler=self._dispatcher,
                    limits=limits,
                    reward=self._reward,
                )
                self._report(trajectory)
                return
            except protocols.EnvironmentCrashed as crash:
                # By prompt, so that a single prompt that breaks the environment stands out.
                self._voids[trajectory.prompt_id] += 1
                # A failed reward has had its own retries, and a second rollout would meet the same reward function.
                if retry == retries or isinstance(crash, protocols.RewardFailed):
                    raise
                self._crashes.tell(f"Attempt {trajectory.trajectory_id} begins again: {crash}")
                # A fresh environment may answer differently, so no token of the crashed one is kept.
                _empty(trajectory)
            finally:
                self._dispatcher.finish(trajectory.trajectory_id)

    def _report(self, trajectory: protocols.Trajectory) -> None:
        if trajectory.metrics.get("replay_differs") and not self._noted:
            self._noted = True
            self._note(
                f"Attempt {trajectory.trajectory_id} began again: stepped through its outputs again after the "
                f"restart, {self._config.task.environment} answered otherwise than before; its tokens until then were "
                "dropped. agent/replay_differs is the share of such rollouts."
            )

    def _environment(self) -> protocols.Environment:
        try:
            return self._make_environment()
        except Exception as error:
            raise protocols.EnvironmentCrashed(
                f"the factory {self._config.task.environment} {resolving.raised(error)}"
            ) from error


def _empty(trajectory: protocols.Trajectory) -> None:
    """Empties the trajectory in place, because its group and the dispatcher hold the same object."""
    trajectory.clear()
    trajectory.metrics.clear()
    trajectory.reward = trajectory.finish = trajectory.environment_reward = None
