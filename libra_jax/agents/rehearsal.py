"""Plays a user's own environment for one rollout in a child process, before any worker starts.

A child, because an environment may start threads and processes and change this one.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from multiprocessing import connection
from typing import cast

from libra_jax import config, protocols
from libra_jax.agents import child, factories, guarded, resolving
from libra_jax.agents.tools import toolkit

SECONDS = 20.0
"""Seconds that the rollout may take. A slower one is left to the run."""

CLOSE_SECONDS = 5.0
"""Seconds that the child may take to end."""

OURS = "libra_jax."
"""Beginning of the environments that ship, which are not played: some start sandboxes and other programs."""


@dataclass(frozen=True)
class Problem:
    """What went wrong.

    Attributes:
      sentence: names the setting, and what the environment was given.
      certain: a run would fail, too. A run waits longer for what was only slow here.
    """

    sentence: str
    certain: bool = True


def play(run: config.RunConfig, task: protocols.Task, answer: str) -> Problem | None:
    """Poses the task and answers it. Returns what went wrong; None if nothing did, or if it is not played.

    An environment that ships, and one whose tools are another program's (`tools.mcp`), is not played.

    Args:
      run: configuration of the run.
      task: the task.
      answer: the policy's only output.
    """
    if run.task.environment.startswith(OURS) or run.tools.mcp or run.tools.mcp_file:
        return None
    certain, name = True, resolving.shown(run.task.environment)
    with child.forked(_played, run, task, answer) as (played, receiver):
        try:
            if receiver.poll(SECONDS):
                problem = str(receiver.recv())
            else:
                problem, certain = f"{name} took more than {SECONDS:g} s; a run may wait longer", False
            played.join(CLOSE_SECONDS if certain else 0.0)
        except EOFError:
            played.join(CLOSE_SECONDS)
            problem = f"{name} ended its process (exit status {played.exitcode})"
    if not problem:
        return None
    given = "; it was given the first task and the task's own answer"
    return Problem(f"config.task.environment: {problem}{given}", certain)


def _played(run: config.RunConfig, task: protocols.Task, answer: str, sender: connection.Connection) -> None:
    """Sends the first problem, or an empty text."""

    async def body() -> None:
        async with toolkit.Toolkit(run.tools, run.sandbox, run.task.call_seconds) as tools:
            made = factories.environment_factory(run.task, tools)()
            if factories.is_harness(made):  # it would ask a model, and there is none yet
                return
            world = guarded.Environment(
                cast("protocols.Environment", made),
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
    except Exception as error:  # of the user's code; a traceback would hide what it was doing
        sender.send(resolving.raised(error))
    else:
        sender.send("")
