"""Success rates of prompts, from their finished rollouts in an exponential window."""

from __future__ import annotations

from typing import TypedDict

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.coordinator import filters


class RatesState(TypedDict):
    """Weighted successes and rollouts by prompt, and prompt, successes and rollouts of each group not counted yet."""

    counts: dict[str, tuple[float, float]]
    later: dict[str, tuple[str, int, int]]


class Rates:
    """The success rate of each prompt that has finished rollouts.

    A rollout is a success if its reward, without the shaping of reward functions, reaches `algorithm.success_reward`.
    Rollouts whose reward is left out because a limit cut them off (`task.cut_off`) do not count. Each further rollout
    of a prompt makes the earlier ones weigh less, by 1 - 1 / `algorithm.success_window`.

    Groups are counted in the order of their numbers, once `advance` says so. So rates depend on no timing. An entry is
    two numbers. There are at most as many as groups that finished, so nothing is ever dropped.
    """

    def __init__(self, config: configuration.RunConfig) -> None:
        self._config = config
        # A run that never looks at them keeps none, because a source without end would fill its checkpoints with them.
        self._used = config.uses_success
        # Weighted successes and rollouts by prompt (`Task.prompt`).
        self._counts: dict[str, tuple[float, float]] = {}
        # Prompt, successes and rollouts of finished groups that are not counted yet, by group.
        self._later: dict[int, tuple[str, int, int]] = {}

    def add(self, group: protocols.Group) -> None:
        """Takes a group whose rollouts are all scored."""
        counted = [one for one in group.trajectories if not self._config.task.cuts(one.finish)]
        if not self._used or not counted:
            return
        rewards = [filters.compared_reward(self._config, trajectory) for trajectory in counted]
        threshold = self._config.algorithm.success_reward
        solved = sum(reward is not None and reward >= threshold for reward in rewards)
        self._later[group.group_id] = group.task.prompt, solved, len(counted)

    def advance(self, before: int) -> None:
        """Counts the groups with numbers below `before`."""
        for group_id in sorted(number for number in self._later if number < before):
            prompt, solved, size = self._later.pop(group_id)
            successes, rollouts = self._counts.get(prompt, (0.0, 0.0))
            kept = (1.0 - 1.0 / self._config.algorithm.success_window) ** size
            self._counts[prompt] = kept * successes + solved, kept * rollouts + size

    def rate(self, prompt: str) -> float | None:
        """Returns the success rate of a prompt; None if none of its rollouts has finished."""
        counts = self._counts.get(prompt)
        return None if counts is None else counts[0] / counts[1]

    def rollouts(self, prompt: str) -> float:
        """Returns the weighted number of rollouts behind a prompt's rate."""
        return self._counts.get(prompt, (0.0, 0.0))[1]

    def state(self) -> RatesState:
        """Returns a checkpoint's content."""
        return {"counts": dict(self._counts), "later": {str(number): group for number, group in self._later.items()}}

    def restore(self, state: RatesState) -> None:
        """Restores the result of `state`, bit for bit."""
        self._counts = {prompt: (successes, rollouts) for prompt, (successes, rollouts) in state["counts"].items()}
        self._later = {int(number): (prompt, solved, size) for number, (prompt, solved, size) in state["later"].items()}
