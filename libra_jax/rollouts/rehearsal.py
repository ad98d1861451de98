"""Plays a user's own environment for one rollout in a child process, before any worker starts.

A child, because an environment may start threads and processes and change this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from multiprocessing import connection
from typing import cast

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.chat import tokenizers
from libra_jax.rollouts import deadline_environment, factories, loop
from libra_jax.tools import toolkit
from libra_jax.utils import processes, resolving, user_values

SECONDS = 20.0
"""Seconds that the rollout may take. A slower one is left to the run."""

CLOSE_SECONDS = 5.0
"""Seconds that the child may take to end."""

GIVEN = "; it was given the first task and the task's own answer"
"""Output of the first rollout, as the end of a sentence."""

SILENT = "; it was given the first task and an empty output"


@dataclass(frozen=True)
class Rehearsed:
    """The result of a trial of an environment.

    Attributes:
      problem: what went wrong. Names the setting, and what the environment was given. Empty if nothing did.
      certain: a run would fail, too. A run waits longer for what was only slow here.
      reward: reward of the task's own answer; None if the rollout did not end with it.
    """

    problem: str = ""
    certain: bool = True
    reward: float | None = None


@dataclass(frozen=True)
class Posed:
    """The first task as an environment poses it.

    Attributes:
      messages: its first messages.
      tools: names of the tools that the policy may call.
    """

    messages: tuple[protocols.Message, ...]
    tools: tuple[str, ...]


@contextlib.asynccontextmanager
async def _open_environment(
    run: config_lib.RunConfig, task: protocols.Task
) -> AsyncIterator[tuple[deadline_environment.DeadlineEnvironment, toolkit.Toolkit] | None]:
    """Makes the environment, and closes it. Yields None for a harness: it would ask a model, and there is none yet."""
    async with toolkit.Toolkit(run.tools, run.sandbox, run.task.call_seconds) as tools:
        environment = factories.environment_factory(run.task, tools)()
        if factories.is_harness(environment):
            yield None
            return
        world = deadline_environment.DeadlineEnvironment(
            cast("protocols.Environment", environment), task, factories.limits(run)
        )
        try:
            yield world, tools
        finally:
            await world.close({})


def pose(run: config_lib.RunConfig, task: protocols.Task) -> Posed | None:
    """Poses the task in a child process. Returns None for a harness, tools of another program, or a failed reset.

    Raises:
      ConfigError: the environment refuses one of its arguments.
    """
    if run.tools.mcp or run.tools.mcp_file:
        return None
    with processes.Peer(_send_posed_task, run, task, name="the rehearsal", fork=True) as peer:
        try:
            result = peer.receive(SECONDS)
        except (protocols.DeadlineMissed, protocols.WorkerLost):
            return None
    if isinstance(result, protocols.ConfigError):
        raise result
    return cast("Posed | None", result)


def _send_posed_task(sender: connection.Connection, run: config_lib.RunConfig, task: protocols.Task) -> None:
    """Sends the posed task, the error of a setting, or None."""

    async def body() -> Posed | None:
        async with _open_environment(run, task) as environment_and_tools:
            if environment_and_tools is None:
                return None
            world, tools = environment_and_tools
            messages = [protocols.Message(message.role, message.content) for message in await world.reset()]
            return Posed(tuple(messages), tuple(schema["function"]["name"] for schema in tools.schemas))

    try:
        sender.send(asyncio.run(body()))
    except protocols.ConfigError as error:
        sender.send(error)
    except Exception:  # `play` says what is wrong
        sender.send(None)


def play(run: config_lib.RunConfig, task: protocols.Task, answer: str) -> Rehearsed:
    """Poses the task and answers it, and then once more with an empty output, which should earn nothing.

    An environment that ships, and one whose tools are another program's (`tools.mcp`), is not played. `answer` is the
    policy's only output in the first rollout.
    """
    if run.task.environment.startswith(resolving.SHIPPED) or run.tools.mcp or run.tools.mcp_file:
        return Rehearsed()
    certain, reward, name = True, None, resolving.shown(run.task.environment)
    with processes.Peer(_send_result, run, task, answer, name="the rehearsal", fork=True) as peer:
        try:
            problem, certain, reward = peer.receive(SECONDS)
            if certain:
                peer.exit_status(CLOSE_SECONDS)
        except protocols.DeadlineMissed:
            problem, certain = f"{name} took more than {SECONDS:g} s; a run may wait longer{GIVEN}", False
        except protocols.WorkerLost:
            problem = f"{name} ended its process ({peer.exit_status(CLOSE_SECONDS)}){GIVEN}"
    return Rehearsed(f"config.task.environment: {problem}" if problem else "", certain, reward)


def _send_result(sender: connection.Connection, run: config_lib.RunConfig, task: protocols.Task, answer: str) -> None:
    """Sends the first problem or an empty text, whether a run would surely fail with it, and the answer's reward."""

    async def body(output: str) -> float | None:
        async with _open_environment(run, task) as environment_and_tools:
            if environment_and_tools is None:
                return None
            world, _ = environment_and_tools
            messages = await world.reset()
            if (template := tokenizer()) is not None:
                loop.prompt_tokens(template, task, messages, factories.limits(run))
            result = await world.step(output)
            # Reward functions may replace the environment's own reward.
            uses_reward = (
                user_values.is_finite(result.reward) or not run.reward.functions or run.reward.environment_weight
            )
            return world.reward(result.reward) if result.done and uses_reward else None

    @functools.cache
    def tokenizer() -> protocols.Tokenizer | None:
        try:
            return tokenizers.create(run.task, run.model.path, incremental=False)
        except protocols.LibraError:  # it is not on this machine
            return None

    problem, certain, rewards = "", True, list[float | None]()
    for output, suffix in ((answer, GIVEN), ("", SILENT)):
        try:
            rewards.append(earned := asyncio.run(body(output)))
            if suffix is SILENT and earned is not None and earned > 0:
                name = resolving.shown(run.task.environment)
                problem, certain = f"{name} paid {earned:g}, which a policy can earn by writing nothing{suffix}", False
        except protocols.LibraError as error:
            problem = str(error).removeprefix("config.task.environment: ") + suffix
            # A run replaces a task whose prompt is too long. What a template refuses (the cause) other tasks have too.
            too_long = isinstance(error, protocols.TaskRefused) and error.__cause__ is None
            certain = suffix is GIVEN and not too_long
        except Exception as error:  # of the user's code; a traceback would hide what it was doing
            problem, certain = resolving.raised(error) + suffix, suffix is GIVEN
        if problem:
            break
    sender.send((problem, certain, rewards[0] if rewards else None))
