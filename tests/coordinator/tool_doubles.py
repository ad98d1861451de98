"""Attempts that call a tool of the run's toolkit, and a tool whose server dies, hangs and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import coordinator_doubles as doubles

from libra_jax import protocols
from libra_jax.tools import toolbox, toolkit


class ToolTurns(doubles.TwoTurns):
    """`TwoTurns` whose call is a real one.

    Args:
      tools: the run's.
      name: of the tool that is called.
      arguments: of the call.
    """

    open = 0  # toolboxes that no one has closed, over all attempts

    def __init__(self, tools: toolkit.Toolkit, name: str, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self._tools, self._name, self._arguments = tools, name, arguments
        self._box: toolbox.Toolbox | None = None
        self.running_tool = ""

    async def reset(self, task: protocols.Task) -> Sequence[protocols.Message]:
        self._box = await self._tools.toolbox()
        type(self).open += 1
        return await super().reset(task)

    async def step(self, output: str) -> protocols.StepResult:
        if self._turns:
            return await super().step(output)
        assert self._box is not None
        self._turns, self.running_tool = 1, self._name
        arguments = dict(self._arguments)
        if "task" in arguments:
            arguments["task"] = self._index
        answer = await self._box.call(self._name, arguments)
        self.running_tool = ""
        return protocols.StepResult(tool_returns=[answer])

    async def close(self) -> None:
        if self._box is not None:
            box, self._box = self._box, None
            await box.close()
            type(self).open -= 1


class Server:
    """A `toolkit.Shared` with one tool, as an MCP server is: dead for a while, and deaf to the calls of some tasks.

    Args:
      dead: from and until when it is, in event-loop seconds.
      deaf: tasks whose calls never return.

    Attributes:
      lost: calls that met it dead.
      cancelled: calls that were given up.
      is_open: it has been opened and not closed.
    """

    name = "lookup"
    description = "Looks it up."
    parameters: ClassVar[Mapping[str, Any]] = {"type": "object", "properties": {"task": {"type": "integer"}}}

    made: ClassVar[list[Server]] = []

    def __init__(self, dead: Sequence[float] = (0.0, 0.0), deaf: Sequence[int] = ()) -> None:
        self._dead, self._deaf = dead, deaf
        self.lost = self.cancelled = 0
        self.is_open = False
        self.made.append(self)

    async def open(self) -> None:
        self.is_open = True

    def tools(self) -> Sequence[toolbox.Tool]:
        return [self]

    async def close(self) -> None:
        self.is_open = False

    async def call(self, arguments: Mapping[str, Any]) -> protocols.ToolReturn:
        begin, end = self._dead
        if begin <= asyncio.get_running_loop().time() < end:
            self.lost += 1
            raise protocols.WorkerLost("the server 'lookup' is gone")
        try:
            await asyncio.sleep(1e9 if arguments["task"] in self._deaf else 0.2)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return protocols.ToolReturn(self.name, "success", "50 51")
