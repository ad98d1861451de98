"""Decides which task a run takes next (`task.order`), and how many rollouts it gets (`algorithm.budget`)."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import TypedDict

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.coordinator import budgets, success
from libra_jax.utils import resolving


class PromptsState(TypedDict):
    """Which tasks come next, and what is known of those before.

    `pending` holds index and number of rollouts of each chosen task that is not begun. `visits` holds index, prompt and
    number of visits of each task, for `task.order=success`; `explored` counts those in its own order.
    """

    pending: list[tuple[int, int]]
    rates: success.RatesState
    visits: list[tuple[int, str, int]]
    explored: int


def check(config: config_lib.RunConfig, tasks: protocols.TaskSource) -> None:
    """Refuses settings that go by past rollouts of a prompt if the prompts of the source never come again, or too late.

    Raises:
      ConfigError: `task.order=success`, `algorithm.budget=knapsack` or `algorithm.replay=success`, over a source that
        does not know its number of tasks; or replays are too old before a prompt comes again.
    """
    total = 0
    for name, chosen, refused, usual in (
        ("task.order", config.task.order, "success", "sequential"),
        ("algorithm.budget", config.algorithm.budget, "knapsack", "uniform"),
        ("algorithm.replay", config.algorithm.replay, "success", "none"),
    ):
        if chosen != refused:
            continue
        # Asked here alone: the length of a stream may be an error.
        total = len(tasks) if callable(getattr(type(tasks), "__len__", None)) else 0  # type: ignore[arg-type]
        if total:
            continue
        raise protocols.ConfigError(
            f"config.{name}: {chosen} goes by past rollouts of prompts that come again, and the source "
            f"{resolving.shown(config.task.source)} has no end, or no method __len__; take {usual}, or a source of a "
            "table, such as libra_jax.environments.datasets:task_source"
        )
    steps, max_staleness = total / config.coordinator.groups_per_step, config.algorithm.replay_max_staleness
    if config.algorithm.replay != "none" and config.task.order == "sequential" and steps > max_staleness:
        raise protocols.ConfigError(
            f"config.algorithm.replay_max_staleness: no success is replayed, because each of the {total} prompts comes "
            f"again after {steps:.1f} steps, and {max_staleness} is less; raise it, or take task.order=success or "
            "fewer tasks"
        )


class Prompts:
    """Chooses tasks and the sizes of their groups, `coordinator.groups_per_step` tasks at a time.

    The choice depends on the run's seed, on the number of tasks chosen before and on the results of groups that the
    staleness bound has had trained by then, unless groups were replaced. It depends on no timing. So a run that goes on
    from a checkpoint chooses as if it had not stopped.

    Raises:
      ConfigError: the config names a budget that does not exist, or an order that the source cannot have.
    """

    def __init__(self, config: config_lib.RunConfig, tasks: protocols.TaskSource, rates: success.SuccessRates) -> None:
        check(config, tasks)
        self._config = config
        self._tasks = tasks
        self._rates = rates
        self._budget = budgets.make(config)
        self._pending: list[tuple[int, int]] = []
        # Prompt and number of visits of each task, by index.
        self._visits: dict[int, tuple[str, int]] = {}
        self._explored = 0

    def next(self, position: int) -> tuple[protocols.Task, int]:
        """Returns the next task and the number of its rollouts.

        Args:
          position: number of tasks that were returned before.

        Raises:
          ConfigError: the source or the budget, which may be a user's own, failed.
        """
        if not self._pending:
            self._pending = self._chosen(position)
        index, size = self._pending.pop(0)
        task = self._task(index)
        if self._config.task.order == "sequential":
            return task, size
        _, visits = self._visits.get(index, ("", 0))
        self._visits[index] = task.prompt, visits + 1
        # Ids of tasks, and so of rollouts, are unique in a run.
        if visits:
            task = dataclasses.replace(task, prompt_id=f"{task.prompt_id}-again{visits}", repeats=task.prompt)
        return task, size

    def state(self) -> PromptsState:
        """Returns a checkpoint's content."""
        return {
            "pending": list(self._pending),
            "rates": self._rates.state(),
            "visits": [(index, prompt, visits) for index, (prompt, visits) in self._visits.items()],
            "explored": self._explored,
        }

    def restore(self, state: PromptsState) -> None:
        """Restores the result of `state`."""
        self._pending = [(index, size) for index, size in state["pending"]]
        self._rates.restore(state["rates"])
        self._visits = {index: (prompt, visits) for index, prompt, visits in state["visits"]}
        self._explored = state["explored"]

    def _task(self, index: int) -> protocols.Task:
        with resolving.named(self._config.task.source, "task.source", f"task({index})"):
            return self._tasks.task(index)

    def _chosen(self, position: int) -> list[tuple[int, int]]:
        """Chooses the tasks of a step, or one task if their number of rollouts needs no look at others."""
        sequential = self._config.task.order == "sequential"
        if sequential and self._config.algorithm.budget == "uniform":
            return [(position, self._config.coordinator.group_size)]
        count = self._config.coordinator.groups_per_step
        # At most `max_staleness` + 1 steps of groups are outstanding. The staleness bound has all older groups trained.
        # Whether one of the outstanding groups has finished is chance, so these do not count yet.
        self._rates.advance(position - count * self._config.coordinator.max_staleness)
        indices = range(position, position + count) if sequential else self._by_success(position, count)
        prompts = []
        for index in indices:
            task = self._task(index)
            rate, rollouts = self._rates.rate(task.prompt), self._rates.rollouts(task.prompt)
            prompts.append(budgets.PromptBudget(task.prompt_id, rate, rollouts))
        return list(zip(indices, self._budget(prompts), strict=True))

    def _by_success(self, position: int, count: int) -> Sequence[int]:
        """Chooses tasks whose success rate is near the target, and a share of others in the source's order.

        The weight of a task falls linearly from 1 at the target to 0 at the farther of the rates 0 and 1.
        """
        settings, total = self._config.task, len(self._tasks)  # type: ignore[arg-type]
        rng = random.Random(f"{self._config.seed}/task.order/{position}")
        target, width = settings.target_success, max(settings.target_success, 1.0 - settings.target_success)
        keys: list[tuple[float, int]] = []
        for index in sorted(self._visits):
            # Drawn for every task, so that a draw depends on no other task's rate.
            draw, rate = rng.random(), self._rates.rate(self._visits[index][0])
            weight = 0.0 if rate is None else 1.0 - abs(rate - target) / width
            if weight > 0.0:
                # The largest keys are a weighted sample without replacement (Efraimidis and Spirakis, 2006).
                keys.append((draw ** (1.0 / weight), index))
        by_rate = sum(rng.random() >= settings.exploration for _ in range(count))
        chosen = [index for _, index in sorted(keys, reverse=True)[:by_rate]]
        chosen_set = set(chosen)
        while len(chosen) < count:
            index = self._explored % total
            self._explored += 1
            if len(chosen_set) == total:  # fewer tasks than a step takes
                chosen_set.clear()
            if index not in chosen_set:
                chosen_set.add(index)
                chosen.append(index)
        return chosen
