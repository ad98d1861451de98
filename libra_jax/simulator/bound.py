"""Computes a lower bound on a run's mean step time that no scheduling policy can beat, from its work and longest paths.

Letters: B groups a step, eta the max staleness, N steps. Block b is the groups b*B .. b*B + B - 1 in the order of their
dispatch. t_b is the moment at which training step b begins.

Admission (scheduling/admission.py) dispatches block b when version b - eta exists, and at once if b <= eta. Selection
trains the earliest deadline first. So batch b is block b for every b > eta, and the first eta + 1 batches divide the
first eta + 1 blocks among themselves. Hence, for every policy,

  release_b = t_(b-eta-1) + train_(b-eta-1)          (0 for b <= eta)
  t_b >= t_(b-1) + train_(b-1)                        one training step after another
  t_b >= release_b + path_b                           the longest path of block b: its tools, prefills and tokens alone
                                                      on the fastest instance
  t_b >= release_i + (work_i + ... + work_b) / capacity   for every i <= b: the rollout devices do this work in between

and the bound is (t_(N-1) + train_(N-1)) / N, with every t_b at the largest of its right-hand sides. At eta = 0 this
adds rollout and training. In the limit of many steps it is max(work / capacity, longest path / (eta + 1)). A policy may
choose the groups of the first eta + 1 batches, so for them only what holds for every choice is used.

Work is a lower bound on device-seconds. An engine step has b requests, p prefilled tokens and C tokens of context. It
lasts `max(R, k (b + p)) + collectives + overhead + s b + c C` (costs.py), where R is the time to read the weights (of
experts, those that one token takes), k the arithmetic of a token and s the overhead of a request. Slots bound b by S,
and the key-value cache bounds C by K. So for all theta and phi in [0, 1] the step lasts at least `b x + p z + C y` with

  z = theta k + collectives of a token in the largest step
  x = z + s + phi F / S,    y = c + (1 - phi) F / K,    F = (1 - theta) R + overhead,

which gives every token a share of its own. Each token takes the degree with its smallest share. The best of a few
(theta, phi) is kept, since each pair gives a valid bound. Where accelerators are unlike, a device-second of each has a
price, and the work is the least price of all tokens over the price of all devices: a bound for any prices (duality of
linear programs), of which the best of a few is kept. Weight updates, moves, pre-emption and faults only add
work.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from libra_jax import config as config_lib
from libra_jax.planning.costs import costs
from libra_jax.simulator import scripts, world

Values: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Values tried for theta and phi."""

PRICES = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
"""Prices tried for a device-second of an accelerator, where that of the first one is 1."""

Kinds: TypeAlias = dict[tuple[costs.CostModel, int], int]
"""Costs of the accelerator and degree of each kind of instance, and the most slots that one has."""


@dataclass(frozen=True)
class StepBound:
    """A lower bound and its parts, in seconds a training step.

    Attributes:
      step_seconds: the bound on the mean step time.
      work_seconds: rollout work over the capacity of the rollout devices, mean over steps.
      train_seconds: training alone, mean over steps.
      path_seconds: longest critical path of a batch, mean over steps; a run may spread it over eta + 1 steps.
    """

    step_seconds: float
    work_seconds: float
    train_seconds: float
    path_seconds: float


@dataclass(frozen=True)
class GroupSeconds:
    """Seconds of each group, in order of dispatch: rollout over all rollout devices, training, longest path."""

    work: Values
    train: Values
    path: Values


def lower_bound(
    config: config_lib.RunConfig, simulation: world.SimulationConfig, workload: scripts.Workload
) -> StepBound:
    """Returns the bound of a simulated run in which no group is replaced; the arguments are those of `world.run`.

    Simulated prompts are all new, so each has `coordinator.group_size` rollouts.

    Raises:
      ConfigError: a user's function divides the rollouts.
    """
    config_lib.check(
        ":" not in config.algorithm.budget,
        "algorithm.budget",
        "the bound knows no sizes of groups that a function of yours gives; simulate with uniform",
    )
    limits, model, devices = config.coordinator, simulation.cost_model(config.model.lora), simulation.train_devices
    models, degrees = simulation.instance_models(config), config.rollout.tensor_parallel
    kinds: Kinds = {}
    for kind, slots in zip(zip(models, degrees, strict=True), simulation.instance_slots(config.rollout), strict=True):
        kinds[kind] = max(slots, kinds.get(kind, 0))
    having: dict[costs.CostModel, int] = {}  # rollout devices by accelerator
    for instance_model, degree in zip(models, degrees, strict=True):
        having[instance_model] = having.get(instance_model, 0) + degree
    count = config.steps * limits.groups_per_step
    script_groups = [[workload.script(task, sample) for sample in range(limits.group_size)] for task in range(count)]
    groups = GroupSeconds(
        work=_work(script_groups, kinds, having),
        train=np.array(
            [model.train_seconds([script.own_tokens for script in group], devices) for group in script_groups]
        ),
        path=np.array([max(_path_seconds(script, kinds) for script in group) for group in script_groups]),
    )
    end = run_seconds(groups, limits.groups_per_step, limits.max_staleness)
    paths = groups.path.reshape(config.steps, -1).max(axis=1)
    return StepBound(
        step_seconds=float(end / config.steps),
        work_seconds=float(groups.work.sum() / config.steps),
        train_seconds=float(groups.train.sum() / config.steps),
        path_seconds=float(paths.mean()),
    )


