"""Schedulers by the name that `config.scheduler.policy` gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.scheduling import (
    buckets,
    cmlfq,
    cmlfq_paper,
    heddle,
    least_loaded,
    length_predictor,
    mlfq,
    oracle,
    round_robin,
    sticky,
)
from libra_jax.scheduling import costs as cost_model

Remaining: TypeAlias = Callable[[str], int]
"""Request id to the tokens that it has in truth still to generate: known to a simulator only."""


def create(
    config: configuration.SchedulerConfig,
    *,
    costs: cost_model.Costs | None = None,
    remaining: Remaining | None = None,
    seed: int = 0,
    degrees: Sequence[int] = (),
) -> protocols.Scheduler:
    """A fresh scheduler.

    Args:
      config: names the policy and sets its choices.
      costs: of decoding and moving; `costs.LinearCosts` of `scheduler.costs` if none are handed in.
      remaining: the truth, for the policies that need it.
      seed: of what a policy draws.
      degrees: tensor-parallel degrees of the layout, so that bounds that do not fit it are refused here.

    Raises:
      ConfigError: the policy needs true lengths and has none, or the bounds do not fit the degrees.
    """
    if degrees:
        buckets.check(config.max_remaining_tokens, degrees)
    if costs is None:
        costs = cost_model.LinearCosts(config.costs)
    match config.policy:
        case "cmlfq":
            return cmlfq.Cmlfq(config, costs, degrees=degrees)
        case "cmlfq_paper":
            return cmlfq_paper.CmlfqPaper(config, degrees=degrees)
        case "round_robin":
            return round_robin.RoundRobin(config)
        case "sticky":
            return sticky.Sticky(config)
        case "mlfq":
            return mlfq.Mlfq(config, degrees=degrees)
        case "heddle":
            return heddle.Heddle(config, costs)
        case "length_predictor":
            truth = _truth(config.policy, remaining)
            return length_predictor.LengthPredictor(config, truth, seed=seed, degrees=degrees)
        case "oracle":
            return oracle.Oracle(config, costs, _truth(config.policy, remaining), degrees=degrees)
        case _:
            return least_loaded.LeastLoaded(config)


def _truth(policy: str, remaining: Remaining | None) -> Remaining:
    if remaining is None:
        raise protocols.ConfigError(
            f"config.scheduler.policy: {policy!r} needs the true lengths, which only launch/simulate.py knows; "
            "use 'cmlfq' here"
        )
    return remaining
