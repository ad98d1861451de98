"""What the tests of dialogues share: tools that tell when they were called, and a run's toolkit of them."""

import asyncio
import math

import loop_doubles as doubles

from libra_jax import protocols
from libra_jax.chat import formats
from libra_jax.environments import dialogue
from libra_jax.simulator import clock
from libra_jax.tools import toolbox

PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


class Clocked:
    """A tool that takes `seconds`, says its text again, and notes what became of its calls."""

    description = "Says it again."
    parameters = PARAMETERS

    def __init__(self, name="look", *, eager=False, seconds=0.0, error=None):
        self.name, self.eager, self.seconds, self.error = name, eager, seconds, error
        self.began: list[float] = []
        self.ended: list[str] = []

    async def call(self, arguments):
        self.began.append(asyncio.get_running_loop().time())
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        self.ended.append(arguments["text"])
        if self.error is not None:
            raise self.error
        return protocols.ToolReturn(self.name, "success", arguments["text"])


class Tools:
    """A `toolkit.Toolkit` of tools that are there."""

    def __init__(self, *tools, format="tags", parallel=4, call_seconds=math.inf):
        self.tools, self.format, self.describe, self.parallel = tools, formats.named(format), False, parallel
        self.call_seconds = call_seconds

    def system_message(self, system):
        return system

    async def toolbox(self, *, session=False):
        return toolbox.Toolbox(self.tools)


async def pose(task, box):
    return [protocols.Message("user", "q")]


async def score(task, output, box):
    return dialogue.Verdict(float(output == "done"))


def make(*tools, score=score, **arguments):
    return dialogue.Dialogue(Tools(*tools, **arguments), pose, score)


def attempt(
    outputs, environment, *, delta=1, seconds=0.1, limits=doubles.LIMITS, trajectory=None, sampler=None, **arguments
):
    """The attempt on a virtual clock: tokens come `delta` at a time, `seconds` apart. Nothing is left running."""
    sampler = sampler or doubles.ScriptedSampler(outputs, delta=delta, seconds=seconds)
    trajectory = trajectory or protocols.Trajectory("t/0", "t")

    async def main():
        try:
            return await doubles.run(
                trajectory=trajectory, environment=environment, limits=limits, sampler=sampler, **arguments
            )
        finally:
            assert len(asyncio.all_tasks()) == 1

    return clock.run(main()), sampler
