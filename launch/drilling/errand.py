"""The task of a drill: whatever the policy says at first, code runs in a sandbox; what it says then is its answer.

An untrained policy calls no tool of its own accord, and a drill is to find a sandbox at work.
"""

from __future__ import annotations

from collections.abc import Callable

from libra_jax import protocols
from libra_jax.agents.tools import toolbox, toolkit

CODE = "sum(range(1000))"


class Errand:
    """One attempt.

    Args:
      tools: the run's, with `python`.
    """

    running_tool = "python"

    def __init__(self, tools: toolkit.Toolkit) -> None:
        self._tools = tools
        self._box: toolbox.Toolbox | None = None
        self._called = False

    async def reset(self, task: protocols.Task) -> list[protocols.Message]:
        """Asks what the task asks."""
        self._box, self._called = await self._tools.toolbox(), False
        return [protocols.Message("user", task.payload["expression"])]

    async def step(self, output: str) -> protocols.StepResult:
        """Runs the code, then ends."""
        assert self._box is not None
        if self._called:
            return protocols.StepResult(done=True, reward=0.0)
        self._called = True
        return protocols.StepResult(tool_returns=[await self._box.call("python", {"code": CODE})])

    async def close(self) -> None:
        """Gives the sandbox back."""
        if self._box is not None:
            await self._box.close()


def environment(tools: toolkit.Toolkit) -> Errand:
    """For `task.environment`."""
    return Errand(tools)


def reward() -> Callable[[protocols.Task, str], float]:
    """For `reward.functions`: the share of digits in an answer."""

    def digits(task: protocols.Task, text: str) -> float:
        return sum(map(str.isdigit, text)) / max(len(text), 1)

    return digits
