"""Runs scripted rollouts of several segments: a history that is summarised, and sub-agents.

Outputs are generated in the order of the script, one after another. Outputs of segments that ran side by side in a
recorded run are therefore replayed in the order in which they began. A tool that returns to a segment with later
outputs runs beside the outputs of other segments meanwhile. So a call that waits for a sub-agent lasts as long as the
sub-agent's outputs, and at least as long as it was recorded.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from libra_jax import protocols
from libra_jax.rollouts import deadline_environment, record
from libra_jax.rollouts import loop as agent_loop
from libra_jax.simulator import trajectory as counted


async def run_rollout(setup: agent_loop.RolloutSetup, environment: protocols.Environment) -> protocols.Trajectory:
    """Runs a scripted rollout to its end; one of a single segment runs in the agent loop (`rollouts.loop`).

    Raises:
      EnvironmentCrashed: the environment broke.
      ConfigError: a limit is set that counts seconds of rollouts, which is not simulated for several segments.
    """
    trajectory, limits = setup.trajectory, setup.limits
    assert isinstance(trajectory, counted.CountedTrajectory)
    if not trajectory.script.segments:
        return await agent_loop.run_rollout(setup, environment)
    if limits.rollout_seconds:
        raise protocols.ConfigError(
            "config.task.max_seconds: seconds of rollouts with several segments are not simulated; set it to 0"
        )
    world = deadline_environment.DeadlineEnvironment(environment, setup.task, limits)
    rollout = _BranchingRollout(trajectory, world, setup.tokenizer, setup.sampler, limits)
    try:
        await rollout.run()
    finally:
        rollout.cancel()
        await world.close(trajectory.metrics)
    return trajectory


class _Answer(NamedTuple):
    """What the environment answered to an output, and the seconds that it took."""

    result: protocols.StepResult
    seconds: float


class _BranchingRollout:
    """One rollout under way.

    Args:
      rollout: its empty trajectory.
      tokenizer: counts the prompt's tokens.
      sampler: source of tokens.
      limits: limits of the rollout.
    """

    def __init__(
        self,
        rollout: counted.CountedTrajectory,
        world: deadline_environment.DeadlineEnvironment,
        tokenizer: protocols.Tokenizer,
        sampler: protocols.Sampler,
        limits: agent_loop.Limits,
    ) -> None:
        self._rollout, self._world, self._tokenizer = rollout, world, tokenizer
        self._sampler, self._limits = sampler, limits
        self._segments: dict[int, counted.Counted] = {}
        self._tools: dict[int, asyncio.Task[_Answer]] = {}  # by segment
        self._owed: dict[int, int] = {}  # tokens of the last return, which the segment has not shown yet

    async def run(self) -> None:
        """Generates the outputs, and records how the rollout ended."""
        rollout, loop = self._rollout, asyncio.get_running_loop()
        messages = await self._world.reset()
        prompt = self._tokenizer.render(messages, first=True, generation_prompt=True)
        rollout.append_text(prompt, protocols.TokenSource.PROMPT)
        self._segments[0] = rollout
        outputs = list(rollout.script.outputs())
        for index, output in enumerate(outputs):
            if index >= self._limits.max_turns:
                return self._finish("max_turns", 0.0)
            place = output.segment
            if place in self._tools:
                await self._returned(place, await self._tools.pop(place))
            segment, start_time = self._segment(place), loop.time()
            finish = await self._sample(segment, start_time)
            await self._sampler.tool_called(segment)
            if finish is not None:
                return self._finish(finish, 0.0)
            self._tools[place] = loop.create_task(self._step())
            if output.goes_on and outputs[index + 1].segment != place:
                await asyncio.sleep(0)  # the environment takes this step before the next one
                continue
            answer = await self._tools.pop(place)
            if answer.result.done:
                self._record(segment, answer)
                return self._finish("answered", answer.result.reward or 0.0)
            if output.goes_on:
                await self._returned(place, answer)
            else:
                self._owed[place] = self._record(segment, answer)
        # A tool that timed out took the place of the script's end.
        return self._finish("answered", 0.0)

    def cancel(self) -> None:
        """Ends the tools that still run."""
        for stepping in self._tools.values():
            stepping.cancel()

    def _segment(self, place: int) -> counted.Counted:
        """Returns the script's segment of this number; begins it, and first the one that it begins with."""
        segment = self._segments.get(place)
        if segment is not None:
            return segment
        script = self._rollout.script.segments[place - 1]
        parent = None if script.parent is None else self._segment(script.parent)
        # The child may begin with a return that its parent never answers.
        if parent is not None and script.parent in self._owed and script.shared_tokens > parent.context_tokens:
            self._show(parent, self._owed.pop(script.parent))
        segment = self._segments[place] = self._rollout.begin(place, parent, script.shared_tokens)
        prompt = counted.Runs([(counted.TEXT, script.prompt_tokens)])
        segment.append_text(prompt, protocols.TokenSource.PROMPT)
        return segment

    async def _sample(self, segment: counted.Counted, start_time: float) -> str | None:
        """Samples an output. Returns None if it is complete, or else the limit that it met."""
        limits, before = self._limits, segment.generated_tokens
        room = limits.room(segment.context_tokens, self._rollout.sampled_tokens)
        if room <= 0:
            return limits.spent(0, self._rollout.sampled_tokens) or "max_context"
        sampling = protocols.SamplingParams(limits.temperature, room, (counted.STOP,))
        reason = await self._sampler.sample(segment, sampling)
        segment.turns.append(protocols.Turn(segment.generated_tokens - before, start_seconds=start_time))
        if reason == "stop":
            return None
        if segment.context_tokens >= limits.max_context:
            return "max_context"
        if 0 < limits.rollout_tokens <= self._rollout.sampled_tokens:
            return "max_tokens"
        return "length"

    async def _step(self) -> _Answer:
        start_time = asyncio.get_running_loop().time()
        # By the rollout's name, as `CountedText` decodes an output.
        result = await self._world.step(self._rollout.trajectory_id)
        return _Answer(result, asyncio.get_running_loop().time() - start_time)

    def _record(self, segment: counted.Counted, answer: _Answer) -> int:
        """Records the tool that the last output called, in its turn. Returns the tokens of the return."""
        result = answer.result
        reported_seconds = sum(returned.seconds for returned in result.tool_returns)  # a script has one at most
        record.record_returns(segment.turns[-1], result.tool_returns, reported_seconds or answer.seconds)
        messages = [protocols.Message("tool", returned.content) for returned in result.tool_returns]
        return len(self._tokenizer.render([*messages, *result.messages], first=False, generation_prompt=True))

    def _show(self, segment: counted.Counted, tokens: int) -> None:
        segment.turns[-1].payload_tokens = tokens
        segment.append_text(counted.Runs([(counted.TEXT, tokens)]), protocols.TokenSource.TOOL)

    async def _returned(self, place: int, answer: _Answer) -> None:
        """Shows a tool's return to its segment, which goes on."""
        segment = self._segments[place]
        tokens = self._record(segment, answer)
        self._show(segment, tokens)
        state = record.record_payload(segment.turns[-1], answer.result.tool_returns, tokens)
        await self._sampler.tool_returned(segment, state)

    def _finish(self, finish: str, reward: float) -> None:
        rollout = self._rollout
        rollout.metrics.update(record.turn_metrics(rollout.all_turns, reward, finish))
        rollout.reward = rollout.environment_reward = reward
        rollout.finish = finish
