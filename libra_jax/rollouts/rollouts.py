"""Runs one rollout under the run's rules.

A crash of the environment counts as a failure of infrastructure, so its rollout is retried from the start.
"""

from __future__ import annotations

import abc
import asyncio
import collections
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

from libra_jax import protocols
from libra_jax.rewards import scoring
from libra_jax.rollouts import factories, harness_loop, streams
from libra_jax.rollouts import loop as agent_loop
from libra_jax.utils import resolving, run_context, user_code

MOST_REMARKS = 40
"""Sentences on what agents met that a run notes."""

MakeTrajectory = Callable[[str, str], protocols.Trajectory]
"""Makes an empty trajectory from its id and its prompt's id."""


RunRollout = Callable[[agent_loop.RolloutSetup, protocols.Environment], Awaitable[protocols.Trajectory]]
"""Runs one rollout to its end (`rollouts.loop.run_rollout`)."""


@dataclass(frozen=True, kw_only=True)
class RolloutAgent:
    """What rollouts need of the agent, in the process that runs them.

    Attributes:
      make_environment: returns a fresh environment, or a fresh harness, at each call.
      tokenizer: the policy's tokenizer.
      reward: scores rollouts; None leaves them the environments' own rewards.
      teacher: scores the tokens of training rollouts; None unless the run has a teacher behind an endpoint.
      make_trajectory: returns an empty trajectory (those of the simulator hold no token lists).
      host: gives harnesses their sessions; None only if no environment is a harness.
      run_rollout: runs a rollout in an environment (those of the simulator may have several segments).
    """

    make_environment: Callable[[], protocols.Environment | protocols.Harness]
    tokenizer: protocols.Tokenizer
    reward: scoring.Scorer | None = None
    teacher: protocols.Teacher | None = None
    make_trajectory: MakeTrajectory = protocols.Trajectory
    host: harness_loop.SessionResources | None = None
    run_rollout: RunRollout = agent_loop.run_rollout


@dataclass(frozen=True, kw_only=True)
class Agent(RolloutAgent):
    """What the policy is asked to do, and how its rollouts are scored.

    Attributes:
      tasks: training and held-out tasks.
      demonstrator: solves tasks for the warm start; None if there is none.
    """

    tasks: protocols.TaskSource
    demonstrator: protocols.Demonstrator | None = None


class RolloutRunner(abc.ABC):
    """Runs rollouts: in this process (`Rollouts`) or on loop workers (`coordinator.loop_workers.LoopWorkers`).

    Args:
      run: what the parts of the run share (`task`).
      agent: what the policy is asked to do.
    """

    def __init__(self, run: run_context.RunContext, agent: RolloutAgent) -> None:
        self._config = run.config
        self._clock = run.clock
        self._agent = agent

    def begin(self, trajectory_id: str, task: protocols.Task) -> protocols.Trajectory:
        """Returns an empty trajectory for the task, started now."""
        trajectory = self._agent.make_trajectory(trajectory_id, task.prompt_id)
        trajectory.start_seconds = self._clock()
        return trajectory

    @abc.abstractmethod
    async def run(self, order: protocols.RolloutOrder) -> None:
        """Runs the rollout until its trajectory, which grows in place, has a reward.

        Raises:
          EnvironmentCrashed: the environment or its factory crashed `task.environment_retries` + 1 times, or the reward
            failed as often as the config allows, or no rollout can pose the task.
        """

    @abc.abstractmethod
    def take_counts(self) -> protocols.StreamCounts:
        """Returns the counts of the rollouts' streams since the last call."""

    @abc.abstractmethod
    def take_voids(self) -> collections.Counter[str]:
        """Returns the number of rollouts that crashed since the last call, by prompt id."""

    async def teach(self, trajectory: protocols.Trajectory) -> None:
        """Records the teacher's log-probabilities of a finished rollout that will be trained, if there is a teacher."""
        teacher = self._agent.teacher
        # A rollout restored from a checkpoint may have them already.
        if teacher is None or self._config.task.masks(trajectory.finish):
            return
        start_seconds = self._clock()
        for segment in trajectory.segments:
            if not segment.teacher_log_probs:
                segment.teacher_log_probs.extend((await teacher.log_probs(segment.context()))[segment.shared :])
        trajectory.metrics["teacher/seconds"] = self._clock() - start_seconds


