"""A dialogue with tools: the policy may call several tools per output, until an output calls none.

Environments differ in how they ask the question (`pose`) and score the last output (`score`). Both functions get the
rollout's toolbox, and through it the rollout's sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from libra_jax import protocols
from libra_jax.chat import formats
from libra_jax.environments import question
from libra_jax.tools import toolbox, toolkit
from libra_jax.utils import deadlines, user_values


@dataclass(frozen=True)
class Verdict:
    """The verdict on a rollout.

    Attributes:
      reward: A finite number.
      metrics: Further numbers to report, such as `f1`.
    """

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)


Pose = Callable[[protocols.Task, toolbox.Toolbox], Awaitable[Sequence[protocols.Message]]]
"""Function that returns the first messages of a rollout.

It also puts the files that the task needs into the sandbox.
"""

Score = Callable[[protocols.Task, str, toolbox.Toolbox], Awaitable[Verdict | float] | Verdict | float]
"""Returns the verdict on the whole text of the output that called no tool; a number is a verdict of that reward.

A plain function runs on a thread, so that the step's deadline holds for it.
"""

NO_CALL = "call"
"""Name of the tool in a return if the policy's text is not a valid call."""


async def posed(task: protocols.Task, box: toolbox.Toolbox, key: str = "prompt") -> Sequence[protocols.Message]:
    """A `Pose` of a value of the task's payload, which is a text or a list of messages."""
    del box
    return question.opening(task.payload[key])


def solved(
    opening: Sequence[protocols.Message], calls: Sequence[tuple[str, str]], answer: str
) -> list[protocols.Message]:
    """Returns a solved dialogue to demonstrate: the opening, pairs of a call and its return, and the answer."""
    pairs = [(protocols.Message("assistant", call), protocols.Message("tool", returned)) for call, returned in calls]
    return [*opening, *itertools.chain.from_iterable(pairs), protocols.Message("assistant", answer)]


