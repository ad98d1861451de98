"""Makes the objects of a run from the names in its config: tasks, environments and limits."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TypeGuard, cast

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.rollouts import loop
from libra_jax.tools import toolkit
from libra_jax.utils import deadlines, resolving

TRIAL_CLOSE_SECONDS = 30.0
"""Seconds that an environment made on trial may take to close."""


def task_source(task: config_lib.TaskConfig, seed: int, field: str = "task.arguments") -> protocols.TaskSource:
    """Returns the tasks of `task.source`. An error about the arguments names `field`.

    Raises:
      ConfigError: The factory cannot be found or called, or `task.path` is set but the factory takes no path.
      DataError: The source's file cannot be used.
    """
    factory = resolving.resolve(task.source, "task.source")
    reserved = {"path": task.path, "seed": seed}
    for name in reserved:
        config_lib.check(name not in task.arguments, field, f"must not hold {name!r}: it has a field of its own")
    parameters = _parameters(factory)
    if (
        parameters is not None
        and "path" not in parameters
        and not any(item.kind is item.VAR_KEYWORD for item in parameters.values())
    ):
        config_lib.check(
            not task.path,
            "task.path",
            f"{task.path!r} would be ignored, because {resolving.shown(task.source)} has no parameter 'path'; clear "
            "task.path, or set task.source to one that reads a file: libra_jax.environments.datasets:task_source",
        )
        # A source that reads no file need not take a path.
        del reserved["path"]
    arguments = {**reserved, **task.arguments}
    return cast(protocols.TaskSource, resolving.call(factory, task.source, arguments, field))


def demonstrated_tasks(settings: config_lib.RunConfig, tasks: protocols.TaskSource) -> protocols.TaskSource:
    """Returns the tasks that the warm start demonstrates: the run's own, or others if `warm_start.arguments` is set.

    Raises as `task_source`.
    """
    overrides = settings.warm_start.arguments
    if not (overrides and settings.warm_start.steps):
        return tasks
    return task_source(
        dataclasses.replace(settings.task, arguments={**settings.task.arguments, **overrides}),
        settings.seed,
        field="warm_start.arguments",
    )


def _parameters(factory: Callable[..., object]) -> Mapping[str, inspect.Parameter] | None:
    """Returns the parameters of a factory. None for a callable written in C that has no readable signature."""
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return None


def is_harness(environment: object) -> TypeGuard[protocols.Harness]:
    """Returns whether an object drives its rollouts itself (`protocols.Harness`), instead of being stepped."""
    return callable(getattr(environment, "run", None)) and not callable(getattr(environment, "step", None))


def environment_factory(
    task: config_lib.TaskConfig, tools: toolkit.Toolkit | None = None
) -> Callable[[], protocols.Environment | protocols.Harness]:
    """Returns a function that makes a fresh environment of `task.environment` at each call. Makes none itself.

    The run's tools are passed to a factory that has a parameter `tools`. They are None only if no environment is used.

    Raises:
      ConfigError: The factory cannot be found, takes other arguments, or is a class that lacks a method.
    """
    factory, field = resolving.resolve(task.environment, "task.environment"), "task.environment_arguments"
    arguments = dict(task.environment_arguments)
    if "tools" in (_parameters(factory) or ()):
        config_lib.check("tools" not in arguments, field, "must not hold 'tools': name them in tools.use")
        arguments["tools"] = tools
    elif tools is not None:
        config_lib.check(
            not tools.names,
            "tools.use",
            f"names {', '.join(tools.names)}, but {resolving.shown(task.environment)} offers no tools (its factory has "
            "no parameter 'tools'); take libra_jax.environments.math:environment, a factory of yours that has "
            "the parameter and returns a dialogue.Dialogue, or clear tools.use",
        )
    resolving.check_arguments(factory, task.environment, arguments, field)
    # A class shows its methods without being called; what a function makes is looked at by `make`.
    if inspect.isclass(factory):
        _check_methods(task, factory, factory)

    def make() -> protocols.Environment | protocols.Harness:
        environment = resolving.call(factory, task.environment, arguments, field)
        _check_methods(task, environment, type(environment))
        return cast("protocols.Environment | protocols.Harness", environment)

    return make


def _check_methods(task: config_lib.TaskConfig, environment: object, kind: type) -> None:
    called = resolving.shown(task.environment)
    makes = called if called == kind.__name__ else f"{called} makes a {kind.__name__}, which"
    for method in ("run", "close") if is_harness(environment) else ("reset", "step", "close"):
        config_lib.check(
            callable(getattr(environment, method, None)), "task.environment", f"{makes} has no method {method}"
        )


@contextlib.asynccontextmanager
async def demonstrator(
    task: config_lib.TaskConfig, tools: toolkit.Toolkit | None, *, needed: bool
) -> AsyncIterator[protocols.Demonstrator | None]:
    """Makes one environment, to check that this works, and lends it as the demonstrator. Always closes it.

    Yields the environment if demonstrations are needed and it has a method `demonstration`, otherwise None.

    Raises:
      ConfigError: The factory cannot be found or called, or does not make an environment.
    """
    trial = environment_factory(task, tools)()
    lent = needed and callable(getattr(trial, "demonstration", None))

    async def close() -> None:
        # Nothing depends on this close, and some environments cannot close before their first `reset`.
        with contextlib.suppress(Exception):
            await deadlines.cancel_after(TRIAL_CLOSE_SECONDS, deadlines.call(trial.close))

    if not lent:
        await close()
        yield None
        return
    try:
        yield cast(protocols.Demonstrator, trial)
    finally:
        await close()


def limits(run: config_lib.RunConfig, temperature: float | None = None) -> loop.Limits:
    """Returns a rollout's limits. `temperature` replaces the config's; evaluation uses this."""
    return loop.Limits(
        max_turns=run.task.max_turns,
        max_tokens=run.rollout.max_tokens,
        max_context=run.rollout.max_context,
        tool_seconds=run.task.tool_seconds,
        temperature=run.rollout.temperature if temperature is None else temperature,
        wait_seconds=run.task.wait_seconds,
        reset_seconds=run.task.reset_seconds,
        rollout_tokens=run.task.max_tokens,
        rollout_seconds=run.task.max_seconds,
    )