class Rollouts(RolloutRunner):
    """Runs rollouts in this process, each in a fresh environment.

    Args:
      run: what the parts of the run share (`task`, `rollout`). The recorder gets a note for each of the first crashes
        that are retried, and one if a rollout could not resume after a restart of the run.
      agent: what the policy is asked to do.
      sampler: the source of sampled tokens.
    """

    def __init__(self, run: run_context.RunContext, agent: RolloutAgent, sampler: streams.Streams) -> None:
        super().__init__(run, agent)
        self._note = run.recorder.note
        self._streams = sampler
        self._noted = False
        self._remarked: set[str] = set()
        self._crashes = resolving.FirstFew(run.recorder.note)
        self._voids: collections.Counter[str] = collections.Counter()

    def take_voids(self) -> collections.Counter[str]:
        voids, self._voids = self._voids, collections.Counter()
        return voids

    def take_counts(self) -> protocols.StreamCounts:
        return self._streams.take_counts()

    async def run(self, order: protocols.RolloutOrder) -> None:
        trajectory = order.trajectory
        setup = agent_loop.RolloutSetup(
            trajectory=trajectory,
            task=order.task,
            tokenizer=self._agent.tokenizer,
            sampler=self._streams,
            limits=factories.limits(self._config, order.temperature),
            reward=self._agent.reward,
        )
        retries = self._config.task.environment_retries
        # Of this process's event loop, whose clock turns are timed by.
        trajectory.goes_on_at(asyncio.get_running_loop().time())
        voided = False
        for retry in range(retries + 1):
            # Exponential backoff; the rollout holds no engine slot meanwhile.
            if retry:
                await asyncio.sleep(self._config.task.retry_seconds * 2.0 ** (retry - 1))
            # A rollout restored from a checkpoint may have its reward already.
            if trajectory.reward is not None:
                return
            self._streams.open(trajectory, order.group_id, order.dispatch_version)
            try:
                try:
                    with user_code.contain_exits():
                        await self._run_once(setup, score_void=voided or retry == retries)
                except user_code.UserExit as error:
                    # Else the rollout's task would end as cancelled, and its group would wait for it forever.
                    problem = f"rollout {trajectory.trajectory_id} {resolving.raised(error)}"
                    raise protocols.EnvironmentCrashed(problem) from error
                return
            except protocols.EnvironmentCrashed as crash:
                # By prompt, so that a single prompt that breaks the environment stands out.
                self._voids[trajectory.prompt_id] += 1
                voided = voided or isinstance(crash, protocols.AttemptVoided)
                # A failed reward has had its own retries, and a second rollout would meet the same function or prompt.
                if retry == retries or isinstance(crash, protocols.RewardFailed | protocols.TaskRefused):
                    raise
                self._crashes.tell(f"Rollout {trajectory.trajectory_id} begins again: {crash}")
                # A fresh environment may answer differently, so no token of the crashed one is kept. Emptied in place,
                # because the group and the streams hold the same object.
                trajectory.clear()
                trajectory.metrics.clear()
                trajectory.reward = trajectory.finish = trajectory.environment_reward = None
            finally:
                self._streams.finish(trajectory.trajectory_id)

    async def _run_once(self, setup: agent_loop.RolloutSetup, *, score_void: bool) -> None:
        """Runs the rollout in one fresh environment. Raises EnvironmentCrashed if it or its factory crashes.

        If `score_void`, a rollout that the agent's own side voids has the reward 0.
        """
        try:
            environment = self._agent.make_environment()
        except Exception as error:
            raise protocols.EnvironmentCrashed(
                f"the factory {self._config.task.environment} {resolving.raised(error)}"
            ) from error
        if factories.is_harness(environment):
            if self._agent.host is None:
                raise protocols.LibraError(
                    f"{self._config.task.environment} is a harness, and this run has no gateway."
                )
            await harness_loop.run_harness(setup, environment, self._agent.host, score_void=score_void)
            self._tell_remarks(self._agent.host.remarks)
            return
        trajectory = await self._agent.run_rollout(setup, cast("protocols.Environment", environment))
        # Noted once: after a restart this may concern every rollout that was in flight.
        if trajectory.metrics.get("replay_differs") and not self._noted:
            self._noted = True
            self._note(
                f"Rollout {trajectory.trajectory_id} began again: stepped through its outputs again after the "
                f"restart, {self._config.task.environment} answered otherwise than before; its tokens until then were "
                "dropped. agent/replay_differs is the share of such rollouts."
            )

    def _tell_remarks(self, remarks: collections.Counter[str]) -> None:
        """Notes what agents met, each once."""
        new = [remark for remark in remarks if remark not in self._remarked][: MOST_REMARKS - len(self._remarked)]
        remarks.clear()
        self._remarked.update(new)
        if new:
            self._note(
                f"What agents asked for or met, counted by agent/hints, agent/refused_requests, "
                f"agent/agent_failed and agent/agent_voided: "
                f"{'; '.join(new)}. Hints change nothing of what is sampled (config.gateway.strict refuses them)."
            )
