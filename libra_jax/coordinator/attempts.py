"""One attempt under the run's rules: a crash of the environment itself is infrastructure, so it is tried afresh."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.agents import factories, resolving, telling
from libra_jax.agents import loop as agent_loop
from libra_jax.agents.rewards import scoring
from libra_jax.coordinator import dispatch

MakeTrajectory = Callable[[str, str, float], protocols.Trajectory]


def make_trajectory(trajectory_id: str, prompt_id: str, start_seconds: float) -> protocols.Trajectory:
    """The trajectory of a real run."""
    return protocols.Trajectory(trajectory_id, prompt_id, start_seconds=start_seconds)


class Attempts:
    """Runs attempts, each in a fresh environment.

    Args:
      config: the run's configuration (`task`, `rollout`).
      dispatcher: where tokens come from.
      make_environment: a fresh environment a call.
      tokenizer: the policy's.
      reward: scores attempts; None leaves them the environments' own rewards.
      make_trajectory: an attempt that has not begun, from its id, its prompt's and its begin in event-loop seconds.
      note: told of the first crashes that are tried again; and, once, that an attempt could not be taken up where a run
        before was cut off.
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
        self._crashes = telling.FirstFew(note)
        self._voids: collections.Counter[str] = collections.Counter()

    def take_voids(self) -> collections.Counter[str]:
        """Returns how many attempts at each prompt crashed since the last call, by the prompt's id."""
        taken, self._voids = self._voids, collections.Counter()
        return taken

    def begin(self, trajectory_id: str, task: protocols.Task) -> protocols.Trajectory:
        """An attempt that has not begun, begun now."""
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
        """Runs the attempt to its reward, from wherever the trajectory stands.

        Raises:
          EnvironmentCrashed: the environment or its factory broke `task.environment_retries` + 1 times, or the reward
            broke as often as it may.
        """
        limits, retries = factories.limits(self._config, temperature), self._config.task.environment_retries
        for retry in range(retries + 1):
            if retry:  # what broke may need a while; no instance's slot is held meanwhile
                await asyncio.sleep(self._config.task.retry_seconds * 2.0 ** (retry - 1))
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
                self._voids[trajectory.prompt_id] += 1
                if retry == retries or isinstance(crash, protocols.RewardFailed):
                    raise
                self._crashes.tell(f"Attempt {trajectory.trajectory_id} is begun anew: {crash}")
                _empty(trajectory)
            finally:
                self._dispatcher.finish(trajectory.trajectory_id)

    def _report(self, trajectory: protocols.Trajectory) -> None:
        if trajectory.metrics.get("replay_differs") and not self._noted:
            self._noted = True
            self._note(
                f"Attempt {trajectory.trajectory_id} was begun anew: stepped through its outputs again after the "
                f"restart, {self._config.task.environment} answered otherwise than before; its tokens until then were "
                "dropped. agent/replay_differs is the share of such attempts."
            )

    def _environment(self) -> protocols.Environment:
        try:
            return self._make_environment()
        except Exception as error:
            raise protocols.EnvironmentCrashed(
                f"the factory {self._config.task.environment} {resolving.raised(error)}"
            ) from error


def _empty(trajectory: protocols.Trajectory) -> None:
    """Makes the trajectory, which others hold, one that has not begun."""
    trajectory.clear()
    trajectory.metrics.clear()
    trajectory.reward = trajectory.finish = trajectory.environment_reward = None
