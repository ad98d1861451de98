"""A simulated environment: it follows its rollout's script, and its tools take the time that the script says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from libra_jax import protocols
from libra_jax.simulator import trajectory


class ScriptedEnvironment:
    """A `protocols.Environment` of one rollout. Its reward alternates by sample, which has no effect on time."""

    def __init__(self, book: trajectory.Book) -> None:
        self._book = book
        self._turn = 0
        self.running_tool = ""

    async def reset(self, task: protocols.Task) -> Sequence[protocols.Message]:
        """Shows a prompt of the scripted length."""
        self._turn = 0
        return [protocols.Message("user", str(self._book.prompt_tokens(task.prompt_id)))]

    async def step(self, output: str) -> protocols.StepResult:
        """Runs the tool that the script's turn calls; `output` is the rollout's name, as `CountedText` decodes it."""
        turns = self._book.script(output).turns
        at, self._turn = self._turn, self._turn + 1
        if at >= len(turns):  # a tool that timed out took the place of the script's end
            return _end(output)
        turn = turns[at]
        self.running_tool = turn.tool or ""
        if turn.tool_seconds > 0:
            await asyncio.sleep(turn.tool_seconds)
        if self._turn == len(turns):
            return _end(output)
        payload = str(turn.payload_tokens)
        if turn.tool is None:
            return protocols.StepResult(messages=[protocols.Message("user", payload)])
        return protocols.StepResult(
            tool_returns=[protocols.ToolReturn(turn.tool, turn.status or "success", payload, turn.tool_seconds)]
        )

    async def close(self) -> None:
        """Does nothing: the environment holds nothing."""


def _end(name: str) -> protocols.StepResult:
    return protocols.StepResult(done=True, reward=float(int(name.rpartition("/")[2]) % 2))


class NumberedTasks:
    """A `protocols.TaskSource`: the task at position n is called "n"."""

    def task(self, index: int) -> protocols.Task:
        return protocols.Task(str(index), {})

    def evaluation_task(self, index: int) -> protocols.Task:
        """Returns a held-out task, which a task source must have; the simulator evaluates nothing."""
        return protocols.Task(f"held-out-{index}", {})
