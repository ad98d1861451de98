"""Divides the rollouts of a step among its prompts (`algorithm.budget`)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.utils import resolving

FIELD = "algorithm.budget"


@dataclass(frozen=True)
class PromptBudget:
    """What is known of a prompt that gets rollouts.

    Attributes:
      success: share of its past rollouts that succeeded; None if it has none.
      rollouts: number of past rollouts behind `success`, older ones weighted less.
    """

    prompt_id: str
    success: float | None = None
    rollouts: float = 0.0


Budget = Callable[[Sequence[PromptBudget]], list[int]]
"""Returns the number of rollouts of each prompt of a step."""


def value(rollouts: int, success: float) -> float:
    """Returns the expected value of a prompt's rollouts (Knapsack RL, arXiv 2509.25849).

    [1 - p^N - (1 - p)^N] * p (1 - p)^2, with N rollouts of success rate p. The first factor is the chance that the
    rollouts differ, so that a group has a gradient. The second is the gain in success rate that a gradient promises.
    """
    p, q = success, 1.0 - success
    return (1.0 - p**rollouts - q**rollouts) * p * q**2


def knapsack(rates: Sequence[float], total: int, minimum: int, maximum: int) -> list[int]:
    """Divides rollouts among prompts so that the sum of their `value` is largest.

    A further rollout of a prompt with N of them adds (p^N q + q^N p) * p q^2, where q = 1 - p. That falls with N, so
    values are concave, and giving each rollout to the prompt that it adds most to is exact. If rollouts add the same,
    as they add nothing at rates of 0 and 1, the prompt with the fewest goes first, then the harder one.

    Args:
      rates: success rate of each prompt.
      total: number of rollouts, from `minimum` to `maximum` times the number of prompts.
      minimum: fewest rollouts of a prompt, at least 1.
      maximum: most rollouts of a prompt.
    """
    sizes = [minimum] * len(rates)

    def entry(place: int) -> tuple[float, int, float, int]:
        p, size = rates[place], sizes[place]
        q = 1.0 - p
        return -(p**size * q + q**size * p) * p * q**2, size, p, place

    heap = [entry(place) for place in range(len(rates))] if maximum > minimum else []
    heapq.heapify(heap)
    for _ in range(total - minimum * len(rates)):
        place = heap[0][-1]
        sizes[place] += 1
        if sizes[place] < maximum:
            heapq.heapreplace(heap, entry(place))
        else:
            heapq.heappop(heap)
    return sizes


def make(config: config_lib.RunConfig) -> Budget:
    """Returns the run's budget, which divides groups_per_step x group_size rollouts among groups_per_step prompts.

    Raises:
      ConfigError: there is no such function, it does not take `algorithm.budget_arguments`, or it fails on made-up
        prompts. The budget itself raises it if the user's function fails, or divides other than it was asked to.
    """
    name, size = config.algorithm.budget, config.coordinator.group_size
    if name == "uniform":
        return lambda prompts: [size] * len(prompts)
    minimum, maximum = config.algorithm.budget_least, config.most_rollouts
    if name == "knapsack":
        return lambda prompts: _with_prior(prompts, size, minimum, maximum)
    arguments = dict(config.algorithm.budget_arguments)
    function = resolving.resolve(name, FIELD)
    keywords = {"prompts": None, "total": None, "least": None, "most": None, **arguments}
    resolving.check_arguments(function, name, keywords, f"{FIELD}_arguments")

    def checked_budget(prompts: Sequence[PromptBudget]) -> list[int]:
        total = size * len(prompts)
        with resolving.named(name, FIELD, "the call"):
            sizes = list(function(prompts=prompts, total=total, least=minimum, most=maximum, **arguments))
        right = len(sizes) == len(prompts) and all(type(one) is int and minimum <= one <= maximum for one in sizes)
        if right and sum(sizes) == total:
            return sizes
        raise protocols.ConfigError(
            f"config.{FIELD}: {resolving.shown(name)} returned {sizes!r:.80} for {len(prompts)} prompts; return one "
            f"int each, from {minimum} to {maximum} (algorithm.budget_least, budget_most), {total} in all"
        )

    # Tried here, because the run would meet a mistake in it only once its engines are up.
    count = config.coordinator.groups_per_step
    checked_budget([PromptBudget(f"example-{place}") for place in range(count)])
    checked_budget([PromptBudget(f"example-{place}", place / max(1, count - 1), float(size)) for place in range(count)])
    return checked_budget


def _with_prior(prompts: Sequence[PromptBudget], prior: int, minimum: int, maximum: int) -> list[int]:
    """Returns `prior` rollouts for prompts without a rate, and divides those of the others by `knapsack`."""
    rates = [prompt.success for prompt in prompts if prompt.success is not None]
    sizes = iter(knapsack(rates, prior * len(rates), minimum, maximum))
    return [prior if prompt.success is None else next(sizes) for prompt in prompts]
