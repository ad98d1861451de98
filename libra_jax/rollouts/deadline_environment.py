"""A rollout's environment, with a deadline on each call. What goes wrong is a crash that says whose and where."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from libra_jax import protocols
from libra_jax.utils import deadlines, resolving, user_values

if TYPE_CHECKING:
    from libra_jax.rollouts import loop

_FIELDS = {"step": "tool_seconds", "ready": "wait_seconds"}
"""Fields of `config.task` with the deadlines of methods. All other methods have `reset_seconds`."""


class DeadlineEnvironment:
    """The environment as the loop calls it. Check `optional` before a call of an optional method.

    Methods that are plain functions run on threads, so that the deadlines hold for them too. If the environment breaks,
    overruns its deadline or returns something invalid, every method except `close` raises `EnvironmentCrashed`. A
    `LibraError` of the environment itself is passed on, unless it is a lost worker.

    Args:
      environment: The user's environment.
      task: Task of the rollout. Errors name it.
      limits: Limits with the deadlines of the methods.
    """

    def __init__(self, environment: protocols.Environment, task: protocols.Task, limits: loop.Limits) -> None:
        self._environment = environment
        self._task = task
        self._reset_seconds, self._step_seconds = limits.reset_seconds, limits.tool_seconds
        self._wait_seconds = limits.wait_seconds
        kind = type(environment)
        self._name = f"{kind.__module__}:{kind.__qualname__}"
        self._counts = collections.Counter[str]()

    def optional(self, verb: str) -> Callable[..., Any] | None:
        """Returns an optional method of the environment. None if it has no such method."""
        method = getattr(self._environment, verb, None)
        # A user's attribute of the same name that cannot be called is not the optional method.
        return method if callable(method) else None

    async def reset(self) -> Sequence[protocols.Message]:
        """Returns the messages that pose the task."""
        self._counts.clear()
        messages = await self._call("reset", self._reset_seconds, self._task.copy())
        if problem := user_values.messages_problem(messages) or ("" if messages else "no message, which asks nothing"):
            raise self.crash("reset", f"returned {problem}")
        return list(messages)

    async def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a snapshot."""
        await self._call("restore", self._reset_seconds, self._task.copy(), protocols.copy_data(state))

    async def snapshot(self) -> Mapping[str, Any] | None:
        """Returns the environment's state, which JSON can hold. None if the environment gives none now, or never."""
        if self.optional("snapshot") is None:
            return None
        state = await self._call("snapshot", self._reset_seconds)
        try:
            # Checked now: a checkpoint would fail much later, and could not name the environment.
            json.dumps(state)
        except (TypeError, ValueError) as error:
            raise self.crash("snapshot", f"gave a state that is not JSON ({error})") from error
        return cast("Mapping[str, Any] | None", protocols.copy_data(state))

    async def ready(self, output: str) -> None:
        """Waits for what the step needs. This wait is not part of the tool's time."""
        try:
            await self._call("ready", self._wait_seconds, output)
        except deadlines.Overdue:
            raise self.crash(
                "ready",
                f"waited more than {self._wait_seconds:g} s (config.task.wait_seconds) for what other rollouts "
                "hold; raise that, or give them more to share, such as config.sandbox.most",
            ) from None

    async def step(self, output: str) -> protocols.StepResult:
        """Returns the answer to an output. After the deadline, it is a "timeout" of the tool in `running_tool`."""
        try:
            result = await self._call("step", self._step_seconds, output)
        except deadlines.Overdue:
            tool = str(getattr(self._environment, "running_tool", "") or "")
            if not tool:  # it may have been scoring, and what failed is never scored as zero
                raise self.crash(
                    "step",
                    f"took more than {self._step_seconds:g} s (config.task.tool_seconds); it ran no tool, or "
                    "did not name it in the environment's attribute running_tool",
                ) from None
            return protocols.StepResult(tool_returns=[protocols.ToolReturn(tool, "timeout", "timeout")])
        if not isinstance(result, protocols.StepResult):
            raise self.crash("step", f"returned {type(result).__name__} instead of a StepResult")
        if problem := user_values.metrics_problem(result.metrics):
            raise self.crash("step", f"gave {problem}")
        if problem := user_values.messages_problem(result.messages):
            raise self.crash("step", f"gave the StepResult.messages {problem}")
        if problem := user_values.returns_problem(result.tool_returns):
            raise self.crash("step", f"gave the StepResult.tool_returns {problem}")
        nothing = result.reward is None or (user_values.is_finite(result.reward) and result.reward == 0)
        if not (result.done or nothing):  # it would be lost without a word
            raise self.crash(
                "step",
                f"gave the reward {user_values.shown(result.reward)} with done=False; a rollout has one reward: "
                "add up those of its steps, and give the sum with done=True",
            )
        return dataclasses.replace(result, metrics={**self._counts, **result.metrics}) if self._counts else result

    def reward(self, reward: object) -> float:
        """Returns the reward of a step's result, after its check."""
        if not user_values.is_finite(reward):
            raise self.crash("step", f"gave the reward {user_values.shown(reward)}, which is not a finite number")
        return float(reward)

    async def close(self, metrics: dict[str, float]) -> None:
        await close(self._environment.close, self._reset_seconds, metrics)

    def crash(self, verb: str, problem: str) -> protocols.EnvironmentCrashed:
        """Returns the error that says what the environment did."""
        return protocols.EnvironmentCrashed(f"environment {self._name}, task {self._task.prompt_id}: {verb} {problem}")

    async def _call(self, verb: str, seconds: float, *arguments: Any) -> Any:
        """Awaits a method. Raises `Overdue` for a step or a wait that is too slow, and a crash for everything else."""
        user_values.counts.set(self._counts)  # of this rollout's task and of those that it starts
        try:
            return await deadlines.cancel_after(seconds, deadlines.call(getattr(self._environment, verb), *arguments))
        except deadlines.Overdue as overdue:
            # A late step or wait has a meaning to the caller if it ended. One that goes on could still touch the
            # environment.
            if verb in _FIELDS and overdue.reaped:
                raise
            deaf = "" if overdue.reaped else " and did not end when it was cancelled"
            field = _FIELDS.get(verb, "reset_seconds")
            raise self.crash(verb, f"took more than {seconds:g} s (config.task.{field}){deaf}") from None
        except (protocols.WorkerLost, protocols.DeadlineMissed) as error:  # a sandbox, a tool's server
            raise self.crash(verb, f"lost a worker: {error}") from error
        except protocols.LibraError:
            raise
        except Exception as error:
            raise self.crash(verb, resolving.raised(error)) from error


async def close(method: Callable[..., Any], seconds: float, metrics: dict[str, float]) -> None:
    """Runs the method that closes a user's object, for at most `seconds`.

    A failed close cannot undo the rollout: the metric `close_failures` counts it. If the caller is cancelled
    meanwhile, the close still finishes.
    """

    async def body() -> None:
        try:
            await deadlines.cancel_after(seconds, deadlines.call(method))
        except Exception:
            metrics["close_failures"] = 1.0

    closing = asyncio.ensure_future(body())
    try:
        await deadlines.finish(closing)
    finally:
        closing.cancel()  # only a second cancellation gets here before the close has ended
