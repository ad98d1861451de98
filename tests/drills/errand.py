"""The task of a drill: code runs in a sandbox before the policy says anything; what it says then is its answer.

An untrained policy calls no tool, and seldom ends an output before it is cut off; a drill is to find a sandbox at work.
"""

from __future__ import annotations

from collections.abc import Callable

from libra_jax import protocols
from libra_jax.tools import toolbox, toolkit

CODE = "sum(range(1000))"


class Errand:
    """One attempt.

    Args:
      tools: the run's, with `python`.
    """

    def __init__(self, tools: toolkit.Toolkit) -> None:
        self._tools = tools
        self._box: toolbox.Toolbox | None = None

    async def reset(self, task: protocols.Task) -> list[protocols.Message]:
        """Runs the code, then asks what the task asks. The sandbox is the attempt's until that ends."""
        await self.close()
        self._box = await self._tools.toolbox()
        await self._box.call("python", {"code": CODE})
        return [protocols.Message("user", task.payload["expression"])]

    async def step(self, output: str) -> protocols.StepResult:
        """Ends."""
        return protocols.StepResult(done=True, reward=0.0)

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
