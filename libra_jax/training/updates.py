"""Reports of the updates of a step, on the host, and the metrics made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from libra_jax.algorithms import objective
from libra_jax.training import step

OF_THE_BATCH = ("mismatch/", "offpolicy/", "router/replayed")
"""Metrics that compare the engine with the policy that the batch came to: after an update, it is another policy."""

OF_ROLLOUTS = ("/ess", "/router/balance")
"""Metrics of single rollouts, left out if a row holds parts of rollouts, or several rollouts as one sequence."""

OF_AN_UPDATE = (
    "loss",
    "grad_norm",
    "learning_rate",
    "ess",
    "skipped",
    "clip/low_fraction",
    "clip/high_fraction",
    "ratio/max",
    "kl/behaviour",
)
"""Metrics that a step of several updates also reports for each."""


@dataclasses.dataclass(frozen=True)
class Update:
    """Reports of one update on the host.

    Attributes:
      applied: `loss`, `grad_norm` and `skipped`.
      sums: metric sums and maxima over the update's micro-batches.
    """

    applied: Mapping[str, float]
    sums: step.Report

    @property
    def is_empty(self) -> bool:
        """True if the update was skipped because no token was trained."""
        return bool(self.applied["skipped"]) and is_finite(self.applied)

    def metrics(self) -> dict[str, float]:
        """Returns its metrics. A mean or a maximum over nothing is left out."""
        metrics, sums = dict(self.applied), dict(self.sums["metrics"])
        if (share := objective.effective_share(sums)) is not None:
            metrics["ess"] = share
        sums = {name: pair for name, pair in sums.items() if name not in (objective.WEIGHT, objective.WEIGHT_SQUARED)}
        metrics |= {name: total / count for name, (total, count) in sums.items() if count > 0}
        # All maxima are of positive numbers, so 0 means that there was nothing to compare.
        return metrics | {name: value for name, value in self.sums["maxima"].items() if value != 0}


def is_finite(metrics: Mapping[str, float]) -> bool:
    """Returns True if the losses and gradient norms of a step or an update are finite."""
    names = ("loss", "grad_norm", "critic/loss", "critic/grad_norm")
    return bool(np.isfinite([metrics.get(name, 0.0) for name in names]).all())


def combined(parts: Sequence[step.Report]) -> step.Report:
    """Combines the reports of several micro-batches into one: (sum, count) and maximum of each metric."""
    metrics: dict[str, tuple[float, float]] = {}
    maxima: dict[str, float] = {}
    for part in parts:
        for name, (total, count) in part["metrics"].items():
            before = metrics.get(name, (0.0, 0.0))
            metrics[name] = before[0] + float(total), before[1] + float(count)
        for name, value in part["maxima"].items():
            # np.max, not max: a NaN must win, and Python's max may drop it.
            maxima[name] = float(np.max([value, maxima.get(name, value)]))
    return {"metrics": metrics, "maxima": maxima}


def step_metrics(updates: Sequence[Update], *, keeps_first: bool) -> dict[str, float]:
    """Returns the metrics of a step's updates together, and with several updates also some of each.

    Args:
      updates: the updates in order.
      keeps_first: all updates compare the engine with the policy of before the first; else only the first does.
    """
    sums = [update.sums for update in updates]
    if not keeps_first:
        for later in sums[1:]:
            for part in later.values():
                for name in [name for name in part if name.startswith(OF_THE_BATCH)]:
                    del part[name]
    # An update without a trained token has no loss, which a mean over it would make smaller.
    counted = [update for update in updates if not update.is_empty] or updates
    applied = {name: float(np.mean([update.applied[name] for update in counted])) for name in updates[0].applied}
    applied["skipped"] = float(np.mean([update.applied["skipped"] for update in updates]))
    metrics = Update(applied, combined(sums)).metrics()
    for number, update in enumerate(updates if len(updates) > 1 else (), 1):
        update_metrics = update.metrics()
        metrics |= {f"update/{number}/{name}": update_metrics[name] for name in OF_AN_UPDATE if name in update_metrics}
    return metrics


def rate_scale(rule: str, parts: Sequence[step.Report]) -> float:
    """Returns the factor of an update's learning rate (VCPO, eq. 6).

    Args:
      rule: `algorithm.ess_scaling`.
      parts: reports of the update's micro-batches, on the devices.
    """
    if rule == "off":
        return 1.0
    share = objective.effective_share(combined(jax.device_get(list(parts)))["metrics"])
    # Nothing trained, or weights that are not finite: the update changes nothing, or is skipped.
    if share is None or not np.isfinite(share):
        return 1.0
    return share**0.5 if rule == "sqrt" else share
