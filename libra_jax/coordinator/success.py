"""Success rates of prompts, from their finished rollouts in an exponential window."""

from __future__ import annotations

from typing import TypedDict

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.coordinator import filters


def outcomes(config: config_lib.RunConfig, group: protocols.Group) -> list[tuple[protocols.Trajectory, bool]]:
    """Returns the scored rollouts of a group that count, each with True if it is a success.

    A rollout is a success if its reward, without the shaping of reward functions, reaches `algorithm.success_reward`.
    Rollouts whose reward is left out because a limit cut them off (`task.cut_off`) do not count.
    """
    results = []
    for trajectory in group.trajectories:
        if not config.task.cuts(trajectory.finish):
            reward = filters.compared_reward(config, trajectory)
            target = config.algorithm.success_reward
            # 0.7 + 0.2 + 0.1, a sum of weighted functions, is less than 1.0 by rounding alone.
            reaches = reward is not None and (reward >= target or protocols.equal_rewards([reward, target]))
            results.append((trajectory, reaches))
    return results


class RatesState(TypedDict):
    """Weighted successes and rollouts by prompt, and prompt, successes and rollouts of each group not counted yet."""

    counts: dict[str, tuple[float, float]]
    later: dict[str, tuple[str, int, int]]


class SuccessRates:
    """The success rate of each prompt that has finished rollouts.

    `outcomes` says which rollouts count, and which are successes. Each further rollout of a prompt makes the earlier
    ones weigh less, by 1 - 1 / `algorithm.success_window`.

    Groups are counted in the order of their numbers, once `advance` says so. So rates depend on no timing. An entry is
    two numbers. There are at most as many as groups that finished, so nothing is ever dropped.
    """

    def __init__(self, config: config_lib.RunConfig) -> None:
        self._config = config
        # A run that never looks at them keeps none, because a source without end would fill its checkpoints with them.
        self._used = config.uses_success
        # Weighted successes and rollouts by prompt (`Task.prompt`).
        self._counts: dict[str, tuple[float, float]] = {}
        # Prompt, successes and rollouts of finished groups that are not counted yet, by group.
        self._later: dict[int, tuple[str, int, int]] = {}

    def add(self, group: protocols.Group) -> None:
        """Takes a group whose rollouts are all scored."""
        results = outcomes(self._config, group) if self._used else []
        if results:
            self._later[group.group_id] = group.task.prompt, sum(solves for _, solves in results), len(results)

    def advance(self, before: int) -> None:
        """Counts the groups with numbers below `before`."""
        for group_id in sorted(number for number in self._later if number < before):
            prompt, solved, size = self._later.pop(group_id)
            successes, rollouts = self._counts.get(prompt, (0.0, 0.0))
            decay = (1.0 - 1.0 / self._config.algorithm.success_window) ** size
            self._counts[prompt] = decay * successes + solved, decay * rollouts + size

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
