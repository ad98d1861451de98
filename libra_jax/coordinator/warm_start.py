"""Runs the warm start: supervised steps on demonstrations, before reinforcement learning begins."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.agents import resolving, tokenizers
from libra_jax.coordinator import stopping

FIRST_TASK = 1_000_000_000
"""Position of the first demonstrated task. It is far beyond the tasks that a run trains on, and never held out."""


class WarmStart:
    """Takes supervised steps. `taken` counts them, including steps that the target loss made unnecessary.

    Args:
      config: the run's configuration (`warm_start`).
      tasks: source of the tasks to demonstrate.
      demonstrator: solves the tasks; may be None only if the config asks for no steps.
      tokenizer: the policy's tokenizer.
    """

    def __init__(
        self,
        config: configuration.RunConfig,
        *,
        tasks: protocols.TaskSource,
        demonstrator: protocols.Demonstrator | None,
        tokenizer: protocols.Tokenizer,
    ) -> None:
        configuration.check(
            demonstrator is not None or config.warm_start.steps == 0,
            "warm_start.steps",
            f"must be 0, because the environment {config.task.environment} offers no demonstrations",
        )
        self._limits = config.warm_start
        self._names = config.task
        self._tasks = tasks
        self._demonstrator = demonstrator
        self._tokenizer = tokenizer
        self.taken = 0

    async def run(
        self,
        step: Callable[[list[protocols.Trajectory]], Coroutine[Any, Any, Mapping[str, float]]],
        ending: stopping.Ending,
        status: Callable[[str], None],
    ) -> dict[str, float]:
        """Takes the remaining steps. Stops between two steps if the run is to end.

        Args:
          step: takes one step on the trainer.
          ending: the run's end.
          status: takes a line about the progress.

        Returns:
          The last step's metrics under `warm_start/`; empty if no step was left.
        """
        metrics: Mapping[str, float] = {}
        if self.taken < self._limits.steps:
            status(f"warm start {self.taken}/{self._limits.steps}, compiling its programs first")
        while self.taken < self._limits.steps:
            metrics = await ending.race(step(self._batch()), through_stop=True)
            self.taken += 1
            loss = metrics.get("loss", math.inf)
            status(f"warm start {self.taken}/{self._limits.steps}, loss {loss:.4f}")
            if loss <= self._limits.target_loss:
                status(f"warm start ended after {self.taken} steps: loss {loss:.4f} reached its target")
                # Counts the remaining steps as taken, so that a resumed run does not take them.
                self.taken = self._limits.steps
            ending.check()
        return {f"warm_start/{name}": value for name, value in metrics.items()}

    def _batch(self) -> list[protocols.Trajectory]:
        first = FIRST_TASK + self.taken * self._limits.batch_size
        return [self._demonstration(index) for index in range(first, first + self._limits.batch_size)]

    def _demonstration(self, index: int) -> protocols.Trajectory:
        assert self._demonstrator is not None
        with resolving.named(self._names.source, "task.source", f"task({index})"):
            task = self._tasks.task(index)
        with resolving.named(self._names.environment, "task.environment", f"the demonstration of {task.prompt_id}"):
            return tokenizers.demonstration_trajectory(task, self._demonstrator, self._tokenizer)
