"""Schedulers by the name that `config.scheduler.policy` gives them."""

from __future__ import annotations

from collections.abc import Sequence

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.scheduling import cmlfq, levels
from libra_jax.scheduling import costs as cost_model
from libra_jax.scheduling.rivals import authors, baselines, heddle, known_lengths


def create(
    config: config_lib.SchedulerConfig,
    *,
    costs: cost_model.Costs | None = None,
    remaining: known_lengths.Remaining | None = None,
    seed: int = 0,
    kinds: Sequence[protocols.Kind] = (),
) -> protocols.Scheduler:
    """Creates a scheduler that has learnt nothing yet.

    Args:
      config: names the policy and sets its choices.
      costs: costs of decoding and moving; None takes `costs.LinearCosts` of `scheduler.costs`.
      remaining: true remaining lengths, for the policies that need them.
      seed: seed of what a policy draws.
      kinds: kinds of the layout's instances, so that bounds that do not fit them are refused here.

    Raises:
      ConfigError: the policy needs true lengths and has none, or the bounds do not fit the kinds.
    """
    if kinds:
        levels.check(config.max_remaining_tokens, kinds)
    if costs is None:
        costs = cost_model.LinearCosts(config.costs)
    arguments = config.arguments
    # No default but the last case: config has checked that the policy is one of `POLICIES`. Policies with a single
    # bucket need no kinds.
    match config.policy:
        case "cmlfq":
            return cmlfq.Cmlfq(config, costs, kinds=kinds, **arguments)
        case "cmlfq_paper":
            return cmlfq.CmlfqPaper(config, kinds=kinds)
        case "cmlfq_authors":
            return authors.CmlfqAuthors(config, kinds=kinds, **arguments)
        case "round_robin":
            return baselines.RoundRobin(config)
        case "sticky":
            return baselines.Sticky(config, **arguments)
        case "sticky_cache":
            return baselines.StickyCache(config)
        case "mlfq":
            return baselines.Mlfq(config, kinds=kinds, **arguments)
        case "heddle":
            return heddle.Heddle(config, costs, **arguments)
        case "length_predictor" if remaining is not None:
            return known_lengths.LengthPredictor(config, remaining, seed=seed, kinds=kinds, **arguments)
        case "oracle" if remaining is not None:
            return known_lengths.Oracle(config, costs, remaining, kinds=kinds, **arguments)
        case "clairvoyant" if remaining is not None:
            return known_lengths.Clairvoyant(config, costs, remaining, kinds=kinds, **arguments)
        case "length_predictor" | "oracle" | "clairvoyant":
            raise protocols.ConfigError(
                f"config.scheduler.policy: {config.policy!r} needs the true lengths, which only launch/simulate.py "
                "knows; use 'cmlfq' here"
            )
        case _:
            return baselines.LeastLoaded(config)
