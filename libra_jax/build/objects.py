"""Objects of a Python program instead of the names that a config takes: environment, reward function, tasks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.environments import datasets
from libra_jax.rewards import scoring
from libra_jax.utils import resolving

MakeEnvironment = Callable[..., protocols.Environment]
"""An environment's class, or a function that returns a fresh environment."""

RewardFunction = Callable[[protocols.Task, str], Any] | Callable[[protocols.Task, scoring.Transcript], Any]
"""Scores a rollout: takes its task and the policy's text, or its `transcript` if the parameter has this name."""

Tasks = protocols.TaskSource | Sequence[Mapping[str, Any]]
"""A source of tasks, or their payloads: mappings with a `prompt`."""

QUESTIONS = "libra_jax.environments.question:environment"
"""The environment of tasks that are given without an environment."""


def need(config: object, kind: type, name: str) -> None:
    """Raises ConfigError unless the config is of this kind, whose public name the sentence gives."""
    if not isinstance(config, kind):
        description = f"the class {config.__name__}" if isinstance(config, type) else f"a {type(config).__name__}"
        raise protocols.ConfigError(f"config: must be a {name}, not {description}")


def with_objects(
    config: config_lib.RunConfig,
    environment: MakeEnvironment | None = None,
    reward: RewardFunction | None = None,
    tasks: Tasks | None = None,
    *,
    holdout: float = 0.05,
) -> config_lib.RunConfig:
    """Returns a checked, frozen copy of the config, with names instead of the given objects.

    Args:
      config: configuration of the run; not changed.
      environment: replaces `task.environment`. If it is None, given tasks are questions with an `answer`.
      reward: added to `reward.functions` as "reward"; the environment's own reward then no longer counts.
      tasks: replaces `task.source`.
      holdout: share of the tasks' prompts that are held out for evaluation; 1: all tasks are evaluated.

    Raises:
      ConfigError: a value is out of range, an object is not callable, `reward.environment_weight` would have no
        effect, or the run's workers are in other processes, which cannot see the caller's objects.
      DataError: the tasks are empty or malformed.
    """
    need(config, config_lib.RunConfig, "libra_jax.config.RunConfig")
    config_lib.check(
        reward is None or config.reward.environment_weight in (0.0, 1.0),
        "reward.environment_weight",
        f"{config.reward.environment_weight:g} has no effect beside the argument reward, which scores instead of the "
        "environment; leave it out, and add transcript.environment_reward in the function",
    )
    values = config_lib.to_dict(config)
    task = values["task"]
    if tasks is not None:
        task["source"], task["path"] = _source(tasks, values["seed"], holdout), ""
        if isinstance(tasks, Sequence) and holdout == 1:
            values["evaluation"]["tasks"] = len(tasks)
        if environment is None and task["environment"] == config_lib.TaskConfig().environment:
            task["environment"] = QUESTIONS
    if environment is not None:
        task["environment"] = resolving.give(environment, "task.environment")
    if reward is not None:
        named = {"name": resolving.give(reward, "reward.functions")}
        function = {"factory": resolving.ITSELF, "arguments": named}
        values["reward"]["functions"] = {**values["reward"]["functions"], "reward": function}
        values["reward"]["environment_weight"] = 0.0
    result = config_lib.parse(type(config), values)
    alone = [name for name in (task["source"], task["environment"]) if name.startswith(f"{resolving.GIVEN}:")]
    if reward is not None and named["name"].startswith(f"{resolving.GIVEN}:"):
        alone.append(named["name"])
    config_lib.check(
        not alone or result.cluster.backend == "inprocess",
        "cluster.backend",
        f"{result.cluster.backend} runs workers in other processes, which cannot see "
        f"{', '.join(map(resolving.shown, alone))} of this program; "
        "put them into a module, or set cluster.backend=inprocess",
    )
    return result


@dataclass(frozen=True)
class Listed:
    """Tasks that are evaluated, each once, in this order."""

    tasks: Sequence[protocols.Task]

    def task(self, index: int) -> protocols.Task:
        return self.tasks[index % len(self.tasks)]

    evaluation_task = task


def _source(tasks: Tasks, seed: int, holdout: float) -> str:
    """Registers the tasks and returns the name of their factory."""
    if not isinstance(tasks, Sequence):
        source = tasks
        config_lib.check(
            callable(getattr(source, "task", None)), "task.source", f"{source!r:.80} has no method task(index)"
        )
        kind = f"{type(source).__module__}.{type(source).__qualname__}"
        return resolving.give(lambda seed: source, "task.source", name="tasks", text=kind)
    rows = list(tasks)
    datasets.of_rows(rows, seed)  # reports errors in the rows before anything is written

    def make_source(seed: int, holdout: float = holdout) -> protocols.TaskSource:
        if holdout < 1:
            return datasets.of_rows(rows, seed, holdout)
        return Listed([protocols.Task(f"tasks-{number}", dict(row)) for number, row in enumerate(rows)])

    # Two names, so that an evaluation beside a run on the same rows does not replace the run's tasks.
    name = "tasks" if holdout < 1 else "evaluated"
    return resolving.give(make_source, "task.source", name=name, text=json.dumps(rows, sort_keys=True, default=str))
