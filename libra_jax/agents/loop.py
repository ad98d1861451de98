"""The multi-turn loop of one attempt: render, sample, step the environment, append its return; token in, token out.

A resumed attempt runs the same loop over the tokens its trajectory already holds: what the environment says is compared
with the retained tokens instead of appended, and outputs that are complete are stepped instead of sampled. So an
attempt may be cut off at any token and goes on from there with a fresh environment. One whose environment gave a
snapshot (`protocols.Resumable`) begins from there. One whose environment answers otherwise than before starts over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from libra_jax import protocols
from libra_jax.agents import guarded, progress, resolving
from libra_jax.agents.rewards import scoring


@dataclass(frozen=True)
class Limits:
    """What one attempt may use.

    Attributes:
      max_turns: model outputs.
      max_tokens: generated tokens of one output, those retained from before a resume included.
      max_context: tokens of the whole context.
      tool_seconds: deadline of one environment step; passing it is the return "timeout" of the tool that the
        environment's `running_tool` names, and a crash of the environment where that names none.
      temperature: of sampling; 0 is greedy.
      reset_seconds: deadline of the environment's `reset`, `close`, `snapshot` and `restore`.
      wait_seconds: deadline of its `ready`.
      attempt_tokens: generated tokens over all outputs; 0 is no limit.
      attempt_seconds: of the attempt from its first token on; 0 is no limit. An output is cut off; a step that has
        begun is let end, within its own deadline.
      answer_tokens: room for the next output. Tool returns that leave less are cut in their middle; 0: not cut, the
        attempt ends where they leave no room at all.
    """

    max_turns: int
    max_tokens: int
    max_context: int
    tool_seconds: float
    temperature: float
    reset_seconds: float = 120.0
    wait_seconds: float = 600.0
    attempt_tokens: int = 0
    attempt_seconds: float = 0.0
    answer_tokens: int = 0


async def run_attempt(
    *,
    trajectory: protocols.Trajectory,
    task: protocols.Task,
    environment: protocols.Environment,
    tokenizer: protocols.Tokenizer,
    sampler: protocols.Sampler,
    limits: Limits,
    reward: scoring.Scorer | None = None,
    status: Callable[[str], None] | None = None,
) -> protocols.Trajectory:
    """Runs one attempt to its end, from wherever `trajectory` stands, and returns that same object.

    At the end `trajectory.reward` and `trajectory.finish` are set. An attempt whose policy did not answer within its
    limits (any other finish than "answered") has reward 0, unless `reward` says otherwise; `task.cut_off` says whether
    the trainer looks at it. Its metrics, besides the
    environment's: `turns`, `tool_calls`, `tool_timeouts`, `answered`, `tool_success` (1 if the last tool call
    succeeded), `rewarded_after_tool` (1 if rewarded, with a successful tool call before the answer), `replay_differs`
    (1 if retained tokens had to be dropped) and, where they may be cut, `returns_cut`. `environment` is closed in every
    case.

    Args:
      trajectory: empty for a new attempt; else what a killed one left, cut anywhere.
      task: what is attempted.
      environment: fresh. Its `reset` is called a second time if a replay differed. Methods that are plain functions run
        on threads, so that the deadlines hold for them too. While a step runs a tool, its attribute `running_tool`
        names it: only such a step may time out as a tool does. One that hangs without is a crash.
      tokenizer: its template is applied to increments only.
      sampler: where tokens come from. `tool_called` follows each output that was sampled here, before its step, the
        scoring or the end; `tool_returned` follows the step where another output is to come.
      limits: what the attempt may use.
      reward: scores every finished attempt, within deadlines of its own; None: the environment's reward counts.
      status: told, in a few words, what the attempt is doing.

    Raises:
      EnvironmentCrashed: the environment broke, or gave a reward that is not a finite number.
      RewardFailed: the same of the reward function.
    """
    world = guarded.Environment(
        environment,
        task,
        reset_seconds=limits.reset_seconds,
        step_seconds=limits.tool_seconds,
        wait_seconds=limits.wait_seconds,
    )
    if trajectory.finish is not None and trajectory.reward is not None:
        await world.close(trajectory.metrics)
        return trajectory
    attempt = _Attempt(trajectory, task, world, tokenizer, sampler, limits, reward, status or (lambda _: None))
    try:
        try:
            await attempt.run()
        except progress.ReplayDiffers:
            attempt.start_over()
            await attempt.run()
    finally:
        await world.close(trajectory.metrics)
    return trajectory


class _Attempt:
    """One attempt, from wherever its trajectory stands."""

    def __init__(
        self,
        trajectory: protocols.Trajectory,
        task: protocols.Task,
        environment: guarded.Environment,
        tokenizer: protocols.Tokenizer,
        sampler: protocols.Sampler,
        limits: Limits,
        reward: scoring.Scorer | None,
        status: Callable[[str], None],
    ) -> None:
        self.trajectory = trajectory
        self.task = task
        self.environment = environment
        self.tokenizer = tokenizer
        self.sampler = sampler
        self.limits = limits
        self.reward = reward
        self.status = status
        self.out_of_time = False
        self._begin(replay_differs=False)

    def _begin(self, *, replay_differs: bool) -> None:
        self.walk = progress.Walk(self.trajectory)
        self.messages: list[protocols.Message] = []
        self.watch = progress.Stopwatch(self.trajectory, self.limits.attempt_seconds)
        self.metrics: dict[str, float] = {"replay_differs": float(replay_differs)}
        if self.limits.answer_tokens:
            self.metrics["returns_cut"] = 0.0

    def start_over(self) -> None:
        """Drops every retained token; the metrics say so."""
        self.trajectory.clear()
        self._begin(replay_differs=True)

    async def run(self) -> None:
        """Alternates outputs and steps until the attempt is over."""
        self.status("opening")
        if not await self._take_up():
            await self._open()
        while (spent := self._spent()) is None:
            output, sampled = await self._output()
            if output is None:
                if sampled:  # scoring and closing may take long, and neither needs the place
                    await self.sampler.tool_called(self.trajectory)
                return await self._finish(self._cut_off(), 0.0)
            result = await self._step(output, sampled)
            if result.done:
                return await self._finish("answered", result.reward)
            shown = self._show(result)
            if shown is None:
                return await self._finish("max_context", 0.0)
            self.walk.turn += 1
            if self.walk.at_end and self._spent() is None:
                await self._keep()
                if sampled:
                    await self.sampler.tool_returned(self.trajectory, shown)
        return await self._finish(spent, 0.0)

    def _spent(self) -> str | None:
        """The limit that another output would pass; time counts once nothing retained is left to account for."""
        if self.walk.turn >= self.limits.max_turns:
            return "max_turns"
        if 0 < self.limits.attempt_tokens <= self.walk.generated:
            return "max_tokens"
        return "max_seconds" if self.walk.at_end and self.watch.over() else None

    def _cut_off(self) -> str:
        """The limit that an output without a stop token has met."""
        if 0 < self.limits.attempt_tokens <= self.walk.generated:
            return "max_tokens"
        if len(self.trajectory.token_ids) >= self.limits.max_context:
            return "max_context"
        return "max_seconds" if self.out_of_time else "length"

    # The beginning ----------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        messages = await self.environment.reset()
        prompt = self._render(messages, first=True)
        self.messages = [*messages]
        if len(prompt) >= self.limits.max_context:
            raise protocols.EnvironmentCrashed(
                f"task {self.task.prompt_id}: its prompt of {len(prompt)} tokens leaves no room to answer within "
                f"rollout.max_context = {self.limits.max_context}; raise that or drop the task"
            )
        self.walk.append(prompt, protocols.TokenSource.PROMPT)

    async def _take_up(self) -> bool:
        """Restores the environment to its latest snapshot, if there is one; False, and nothing done, if not."""
        kept = self.trajectory.snapshot
        if kept is None or not self.environment.has("restore"):
            return False
        await self.environment.restore(kept.state)
        self.walk.jump(kept.position, kept.turn)
        self.messages = [*kept.messages]
        self.metrics.update(kept.metrics)
        return True

    async def _keep(self) -> None:
        """Takes a snapshot, where the environment can."""
        state = await self.environment.snapshot() if self.environment.has("snapshot") else None
        if state is None:
            return
        self.trajectory.snapshot = protocols.AttemptSnapshot(
            state, self.walk.position, self.walk.turn, dict(self.metrics), tuple(self.messages)
        )

    # Tokens -----------------------------------------------------------------------------------------------------

    def _render(self, messages: Sequence[protocols.Message], *, first: bool) -> list[int]:
        return self.tokenizer.render(messages, first=first, generation_prompt=True)

    async def _output(self) -> tuple[str | None, bool]:
        """The next model output: its text without the stop token (None if it has none), and if any was sampled now."""
        trajectory, limits, start = self.trajectory, self.limits, self.walk.position
        kept = self.walk.retained_output(limits.max_tokens, self.tokenizer.stop_token_ids)
        stopped = kept > 0 and trajectory.token_ids[start + kept - 1] in self.tokenizer.stop_token_ids
        room = min(limits.max_tokens - kept, limits.max_context - start - kept)
        if limits.attempt_tokens:
            room = min(room, limits.attempt_tokens - self.walk.generated - kept)
        sampled = not stopped and room > 0
        began = asyncio.get_running_loop().time()
        if not stopped and start + kept != len(trajectory.token_ids):
            raise progress.ReplayDiffers
        if sampled:
            del trajectory.turns[self.walk.turn :]
            self.status(f"generating, turn {self.walk.turn + 1}")
            stopped = await self._sample(start, room)
        end = len(trajectory.token_ids) if sampled else start + kept
        self.walk.record(end, began)
        read = stopped or self.reward is not None  # what was cut off is a scorer's alone to read
        output = self.tokenizer.decode(trajectory.token_ids[start : end - stopped]) if read else ""
        self.messages.append(protocols.Message("assistant", output))
        return output if stopped else None, sampled

    async def _sample(self, start: int, room: int) -> bool:
        """Samples the output that begins at `start`, at most `room` more tokens; whether it ended with a stop token."""
        trajectory, stop_ids = self.trajectory, tuple(self.tokenizer.stop_token_ids)
        sampling = protocols.SamplingParams(self.limits.temperature, room, stop_ids)
        hear = self.environment.hear
        if self.limits.attempt_seconds or hear is not None:
            listener = None if hear is None else progress.Hearing(hear, self.tokenizer, trajectory, start)
            reason = await self._sample_watched(sampling, listener)
        else:
            reason = await self.sampler.sample(trajectory, sampling)
        stopped = len(trajectory.token_ids) > start and trajectory.token_ids[-1] in stop_ids
        if reason == "stop" and not stopped:
            raise protocols.LibraError(
                f"the engine ended {trajectory.trajectory_id} at token {trajectory.token_ids[-1]}, which is no "
                f"stop token of the tokenizer ({stop_ids}): model and tokenizer do not match"
            )
        return stopped

    async def _sample_watched(
        self, sampling: protocols.SamplingParams, listener: progress.Hearing | None
    ) -> protocols.FinishReason:
        """Samples while time is taken, and while the environment hears it; "length" where the time is up."""

        def heard() -> None:
            self.watch.tokens_came(timer)
            if listener is not None:
                listener.heard()

        reason: protocols.FinishReason = "length"
        try:
            async with asyncio.timeout(None) as timer:
                self.watch.arm(timer)
                if listener is not None:
                    listener.heard()  # the beginning of an output that was cut off
                reason = await self.sampler.sample(self.trajectory, sampling, heard)
        except TimeoutError:
            self.out_of_time = timer.expired()
            if not self.out_of_time:
                raise
        if listener is not None and listener.error is not None:
            error = listener.error
            raise self.environment.crash("hear", resolving.raised(error)) from error
        return reason

    # The environment --------------------------------------------------------------------------------------------

    async def _step(self, output: str, sampled: bool) -> protocols.StepResult:
        """The environment's answer to an output, and the turn's tool, outcome and seconds."""
        if sampled:
            await self.sampler.tool_called(self.trajectory)
        if self.environment.has("ready"):
            self.status(f"waiting, turn {self.walk.turn + 1}")
            await self.environment.ready(output)
        self.status(f"tool, turn {self.walk.turn + 1}")
        loop = asyncio.get_running_loop()
        began = loop.time()
        result = await self.environment.step(output)
        self.metrics.update((name, float(value)) for name, value in result.metrics.items())
        if result.done and not self.walk.at_end:
            raise progress.ReplayDiffers
        answers, turn = result.tool_returns, self.trajectory.turns[self.walk.turn]
        if answers:
            turn.tool, turn.status = _joined(answers)
        told = answers[0].seconds if len(answers) == 1 else 0.0  # of several, some may have waited for others
        turn.tool_seconds = turn.tool_seconds or told or loop.time() - began
        return result

    def _show(self, result: protocols.StepResult) -> protocols.CausalState | None:
        """Appends the tool returns and further messages; None, and nothing appended, if they leave no room to go on."""
        answers, room = result.tool_returns, self.limits.max_context - self.walk.position

        def messages(answers: Sequence[protocols.ToolReturn]) -> list[protocols.Message]:
            return [*(protocols.Message("tool", answer.content) for answer in answers), *result.messages]

        said = messages(answers)
        tokens = self._render(said, first=False)
        if self.limits.answer_tokens and len(tokens) > room - self.limits.answer_tokens:
            cut = progress.cut_to_fit(
                answers,
                lambda answers: len(self._render(messages(answers), first=False)),
                room - self.limits.answer_tokens,
            )
            if cut is not None:
                said = messages(cut)
                tokens = self._render(said, first=False)
            self.metrics["returns_cut"] += float(cut is not None)
        self.trajectory.turns[self.walk.turn].payload_tokens = len(tokens)
        if len(tokens) >= room:
            if not self.walk.at_end:
                raise progress.ReplayDiffers
            return None
        self.walk.append(tokens, protocols.TokenSource.TOOL)
        self.messages += said
        tool, outcome = _joined(answers) if answers else ("environment", "success")
        return protocols.CausalState(tool, len(tokens), outcome)

    # The end ----------------------------------------------------------------------------------------------------

    async def _finish(self, finish: str, reward: float | None) -> None:
        own = float(reward) if guarded.is_finite(reward) else None
        if self.reward is not None:
            self.status("scoring")
            reward = await self._score(self.reward, finish, reward)
        elif not guarded.is_finite(reward):
            raise self.environment.crash("step", f"gave the reward {reward!r}, which is not a finite number")
        assert reward is not None
        trajectory = self.trajectory
        del trajectory.turns[self.walk.turn + 1 :]
        calls = [turn for turn in trajectory.turns if turn.tool is not None]
        after_tool = reward > 0 and finish == "answered" and any(turn.status == "success" for turn in calls)
        trajectory.metrics.update(self.metrics)
        trajectory.metrics.update(
            turns=float(len(trajectory.turns)),
            tool_calls=float(len(calls)),
            tool_timeouts=float(sum(turn.status == "timeout" for turn in calls)),
            tool_success=float(bool(calls) and calls[-1].status == "success"),
            rewarded_after_tool=float(after_tool),
            answered=float(finish == "answered"),
        )
        trajectory.reward, trajectory.finish, trajectory.environment_reward = float(reward), finish, own
        self.status(f"{finish}, reward {float(reward):g}")

    async def _score(self, scorer: scoring.Scorer, finish: str, own: float | None) -> float:
        """What the scorer says; its deadlines are its own."""
        turns = self.trajectory.turns[: self.walk.turn + 1]
        transcript = scoring.Transcript(
            text=self.tokenizer.decode(self.trajectory.token_ids),
            answer=self.messages[-1].content if finish == "answered" else "",
            finish=finish,
            messages=tuple(self.messages),
            tools=tuple(
                protocols.CausalState(turn.tool, turn.payload_tokens, turn.status)
                for turn in turns
                if turn.tool is not None and turn.status is not None
            ),
            metrics={name: value for name, value in self.metrics.items() if name != "replay_differs"},
            environment_reward=float(own) if guarded.is_finite(own) else None,
        )
        crash = f"reward, task {self.task.prompt_id}: it"
        try:
            score = await scorer(self.task, transcript)
        except protocols.LibraError:
            raise
        except Exception as error:
            raise protocols.RewardFailed(f"{crash} {resolving.raised(error)}") from error
        if not guarded.is_finite(score.reward):
            raise protocols.RewardFailed(f"{crash} gave {score.reward!r}, which is not a finite number")
        self.metrics.update(score.metrics)
        return score.reward


_FROM_BEST = ("success", "failure", "timeout")


def _joined(answers: Sequence[protocols.ToolReturn]) -> tuple[str, protocols.ToolStatus]:
    """Joins the tools of one turn: each tool's name once, in one order, and the worst status."""
    tools = "+".join(sorted({answer.tool for answer in answers}))
    return tools, max((answer.status for answer in answers), key=_FROM_BEST.index)
