"""Plays a user's own environment for one rollout in a child process, before any worker starts.

A child, because an environment may start threads and processes and change this one.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
from multiprocessing import connection

from libra_jax import config, protocols
from libra_jax.agents import factories, guarded
from libra_jax.agents.tools import toolkit

SECONDS = 20.0
"""Seconds that the rollout may take. A slower one is left to the run."""

CLOSE_SECONDS = 5.0
"""Seconds that the child may take to end."""

OURS = "libra_jax."
"""Beginning of the environments that ship, which are not played: some start sandboxes and other programs."""


def play(run: config.RunConfig, task: protocols.Task, answer: str) -> str:
    """Returns what goes wrong when the task is posed and answered; empty if nothing does, or if it is not played.

    An environment that ships, and one whose tools are another program's (`tools.mcp`), is not played.

    Args:
      run: configuration of the run.
      task: the task.
      answer: the policy's only output.
    """
    if run.task.environment.startswith(OURS) or run.tools.mcp or run.tools.mcp_file:
        return ""
    forked = multiprocessing.get_context("fork")  # only fork does not import the command's script a second time
    receiver, sender = forked.Pipe(duplex=False)
    child = forked.Process(target=_played, args=(run, task, answer, sender))
    child.start()
    sender.close()  # a child that dies then ends the wait
    try:
        problem = str(receiver.recv()) if receiver.poll(SECONDS) else ""
        child.join(CLOSE_SECONDS)
    except EOFError:
        child.join(CLOSE_SECONDS)
        problem = f"{run.task.environment} ended its process (exit status {child.exitcode})"
    finally:
        child.kill()  # SIGTERM would run the handler that the command has installed, which the child inherited
        child.join()
        receiver.close()
    return problem and f"config.task.environment: {problem}; it was given the first task and the task's own answer"


def _played(run: config.RunConfig, task: protocols.Task, answer: str, sender: connection.Connection) -> None:
    """Sends the first problem, or an empty text."""

    async def body() -> None:
        async with toolkit.Toolkit(run.tools, run.sandbox, run.task.call_seconds) as tools:
            world = guarded.Environment(
                factories.environment_factory(run.task, tools)(),
                task,
                reset_seconds=run.task.reset_seconds,
                step_seconds=run.task.tool_seconds,
                wait_seconds=run.task.wait_seconds,
            )
            try:
                await world.reset()
                result = await world.step(answer)
                if result.reward is not None and not math.isfinite(result.reward):
                    raise world.crash("step", f"gave a reward of {result.reward}, which is not a finite number")
            finally:
                await world.close({})

    try:
        asyncio.run(body())
    except protocols.LibraError as error:
        sender.send(str(error).removeprefix("config.task.environment: "))
    else:
        sender.send("")