@dataclass
class EarlyCalls:
    """Starts calls of one output while the output is still generated, if their tools change nothing.

    Attributes:
      box: Tools of the rollout. Only calls of `eager` tools start early.
      parser: Parser of this output alone.
      max_calls: Number of calls of the output that are run at all.
      call_count: Number of calls so far.
      running_calls: Started calls by position, until they are taken.
    """

    box: toolbox.Toolbox
    parser: formats.Scanner
    max_calls: int
    call_count: int = 0
    running_calls: dict[int, tuple[formats.WrittenCall, asyncio.Task[protocols.ToolReturn]]] = field(
        default_factory=dict
    )

    def hear(self, text: str) -> None:
        """Takes the next piece of the output, and starts the calls that the piece completes."""
        for call in self.parser.feed(text):
            place, self.call_count = self.call_count, self.call_count + 1
            # Calls beyond `max_calls` and ill-formed ones are answered with a failure, so nothing is started for them.
            if place < self.max_calls and not call.problem and self.box.eager(call.name):
                running = asyncio.get_running_loop().create_task(self.box.call(call.name, call.arguments))
                self.running_calls[place] = call, running

    async def close(self) -> None:
        """Cancels the calls that were not taken, and waits for their end."""
        tasks = [running for _, running in self.running_calls.values()]
        self.running_calls.clear()
        for running in tasks:
            running.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Dialogue:
    """The environment of one rollout.

    Args:
      tools: Tools of the run.
      pose: Asks the question.
      score: Scores the answer.
      system: System message, put before the description of the tools. Empty means none.
      sandbox: Whether `pose` or `score` need the rollout's sandbox even if no tool does.
      demonstrate: Solves a task for the warm start. None if there are no demonstrations.
    """

    def __init__(
        self,
        tools: toolkit.Toolkit,
        pose: Pose,
        score: Score,
        *,
        system: str = "",
        sandbox: bool = False,
        demonstrate: Callable[[protocols.Task], Sequence[protocols.Message]] | None = None,
    ) -> None:
        self._tools, self._pose, self._score = tools, pose, score
        self._system, self._sandbox = system, sandbox
        self._toolbox: toolbox.Toolbox | None = None
        self._task: protocols.Task | None = None
        self._ahead: EarlyCalls | None = None
        self._early = 0
        self._running: dict[int, str] = {}
        # Set only if it exists: the warm start looks for this attribute.
        if demonstrate is not None:
            self.demonstration = demonstrate

    @property
    def running_tool(self) -> str:
        """Names of the tools whose calls have not returned. After a deadline ended a step, these were too slow."""
        return "+".join(sorted(set(self._running.values())))

    async def reset(self, task: protocols.Task) -> Sequence[protocols.Message]:
        """Returns the system message with the description of the tools, and the question."""
        # A replay that differed resets the same environment again.
        await self.close()
        self._task = task
        self._toolbox = await self._tools.toolbox(session=self._sandbox)
        posed = await deadlines.call(self._pose, task, self._toolbox)
        if problem := user_values.messages_problem(posed):
            raise protocols.EnvironmentCrashed(f"{_name(self._pose)}, task {task.prompt_id}: returned {problem}")
        system = self._tools.system_message(self._system)
        return [*([protocols.Message("system", system)] if system else []), *posed]

    @property
    def hear(self) -> Callable[[str], None] | None:
        """Handler of streamed text that starts calls of eager tools at once. None if the rollout has no such tool.

        See `protocols.Listener`.
        """
        return self._hear if self._toolbox is not None and self._toolbox.any_eager else None

    def _hear(self, text: str) -> None:
        assert self._toolbox is not None
        if self._ahead is None:
            parser = self._tools.format.parser(self._toolbox.schemas())
            self._ahead = EarlyCalls(self._toolbox, parser, self._tools.parallel)
        self._ahead.hear(text)

    async def ready(self, output: str) -> None:
        """Waits for the rollout's sandbox, if the output calls a tool that needs it. See `protocols.Queued`."""
        if self._toolbox is not None:
            # Only calls that will run: one beyond the limit must not make the rollout wait for a sandbox.
            calls = self._calls(self._toolbox, output)[: self._tools.parallel]
            await self._toolbox.ready([call.name for call in calls if not call.problem])

    async def step(self, output: str) -> protocols.StepResult:
        """Runs the calls of an output concurrently, or scores an output without calls. Slow calls time out."""
        if self._task is None or self._toolbox is None:
            raise RuntimeError("step before reset")
        # A call that an earlier deadline cut off must not be blamed again.
        self._running.clear()
        early, self._ahead = self._ahead, None
        metrics: dict[str, float] = {}
        try:
            calls = self._calls(self._toolbox, output)
            returns = await self._side_by_side(self._toolbox, calls, early) if calls else []
            if self._toolbox.any_eager:
                metrics["early_calls"] = float(self._early)
            if calls:
                return protocols.StepResult(tool_returns=returns, metrics=metrics)
        finally:
            if early is not None:
                # Also after an error, or an early call that no one took would run on into the next step.
                await early.close()
        verdict = await deadlines.call(self._score, self._task, output, self._toolbox)
        if user_values.is_finite(verdict):
            verdict = Verdict(float(verdict))
        if not isinstance(verdict, Verdict):
            raise protocols.EnvironmentCrashed(
                f"{_name(self._score)}, task {self._task.prompt_id}: returned {verdict!r}; return "
                "dialogue.Verdict(reward), or a finite number"
            )
        return protocols.StepResult(done=True, reward=verdict.reward, metrics={**metrics, **verdict.metrics})

    def _calls(self, box: toolbox.Toolbox, output: str) -> list[formats.WrittenCall]:
        schemas = box.schemas()
        if not schemas:  # without tools, every output is an answer
            return []
        parser = self._tools.format.parser(schemas)
        return [*parser.feed(output), *parser.finish()]

    async def _side_by_side(
        self, box: toolbox.Toolbox, calls: Sequence[formats.WrittenCall], early: EarlyCalls | None
    ) -> list[protocols.ToolReturn]:
        """Returns the results of the calls. Calls that are too slow are cut off before the whole step's deadline.

        If a call raises or the wait is cancelled, the other calls are cancelled too.
        """
        loop = asyncio.get_running_loop()
        start = loop.time()
        running = [loop.create_task(self._run(box, place, call, early)) for place, call in enumerate(calls)]
        try:
            with contextlib.suppress(deadlines.Overdue):
                # Ends at the first error, so that a lost sandbox is not waited for until the deadline.
                completion = asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
                await deadlines.cancel_after(self._tools.call_seconds, completion)
            # Re-raises an infrastructure failure of one call, which would otherwise hide in its task.
            if raised := [call for call in running if call.done() and call.exception() is not None]:
                await raised[0]
            seconds = loop.time() - start
            return [
                run.result() if run.done() else protocols.ToolReturn(str(call.name), "timeout", "timeout", seconds)
                for call, run in zip(calls, running, strict=True)
            ]
        finally:
            for run in running:
                run.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _run(
        self, box: toolbox.Toolbox, place: int, call: formats.WrittenCall, early: EarlyCalls | None
    ) -> protocols.ToolReturn:
        max_calls = self._tools.parallel
        problem = call.problem or (f"no more than {max_calls} calls run at once" if place >= max_calls else "")
        if problem:
            return protocols.ToolReturn(NO_CALL, "failure", f"error: {problem}")
        # A policy may write a name that is no text.
        self._running[place] = str(call.name)
        # The parse of the whole output decides: `EarlyCalls.close` cancels an early call that differs from the parse.
        if early is None or place not in early.running_calls or early.running_calls[place][0] != call:
            answer = await box.call(call.name, call.arguments)
        else:
            loop = asyncio.get_running_loop()
            start = loop.time()
            answer = await early.running_calls.pop(place)[1]
            self._early += 1
            # Only the seconds that the rollout waited.
            answer = dataclasses.replace(answer, seconds=loop.time() - start)
        del self._running[place]  # stays if a deadline cuts the call off: the loop then reads `running_tool`
        return answer

    async def snapshot(self) -> Mapping[str, Any] | None:
        """Returns an empty state if the rollout has no sandbox, as nothing else is kept between steps.

        See `protocols.Resumable`.
        """
        # Variables and files of a sandbox are not kept, so such a rollout is stepped through its outputs again.
        return {} if self._toolbox is not None and self._toolbox.session is None else None

    async def restore(self, task: protocols.Task, state: Mapping[str, Any]) -> None:
        """Resets the environment, as there is no state to restore. See `protocols.Resumable`."""
        del state
        await self.reset(task)

    async def close(self) -> None:
        """Ends the rollout's early calls and its sandbox."""
        # Forgotten before they are ended, so that a cancelled close never ends anything twice.
        early, self._ahead = self._ahead, None
        box, self._toolbox = self._toolbox, None
        try:
            if early is not None:
                await early.close()
        finally:
            if box is not None:
                await box.close()


def _name(function: Callable[..., Any]) -> str:
    named = inspect.unwrap(function)
    return f"{named.__module__}:{getattr(named, '__qualname__', type(named).__qualname__)}"