def run_seconds(groups: GroupSeconds, size: int, eta: int) -> float:
    """Returns a lower bound on the end of the last training step (the recurrence of the module's docstring)."""
    work, train, path = (values.reshape(-1, size) for values in (groups.work, groups.train, groups.path))
    steps = len(work)
    pool = slice(0, (eta + 1) * size)  # the groups that the first eta + 1 batches are chosen from
    sorted_seconds = {name: np.sort(getattr(groups, name)[pool]) for name in ("work", "train", "path")}
    trained = np.concatenate(([0.0], np.cumsum(train.sum(axis=1))))
    begins: list[float] = []
    ends: list[float] = []
    for step in range(steps):
        bounds = [ends[-1] if ends else 0.0]
        if step < eta:
            # A policy may choose any groups of the pool, so the cheapest ones bound it.
            done = (step + 1) * size
            bounds += [float(sorted_seconds["path"][done - 1]), float(sorted_seconds["work"][:done].sum())]
        else:
            first = 0 if step == eta else step  # the batch at eta completes every earlier block
            # When admission lets each block begin: with the version that is eta before it, the first eta + 1 at once.
            released = [ends[block - eta - 1] if block > eta else 0.0 for block in range(step + 1)]
            bounds.append(released[step] + float(path[first : step + 1].max()))
            bounds += [begin + float(work[block : step + 1].sum()) for block, begin in enumerate(released)]
        begins.append(max(bounds))
        ends.append(
            begins[-1] + (float(sorted_seconds["train"][:size].sum()) if step <= eta else float(train[step].sum()))
        )
        if step == min(eta, steps - 1):  # by now the first batches have trained exactly the first blocks
            ends[-1] = max(ends[-1], begins[0] + float(trained[step + 1]))
    return ends[-1]


def _path_seconds(script: scripts.Script, kinds: Kinds) -> float:
    """Returns the seconds of the rollout alone: each part on the instance that is fastest at it, every prefix
    cached."""
    step = min(model.fixed_seconds(degree, 1) for model, degree in kinds)
    token_seconds = min(model.context_seconds(degree) for model, degree in kinds)
    seconds, outputs = 0.0, list(script.outputs())
    for (turn, place, cached, new, goes_on), after in itertools.zip_longest(outputs, outputs[1:]):
        seconds += min(model.prefill_seconds(degree, max(1, new), cached) for model, degree in kinds)
        steps = turn.generated_tokens - 1  # prefill samples the first token
        context = cached + max(1, new)
        seconds += steps * (step + token_seconds * (context + 1 + (steps - 1) / 2))
        # A tool that runs beside the outputs of other segments may take no time of its own.
        if not goes_on or after.segment == place:
            seconds += turn.tool_seconds
    return seconds


def _work(
    script_groups: Sequence[Sequence[scripts.Script]], kinds: Kinds, having: Mapping[costs.CostModel, int]
) -> Values:
    """Returns a lower bound on the seconds that each group's tokens take of all rollout devices together."""
    # For every turn: its group, tokens decoded, context when decoding begins, and tokens prefilled before it.
    rows = []
    for index, scripts_of_group in enumerate(script_groups):
        for script in scripts_of_group:
            for turn, _, cached, new, _ in script.outputs():
                fresh = max(1, new)
                # Prefill samples the first token.
                rows.append((index, turn.generated_tokens - 1, cached + fresh, fresh))
    group, *measured = np.array(rows).T
    tokens, starts, new = (values.astype(float) for values in measured)
    causal = np.bincount(group, weights=new * (starts - new / 2), minlength=len(script_groups))
    best: Values = np.zeros(len(script_groups))
    first, *other_models = having
    for theta, phi, *tried in itertools.product(SHARES, SHARES, *([PRICES] * len(other_models))):
        prices = {first: 1.0, **dict(zip(other_models, tried, strict=True))}
        shares = [
            tuple(prices[model] * share for share in token_shares(model, degree, slots, theta, phi))
            for (model, degree), slots in kinds.items()
        ]

        def min_seconds(context: Values, shares: Sequence[tuple[float, ...]] = shares) -> Values:
            return np.min([fixed + per_token * context for fixed, _, per_token in shares], axis=0)

        # A minimum of lines is concave, so the mean of its ends is at most its mean over the turn.
        seconds = tokens * (min_seconds(starts) + min_seconds(starts + tokens)) / 2 + new * min(
            prefill for _, prefill, _ in shares
        )
        total: Values = np.bincount(group, weights=seconds, minlength=len(script_groups)).astype(np.float64)
        total += causal * min(prices[model] * model.attention_seconds(1, 1, 0) * 2 for model in having)
        total /= sum(prices[model] * count for model, count in having.items())
        if total.sum() > best.sum():
            best = total
    return best


def token_shares(
    model: costs.CostModel, degree: int, slots: int, theta: float, phi: float
) -> tuple[float, float, float]:
    """Returns the least device-seconds of a decoded token, of a prefilled token, and of a token of context in a
    decode step."""
    chunk, overhead, request = model.coefficients.chunk_tokens, model.overhead(0), model.overhead(1) - model.overhead(0)
    largest = slots + chunk
    prefill = theta * model.token_seconds(degree) + model.collective_seconds(degree, largest) / largest
    fixed = (1 - theta) * model.reading_seconds(degree, 1.0) + overhead
    decode = prefill + request + phi * fixed / slots
    context = model.context_seconds(degree) + (1 - phi) * fixed / model.kv_tokens(degree)
    return degree * decode, degree * prefill, degree * context
