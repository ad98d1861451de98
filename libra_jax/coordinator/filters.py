"""Decides whether a finished group is trained or replaced (`algorithm.filter`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.utils import resolving

FIELD = "algorithm.filter"

Filter = Callable[[protocols.Group], str | None]
"""Returns why a finished group is replaced, or None to keep it."""

ZERO_VARIANCE, FILTERED = "zero_variance", "filter"
"""Names under which groups are counted that the built-in filter, and a user's own, replaced."""


def make(config: config_lib.RunConfig) -> tuple[str, Filter]:
    """Returns the name under which replaced groups are counted, and the run's filter.

    Raises:
      ConfigError: there is no such function, or it does not take `algorithm.filter_arguments`. The filter itself raises
        it if the user's function fails, or returns anything but None or a reason.
    """
    name, arguments = config.algorithm.filter, dict(config.algorithm.filter_arguments)
    if name == "none":
        return FILTERED, lambda group: None
    if name == "zero_variance":
        return ZERO_VARIANCE, lambda group: same_rewards(config, group)
    function = resolving.resolve(name, FIELD)
    resolving.check_arguments(function, name, {"group": None, **arguments}, f"{FIELD}_arguments")

    def checked_filter(group: protocols.Group) -> str | None:
        with resolving.named(name, FIELD, f"the call for {group.task.prompt_id}"):
            reason = function(group=dataclasses.replace(group, task=group.task.copy()), **arguments)
        if reason is None or (isinstance(reason, str) and reason):
            return reason
        raise protocols.ConfigError(
            f"config.{FIELD}: {resolving.shown(name)} returned {reason!r:.80} for {group.task.prompt_id}; return None "
            "to keep the group, or a text that says why it is replaced"
        )

    return FILTERED, checked_filter


def compared_reward(config: config_lib.RunConfig, trajectory: protocols.Trajectory) -> float | None:
    """Returns the reward by which a rollout counts as better or worse than others of its prompt.

    Reward functions shape the sum, and a brevity term alone makes nearly every sum differ. So this is the environment's
    own reward, unless that has no weight or is missing.
    """
    environment_reward = trajectory.environment_reward if config.reward.environment_weight else None
    return trajectory.reward if environment_reward is None else environment_reward


def same_rewards(config: config_lib.RunConfig, group: protocols.Group) -> str | None:
    """Returns why all rollouts of a group whose rewards count have equal ones; None if rewards differ."""
    counted = [trajectory for trajectory in group.trajectories if not config.task.cuts(trajectory.finish)]
    rewards = [compared_reward(config, trajectory) for trajectory in counted]
    if not protocols.equal_rewards([reward for reward in rewards if reward is not None]):
        return None
    prompt, size = group.task.prompt_id, len(group.trajectories)
    cut = size - len(counted)
    if cut >= size - 1 and cut:
        return (
            f"{cut} of {size} rollouts of {prompt} were cut off at a limit and not compared (task.cut_off); raise "
            "task.max_seconds or rollout.max_context"
            + (", or set task.cut_off=zero" if config.task.cut_off == "mask" else "")
        )
    source = "the environment gave" if config.reward.environment_weight else "the reward functions gave"
    return f"{source} every rollout of {prompt} the same reward"
