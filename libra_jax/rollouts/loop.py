"""The multi-turn loop of one rollout: render, sample, step the environment, append its return. Works on tokens only.

A resumed rollout runs the same loop over the tokens that its trajectory already holds. The environment's messages are
compared with the retained tokens instead of appended, and complete outputs are stepped instead of sampled. So a rollout
may be cut off at any token, and continues from there with a fresh environment. If the environment gave a snapshot
(`protocols.Resumable`), the rollout continues from the snapshot. If the environment answers differently than before,
the rollout starts over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from libra_jax import protocols
from libra_jax.rollouts import deadline_environment, progress
from libra_jax.rollouts import record as record_lib
from libra_jax.utils import resolving


@dataclass(frozen=True)
class Limits:
    """Limits of one rollout.

    Attributes:
      max_turns: Largest number of model outputs.
      max_tokens: Largest number of generated tokens of one output, including tokens retained by a resume.
      max_context: Largest number of tokens of the whole context.
      tool_seconds: Deadline of one environment step in seconds. A late step is the return "timeout" of the tool that
        the environment's `running_tool` names. If it names none, the environment has crashed.
      temperature: Sampling temperature. 0 is greedy.
      reset_seconds: Deadline in seconds of the environment's `reset`, `close`, `snapshot` and `restore`.
      wait_seconds: Deadline in seconds of the environment's `ready`.
      rollout_tokens: Largest number of generated tokens over all outputs. 0 means no limit.
      rollout_seconds: Seconds of the rollout from its first token on. 0 means no limit. An output is cut off at the
        limit, but a step that has begun may end within its own deadline.
      options: Further settings of the sampler, where nothing is trained.
    """

    max_turns: int
    max_tokens: int
    max_context: int
    tool_seconds: float
    temperature: float
    reset_seconds: float = 120.0
    wait_seconds: float = 600.0
    rollout_tokens: int = 0
    rollout_seconds: float = 0.0
    options: protocols.SamplingOptions = protocols.NO_OPTIONS

    def spent(self, outputs: int, generated: int) -> str | None:
        """Returns the limit that another output would exceed after these outputs and generated tokens, or None."""
        if outputs >= self.max_turns:
            return "max_turns"
        return "max_tokens" if 0 < self.rollout_tokens <= generated else None

    def room(self, context: int, generated: int) -> int:
        """Returns the most tokens of an output after a context, in a rollout that has generated tokens before."""
        room = min(self.max_tokens, self.max_context - context)
        return min(room, self.rollout_tokens - generated) if self.rollout_tokens else room


@dataclass(kw_only=True)
class RolloutSetup(record_lib.RolloutRecord):
    """What a rollout needs besides what drives it.

    Attributes:
      sampler: Source of tokens. Its `tool_called` is called after each output sampled here, before the step, the
        scoring or the end. Its `tool_returned` is called after a step if another output follows.
      limits: Limits of the rollout.
    """

    sampler: protocols.Sampler
    limits: Limits


async def run_rollout(setup: RolloutSetup, environment: protocols.Environment) -> protocols.Trajectory:
    """Runs a rollout to its end, from the current state of its trajectory, and returns that same object.

    At the end, `trajectory.reward` and `trajectory.finish` are set. If the policy did not answer within its limits (any
    finish but "answered"), the reward is 0, unless `reward` gives another. `task.cut_off` tells whether the trainer
    uses such rollouts. `environment` is closed in every case.

    These metrics are added to the environment's own: `turns`, `tool_calls`, `tool_timeouts`, `answered`, `tool_success`
    (1 if the last tool call succeeded), `rewarded_after_tool` (1 if rewarded after a successful tool call) and
    `replay_differs` (1 if retained tokens had to be dropped).

    Args:
      setup: The rollout's trajectory, task, sampler and so on.
      environment: Fresh environment. Its `reset` is called again if a replay differed. Its plain functions run on
        threads, so that deadlines hold for them too. While a step runs a tool, its `running_tool` names the tool. Only
        then may the step time out as a tool; a step that hangs otherwise is a crash.

    Raises:
      EnvironmentCrashed: The environment broke, or gave a reward that is not a finite number.
      TaskRefused: The chat template refuses a message of the environment, or the prompt leaves no room to answer.
      RewardFailed: The reward function broke, or gave a reward that is not a finite number.
    """
    trajectory = setup.trajectory
    world = deadline_environment.DeadlineEnvironment(environment, setup.task, setup.limits)
    # A resumed rollout that had ended before: only its fresh environment is left to close.
    if trajectory.finish is not None and trajectory.reward is not None:
        await world.close(trajectory.metrics)
        return trajectory
    rollout = _EnvironmentRollout(**vars(setup), environment=world)
    try:
        try:
            await rollout.run()
        except record_lib.ReplayDiffers:
            # The retained tokens belong to another dialogue than the one that this environment holds.
            trajectory.clear()
            await rollout.run(replay_differs=True)
    finally:
        await world.close(trajectory.metrics)
    return trajectory


@dataclass(kw_only=True)
class _EnvironmentRollout(RolloutSetup):
    """A rollout whose environment is stepped, continued from the current state of its trajectory."""

    environment: deadline_environment.DeadlineEnvironment

    async def run(self, *, replay_differs: bool = False) -> None:
        """Alternates outputs and steps until the rollout is over.

        Args:
          replay_differs: Whether retained tokens had to be dropped. A metric records this.
        """
        self.out_of_time = False
        self.record = record_lib.TokenRecord(self.trajectory)
        self.watch = progress.Stopwatch(self.trajectory, self.limits.rollout_seconds)
        self.metrics = {"replay_differs": float(replay_differs)}
        await self._open()
        while (spent := self._spent()) is None:
            output, sampled = await self._output()
            if output is None:
                if sampled:  # scoring and closing may take long and need no place in the engine
                    await self.sampler.tool_called(self.trajectory)
                # The output has no stop token, so it met a limit. If it met several, the last of these counts.
                finish = "max_seconds" if self.out_of_time else "length"
                if len(self.trajectory.token_ids) >= self.limits.max_context:
                    finish = "max_context"
                if 0 < self.limits.rollout_tokens <= self.record.generated:
                    finish = "max_tokens"
                return await self._finish(finish, 0.0)
            result = await self._step(output, sampled)
            if result.done:
                return await self._finish("answered", result.reward)
            causal_state = self._show(result)
            if causal_state is None:
                return await self._finish("max_context", 0.0)
            # A snapshot of a replayed turn would lie behind the retained tokens, and after the last output none is
            # needed.
            if self.record.at_end and self._spent() is None:
                state = await self.environment.snapshot()
                if state is not None:
                    loop_state = (self.record.position, self.record.turn, dict(self.metrics), tuple(self.messages))
                    self.trajectory.snapshot = protocols.RolloutSnapshot(state, *loop_state)
                if sampled:
                    await self.sampler.tool_returned(self.trajectory, causal_state)
        return await self._finish(spent, 0.0)

    def _spent(self) -> str | None:
        """Returns the limit that another output would exceed, or None.

        Time counts only after all retained tokens are replayed.
        """
        spent = self.limits.spent(self.record.turn, self.record.generated)
        return spent or ("max_seconds" if self.record.at_end and self.watch.over() else None)

    async def _open(self) -> None:
        """Restores the environment to its latest snapshot. If there is none, resets it and takes its prompt."""
        snapshot, trajectory = self.trajectory.snapshot, self.trajectory
        if snapshot is not None and self.environment.optional("restore") is not None:
            await self.environment.restore(snapshot.state)
            generated = sum(trajectory.loss_mask[: snapshot.position])
            self.record = record_lib.TokenRecord(trajectory, snapshot.position, snapshot.turn, generated)
            self.messages = [*snapshot.messages]
            self.metrics.update(snapshot.metrics)
            return
        self.messages = [*await self.environment.reset()]
        prompt = prompt_tokens(self.tokenizer, self.task, self.messages, self.limits)
        self.record.append(prompt, protocols.TokenSource.PROMPT)

    # Tokens -----------------------------------------------------------------------------------------------------

    async def _output(self) -> tuple[str | None, bool]:
        """Returns the next output, and whether any of it was sampled now.

        The output is the text without its stop token, or None if it has no stop token.
        """
        trajectory, start = self.trajectory, self.record.position
        retained_count, stopped = self.record.retained_output(self.tokenizer.stop_token_ids)
        if retained_count > self.limits.max_tokens:
            retained_count, stopped = self.limits.max_tokens, False
        room = self.limits.room(start, self.record.generated) - retained_count
        sampled = not stopped and room > 0
        start_seconds = asyncio.get_running_loop().time()
        # A retained output without a stop token must be the last one; tokens after it cannot come from this replay.
        if not stopped and start + retained_count != len(trajectory.token_ids):
            raise record_lib.ReplayDiffers
        if sampled:
            # Retained turns from here on describe an output that is sampled again or continued.
            del trajectory.turns[self.record.turn :]
            stopped = await self._sample(start, room)
        end = len(trajectory.token_ids) if sampled else start + retained_count
        # An output without a token has no turn, unless a resume retained it.
        if end > start or self.record.turn < len(trajectory.turns):
            self.record.record_output(end - start, start_seconds)
            self.record.pass_output(end - start)
        read = stopped or self.reward is not None  # only a scorer reads an output that was cut off
        output = (
            record_lib.opening(self.tokenizer, trajectory.token_ids, start)
            + self.tokenizer.decode(trajectory.token_ids[start : end - stopped])
            if read
            else ""
        )
        self.messages.append(protocols.Message("assistant", output))
        return output if stopped else None, sampled

    async def _sample(self, start: int, room: int) -> bool:
        """Samples at most `room` more tokens of the output that begins at `start`.

        Returns whether it ended with a stop token.
        """
        trajectory, stop_ids = self.trajectory, tuple(self.tokenizer.stop_token_ids)
        sampling = protocols.SamplingParams(self.limits.temperature, room, stop_ids)
        hear = self.environment.optional("hear")
        listener = None
        if hear is not None:
            listener = progress.Hearing(
                hear, self.tokenizer, trajectory, start, record_lib.opening(self.tokenizer, trajectory.token_ids, start)
            )

        def handle_tokens() -> None:
            self.watch.tokens_came(timer)
            if listener is not None:
                listener.pass_on()

        reason: protocols.FinishReason = "length"
        try:
            async with asyncio.timeout(None) as timer:
                self.watch.arm(timer)
                if listener is not None:
                    listener.pass_on()  # the retained beginning of an output that was cut off
                # A call for each piece of tokens costs time, so it is made only if something listens or measures.
                callbacks = (handle_tokens,) if self.limits.rollout_seconds or listener is not None else ()
                reason = await self.sampler.sample(trajectory, sampling, *callbacks)
        except TimeoutError:
            self.out_of_time = timer.expired()
            # A TimeoutError of the sampler itself is not this timer's.
            if not self.out_of_time:
                raise
        if listener is not None and listener.error is not None:
            raise self.environment.crash("hear", resolving.raised(listener.error)) from listener.error
        stopped = len(trajectory.token_ids) > start and trajectory.token_ids[-1] in stop_ids
        if reason == "stop" and not stopped:
            raise protocols.LibraError(
                f"the engine ended {trajectory.trajectory_id} at token {trajectory.token_ids[-1]}, which is no "
                f"stop token of the tokenizer ({stop_ids}): model and tokenizer do not match"
            )
        return stopped

    # The environment --------------------------------------------------------------------------------------------

    async def _step(self, output: str, sampled: bool) -> protocols.StepResult:
        """Returns the environment's answer to an output. Records the turn's tool, status and seconds."""
        if sampled:
            await self.sampler.tool_called(self.trajectory)
        if self.environment.optional("ready") is not None:
            await self.environment.ready(output)
        loop = asyncio.get_running_loop()
        step_start = loop.time()
        result = await self.environment.step(output)
        self.metrics.update((name, float(value)) for name, value in result.metrics.items())
        if result.done and not self.record.at_end:
            raise record_lib.ReplayDiffers
        answers, turn = result.tool_returns, self.trajectory.turns[self.record.turn - 1]
        # Of several concurrent returns, some may include waits for others.
        reported_seconds = answers[0].seconds if len(answers) == 1 else 0.0
        record_lib.record_returns(turn, answers, reported_seconds or loop.time() - step_start)
        return result

    def _show(self, result: protocols.StepResult) -> protocols.CausalState | None:
        """Appends the tool returns and further messages.

        Returns None, and appends nothing, if they leave no room to go on.
        """
        answers, room = result.tool_returns, self.limits.max_context - self.record.position
        messages = [*(protocols.Message("tool", answer.content) for answer in answers), *result.messages]
        tokens = _rendered(self.tokenizer, self.task, messages, first=False)
        causal_state = record_lib.record_payload(self.trajectory.turns[self.record.turn - 1], answers, len(tokens))
        # No room for the next output: the rollout ends here, so nothing can be retained beyond.
        if len(tokens) >= room:
            if not self.record.at_end:
                raise record_lib.ReplayDiffers
            return None
        self.record.append(tokens, protocols.TokenSource.TOOL)
        self.messages += messages
        return causal_state

    # The end ----------------------------------------------------------------------------------------------------

    async def _finish(self, finish: str, reward: float | None) -> None:
        if self.reward is None:
            reward = self.environment.reward(reward)
        # Retained turns that this walk did not reach are no part of the rollout.
        del self.trajectory.turns[self.record.turn :]
        await self.end(finish, reward, self.messages, self.metrics)


def prompt_tokens(
    tokenizer: protocols.Tokenizer, task: protocols.Task, messages: Sequence[protocols.Message], limits: Limits
) -> list[int]:
    """Returns the tokens of a rollout's first messages.

    Raises:
      TaskRefused: The chat template refuses a message, or the prompt leaves no room to answer.
    """
    prompt = _rendered(tokenizer, task, messages, first=True)
    if len(prompt) >= limits.max_context:
        raise protocols.TaskRefused(
            f"task {task.prompt_id}: its prompt of {len(prompt)} tokens leaves no room to answer within "
            f"rollout.max_context = {limits.max_context}; raise that or drop the task"
        )
    return prompt


def _rendered(
    tokenizer: protocols.Tokenizer, task: protocols.Task, messages: Sequence[protocols.Message], *, first: bool
) -> list[int]:
    """Returns the tokens of an increment. One task's messages that the template refuses must not end the run."""
    try:
        return tokenizer.render(messages, first=first, generation_prompt=True)
    except protocols.DataError as error:
        raise protocols.TaskRefused(f"task {task.prompt_id}: {error}") from error
