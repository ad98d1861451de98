"""The report's section on the health of the learning: what shows a policy that collapses, drifts or stands still."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from libra_jax.telemetry import figures, page


@dataclass(frozen=True)
class Plot:
    """One picture.

    Attributes:
      title: its heading.
      curves: what each metric is called in it, by the metric's name.
      note: what to look for.
      percent: the metrics are shares.
      log: the metrics may differ by orders of magnitude.
    """

    title: str
    curves: Mapping[str, str]
    note: str
    percent: bool = False
    log: bool = False


PLOTS = (
    Plot(
        "Entropy",
        {"entropy": "nats a token"},
        "A fall to zero early is a policy that has stopped to explore; a steady rise is one that unlearns.",
    ),
    Plot(
        "Gradient norm",
        {"grad_norm": "before clipping"},
        "Zero is a step without a signal. Jumps by orders of magnitude ask for a lower learning rate.",
    ),
    Plot(
        "KL",
        {"kl/reference": "to the reference", "kl/behaviour": "to the sampling policy", "offpolicy/kl": "off-policy"},
        "Nats a token. To the reference it grows as the policy learns; to the sampling policy it should stay small.",
        log=True,
    ),
    Plot(
        "Clip fraction",
        {"clip/high_fraction": "high", "clip/low_fraction": "low", "clip/dual_fraction": "dual"},
        "Share of tokens whose ratio the loss clips. Much above a fifth is a step that is too large.",
        percent=True,
    ),
    Plot(
        "Reward spread",
        {"reward/std": "standard deviation"},
        "Over all rollouts of a step. Near zero there is nothing to learn from.",
    ),
    Plot(
        "Groups without a gradient",
        {"groups/without_gradient": "share of groups"},
        "Share of groups whose rollouts all have the same reward, so that they teach nothing.",
        percent=True,
    ),
    Plot(
        "Lengths",
        {"tokens/mean": "tokens a rollout"},
        "Generated tokens, mean of each step. Growth without reward, or a collapse, is often a reward that is gamed.",
    ),
)


def sections(steps: Mapping[int, Mapping[str, float]]) -> list[page.Section]:
    """Returns a picture for each plot that the run has numbers for.

    Args:
      steps: numbers of each step, by their names in `metrics.jsonl`.
    """
    out = []
    for plot in PLOTS:
        shown = {called: found for name, called in plot.curves.items() if (found := _curve(steps, name))}
        if shown:
            picture = figures.curves(shown, width=5, height=2.6, percent=plot.percent, log=plot.log, zero=True)
            out.append(page.Section(plot.title, picture, plot.note))
    return out


def _curve(steps: Mapping[int, Mapping[str, float]], name: str) -> dict[int, float]:
    """Finite values by step."""
    return {step: found[name] for step, found in steps.items() if name in found and math.isfinite(found[name])}
